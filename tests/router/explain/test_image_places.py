"""Which image of which message one is, as a sentence; and what it takes to encode images again."""

import msgspec
import pytest

from replicas.protocol.blocks import hash_blocks, pack_token_ids
from replicas.protocol.frames import PromptUsage
from router.explain.explanation import prompt_explanation
from router.explain.image_places import image_differs
from router.explain.nearest import Digests, PromptFacts
from router.explain.prefix_tree import NamespaceName
from router.misses import Cause, MissedSpan, Misses
from router.routing.decision import Decision
from tests.replicas.builders import ROOT
from tests.router.explain.decisions import BLOCK_SIZE, decision

PREFILL, ENCODE = 0.001, 0.01
NUM_TOKENS = 161


@pytest.mark.parametrize(
    ("path", "beside", "sentence"),
    [
        ("messages[3].content[4].image_url", ["messages[3].content[1].image_url"], "image 2 of message 4"),
        ("messages[3].content[0].source", ["messages[2].content[0].source"], "image 1 of message 4"),
        ("input[1].output[1].image_url", ["input[1].output[0].image_url"], "image 2 of item 2"),
        (
            "contents[2].parts[1].inlineData",
            ["contents[2].parts[2].functionResponse.parts[0].inlineData"],
            "image 1 of message 3",
        ),
        (
            "contents[2].parts[2].functionResponse.parts[1].inlineData",
            ["contents[2].parts[2].functionResponse.parts[0].inlineData", "contents[2].parts[10].inlineData"],
            "image 2 of message 3",
        ),
        (
            "messages[10].content[10]",
            ["messages[10].content[9]", "messages[1].content[0]"],
            "image 2 of message 11",
        ),
    ],
)
def test_images_and_messages_are_counted_from_one_in_the_order_of_the_body(
    path: str, beside: list[str], sentence: str
) -> None:
    for paths in ([path, *beside], [*beside, path]):
        assert image_differs(path, paths) == f"{sentence} differs"


def test_a_path_without_a_number_is_an_image_all_the_same() -> None:
    assert image_differs("prompt", ["prompt"]) == "an image differs"


def _facts(*media: tuple[int, int]) -> PromptFacts:
    token_ids = list(range(NUM_TOKENS))
    return PromptFacts(
        Digests(bytes(16)),
        "ada",
        ROOT,
        NamespaceName("m", None, "ada"),
        BLOCK_SIZE,
        b"".join(hash_blocks(ROOT, token_ids, BLOCK_SIZE)),
        pack_token_ids(token_ids),
        media=media,
    )


def _decision(encode: float | None) -> Decision:
    made = decision(a=0)
    (one,) = made.candidates
    load = msgspec.structs.replace(
        one.load, prefill_seconds_per_token=PREFILL, encode_seconds_per_token=encode
    )
    return msgspec.structs.replace(made, candidates=(msgspec.structs.replace(one, load=load),))


def _lost_ms(
    *media: tuple[int, int], num_cached: int = 32, encode: float | None = ENCODE, until: int = 160
) -> float | None:
    """Of a prompt that has lost what is behind its cached tokens until there; the rest is new."""
    spans = (
        MissedSpan(Cause.EVICTED, num_cached, until, None, None),
        MissedSpan(Cause.NEVER_CACHED, until, NUM_TOKENS, None, None),
    )
    usage = PromptUsage(NUM_TOKENS, num_cached, 0, 0)
    explanation = prompt_explanation(
        _facts(*media), usage, _decision(encode), Misses(Cause.EVICTED, spans), None
    )
    assert explanation.num_lost_tokens == until - num_cached
    return explanation.lost_ms


@pytest.mark.parametrize(
    ("media", "num_encoded"),
    [
        ((), 0),
        (((40, 60), (70, 100)), 50),
        (((0, 20), (70, 100)), 30),  # the first was read
        (((20, 50),), 30),  # what is left of it had to be encoded with the rest
        (((140, 161),), 0),  # its end is new: it would have been encoded anyway
    ],
)
def test_lost_time_has_the_images_that_were_encoded_again(
    media: tuple[tuple[int, int], ...], num_encoded: int
) -> None:
    assert _lost_ms(*media) == pytest.approx(1e3 * (128 * PREFILL + num_encoded * ENCODE))


def test_an_image_that_is_partly_new_is_no_loss() -> None:
    assert _lost_ms((40, 90), until=64) == pytest.approx(1e3 * 32 * PREFILL)
    assert _lost_ms((40, 64), until=64) == pytest.approx(1e3 * (32 * PREFILL + 24 * ENCODE))


def test_without_a_measure_of_encoding_only_tokens_count() -> None:
    assert _lost_ms((40, 60), encode=None) == pytest.approx(1e3 * 128 * PREFILL)
