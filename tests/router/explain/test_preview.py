"""Why a prompt goes where it goes: what is said of a decision is the term that has decided."""

from random import Random

import pytest

from replicas.protocol.status import ReplicaId
from router.explain.preview import because
from router.routing.cost import CostParameters
from router.routing.decision import Decision, decide
from router.routing.load import ReplicaLoad
from tests.router.routing.fleets import fleet, overlapping, ranked, ready, request

FIRST, SECOND = ranked(2)
IDLE = ReplicaLoad(cache_fill=0.2)
FULL = ReplicaLoad(cache_fill=1.0)
AWAY, FULLER = f"not to {FIRST}", "its cache is fuller, so room costs more"
BUSY = ReplicaLoad(num_requests=20, num_pending_tokens=20_000)


def decided(first: ReplicaLoad, second: ReplicaLoad, blocks: dict[ReplicaId, int]) -> Decision:
    loads = fleet(2, **{FIRST: first, SECOND: second})
    return decide(request(), ready(loads), overlapping(blocks), CostParameters(), Random(1))


@pytest.mark.parametrize(
    ("first", "second", "blocks", "said"),
    [
        (BUSY, IDLE, {}, f"{AWAY}, its home: its queue is longer (2200 ms, 0.0 ms at {SECOND})"),
        (FULL, IDLE, {}, f"{AWAY}, its home: {FULLER} (2400 ms, 480 ms at {SECOND})"),
        (
            *(FULL, IDLE, {FIRST: 100}),
            f"{AWAY}, which has more of the prompt: {FULLER} (1920 ms, 480 ms at {SECOND})",
        ),
        (IDLE, IDLE, {}, "it is the first of the bucket's affinity order"),
        (FULL, FULL, {SECOND: 9}, "no other replica holds more of the prompt"),
    ],
)
def test_what_decided_is_said(
    first: ReplicaLoad, second: ReplicaLoad, blocks: dict[ReplicaId, int], said: str
) -> None:
    assert because(decided(first, second, blocks)) == said


def test_beside_a_near_tie_the_home_has_more_requests() -> None:
    asked = request(num_tokens=500)
    loads = fleet(2, **{FIRST: ReplicaLoad(num_requests=5, decode_step_seconds=1e-6), SECOND: ReplicaLoad()})
    made = decide(asked, ready(loads), overlapping({}), CostParameters(), Random(1))
    assert made.replica_id == SECOND
    assert because(made).startswith(f"not to {FIRST}, its home: ")
