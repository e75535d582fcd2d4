"""What is said about a prompt's hit or miss: only what the data says."""

import msgspec
import pytest

from replicas.protocol.frames import PromptUsage
from replicas.protocol.status import ReplicaId
from replicas.protocol.ways import Reach
from router.observation.misses import findings
from router.observation.sightings import Known
from router.routing.cost import Cost
from router.routing.decision import Candidate, Decision, DecisionReason
from router.routing.load import ReplicaLoad

BLOCK_SIZE = 16
NOTHING_KNOWN = Known(0)


def decision(**overlaps: int) -> Decision:
    """The first one is chosen."""
    candidates = tuple(
        Candidate(
            ReplicaId(name),
            rank,
            overlap,
            ReplicaLoad(3, 500),
            Cost(0.01, 0.02, 0.0, 0.0),
            Reach(overlap, overlap, overlap, overlap),
        )
        for rank, (name, overlap) in enumerate(overlaps.items())
    )
    chosen = candidates[0]
    return Decision(chosen.replica_id, chosen.overlap_tokens, DecisionReason.HOME, 0, candidates)


def kinds(num_cached: int, made: Decision | None, known: Known, num_prompt_tokens: int = 1000) -> list[str]:
    usage = PromptUsage(num_prompt_tokens, num_cached, 0)
    return [finding.kind.value for finding in findings(usage, made, known, BLOCK_SIZE)]


@pytest.mark.parametrize(
    ("num_cached", "made", "known", "expected"),
    [
        (992, decision(a=992, b=0), Known(992), ["cached"]),
        (992, decision(a=896, b=0), Known(992), ["cached", "lucky"]),
        (0, decision(a=0, b=0), NOTHING_KNOWN, ["new"]),
        (0, decision(a=0, b=0), Known(0, is_elsewhere=True), ["new", "namespace"]),
        (512, decision(a=512, b=0), Known(512), ["new"]),
        (0, decision(a=0, b=512), Known(512, ReplicaId("b")), ["elsewhere", "new"]),
        (0, decision(a=0, b=512), Known(992, ReplicaId("b")), ["elsewhere", "gone"]),
        (0, decision(a=0, b=0), Known(992, ReplicaId("b")), ["gone"]),
        (256, decision(a=512, b=0), Known(992, ReplicaId("a")), ["stale", "gone"]),
        # Another replica holds more, but not more than this one was believed to.
        (256, decision(a=512, b=384), Known(512, ReplicaId("a")), ["stale", "new"]),
        (0, None, Known(0), ["new"]),
        (0, None, Known(992, ReplicaId("b")), []),
    ],
)
def test_each_miss_has_its_reason(
    num_cached: int, made: Decision | None, known: Known, expected: list[str]
) -> None:
    assert kinds(num_cached, made, known) == expected


def test_what_another_would_pull_it_did_not_hold_and_what_nobody_would_move_is_not_gone() -> None:
    made = decision(a=0, b=0)
    chosen, other = made.candidates
    pulling = other._replace(overlap_tokens=512, reach=Reach(0, 0, 0, 512))
    made = msgspec.structs.replace(made, candidates=(chosen, pulling))
    assert kinds(0, made, Known(512, ReplicaId("c"))) == ["new"]
    too_slow = other._replace(overlap_tokens=0, reach=Reach(0, 0, 512, 512))
    made = msgspec.structs.replace(made, candidates=(chosen, too_slow))
    assert kinds(0, made, Known(512, ReplicaId("b"))) == ["elsewhere", "new"]


def test_a_prompt_without_a_full_block_before_its_last_token_can_hit_nothing() -> None:
    assert kinds(0, decision(a=0), NOTHING_KNOWN, num_prompt_tokens=16) == ["short"]
    assert kinds(16, decision(a=16), NOTHING_KNOWN, num_prompt_tokens=17) == ["cached"]


def test_the_sentences_name_replicas_tokens_and_costs() -> None:
    known = Known(992, ReplicaId("b"))
    found = findings(PromptUsage(1000, 0, 0), decision(a=0, b=512), known, BLOCK_SIZE)
    elsewhere, gone = (finding.text for finding in found)
    assert elsewhere == (
        "b held 512 tokens, at a cost of 30.0 ms with 3 requests and 500 pending tokens; a cost 30.0 ms with"
        " 3 requests and 500 pending tokens."
    )
    assert gone == (
        "Tokens 513 to 992 had been seen before, most recently on b; the index, which keeps only some blocks,"
        " had them at no replica that was compared."
    )
