import re
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
STATES = {"s": STARTING, "r": READY, "d": DRAINING, "x": STOPPED}
REVISIONS = {"+": SPEC.pools[0].revision, "-": "0ld", "?": None}


def fleet(text: str) -> tuple[ReplicaLife, ...]:
    """Read replicas such as `2x-@99/3`: number, state, revision (new, old, unknown), since when, deaths."""
    found = []
    for number, state, revision, since, deaths in re.findall(
        r"(\d+)([srdx])([-+?])(?:@([\d.]+))?(?:/(\d+))?", text
    ):
        cause = "it is broken" if deaths else None
        found.append(
            ReplicaLife(
                *(ReplicaId(f"replica-{number}"), STATES[state], float(since or 90), int(deaths or 0), cause),
                REVISIONS[revision],
            )
        )
    assert len(found) == len(text.split())
    return tuple(found)


def planned(spec: FleetSpec, observed: tuple[ReplicaLife, ...]) -> str:
    actions = plan(spec, observed, NOW).actions
    return ", ".join(f"{action.kind} {action.replica_id.removeprefix('replica-')}" for action in actions)


@pytest.mark.parametrize(
    ("what", "observed", "actions", "wake"),
    [
        ("nothing runs", "", "start 0, start 1", None),
        ("all is well", "0r+ 1r+", "", None),
        ("one is missing", "0r+", "start 1", None),
        ("one is starting", "0r+ 1s+", "", None),
        ("one just died", "0r+ 1x+@100/1", "replace 1", None),
        ("died twice: wait", "0r+ 1x+@100/2", "", 1.0),
        ("still waiting", "0r+ 1x+@99.25/2", "", 0.25),
        ("waited long enough", "0r+ 1x+@99/2", "replace 1", None),
        ("the wait is bounded", "0r+ 1x+@100/50", "", 8.0),
        ("wakes for the first of two", "0x+@100/3 1x+@100/2", "", 1.0),
        ("surplus", "0r+ 1r+ 2r+", "drain 2", None),
        ("surplus drains already", "0r+ 1r+ 2d+", "", 10.0),
        ("drained too long", "0r+ 1r+ 2d+@80", "stop 2", None),
        ("surplus still starts", "0r+ 1r+ 2s+", "stop 2", None),
        ("a dead surplus replica is cleared away", "0r+ 1r+ 2x+@100/9", "stop 2", None),
        ("wanted again while it drains: wait", "0r+ 1d+@95", "", 15.0),
        ("wanted again, drained", "0r+ 1x+@100", "replace 1", None),
        ("replicas that run stay, whatever their number", "9r+ 8s+ 0x+@0/1", "stop 0", None),
    ],
)
def test_plan(what: str, observed: str, actions: str, wake: float | None) -> None:
    assert planned(SPEC, fleet(observed)) == actions, what
    assert plan(SPEC, fleet(observed), NOW).wake_in_seconds == wake


def test_an_empty_fleet_drains_everything() -> None:
    made = plan(FleetSpec(()), fleet("0r+ 1r+"), NOW)
    assert [action.kind for action in made.actions] == [ActionKind.DRAIN] * 2


@pytest.mark.parametrize(
    ("what", "surge", "observed", "actions"),
    [
        ("one more than there should be", 1, "0r- 1r-", "start 2"),
        ("two more", 2, "0r- 1r-", "start 2, start 3"),
        ("wait until it is ready", 1, "0r- 1r- 2s+", ""),
        ("one old one has become spare", 1, "0r- 1r- 2r+", "drain 0"),
        ("the next one need not wait for the drain", 1, "0d- 1r- 2r+", "start 3"),
        ("an old one that has ended is cleared away", 1, "0x-/0 1r- 2r+", "stop 0, start 3"),
        ("the last old one", 1, "1r- 2r+ 0r+", "drain 1"),
        ("without surge an old one leaves first", 0, "0r- 1r-", "drain 0"),
        ("and a new one takes its place", 0, "0d- 1r-", "start 2"),
        ("old ones that serve nobody yet go at once", 1, "0s- 1s-", "stop 0, stop 1, start 2"),
        ("what was found and has not yet said what it is stays", 1, "0s? 1r?", ""),
        ("what ended before it said what it is holds nothing up", 1, "0x? 1r+", "stop 0, start 2"),
        ("shrunk meanwhile, one more than the surge allows", 1, "1r- 3r- 0s+ 2s+", "stop 2"),
        ("shrunk meanwhile without a surge", 0, "1r- 0s+ 2s+", "stop 2"),
        ("one that has ended comes back only if there is a place", 1, "1r- 3r- 0d+ 2s+ 4x+", ""),
    ],
)
def test_a_rollout(what: str, surge: int, observed: str, actions: str) -> None:
    spec = replace(SPEC, pools=(replace(SPEC.pools[0], surge=surge),))
    assert planned(spec, fleet(observed)) == actions, what


def test_an_old_replica_stays_until_routers_have_found_the_new_one() -> None:
    old = fleet("0r- 1r-")
    new = ReplicaLife(ReplicaId("replica-2"), READY, NOW - 0.5, revision=SPEC.pools[0].revision)
    made = plan(SPEC, (*old, new), NOW)
    assert (made.actions, made.wake_in_seconds) == ((), SETTLE_SECONDS - 0.5)


def test_one_that_routers_are_just_finding_keeps_its_place_in_a_pool_that_shrinks() -> None:
    old = fleet("1r- 3r-")
    revision = SPEC.pools[0].revision
    new = [ReplicaLife(ReplicaId(f"replica-{n}"), READY, NOW - 0.5, revision=revision) for n in (0, 2)]
    made = plan(SPEC, (*old, *new), NOW)
    assert (made.actions, made.wake_in_seconds) == ((), SETTLE_SECONDS - 0.5)
    later = plan(SPEC, (*old, *new), NOW + SETTLE_SECONDS)
    assert [str(action.replica_id) for action in later.actions] == ["replica-1", "replica-3"]


def test_one_that_is_to_end_is_kept_for_none_that_starts() -> None:
    ending, *others = fleet("0s+ 1s+ 2s+")
    observed = (replace(ending, is_dismissed=True), *others)
    assert [str(action.replica_id) for action in plan(SPEC, observed, NOW).actions] == ["replica-0"]


def test_a_rollout_whose_first_new_replica_ends_stops_and_says_why() -> None:
    old = fleet("0r- 1r-")
    made = plan(SPEC, (*old, *fleet("2x+/1")), NOW)
    assert made.actions == ()
    assert made.failed_rollouts == (("replica", "replica-2 did not start: it is broken"),)


def test_a_later_failure_is_tried_again_for_the_new_settings_have_proved_themselves() -> None:
    made = plan(SPEC, fleet("1r- 2r+ 3x+/1"), NOW)
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
