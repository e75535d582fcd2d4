from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import BackoffSpec, FleetSpec, FoundServer, PoolSpec
from cluster.controller.plan import SETTLE_SECONDS, plan
from cluster.controller.replica_life import ActionKind, ReplicaLife
from replicas.protocol.status import ReplicaId, ReplicaState
from tests.cluster.finding import finding

SPEC = FleetSpec((PoolSpec(2),), BackoffSpec(initial_seconds=1, max_seconds=8), drain_seconds=20)
NOW = 100.0

STARTING, READY, DRAINING, STOPPED = ReplicaState


def seen(name: str, state: ReplicaState, since: float = 90.0, deaths: int = 0) -> ReplicaLife:
    cause = "killed" if deaths else None
    return ReplicaLife(ReplicaId(name), state, since, deaths, cause, SPEC.pools[0].revision)


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
def test_plan(observed: list[ReplicaLife], actions: list[str], wake: float | None) -> None:
    made = plan(SPEC, tuple(observed), NOW)
    assert [f"{action.kind} {action.replica_id}" for action in made.actions] == actions
    assert made.wake_in_seconds == wake


def test_an_empty_fleet_drains_everything() -> None:
    made = plan(FleetSpec(()), (READY_0, READY_1), NOW)
    assert [action.kind for action in made.actions] == [ActionKind.DRAIN] * 2


def test_every_action_says_why() -> None:
    (action,) = plan(SPEC, (READY_0, seen("replica-1", STOPPED, 0, 3)), NOW).actions
    assert action.details == "replica-1 died (killed), 3 times in a row"


def fleet(*replicas: tuple[str, ReplicaState, str], deaths: int = 0) -> tuple[ReplicaLife, ...]:
    """Names, states, and the revision: new, old, or one that nobody knows."""
    revisions = {"new": SPEC.pools[0].revision, "old": "0ld", "unknown": None}
    return tuple(
        ReplicaLife(
            *(ReplicaId(name), state, 90.0, deaths if state is STOPPED else 0),
            *("it is broken" if state is STOPPED else None, revisions[revision]),
        )
        for name, state, revision in replicas
    )


@pytest.mark.parametrize(
    ("surge", "observed", "actions"),
    [
        pytest.param(
            1,
            fleet(("replica-0", READY, "old"), ("replica-1", READY, "old")),
            ["start replica-2"],
            id="one more than there should be",
        ),
        pytest.param(
            2,
            fleet(("replica-0", READY, "old"), ("replica-1", READY, "old")),
            ["start replica-2", "start replica-3"],
            id="two more",
        ),
        pytest.param(
            1,
            fleet(("replica-0", READY, "old"), ("replica-1", READY, "old"), ("replica-2", STARTING, "new")),
            [],
            id="wait until it is ready",
        ),
        pytest.param(
            1,
            fleet(("replica-0", READY, "old"), ("replica-1", READY, "old"), ("replica-2", READY, "new")),
            ["drain replica-0"],
            id="one old one has become spare",
        ),
        pytest.param(
            1,
            fleet(
                *(("replica-0", DRAINING, "old"), ("replica-1", READY, "old")),
                ("replica-2", READY, "new"),
            ),
            ["start replica-3"],
            id="the next one need not wait for the drain",
        ),
        pytest.param(
            1,
            fleet(("replica-0", STOPPED, "old"), ("replica-1", READY, "old"), ("replica-2", READY, "new")),
            ["stop replica-0", "start replica-3"],
            id="an old one that has ended is cleared away",
        ),
        pytest.param(
            1,
            fleet(("replica-1", READY, "old"), ("replica-2", READY, "new"), ("replica-0", READY, "new")),
            ["drain replica-1"],
            id="the last old one",
        ),
        pytest.param(
            0,
            fleet(("replica-0", READY, "old"), ("replica-1", READY, "old")),
            ["drain replica-0"],
            id="without surge an old one leaves first",
        ),
        pytest.param(
            0,
            fleet(("replica-0", DRAINING, "old"), ("replica-1", READY, "old")),
            ["start replica-2"],
            id="and a new one takes its place",
        ),
        pytest.param(
            1,
            fleet(("replica-0", STARTING, "old"), ("replica-1", STARTING, "old")),
            ["stop replica-0", "stop replica-1", "start replica-2"],
            id="old ones that serve nobody yet go at once",
        ),
        pytest.param(
            1,
            fleet(("replica-0", STARTING, "unknown"), ("replica-1", READY, "unknown")),
            [],
            id="what was found and has not yet said what it is stays",
        ),
        pytest.param(
            1,
            fleet(("replica-0", STOPPED, "unknown"), ("replica-1", READY, "new")),
            ["stop replica-0", "start replica-2"],
            id="what was found and has ended before it said what it is holds nothing up",
        ),
        pytest.param(
            1,
            fleet(
                *(("replica-1", READY, "old"), ("replica-3", READY, "old")),
                *(("replica-0", STARTING, "new"), ("replica-2", STARTING, "new")),
            ),
            ["stop replica-2"],
            id="shrunk meanwhile, two old and two new ones are one more than the surge allows",
        ),
        pytest.param(
            0,
            fleet(
                ("replica-1", READY, "old"), ("replica-0", STARTING, "new"), ("replica-2", STARTING, "new")
            ),
            ["stop replica-2"],
            id="shrunk meanwhile without a surge",
        ),
        pytest.param(
            1,
            fleet(
                *(("replica-1", READY, "old"), ("replica-3", READY, "old")),
                *(
                    ("replica-0", DRAINING, "new"),
                    ("replica-2", STARTING, "new"),
                    ("replica-4", STOPPED, "new"),
                ),
            ),
            [],
            id="one that has ended comes back only if the surge has a place for it",
        ),
    ],
)
def test_a_rollout(surge: int, observed: tuple[ReplicaLife, ...], actions: list[str]) -> None:
    spec = replace(SPEC, pools=(replace(SPEC.pools[0], surge=surge),))
    made = plan(spec, observed, NOW)
    assert [f"{action.kind} {action.replica_id}" for action in made.actions] == actions


def test_an_old_replica_stays_until_routers_have_found_the_new_one() -> None:
    old = fleet(("replica-0", READY, "old"), ("replica-1", READY, "old"))
    new = ReplicaLife(ReplicaId("replica-2"), READY, NOW - 0.5, revision=SPEC.pools[0].revision)
    made = plan(SPEC, (*old, new), NOW)
    assert (made.actions, made.wake_in_seconds) == ((), SETTLE_SECONDS - 0.5)


def test_one_that_routers_are_just_finding_keeps_its_place_in_a_pool_that_shrinks() -> None:
    old = fleet(("replica-1", READY, "old"), ("replica-3", READY, "old"))
    revision = SPEC.pools[0].revision
    new = [ReplicaLife(ReplicaId(f"replica-{n}"), READY, NOW - 0.5, revision=revision) for n in (0, 2)]
    made = plan(SPEC, (*old, *new), NOW)
    assert (made.actions, made.wake_in_seconds) == ((), SETTLE_SECONDS - 0.5)
    later = plan(SPEC, (*old, *new), NOW + SETTLE_SECONDS)
    assert [str(action.replica_id) for action in later.actions] == ["replica-1", "replica-3"]


def test_one_that_is_to_end_is_kept_for_none_that_starts() -> None:
    ending = replace(seen("replica-0", STARTING), is_dismissed=True)
    observed = (ending, seen("replica-1", STARTING), seen("replica-2", STARTING))
    assert [str(action.replica_id) for action in plan(SPEC, observed, NOW).actions] == ["replica-0"]


def test_a_rollout_whose_first_new_replica_ends_stops_and_says_why() -> None:
    old = fleet(("replica-0", READY, "old"), ("replica-1", READY, "old"))
    made = plan(SPEC, (*old, *fleet(("replica-2", STOPPED, "new"), deaths=1)), NOW)
    assert made.actions == ()
    assert made.failed_rollouts == (("replica", "replica-2 did not start: it is broken"),)


def test_a_later_failure_is_tried_again_for_the_new_settings_have_proved_themselves() -> None:
    observed = fleet(("replica-1", READY, "old"), ("replica-2", READY, "new"))
    made = plan(SPEC, (*observed, *fleet(("replica-3", STOPPED, "new"), deaths=1)), NOW)
    assert made.failed_rollouts == ()
    assert [action.kind for action in made.actions] == [ActionKind.REPLACE]


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 6), st.randoms(use_true_random=False))
def test_whatever_happens_in_which_order_a_rollout_ends_and_enough_replicas_serve_all_along(
    num_replicas: int, surge: int, num_old: int, random: Random
) -> None:
    pool = PoolSpec(num_replicas, surge=surge)
    spec = FleetSpec((pool,))
    num_needed = min(num_old, num_replicas - (surge == 0))
    seen = {
        pool.replica_id(number): ReplicaLife(pool.replica_id(number), READY, 0.0, revision="0ld")
        for number in range(num_old)
    }
    goal = [(READY, pool.revision)] * num_replicas
    now, num_rounds = 10.0, 0
    while [(replica.state, replica.revision) for replica in seen.values()] != goal:
        num_rounds += 1
        assert num_rounds < 200, seen
        for action in plan(spec, tuple(seen.values()), now).actions:
            match action.kind:
                case ActionKind.START | ActionKind.REPLACE:
                    fresh = ReplicaLife(action.replica_id, STARTING, now, revision=pool.revision)
                    seen[action.replica_id] = fresh
                case ActionKind.DRAIN:
                    seen[action.replica_id] = replace(seen[action.replica_id], state=DRAINING, since=now)
                case ActionKind.STOP:
                    del seen[action.replica_id]
        states = [replica.state for replica in seen.values()]
        assert states.count(READY) >= num_needed, states
        assert states.count(READY) + states.count(STARTING) <= max(num_old, num_replicas + surge)
        now += SETTLE_SECONDS
        busy = [name for name, replica in seen.items() if replica.state in (STARTING, DRAINING)]
        for name in random.sample(sorted(busy), len(busy) and random.randint(1, len(busy))):
            following = READY if seen[name].state is STARTING else STOPPED
            seen[name] = replace(seen[name], state=following, since=now)
    assert plan(spec, tuple(seen.values()), now).actions == ()


def placed(machines: str) -> tuple[ReplicaLife, ...]:
    """A letter for each replica: the machine that it is on."""
    revision = SPEC.pools[0].revision
    return tuple(
        ReplicaLife(ReplicaId(f"replica-{number}"), READY, 90.0, revision=revision, machine=machine)
        for number, machine in enumerate(machines)
    )


@pytest.mark.parametrize(
    ("machines", "num_replicas", "drained"),
    [
        ("abc", 2, ["replica-2"]),
        ("abb", 2, ["replica-0"]),
        ("abab", 2, ["replica-1", "replica-3"]),
        ("abcca", 2, ["replica-1", "replica-2", "replica-3"]),
        ("aab", 1, ["replica-1", "replica-2"]),
    ],
)
def test_where_idle_machines_are_taken_away_a_pool_shrinks_so_that_some_become_idle(
    machines: str, num_replicas: int, drained: list[str]
) -> None:
    spec = replace(SPEC, pools=(replace(SPEC.pools[0], num_replicas=num_replicas),), is_growing=True)
    assert [action.replica_id for action in plan(spec, placed(machines), NOW).actions] == drained


def test_where_machines_stay_the_lower_numbers_do() -> None:
    assert [action.replica_id for action in plan(SPEC, placed("abb"), NOW).actions] == ["replica-2"]


def test_a_replica_that_serves_goes_before_one_on_a_fuller_machine_that_does_not_yet() -> None:
    spec = replace(SPEC, pools=(replace(SPEC.pools[0], num_replicas=1),), is_growing=True)
    first, second, third = placed("abb")
    observed = (first, replace(second, state=STARTING), replace(third, state=STARTING))
    assert [f"{action.kind} {action.replica_id}" for action in plan(spec, observed, NOW).actions] == [
        "stop replica-1",
        "stop replica-2",
    ]


SERVERS = finding("p")
MEMBERS = FleetSpec((SERVERS,)).with_servers({"p": [FoundServer("http://a:1"), FoundServer("http://b:1")]})


def of_server(number: int, state: ReplicaState) -> ReplicaLife:
    pool = MEMBERS.pools[number]
    return ReplicaLife(pool.replica_id(0), state, 90.0, revision=pool.revision)


def test_each_server_has_a_replica_and_one_that_left_the_list_drains() -> None:
    a, b = of_server(0, READY), of_server(1, READY)
    started = plan(MEMBERS, (a,), NOW).actions
    assert [(action.kind, action.replica_id) for action in started] == [(ActionKind.START, "p_at_b-1-0")]
    assert plan(MEMBERS, (a, b), NOW).actions == ()
    only_a = FleetSpec((SERVERS,)).with_servers({"p": [FoundServer("http://a:1")]})
    gone = plan(only_a, (a, b), NOW).actions
    assert [(action.kind, action.replica_id) for action in gone] == [(ActionKind.DRAIN, "p_at_b-1-0")]


def test_one_that_comes_back_waits_for_its_replica_to_have_drained() -> None:
    a = of_server(0, READY)
    assert plan(MEMBERS, (a, of_server(1, DRAINING)), NOW).actions == ()
    again = plan(MEMBERS, (a, of_server(1, STOPPED)), NOW).actions
    assert [(action.kind, action.replica_id) for action in again] == [(ActionKind.REPLACE, "p_at_b-1-0")]


def test_until_a_pool_has_looked_its_replicas_stay() -> None:
    assert plan(FleetSpec((SERVERS,)), (of_server(0, READY), of_server(1, STARTING)), NOW).actions == ()
