"""What is said about a prompt's hit or miss: only what was found, in whole sentences."""

import pytest

from replicas.protocol.frames import PromptUsage
from replicas.protocol.status import ReplicaId
from router.explain.causes import Departed, Past, misses
from router.explain.findings import findings, sentence_of
from router.explain.prefix_tree import Known
from router.misses import Cause, MissedSpan
from router.routing.decision import Decision
from tests.router.explain.decisions import BLOCK_SIZE, decision


def told(
    num_cached: int | None, made: Decision | None, past: Past, num_prompt_tokens: int = 1000
) -> list[str]:
    usage = PromptUsage(num_prompt_tokens, num_cached, 0)
    return [each.text for each in findings(usage, made, misses(usage, made, past, BLOCK_SIZE), BLOCK_SIZE)]


def test_the_sentences_name_replicas_tokens_and_costs() -> None:
    price = "30.0 ms with 3 requests and 500 pending tokens"
    past = Past(Known(768, ReplicaId("c")), [Departed(640, ReplicaId("c"), False, 1.0)], True)
    assert told(0, decision(a=0, b=512), past) == [
        f"Tokens 1 to 512 were held by b, at a cost of {price}; a cost {price}.",
        "Tokens 513 to 640 had been cached at c, and had to make room there.",
        "Tokens 641 to 768 had been cached at c, in an incarnation that is gone.",
        "Tokens 769 to 992 are new: no request that had ended had them.",
    ]


def test_a_hit_is_said_and_so_is_more_than_was_promised() -> None:
    assert told(992, decision(a=992), Past(Known(992))) == ["Everything that could be read from a cache was."]
    assert told(992, decision(a=896), Past(Known(992)))[1] == (
        "a read 96 more tokens from cache than the index, which keeps only some blocks, had promised."
    )


def test_what_the_engine_does_not_say_is_said_with_what_was_expected() -> None:
    assert told(None, decision(a=512), Past(Known(992))) == [
        "The engine does not say how many tokens it read from its cache; the router expected 512 at a."
    ]
    assert told(None, None, Past(Known(0))) == [
        "The engine does not say how many tokens it read from its cache."
    ]


def test_a_prediction_is_called_one() -> None:
    assert told(0, decision(a=992, is_predicted=True), Past(Known(992)))[-1] == (
        "No cache events say what a holds: that is predicted."
    )
    (sentence,) = told(None, decision(a=512, is_predicted=True), Past(Known(992)))
    assert sentence.endswith("the router expected 512 at a, a prediction.")


def test_a_prompt_without_a_full_block_before_its_last_token_can_hit_nothing() -> None:
    assert told(0, decision(a=0), Past(Known(0)), num_prompt_tokens=16) == [
        "The prompt does not fill a block of 16 tokens before its last token."
    ]


@pytest.mark.parametrize("cause", [each for each in Cause if each is not Cause.NOT_REPORTED])
def test_every_cause_has_its_sentence(cause: Cause) -> None:
    text = sentence_of(MissedSpan(cause, 0, 16, ReplicaId("b")), decision(a=0), BLOCK_SIZE)
    assert text.endswith(".") and " " in text


def test_a_large_block_is_named_and_so_is_what_does_not_fill_it() -> None:
    usage = PromptUsage(1300, 0, 0)
    found = findings(usage, decision(a=0), misses(usage, decision(a=0), Past(Known(0)), 1056), 1056)
    assert [each.text for each in found] == [
        "Tokens 1 to 1,056 are new: no request that had ended had them.",
        "Tokens 1,057 to 1,300 do not fill a block of 1,056 tokens that could be read.",
    ]
    short = PromptUsage(300, 0, 0)
    found = findings(short, decision(a=0), misses(short, decision(a=0), Past(Known(0)), 1056), 1056)
    assert [each.text for each in found] == [
        "The prompt does not fill a block of 1,056 tokens before its last token."
    ]
