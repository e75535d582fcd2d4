"""Why tokens were not read: each has one cause, and together they are what was computed."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.protocol.blocks import BlockHash, hash_blocks, pack_token_ids
from replicas.protocol.events import Removal
from replicas.protocol.frames import NO_USER, PromptUsage
from replicas.protocol.keys import IndexChange
from replicas.protocol.prefix_leases import LeaseBreak
from replicas.protocol.status import Epoch, ReplicaId
from replicas.protocol.ways import NO_MOVES, MoveSpeeds
from router.explain.causes import Departed, Past, misses
from router.explain.findings import findings, sentence_of
from router.explain.miss_explainer import MissExplainer
from router.explain.nearest import Digests, PromptFacts
from router.explain.prefix_tree import Known, NamespaceName, Seen
from router.explain.prompt_memory import PromptMemory
from router.misses import Cause, MissedSpan, Misses, losses
from router.routing.decision import Decision
from router.routing.overlap import PrefixIndex
from tests.router.explain.decisions import BLOCK_SIZE, decision

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")


NO_BLOCK = ", below_a_block 8"


def told(found: Misses) -> str:
    return ", ".join(f"{span.cause.value} {span.num_tokens}" for span in found.spans)


NEW = Past(Known(0))
SLOW = MoveSpeeds(host=1.0, disk=None, pull=None)


@pytest.mark.parametrize(
    ("num_cached", "made", "past", "cause", "spans"),
    [
        (992, decision(a=992, b=0), Past(Known(992)), "hit", "below_a_block 8"),
        (0, decision(a=0, b=0), NEW, "never_cached", "never_cached 992"),
        (
            0,
            decision(a=0, b=512),
            Past(Known(512, B)),
            "held_elsewhere",
            "held_elsewhere 512, never_cached 480",
        ),
        (
            128,
            decision(a=128, b=0),
            Past(Known(800, B), [Departed(512, A, False, 2.0), Departed(768, B, True, 1.0)], False),
            "evicted",
            "evicted 384, replica_restarted 256, evicted 32, never_cached 192",
        ),
        (
            0,
            decision(a=0, b=256, promised={"b": 512}),
            NEW,
            "held_elsewhere",
            "held_elsewhere 256, not_yet_written 256, never_cached 480",
        ),
        (
            0,
            decision(a=0, promised={"a": 512}),
            NEW,
            "not_yet_written",
            "not_yet_written 512, never_cached 480",
        ),
        (256, decision(a=512, b=512), Past(Known(512, A)), "evicted", "evicted 256, never_cached 480"),
        (
            0,
            decision(a=0, b=256, c=512, gone=["c"]),
            Past(Known(512, C)),
            "held_elsewhere",
            "held_elsewhere 256, replica_restarted 256, never_cached 480",
        ),
        (0, decision(a=512, speeds=SLOW), NEW, "evicted", "evicted 512, never_cached 480"),
        (
            512,
            decision(a=512, b=768, pull_from="b"),
            NEW,
            "held_elsewhere",
            "held_elsewhere 256, never_cached 224",
        ),
        (  # behind the last block that the index has of another's chain
            0,
            decision(a=0, b=512),
            Past(Known(592, B), (), False, stride_tokens=128),
            "held_elsewhere",
            "held_elsewhere 592, never_cached 400",
        ),
        (
            0,
            decision(a=0, b=384),
            Past(Known(640, B), (), False, stride_tokens=128),
            "held_elsewhere",
            "held_elsewhere 384, evicted 256, never_cached 352",
        ),
        (
            0,
            decision(a=0, b=0),
            Past(Known(96, B), [Departed(96, B, False, 1.0)], False, stride_tokens=128),
            "evicted",
            "evicted 96, never_cached 896",
        ),
        (
            0,
            decision(a=0, b=0),
            Past(Known(96, A), (), False, stride_tokens=128),
            "evicted",
            "evicted 96, never_cached 896",
        ),
        (
            0,
            decision(a=0, b=0),
            Past(Known(592, A), [Departed(512, B, False, 1.0, Removal.CLEARED)], False),
            "cleared",
            "cleared 512, evicted 80, never_cached 400",
        ),
        *(  # the decision counted on what was cleared after it, or before and stored again
            (
                0,
                decision(a=592, b=0),
                Past(Known(592, A), [Departed(512, A, False, at, Removal.CLEARED)], False, decided_at=2.0),
                cause,
                f"{cause} 592, never_cached 400",
            )
            for at, cause in ((2.5, "cleared"), (1.0, "evicted"))
        ),
        (  # a cleared cache has also lost what lies behind the last block that the index names
            0,
            decision(a=0, b=0),
            Past(Known(592, B), [Departed(512, B, False, 1.0, Removal.CLEARED)], False),
            "cleared",
            "cleared 592, never_cached 400",
        ),
        (  # each for its own reason
            0,
            decision(a=0, b=0),
            Past(
                Known(640, B),
                [Departed(128 * (reason + 1), B, False, 1.0, reason) for reason in Removal],
                False,
            ),
            "evicted",
            "evicted 128, expired 128, lease_broken 128, file_lost 128, cleared 128, never_cached 352",
        ),
        (  # a chunk that went after the device's blocks of it still had their KV
            0,
            decision(a=0, b=0),
            Past(
                Known(512, B),
                [
                    Departed(128, B, False, 1.0),
                    Departed(256, B, False, 3.0, Removal.BROKEN),
                    Departed(384, B, False, 1.0),
                    Departed(512, B, False, 2.0, Removal.EXPIRED),
                ],
                False,
            ),
            "lease_broken",
            "lease_broken 256, expired 256, never_cached 480",
        ),
        (
            0,
            None,
            Past(Known(0), repeated=[(0, 128)], repeated_by=Cause.OTHER_NAMESPACE),
            "other_namespace",
            "other_namespace 128, never_cached 864",
        ),
        (  # an edit: what is new of it, what follows it, what was added at the end
            512,
            decision(a=512, b=0),
            Past(Known(512), repeated=[(540, 700), (720, 992)]),
            "prefix_changed",
            "never_cached 28, prefix_changed 160, never_cached 20, prefix_changed 272",
        ),
        (  # other documents behind a block that another replica has
            0,
            decision(a=0, b=16),
            Past(Known(16, B)),
            "held_elsewhere",
            "held_elsewhere 16, never_cached 976",
        ),
        (  # the cause of most that is lost, not of what comes first
            0,
            decision(a=0, b=16),
            Past(Known(16, B), repeated=[(32, 900)]),
            "prefix_changed",
            "held_elsewhere 16, never_cached 16, prefix_changed 868, never_cached 92",
        ),
        (0, None, Past(Known(512, C)), "unknown", "unknown 512, never_cached 480"),
    ],
)
def test_causes_follow_from_facts(
    num_cached: int, made: Decision | None, past: Past, cause: str, spans: str
) -> None:
    found = misses(PromptUsage(1000, num_cached, 0), made, past, BLOCK_SIZE)
    assert found.cause.value == cause
    assert told(found).removesuffix(NO_BLOCK) == spans


@pytest.mark.parametrize(
    ("departed", "spans"),
    [
        ([], "not_resumable 256, never_cached 608"),
        ([Departed(256, A, False, 5.0)], "evicted 128, not_resumable 128, never_cached 608"),
        ([Departed(384, A, False, 5.0)], "evicted 256, never_cached 608"),
        ([Departed(512, A, False, 5.0)], "not_resumable 256, never_cached 608"),
        ([Departed(256, A, False, 5.0, Removal.CLEARED)], "cleared 128, not_resumable 128, never_cached 608"),
    ],
)
def test_what_some_layers_have_was_never_kept_for_all_or_went(departed: list[Departed], spans: str) -> None:
    usage = PromptUsage(1000, 128, 0, num_unresumable_tokens=256)
    past = Past(Known(0), departed_points=departed)
    found = misses(usage, decision(a=128, b=0), past, BLOCK_SIZE)
    assert told(found) == spans + NO_BLOCK
    assert found.spans[0].replica_id == A


@pytest.mark.parametrize(
    ("num_cached", "num_unresumable", "cause", "spans"),
    [
        (976, 0, "hit", "below_a_block 24"),
        (112, 0, "never_cached", "below_a_block 16, never_cached 848, below_a_block 24"),
        (0, 0, "evicted", "evicted 128, never_cached 848, below_a_block 24"),
        (
            *(112, 256, "not_resumable"),
            "not_resumable 256, below_a_block 16, never_cached 592, below_a_block 24",
        ),
    ],
)
def test_what_a_draft_model_has_computed_again_behind_a_hit_is_not_lost(
    num_cached: int, num_unresumable: int, cause: str, spans: str
) -> None:
    usage = PromptUsage(1000, num_cached, 0, num_unresumable_tokens=num_unresumable)
    past = Past(Known(0), num_reusable_tokens=976, peek_tokens=16)
    found = misses(usage, decision(a=128, b=0), past, BLOCK_SIZE)
    assert (found.cause.value, told(found)) == (cause, spans)


def test_what_another_replica_can_not_resume_was_never_kept_there_or_evicted() -> None:
    past = Past(
        Known(384, B),
        [Departed(992, C, False, 5.0)],
        is_known_replica_gone=False,
        num_known_unresumable=384,
        known_points=[Departed(128, B, False, 6.0), Departed(512, B, False, 6.0)],
    )
    found = misses(PromptUsage(1000, 0, 0), decision(a=0, b=0), past, BLOCK_SIZE)
    assert told(found).startswith("evicted 128, not_resumable 256, evicted 608")
    assert [span.replica_id for span in found.spans][:3] == [B, B, C]


def test_a_short_prompt_has_no_block() -> None:
    assert misses(PromptUsage(16, 0, 0), decision(a=0), NEW, BLOCK_SIZE).cause is Cause.BELOW_A_BLOCK
    assert misses(PromptUsage(17, 0, 0), decision(a=0), NEW, BLOCK_SIZE).cause is Cause.NEVER_CACHED


def test_what_the_engine_does_not_say_is_neither_a_hit_nor_a_miss() -> None:
    assert misses(PromptUsage(1000, None, 0), decision(a=512), NEW, BLOCK_SIZE) == (Cause.NOT_REPORTED, ())


def test_what_the_replica_says_itself_comes_first() -> None:
    usage = PromptUsage(
        1000,
        128,
        0,
        num_lost_tokens=64,
        num_unmoved_tokens=32,
        num_evicted_early_tokens=256,
        broken_by=LeaseBreak.HOST_FULL,
        num_expired_tokens=128,
    )
    found = misses(usage, decision(a=128, b=640), NEW, BLOCK_SIZE)
    in_order = "lost_in_transfer 64, not_worth_moving 32, lease_broken 256, expired 128, held_elsewhere 32"
    assert told(found).startswith(in_order)


tokens = st.integers(0, 2000)


@st.composite
def situations(draw: st.DrawFn) -> tuple[PromptUsage, Decision | None, Past]:
    num_prompt = draw(st.integers(1, 2000))
    num_cached = draw(st.integers(0, num_prompt))
    usage = PromptUsage(
        num_prompt,
        num_cached,
        0,
        num_evicted_early_tokens=draw(tokens),
        num_unmoved_tokens=draw(tokens),
        num_lost_tokens=draw(tokens),
        num_expired_tokens=draw(tokens),
    )
    promised = st.dictionaries(st.sampled_from("abc"), tokens)
    gone = st.sampled_from(((), ("b",), ("b", "c")))
    speeds = st.sampled_from((NO_MOVES, SLOW))
    made = draw(
        st.none()
        | st.builds(decision, promised=promised, gone=gone, speeds=speeds, a=tokens, b=tokens, c=tokens)
    )
    departed = draw(
        st.lists(st.builds(Departed, tokens, st.just(C), st.booleans(), st.just(1.0)), max_size=5)
    )
    known = draw(st.builds(Known, tokens, st.sampled_from((None, B)), st.booleans()))
    repeated = draw(st.lists(st.tuples(tokens, tokens).map(sorted).map(tuple), max_size=3).map(sorted))
    past = Past(known, sorted(departed), draw(st.sampled_from((None, True, False))), repeated)
    return usage, made, past


@given(situations())
def test_spans_are_all_that_was_not_read(situation: tuple[PromptUsage, Decision | None, Past]) -> None:
    usage, made, past = situation
    found = misses(usage, made, past, BLOCK_SIZE)
    assert found.num_tokens == usage.num_prompt_tokens - usage.num_cached_tokens
    at = usage.num_cached_tokens
    for span in found.spans:
        assert span.start == at and span.end > at
        at = span.end
    assert Cause.HIT not in [span.cause for span in found.spans]
    assert sum(losses(found.spans).values()) == sum(s.num_tokens for s in found.spans if s.is_lost)
    assert not losses(found.spans) or found.cause in (Cause.HIT, next(iter(losses(found.spans))))
    num_reusable = (usage.num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert (found.cause is Cause.HIT) == (bool(num_reusable) and usage.num_cached_tokens >= num_reusable) or (
        not found.spans
    )


def said(
    num_cached: int | None, made: Decision | None, past: Past, num_prompt_tokens: int = 1000
) -> list[str]:
    usage = PromptUsage(num_prompt_tokens, num_cached, 0)
    return [each.text for each in findings(usage, made, misses(usage, made, past, BLOCK_SIZE), BLOCK_SIZE)]


def test_the_sentences_name_replicas_tokens_and_costs() -> None:
    price = "30.0 ms with 3 requests and 500 pending tokens"
    past = Past(Known(768, ReplicaId("c")), [Departed(640, ReplicaId("c"), False, 1.0)], True)
    assert said(0, decision(a=0, b=512), past) == [
        f"Tokens 1 to 512 were held by b, at a cost of {price}; a cost {price}.",
        "Tokens 513 to 640 had been cached at c, and had to make room there.",
        "Tokens 641 to 768 had been cached at c, in an incarnation that is gone.",
        "Tokens 769 to 992 are new: no request that had ended had them.",
    ]


def test_a_hit_is_said_and_so_is_more_than_was_promised() -> None:
    assert said(992, decision(a=992), Past(Known(992))) == ["Everything that could be read from a cache was."]
    assert said(992, decision(a=896), Past(Known(992)))[1] == (
        "a read 96 more tokens from cache than the index, which keeps only some blocks, had promised."
    )


def test_what_the_engine_does_not_say_is_said_with_what_was_expected() -> None:
    assert said(None, decision(a=512), Past(Known(992))) == [
        "The engine does not say how many tokens it read from its cache; the router expected 512 at a."
    ]
    assert said(None, None, Past(Known(0))) == [
        "The engine does not say how many tokens it read from its cache."
    ]


def test_a_prediction_is_called_one() -> None:
    assert said(0, decision(a=992, is_predicted=True), Past(Known(992)))[-1] == (
        "No cache events say what a holds: that is predicted."
    )
    (sentence,) = said(None, decision(a=512, is_predicted=True), Past(Known(992)))
    assert sentence.endswith("the router expected 512 at a, a prediction.")


def test_a_prompt_without_a_full_block_before_its_last_token_can_hit_nothing() -> None:
    assert said(0, decision(a=0), Past(Known(0)), num_prompt_tokens=16) == [
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


ROOT = BlockHash(bytes(16))
TOKENS = list(range(1000))
HASHES = hash_blocks(ROOT, TOKENS, BLOCK_SIZE)
KEY = bytes(16)


def facts(model: str, num_blocks: int = len(HASHES)) -> PromptFacts:
    namespace = NamespaceName(model, None, "default")
    packed = b"".join(HASHES[:num_blocks])
    return PromptFacts(Digests(KEY), "default", ROOT, namespace, BLOCK_SIZE, packed, pack_token_ids(TOKENS))


def after_one(index_of: Callable[[str], PrefixIndex | None]) -> MissExplainer:
    """After the prompt was served once."""
    usage = PromptUsage(1000, 0, 1000)
    seen = Seen(
        usage=usage, model="one", user=NO_USER, key=None, replica_id=A, ended_at=2.0, epoch=Epoch("first")
    )
    memory = PromptMemory(2**20, KEY)
    memory.add(facts("one"), seen)
    return MissExplainer(memory, index_of)


def test_what_another_name_of_the_same_weights_was_asked_is_no_restart_of_its_replica() -> None:
    indexes = {name: PrefixIndex(BLOCK_SIZE, 128) for name in ("one", "other")}
    indexes["one"].replace(A, Epoch("first"), ())
    explainer = after_one(indexes.get)
    usage = PromptUsage(1000, 0, 0)
    asked = explainer.misses(facts("other"), decision(b=0), usage, decided_at=3.0)
    assert asked.cause == "other_namespace"
    assert explainer.misses(facts("one"), decision(a=0), usage, decided_at=3.0).cause == "evicted"
    indexes["one"].replace(A, Epoch("second"), ())
    asked = explainer.misses(facts("one"), decision(a=0), usage, decided_at=3.0)
    assert asked.cause == "replica_restarted"


def test_behind_the_last_indexed_block_another_replica_still_has_the_rest() -> None:
    index = PrefixIndex(BLOCK_SIZE, 128)
    index.replace(A, Epoch("first"), ())
    found = after_one(lambda model: index).misses(
        facts("one", 6), decision(b=0), PromptUsage(100, 0, 0), decided_at=3.0
    )
    assert (found.cause, found.spans[0].end, found.spans[0].replica_id) == ("held_elsewhere", 96, A)


def test_a_prompt_whose_replica_was_cleared_lost_all_of_it_by_that() -> None:
    """Behind the last of its blocks that the index names, too."""
    index, stored = PrefixIndex(BLOCK_SIZE, 128), tuple(HASHES[7::8])
    index.replace(A, Epoch("first"), stored)
    reasons = bytes([Removal.CLEARED]) * len(stored)
    index.apply(IndexChange(A, Epoch("first"), 1, removed=stored, reasons=reasons))
    found = after_one(lambda model: index).misses(
        facts("one", 30), decision(a=0), PromptUsage(500, 0, 0), decided_at=3.0
    )
    assert (found.spans[0].cause, found.spans[0].end) == ("cleared", 480)
