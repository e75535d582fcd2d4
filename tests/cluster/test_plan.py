import pytest

from cluster.config import BackoffSpec, FleetSpec, PoolSpec
from cluster.plan import ActionKind, ObservedReplica, count_early_deaths, plan
from replicas.protocol.status import ReplicaId, ReplicaState

SPEC = FleetSpec((PoolSpec(2),), BackoffSpec(initial_seconds=1, max_seconds=8), drain_seconds=20)
NOW = 100.0

STARTING, READY, DRAINING, STOPPED = ReplicaState


def seen(name: str, state: ReplicaState, since: float = 90.0, deaths: int = 0) -> ObservedReplica:
    return ObservedReplica(ReplicaId(name), state, since, deaths, "killed" if deaths else None)


READY_0, READY_1 = seen("replica-0", READY), seen("replica-1", READY)


@pytest.mark.parametrize(
    ("observed", "actions", "wake"),
    [
        pytest.param([], ["start replica-0", "start replica-1"], None, id="nothing runs"),
        pytest.param([READY_0, READY_1], [], None, id="all is well"),
        pytest.param([READY_0], ["start replica-1"], None, id="one is missing"),
        pytest.param([READY_0, seen("replica-1", STARTING)], [], None, id="one is starting"),
        pytest.param(
            [READY_0, seen("replica-1", STOPPED, NOW, 1)], ["replace replica-1"], None, id="one just died"
        ),
        pytest.param([READY_0, seen("replica-1", STOPPED, NOW, 2)], [], 1.0, id="died twice: wait"),
        pytest.param([READY_0, seen("replica-1", STOPPED, 99.25, 2)], [], 0.25, id="still waiting"),
        pytest.param(
            [READY_0, seen("replica-1", STOPPED, 99.0, 2)],
            ["replace replica-1"],
            None,
            id="waited long enough",
        ),
        pytest.param([READY_0, seen("replica-1", STOPPED, NOW, 50)], [], 8.0, id="the wait is bounded"),
        pytest.param(
            [seen("replica-0", STOPPED, NOW, 3), seen("replica-1", STOPPED, NOW, 2)],
            [],
            1.0,
            id="wakes for the first of two",
        ),
        pytest.param([READY_0, READY_1, seen("replica-2", READY)], ["drain replica-2"], None, id="surplus"),
        pytest.param(
            [READY_0, READY_1, seen("replica-2", DRAINING, 90)], [], 10.0, id="surplus drains already"
        ),
        pytest.param(
            [READY_0, READY_1, seen("replica-2", DRAINING, 80)],
            ["stop replica-2"],
            None,
            id="drained too long",
        ),
        pytest.param(
            [READY_0, READY_1, seen("replica-2", STARTING)],
            ["stop replica-2"],
            None,
            id="surplus still starts",
        ),
        pytest.param(
            [READY_0, READY_1, seen("replica-2", STOPPED, NOW, 9)],
            ["stop replica-2"],
            None,
            id="a dead surplus replica is cleared away, not brought back",
        ),
        pytest.param(
            [READY_0, seen("replica-1", DRAINING, 95)], [], 15.0, id="wanted again while it drains: wait"
        ),
        pytest.param(
            [READY_0, seen("replica-1", STOPPED, NOW)],
            ["replace replica-1"],
            None,
            id="wanted again, drained",
        ),
        pytest.param(
            [seen("replica-9", READY), seen("replica-8", STARTING), seen("replica-0", STOPPED, 0, 1)],
            ["stop replica-0"],
            None,
            id="replicas that run stay, whatever their number",
        ),
    ],
)
def test_plan(observed: list[ObservedReplica], actions: list[str], wake: float | None) -> None:
    made = plan(SPEC, tuple(observed), NOW)
    assert [f"{action.kind} {action.replica_id}" for action in made.actions] == actions
    assert made.wake_in_seconds == wake


def test_an_empty_fleet_drains_everything() -> None:
    made = plan(FleetSpec(()), (READY_0, READY_1), NOW)
    assert [action.kind for action in made.actions] == [ActionKind.DRAIN] * 2


def test_every_action_says_why() -> None:
    (action,) = plan(SPEC, (READY_0, seen("replica-1", STOPPED, 0, 3)), NOW).actions
    assert action.details == "replica-1 died (killed), 3 times in a row"


def test_a_replica_that_served_long_enough_starts_counting_again() -> None:
    backoff = BackoffSpec(healthy_seconds=30)
    assert count_early_deaths(5, 30.0, backoff) == 1
    assert count_early_deaths(5, 29.9, backoff) == 6
    assert count_early_deaths(0, None, backoff) == 1
