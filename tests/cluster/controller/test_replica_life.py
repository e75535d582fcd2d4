"""The life of a replica: what each event makes of it, and what holds of a fleet whatever happens when."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.config import BackoffSpec, FleetSpec, PoolSpec
from cluster.controller.changes import FleetState, given_up, settled
from cluster.controller.plan import SETTLE_SECONDS, plan
from cluster.controller.replica_life import (
    Action,
    ActionKind,
    DrainAsked,
    Drained,
    EndAsked,
    Event,
    Launched,
    Order,
    ReplicaEnded,
    ReplicaLife,
    ReplicaStarted,
    after_action,
    asked_for,
    found,
)
from replicas.protocol.status import ReplicaId, ReplicaState

STARTING, READY, DRAINING, STOPPED = ReplicaState
NAME = ReplicaId("replica-0")
NOW = 100.0
BACKOFF = BackoffSpec(initial_seconds=1, max_seconds=8, healthy_seconds=30)
STARTED = ReplicaStarted("abc", "m")


def life(state: ReplicaState, since: float = 90.0, deaths: int = 0) -> ReplicaLife:
    cause = "killed" if state is STOPPED and deaths else None
    return ReplicaLife(NAME, state, since, deaths, cause, "abc")


def asked() -> ReplicaLife:
    return asked_for(NAME, "abc", 90.0)[0]


def dismissed(state: ReplicaState) -> ReplicaLife:
    return replace(life(state), is_dismissed=True)


@pytest.mark.parametrize(
    ("before", "event", "state", "orders"),
    [
        (asked(), Launched(), STARTING, [Order.START]),
        (asked(), ReplicaEnded("no room"), STOPPED, []),
        (asked(), EndAsked(), STARTING, []),
        (replace(asked(), is_dismissed=True), Launched(), STARTING, [Order.WATCH, Order.END]),
        (replace(asked(), is_dismissed=True), EndAsked(), STARTING, []),
        (life(STARTING), STARTED, READY, [Order.WATCH]),
        (life(STARTING), ReplicaEnded("broken", is_refusal=True), STOPPED, []),
        (life(STARTING), DrainAsked(), STARTING, []),
        (life(STARTING), EndAsked(), STARTING, [Order.END]),
        (dismissed(STARTING), STARTED, STARTING, [Order.WATCH]),
        (dismissed(STARTING), ReplicaEnded("killed"), STOPPED, []),
        (life(READY), DrainAsked(), DRAINING, [Order.DRAIN]),
        (life(READY), EndAsked(), READY, [Order.END]),
        (life(READY), ReplicaEnded("killed"), STOPPED, []),
        (dismissed(READY), DrainAsked(), READY, []),
        (dismissed(READY), EndAsked(), READY, []),
        (life(DRAINING), DrainAsked(), DRAINING, []),
        (life(DRAINING), Drained(), DRAINING, [Order.END]),
        (life(DRAINING), EndAsked(), DRAINING, [Order.END]),
        (life(DRAINING), ReplicaEnded("killed"), STOPPED, []),
        (dismissed(DRAINING), Drained(), DRAINING, []),
        (life(STOPPED), Drained(), STOPPED, []),
        (life(STOPPED), EndAsked(), STOPPED, []),
    ],
)
def test_what_follows_from_an_event(
    before: ReplicaLife, event: Event, state: ReplicaState, orders: list[Order]
) -> None:
    after, given = before.after(event, NOW, BACKOFF)
    assert (after.state, list(given)) == (state, orders)
    assert after.since == (before.since if state is before.state else NOW)


@pytest.mark.parametrize(
    ("before", "event"),
    [(life(STOPPED), STARTED), (life(STOPPED), ReplicaEnded("again")), (life(READY), STARTED)],
)
def test_what_cannot_happen_raises(before: ReplicaLife, event: Event) -> None:
    with pytest.raises(ValueError, match="cannot go from"):
        before.after(event, NOW, BACKOFF)


@pytest.mark.parametrize(
    ("before", "num_early_deaths", "cause"),
    [
        (life(STARTING, deaths=2), 3, "killed"),
        (life(READY, since=70.1, deaths=2), 3, "killed"),
        (life(READY, since=70.0, deaths=2), 1, "killed"),
        (life(DRAINING, deaths=2), 0, None),
        (replace(life(READY, deaths=2), is_dismissed=True), 0, None),
    ],
)
def test_an_end_that_was_not_asked_for_is_a_death(
    before: ReplicaLife, num_early_deaths: int, cause: str | None
) -> None:
    after, _ = before.after(ReplicaEnded("killed"), NOW, BACKOFF)
    assert (after.num_early_deaths, after.cause, after.has_refused) == (num_early_deaths, cause, False)


def test_a_successor_takes_the_deaths_with_it_and_nothing_else() -> None:
    before = replace(life(STOPPED, deaths=3), machine="m", has_refused=True, is_dismissed=True)
    after, orders = asked_for(NAME, "new", NOW, before)
    assert orders == (Order.LAUNCH,)
    assert after == replace(asked(), since=NOW, num_early_deaths=3, revision="new")


@pytest.mark.parametrize(
    ("one", "wanted", "unwanted", "draining"),
    [
        (life(STARTING), None, ActionKind.STOP, None),
        (life(READY), None, ActionKind.DRAIN, None),
        (life(DRAINING, since=95.0), None, None, 15.0),
        (life(DRAINING, since=80.0), None, None, ActionKind.STOP),
        (life(STOPPED, since=NOW), ActionKind.REPLACE, ActionKind.STOP, None),
        (life(STOPPED, since=NOW, deaths=1), ActionKind.REPLACE, ActionKind.STOP, None),
        (life(STOPPED, since=NOW, deaths=2), 1.0, ActionKind.STOP, None),
        (life(STOPPED, since=99.0, deaths=4), 3.0, ActionKind.STOP, None),
        (life(STOPPED, since=NOW, deaths=99), 8.0, ActionKind.STOP, None),
    ],
)
def test_what_it_needs(one: ReplicaLife, wanted: object, unwanted: object, draining: object) -> None:
    advices = one.if_wanted(BACKOFF, NOW), one.if_unwanted("is surplus"), one.if_draining(20.0, NOW)
    kinds = [advice.kind if isinstance(advice, Action) else advice for advice in advices]
    assert kinds == [wanted, unwanted, draining]


def test_it_waits_for_room_once_it_is_late_and_until_it_serves() -> None:
    one = life(STARTING, since=90.0)
    assert not one.looked_for_room(True, 91.0, 2.0).is_waiting_for_room
    assert not one.looked_for_room(False, 95.0, 2.0).is_waiting_for_room
    waiting = one.looked_for_room(True, 92.0, 2.0)
    assert waiting.is_waiting_for_room
    assert not waiting.after(STARTED, NOW, BACKOFF)[0].is_waiting_for_room


@dataclass(eq=False)
class HeldLife:
    life: ReplicaLife
    has_actor: bool = False


class FleetLife(RuleBasedStateMachine):
    """Plan and lives with a Ray that does what it is told sooner or later, or fails, or loses replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.current: dict[ReplicaId, HeldLife] = {}
        self.all: list[HeldLife] = []
        self.orders: list[tuple[HeldLife, Order]] = []

    @initialize(num_replicas=st.integers(0, 4), surge=st.integers(0, 2))
    def begin(self, num_replicas: int, surge: int) -> None:
        pool = PoolSpec(num_replicas, surge=surge)
        self.state = FleetState(FleetSpec((pool,), BACKOFF, drain_seconds=20))
        self.reconcile()

    @property
    def pool(self) -> PoolSpec:
        return self.state.spec.pools[0]

    def lives(self) -> tuple[ReplicaLife, ...]:
        return tuple(one.life for one in self.current.values())

    def reconcile(self) -> None:
        while True:
            decided = plan(self.state.spec, self.lives(), self.now)
            for action in decided.actions:
                self.execute(action)
            for name, why in decided.failed_rollouts:
                self.state = given_up(self.state, name, why)
            if not decided.failed_rollouts:
                break
        if [(one.state, one.revision) for one in self.lives()] == self.goal():
            self.state = settled(self.state, self.pool.name)

    def goal(self) -> list[tuple[ReplicaState, str | None]]:
        return [(READY, self.pool.revision)] * self.pool.num_replicas

    def execute(self, action: Action) -> None:
        one = self.current.get(action.replica_id)
        before = None if one is None else one.life
        after, orders = after_action(action, before, self.pool.revision, self.now, BACKOFF)
        if after is None:
            del self.current[action.replica_id]
        elif one is not None and action.kind in (ActionKind.DRAIN, ActionKind.STOP):
            one.life = after
            self.orders += [(one, order) for order in orders]
        else:
            self.adopt(HeldLife(after), orders)

    def adopt(self, one: HeldLife, orders: tuple[Order, ...]) -> None:
        self.current[one.life.replica_id] = one
        self.all.append(one)
        self.orders += [(one, order) for order in orders]

    def hear(self, one: HeldLife, event: Event) -> None:
        if isinstance(event, ReplicaEnded):
            one.has_actor = False
        one.life, orders = one.life.after(event, self.now, BACKOFF)
        self.orders += [(one, order) for order in orders]

    def carry_out(self, one: HeldLife, order: Order, *, fails: bool) -> None:
        """A watch goes on while there is something to watch."""
        if order is Order.WATCH and one.has_actor:
            return
        self.orders.remove((one, order))
        match order:
            case Order.LAUNCH if fails:
                self.hear(one, ReplicaEnded("its name is still taken"))
            case Order.LAUNCH:
                one.has_actor = True
                self.hear(one, Launched())
            case Order.START if one.has_actor and not fails:
                revision = one.life.revision or self.pool.revision
                self.hear(one, ReplicaStarted(revision, "m"))
            case Order.START:
                self.hear(one, ReplicaEnded("it is broken", is_refusal=one.has_actor))
            case Order.WATCH:
                self.hear(one, ReplicaEnded("its process ended"))
            case Order.DRAIN:
                self.hear(one, Drained())
            case Order.END:
                one.has_actor = False

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), fails=st.booleans())
    def something_happens(self, data: st.DataObject, fails: bool) -> None:
        one, order = data.draw(st.sampled_from(self.orders))
        self.carry_out(one, order, fails=fails)
        self.reconcile()

    @rule()
    def all_goes_well_for_once(self) -> None:
        for one, order in self.orders.copy():
            self.carry_out(one, order, fails=False)
        self.reconcile()

    @precondition(lambda self: any(one.has_actor for one in self.all))
    @rule(data=st.data())
    def one_dies(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.all if one.has_actor]))
        one.has_actor = False

    @rule(seconds=st.sampled_from((0.1, 2.0, 10.0, 40.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.reconcile()

    @rule(num_replicas=st.integers(0, 4))
    def scale(self, num_replicas: int) -> None:
        spec = self.state.spec.with_pool(replace(self.pool, num_replicas=num_replicas))
        self.state = replace(self.state, spec=spec)
        self.reconcile()

    @rule()
    def roll_out(self) -> None:
        old, name = self.pool, self.pool.name
        spec = self.state.spec.with_pool(replace(old, num_restarts=old.num_restarts + 1))
        previous = {name: self.state.previous.get(name, old)}
        self.state = replace(self.state, spec=spec, previous=previous)
        self.reconcile()

    @precondition(lambda self: any(one.life.state is READY for one in self.current.values()))
    @rule(data=st.data())
    def one_is_asked_to_drain(self, data: st.DataObject) -> None:
        ready = [name for name, one in self.current.items() if one.life.state is READY]
        self.execute(Action(ActionKind.DRAIN, data.draw(st.sampled_from(ready)), "asked to"))
        self.reconcile()

    @rule()
    def the_controller_starts_again(self) -> None:
        """It finds the actors that live, and has forgotten all else."""
        living = {name: one for name, one in self.current.items() if one.has_actor}
        self.current, self.all, self.orders = {}, [], []
        for name in living:
            after, orders = found(name, self.now)
            self.adopt(HeldLife(after, has_actor=True), orders)
        self.reconcile()

    def knows_all(self) -> bool:
        """Nothing is done to a pool before each of its replicas has said what it is."""
        return all(one.revision is not None or one.state is STOPPED for one in self.lives())

    def num_staying(self) -> int:
        return sum(one.state in (STARTING, READY) and not one.is_dismissed for one in self.lives())

    def num_places(self) -> int:
        is_rolling = any(one.revision != self.pool.revision for one in self.lives())
        return self.pool.num_replicas + (self.pool.surge if is_rolling else 0)

    def is_being_found(self, one: ReplicaLife) -> bool:
        """Routers may not know it yet, so none leaves for it."""
        is_fresh = one.revision == self.pool.revision and one.state is READY
        return is_fresh and self.now - one.since < SETTLE_SECONDS

    @invariant()
    def there_are_never_more_than_wanted_and_the_surge(self) -> None:
        if self.knows_all():
            being_found = sum(self.is_being_found(one) for one in self.lives())
            assert self.num_staying() <= self.num_places() + being_found

    @invariant()
    def one_that_died_is_replaced_after_its_back_off_if_there_is_a_place(self) -> None:
        if self.knows_all() and self.num_staying() < self.num_places():
            for one in self.lives():
                if one.state is STOPPED:
                    assert one.since + BACKOFF.delay_seconds(one.num_early_deaths) > self.now

    @invariant()
    def none_leaks(self) -> None:
        for one in self.all:
            following = [order for other, order in self.orders if other is one]
            watchers = [order for order in following if order in (Order.LAUNCH, Order.START, Order.WATCH)]
            assert len(watchers) == (one.life.state is not STOPPED), "its end would not be heard of"
            if one.has_actor:
                assert self.current.get(one.life.replica_id) is one, "it is forgotten and runs"
                assert not one.life.is_dismissed or Order.END in following, "nothing ends it"

    @invariant()
    def draining_ends(self) -> None:
        for one in self.lives():
            assert one.state is not DRAINING or one.is_dismissed or self.now < one.since + 20.0

    def teardown(self) -> None:
        """Left alone, with a Ray that does what it is told, the fleet becomes what was asked for."""
        if not hasattr(self, "state"):
            return
        for _ in range(200):
            for one, order in self.orders.copy():
                self.carry_out(one, order, fails=False)
            self.time_passes(40.0)
            if [(one.state, one.revision) for one in self.lives()] == self.goal():
                break
        else:
            raise AssertionError(f"it never settles: {self.lives()}")
        self.none_leaks()


TestFleetLife = FleetLife.TestCase


@pytest.mark.parametrize("surge", [0, 1])
def test_a_pool_that_shrinks_in_a_rollout_is_soon_within_its_surge(surge: int) -> None:
    """More of both revisions serve and start than a pool of two may have."""
    machine = FleetLife()
    machine.begin(num_replicas=3 - surge, surge=surge)
    machine.all_goes_well_for_once()
    machine.all_goes_well_for_once()
    machine.scale(3)
    machine.all_goes_well_for_once()
    machine.all_goes_well_for_once()
    machine.roll_out()
    ready = [life.replica_id for life in machine.lives() if life.state is READY]
    machine.execute(Action(ActionKind.DRAIN, ready[0], "asked to"))
    machine.reconcile()
    machine.scale(2)
    machine.there_are_never_more_than_wanted_and_the_surge()
    machine.none_leaks()
    machine.teardown()
