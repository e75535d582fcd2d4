"""Which programs run at once, who waits at the gate, and that nobody waits there for ever."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import ReplicaId
from router.caller import Tenant
from router.errors import NoReplicaAvailable, Overloaded, RouterError, TooLate
from router.programs.book import MAX_PARALLEL, Program, ProgramBook, Turn
from router.programs.name import ProgramName
from router.programs.pauses import Pause
from router.queue import gate
from router.queue.gate import (
    GRACE_SECONDS,
    LEAST_PACED_SECONDS,
    LONG_SECONDS,
    MAX_CHILDREN,
    MAX_WAITING,
    MAX_WAITING_BYTES,
    QUANTUM_SECONDS,
    UNPASSED_SECONDS,
)
from router.queue.held import Asking, Held, QueueRules
from router.queue.holding import GATE_SECONDS, Holding
from router.routing.decision import RoutingRequest
from router.routing.table import RoutedRequest
from tests.router.routing.tables import BLOCK_SIZE, CARD, STRIDE, table_of

ROOM = CARD.num_blocks * BLOCK_SIZE
"""Tokens of a replica."""

HALF = ROOM // 2

A = ReplicaId("r0")


@dataclass
class Asked:
    """A request on its way. `calls` counts how often its holder was told of something."""

    turn: Turn | None
    asking: Asking
    found: RoutedRequest | Held | None = None
    calls: list[float] = field(default_factory=list)

    @property
    def program(self) -> Program:
        assert self.turn is not None
        return self.turn.program

    @property
    def held(self) -> Held:
        assert isinstance(self.found, Held)
        return self.found

    @property
    def waits(self) -> bool:
        return isinstance(self.found, Held) and not self.found.is_out

    @property
    def has_gone(self) -> bool:
        return isinstance(self.found, RoutedRequest) or (
            self.found is not None and self.found.routed is not None
        )


class Scene:
    """A router's queue before replicas that are never busy."""

    def __init__(self, size: int = 1, *, has_gate: bool = True, has_book: bool = True) -> None:
        self.table = table_of(size)
        for replica_id in self.table.replica_ids("m"):
            self.table.update_load(replica_id, LoadSnapshot(prefill_seconds_per_token=1e-9))
        self.book = ProgramBook()
        self.holding = Holding(
            self.table, QueueRules(), programs=self.book if has_book else None, has_gate=has_gate
        )

    def ask(
        self,
        session: str,
        num_tokens: int = HALF,
        now: float = 0.0,
        *,
        tenant: str = "red",
        weight: float = 1.0,
        agent: str = "",
        deadline: float | None = None,
        num_bytes: int = 0,
        is_side: bool = False,
    ) -> Asked:
        """Raises what the queue raises; the turn has ended then."""
        parent = "" if agent else None
        name = ProgramName("client", "x", session, agent=agent, parent=parent, is_side=is_side)
        turn = self.holding.begin_turn("m", Tenant(name=tenant, weight=weight), name, num_tokens, (), now)
        request = RoutingRequest(session.encode(), num_tokens, BLOCK_SIZE)
        asking = Asking(
            "m", tenant, request, (), weight=weight, deadline=deadline, num_bytes=num_bytes, turn=turn
        )
        asked = Asked(turn, asking)
        try:
            asked.found = self.holding.ask(asking, now, lambda: asked.calls.append(now))
        except RouterError:
            if turn is not None:
                self.holding.end_turn(turn, now)
            raise
        return asked

    def end(self, asked: Asked, now: float) -> None:
        """As a placement leaves: withdrawn if it waits, then its turn has ended."""
        if isinstance(asked.found, RoutedRequest):
            asked.found.close()
        elif asked.found is not None:
            self.holding.withdraw(asked.found)
        if asked.turn is not None:
            self.holding.end_turn(asked.turn, now)

    def run(self, session: str, num_tokens: int = HALF, now: float = 0.0, **more: object) -> Asked:
        """A turn that ends at once."""
        asked = self.ask(session, num_tokens, now, **more)  # type: ignore[arg-type]
        assert asked.has_gone
        self.end(asked, now)
        return asked

    def look(self, asked: Asked, now: float) -> bool:
        """Whether it has gone then."""
        self.holding.look_at(asked.held, now)
        return asked.has_gone

    @property
    def num_at_gate(self) -> int:
        return len(list(self.holding.at_gate()))

    def assert_consistent(self) -> None:
        admitted = self.book.admitted("m")
        running = [each for each in self.book.programs() if each.admitted_at is not None]
        assert set(admitted.tokens_of) == set(running)
        assert admitted.num_tokens == sum(admitted.tokens_of.values()) >= 0
        waiting = {held.asking.turn.program for held in self.holding.at_gate() if held.asking.turn}
        assert {each for each in self.book.programs() if each.waits_since is not None} == waiting


@pytest.fixture(autouse=True)
def no_context_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "CHEAP_SECONDS", 0.0)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_context_that_is_soon_computed_again_waits_for_room_only_in_an_overload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "CHEAP_SECONDS", HALF * 1e-9)
    scene = Scene()
    assert scene.ask("s1", ROOM).has_gone
    assert scene.ask("s2", HALF - 1).has_gone, "it is computed again at once"
    assert scene.ask("s3", HALF).waits
    scene.holding._fleet("m").delay.holds(0.0)
    assert scene.ask("s4", HALF - 1).waits
    scene.assert_consistent()


def test_programs_run_while_their_contexts_fit_and_the_next_one_waits(scene: Scene) -> None:
    running = [scene.ask("s1"), scene.ask("s2")]
    assert all(asked.has_gone for asked in running)
    third = scene.ask("s3", 1)
    assert third.waits and third.held.is_at_gate and third.program.state == "waiting"
    assert scene.holding.waiting_by_model == {"m": (1, 0)}
    scene.end(running[0], 1.0)
    again = scene.ask("s1", HALF + 10, 2.0)
    assert again.has_gone, "a turn of one that runs"
    assert third.waits and not third.calls
    scene.assert_consistent()


@pytest.mark.parametrize(("agent", "pause"), [("a", Pause.USER), ("a", Pause.TOOL), ("", Pause.USER)])
def test_a_subagent_that_has_ended_gives_its_room_back_at_once(
    scene: Scene, agent: str, pause: Pause
) -> None:
    parent = scene.run("s1", 10)
    ends = scene.ask("s1" if agent else "s2", ROOM - 20, agent=agent)
    waits = scene.ask("s3", 100)
    scene.end(ends, 1.0)
    scene.book.paused(ends.program, pause)
    assert scene.look(waits, 2.0) == (agent == "a" and pause is Pause.USER)
    assert parent.program.admitted_at is not None


def test_one_that_pauses_for_longer_than_the_grace_gives_its_room_to_who_waits(scene: Scene) -> None:
    running = [scene.ask("s1"), scene.ask("s2")]
    third = scene.ask("s3", 10)
    scene.end(running[0], 1.0)
    assert not scene.look(third, 1.0 + GRACE_SECONDS)
    assert scene.look(third, 1.2 + GRACE_SECONDS)
    assert (len(third.calls), third.turn and third.turn.num_admitted) == (1, 2)
    assert third.turn and third.turn.gate_seconds == pytest.approx(1.2 + GRACE_SECONDS)
    assert running[0].program.admitted_at is None, "its room is given back"
    assert scene.ask("s1", HALF, 30.0).waits, "and it is admitted anew"
    scene.assert_consistent()


def test_one_that_pauses_keeps_its_room_while_nobody_needs_it(scene: Scene) -> None:
    scene.run("s1")
    scene.run("s2")
    scene.end(scene.ask("s3", 10, 1000.0), 1000.0)
    kept = {asked.name.session for asked in scene.book.admitted("m").tokens_of}
    assert kept == {"s3", "s2"} or kept == {"s3", "s1"}, "as much as is needed is given back"


@pytest.mark.parametrize("tenants", [("red", "red"), ("red", "green")])
def test_after_its_quantum_a_program_gives_way_between_two_turns(
    scene: Scene, tenants: tuple[str, str]
) -> None:
    """Sooner, if its tenant has more than another one that waits."""
    running = scene.ask("s1", tenant=tenants[0])
    other = scene.ask("s2", tenant=tenants[0])
    quantum = QUANTUM_SECONDS if tenants[0] == tenants[1] else GRACE_SECONDS
    third = scene.ask("s3", now=quantum - 5.0, tenant=tenants[1])
    scene.end(running, quantum)
    assert third.waits
    running = scene.ask("s1", now=quantum, tenant=tenants[0])
    assert running.has_gone
    scene.end(running, quantum + 1.0)
    assert third.has_gone and len(third.calls) == 1
    assert scene.ask("s1", now=quantum + 2.0, tenant=tenants[0]).waits
    assert other.program.admitted_at is not None
    scene.assert_consistent()


def test_subagents_ride_on_their_parent_up_to_a_bound_of_those_that_run(scene: Scene) -> None:
    scene.ask("s1", ROOM)
    children = [scene.ask("s1", HALF, agent=f"a{number}") for number in range(MAX_CHILDREN)]
    assert all(child.has_gone for child in children)
    late = scene.ask("s1", 1, 1.0, agent="late")
    assert late.waits
    assert scene.ask("s2", 1, agent="a0").waits, "that of another session"
    scene.end(children[0], 2.0)
    assert not scene.look(late, 2.0 + GRACE_SECONDS), "it may go on"
    assert scene.look(late, 2.2 + GRACE_SECONDS)
    scene.assert_consistent()


def test_who_may_run_is_looked_through_as_often_however_many_subagents_wait(scene: Scene) -> None:
    class Looked(dict[Program, int]):
        num_looks = 0

        def __iter__(self) -> Iterator[Program]:
            self.num_looks += 1
            return super().__iter__()

    scene.ask("a")
    tokens_of = scene.book.admitted("m").tokens_of = Looked(scene.book.admitted("m").tokens_of)

    def num_looks() -> int:
        before = tokens_of.num_looks
        scene.look(waiting[0], now=float(len(waiting)))
        return tokens_of.num_looks - before

    asked = [scene.ask("a", agent=f"sub {number}") for number in range(2 * MAX_CHILDREN)]
    waiting = [each for each in asked if each.waits]
    assert len(waiting) == MAX_CHILDREN
    few = num_looks()
    waiting += [scene.ask("a", agent=f"late {number}") for number in range(200)]
    assert num_looks() == few


def test_turns_of_one_program_that_wait_go_together(scene: Scene) -> None:
    """It needs its room once, and waits until the last of them goes."""
    first = scene.ask("s0", ROOM)
    waiting = [scene.ask("s1", HALF + 100, 1.0 + number) for number in range(3)]
    assert waiting[0].program.waits_since == 1.0
    scene.end(waiting[0], 5.0)
    assert waiting[1].program.waits_since == 2.0
    scene.end(first, 5.0)
    scene.look(waiting[1], 6.0 + GRACE_SECONDS)
    assert waiting[1].has_gone and waiting[2].has_gone
    assert scene.book.admitted("m").num_tokens == HALF + 100
    assert waiting[1].program.waits_since is None
    scene.assert_consistent()


def test_a_crowd_waits_for_nobody_and_takes_no_room(scene: Scene) -> None:
    scene.ask("s0", ROOM)
    waiting = [scene.ask("s1", 10, 1.0) for _ in range(MAX_PARALLEL)]
    assert all(asked.waits for asked in waiting)
    assert scene.ask("s1", 10, 2.0).has_gone
    scene.look(waiting[0], 3.0)
    assert all(asked.has_gone for asked in waiting)
    assert scene.book.admitted("m").num_tokens == ROOM
    scene.assert_consistent()


def go_in_order(scene: Scene, first: Asked, waiting: Sequence[Asked], now: float) -> list[str]:
    """Each one that goes has the whole fleet, and pauses for long."""
    order: list[str] = []
    left, running = list(waiting), first
    while left:
        scene.end(running, now)
        now += GRACE_SECONDS + 1.0
        scene.look(left[0], now)
        gone = [asked for asked in left if asked.has_gone]
        assert len(gone) == 1
        running = gone[0]
        left.remove(running)
        order.append(running.program.name.session)
    return order


def test_least_served_tenants_come_first_then_least_served_programs(scene: Scene) -> None:
    scene.ask("r0", tenant="red")
    first = scene.ask("first", tenant="grey")
    attained = {"r1": 20.0, "r2": 50.0, "g1": 30.0, "g2": 40.0}
    waiting = []
    for session, seconds in attained.items():
        waiting.append(scene.ask(session, now=1.0, tenant="red" if session[0] == "r" else "green"))
        waiting[-1].program.attained_seconds = seconds
    assert go_in_order(scene, first, waiting, 2.0) == ["g1", "r1", "g2", "r2"]


def test_who_has_waited_ages_and_who_has_waited_for_long_is_first(scene: Scene) -> None:
    first = scene.ask("first", ROOM)
    old, new = scene.ask("old", ROOM, 1.0), scene.ask("new", ROOM, 100.0)
    old.program.attained_seconds = 20.0
    scene.end(first, 100.0)
    scene.look(new, 101.0 + GRACE_SECONDS)
    assert old.has_gone and new.waits, "20 s of service are less than 99 s of waiting"

    scene = Scene()
    scene.run("third", 10, -100.0)
    first = scene.ask("first", ROOM)
    old, new = scene.ask("old", ROOM, 1.0), scene.ask("new", ROOM, 10.0)
    old.program.attained_seconds = 1e6
    scene.end(first, 10.0)
    scene.look(new, 11.0 + GRACE_SECONDS)
    assert new.has_gone and old.waits
    third = scene.ask("third", ROOM, 150.0)
    scene.end(new, 180.0)
    scene.look(third, 2.0 + LONG_SECONDS)
    assert old.has_gone and third.waits


def test_a_weight_is_a_tenants_share_of_the_room() -> None:
    scene = Scene()
    scene.ask("h1", 6000, tenant="heavy", weight=4.0)
    running = scene.ask("l1", 4000, tenant="light")
    first = scene.ask("x", ROOM - 10_000, tenant="grey")
    light = scene.ask("l2", 6000, 1.0, tenant="light")
    heavy = scene.ask("h2", 6000, 1.0, tenant="heavy", weight=4.0)
    scene.end(first, 1.0)
    scene.end(running, 1.0)
    scene.look(light, 2.0 + GRACE_SECONDS)
    assert heavy.has_gone and light.waits


def test_nobody_passes_one_that_has_waited_for_long_and_finds_no_room(scene: Scene) -> None:
    scene.ask("s1", HALF)
    huge = scene.ask("huge", ROOM)
    huge.program.attained_seconds = 0.0
    assert scene.ask("small", 100, UNPASSED_SECONDS - 1.0).has_gone, "there is room meanwhile"
    late = scene.ask("late", 100, UNPASSED_SECONDS + 1.0)
    assert late.waits, "one that comes now"
    assert not scene.look(late, UNPASSED_SECONDS + 2.0), "and one that waits"
    scene.holding.withdraw(huge.held)
    assert scene.look(late, UNPASSED_SECONDS + 3.0)
    scene.assert_consistent()


def test_contexts_that_are_soon_computed_again_starve_no_long_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "CHEAP_SECONDS", 1.0)
    scene.table.update_load(A, LoadSnapshot(prefill_seconds_per_token=1e-3))
    for number in range(60):
        scene.run(f"before {number}", ROOM // 60, now=0.3 * number)
    waiting = scene.ask("agent", HALF, now=18.0)
    assert waiting.waits
    seconds = UNPASSED_SECONDS + GRACE_SECONDS + 1.0
    for number in range(int(seconds)):
        for each in range(3):
            scene.end(scene.ask(f"after {number} {each}", ROOM // 60, now=18.0 + number), 18.0 + number)
        scene.look(waiting, 18.0 + number)
    assert waiting.has_gone
    scene.assert_consistent()


def test_a_program_larger_than_the_fleet_runs_alone(scene: Scene) -> None:
    large = scene.ask("large", 3 * ROOM)
    assert large.has_gone
    other = scene.ask("other", 1, 1.0)
    assert other.waits
    scene.end(large, 2.0)
    assert scene.look(other, 3.0 + GRACE_SECONDS)
    large = scene.ask("large", 3 * ROOM, 40.0)
    assert large.waits
    scene.end(other, 41.0)
    assert not scene.look(large, 42.0)
    assert scene.look(large, 42.0 + GRACE_SECONDS)
    scene.assert_consistent()


def test_one_that_is_due_soon_goes_in_time_or_is_refused_when_it_is_late(scene: Scene) -> None:
    first = scene.ask("s1", ROOM)
    due = scene.ask("s2", ROOM, 10.0, deadline=11.0)
    scene.end(first, 10.1)
    scene.book.dismiss(first.program)
    assert scene.look(due, 10.5)
    waiting = scene.ask("s3", 1000, 10.6, deadline=15.0)
    scene.holding.look_at(waiting.held, 14.95)
    assert waiting.waits
    scene.holding.look_at(waiting.held, 15.05)
    assert isinstance(waiting.held.error, TooLate) and len(waiting.calls) == 1
    patient = scene.ask("s4", 1000, 15.1)
    scene.holding.look_at(patient.held, 15.2 + GATE_SECONDS)
    assert isinstance(patient.held.error, Overloaded) and patient.held.error.retry_after_seconds
    assert scene.holding.counts.num_refused_late == 2 and scene.num_at_gate == 0
    scene.assert_consistent()


def test_a_new_program_that_would_wait_for_too_long_is_refused_and_one_that_has_run_is_not(
    scene: Scene,
) -> None:
    scene.run("known", 10)
    scene.ask("s1", ROOM, 30.0)
    waiting = [scene.ask(f"w{number}", HALF, 30.0) for number in range(4)]
    now = 30.0 + LEAST_PACED_SECONDS
    early = scene.ask("early", HALF, now - 1.0)
    assert early.waits, "nobody knows the pace yet"
    for _ in range(2):
        with pytest.raises(Overloaded) as refused:
            scene.ask("new", HALF, now + 1.0)
        assert refused.value.retry_after_seconds == 60.0
    known = scene.ask("known", HALF, now + 1.0)
    for asked in [*waiting, early, known]:
        scene.end(asked, now + 2.0)
    assert scene.ask("new", 10, now + 3.0).waits


def test_a_pace_is_that_of_late_and_falls_while_nobody_is_admitted(scene: Scene) -> None:
    running = scene.ask("first", ROOM)
    waiting = [scene.ask(f"w{number}", ROOM, 1.0) for number in range(20)]
    gate = scene.holding._fleet("m").gate
    assert gate is not None
    for step in range(1, 11):
        scene.end(running, 30.0 * step - GRACE_SECONDS - 1.0)
        scene.look(waiting[0], 30.0 * step)
        (running,) = [asked for asked in waiting if asked.has_gone]
        waiting.remove(running)
    new = Held(A, asking_of_new(ROOM), lambda: None, work=0.0, order=0, now=300.0)
    found = [gate.expected_seconds(new, now) for now in (300.0, 420.0, 540.0)]
    assert found[0] == pytest.approx(11 * 30.0, rel=0.25)
    assert found[2] > 2 * found[1] > 4 * found[0]


def asking_of_new(num_tokens: int) -> Asking:
    """That of a program which nobody knows."""
    program = Program(b"", ProgramName("client", "x", "new"), "m", "red", 0.0)
    request = RoutingRequest(b"bucket", num_tokens, BLOCK_SIZE)
    return Asking("m", "red", request, (), turn=Turn(program, num_tokens))


@pytest.mark.parametrize("kind", ["places", "bytes"])
def test_as_many_wait_as_there_are_places_and_memory_for(scene: Scene, kind: str) -> None:
    scene.ask("s1", ROOM)
    num, num_bytes = (MAX_WAITING, 0) if kind == "places" else (4, MAX_WAITING_BYTES // 4)
    for number in range(num):
        assert scene.ask(f"w{number}", 10, num_bytes=num_bytes).waits
    with pytest.raises(Overloaded) as refused:
        scene.ask("more", 10, num_bytes=1)
    assert refused.value.retry_after_seconds
    assert (scene.num_at_gate, scene.holding.counts.num_refused_full) == (num, 1)
    assert scene.holding.waiting_by_model == {"m": (num, num * num_bytes)}
    scene.assert_consistent()


def test_one_that_finds_no_replica_when_the_gate_opens_is_told_so(scene: Scene) -> None:
    running = scene.ask("s1", ROOM)
    waiting = [scene.ask("s2", 10), scene.ask("s3", 10)]
    scene.end(running, 1.0)
    scene.table.set_stalled(A, is_stalled=True)
    scene.look(waiting[1], 2.0 + GRACE_SECONDS)
    for asked in waiting:
        assert isinstance(asked.held.error, NoReplicaAvailable) and len(asked.calls) == 1
        scene.end(asked, 30.0)
    scene.assert_consistent()


def test_while_no_replica_is_ready_who_would_fit_learns_it_at_once(scene: Scene) -> None:
    """And the room is counted anew when some are."""
    scene.ask("s1", HALF)
    scene.table.set_stalled(A, is_stalled=True)
    with pytest.raises(NoReplicaAvailable):
        scene.ask("s2", 10, 5.0)
    assert scene.ask("s3", HALF, 5.0).waits, "it would not fit"
    scene.table.set_stalled(A, is_stalled=False)
    scene.table.add_replica(ReplicaId("r1"), CARD, STRIDE)
    assert scene.ask("s4", HALF, 7.0).has_gone
    scene.assert_consistent()


@pytest.mark.parametrize("why", ["cache of unknown size", "host memory", "no gate"])
def test_where_room_is_unbounded_nobody_waits(why: str) -> None:
    scene = Scene(2, has_gate=why != "no gate")
    if why == "cache of unknown size":
        scene.table.add_replica(ReplicaId("r2"), replace(CARD, num_blocks=0), STRIDE)
    elif why == "host memory":
        scene.table.update_load(A, LoadSnapshot(host_seconds_per_token=1e-5))
        assert scene.table.load(A).speeds.host is not None
    asked = [scene.ask(f"s{number}", 10 * ROOM) for number in range(20)]
    assert all(each.has_gone and each.program.admitted_at is not None for each in asked)
    scene.assert_consistent()


def test_side_calls_and_what_names_no_program_are_decided_as_without_a_book() -> None:
    def decisions(scene: Scene, *, is_side: bool) -> list[tuple[object, ...]]:
        full = scene.book.begin("m", "red", ProgramName("client", "x", "full"), 10 * ROOM, (), 0.0)
        scene.book.admit(full.program, 10 * ROOM, 0.0)
        scene.book.routed(full, A, 0.0)
        found: list[tuple[object, ...]] = []
        for number in range(50):
            if is_side:
                asked = scene.ask(f"s{number}", 100 + 37 * number, float(number), is_side=True)
                assert asked.turn is None
            else:
                request = RoutingRequest(f"s{number}".encode(), 100 + 37 * number, BLOCK_SIZE)
                asked = Asked(None, Asking("m", "red", request, ()))
                asked.found = scene.holding.ask(asked.asking, float(number), lambda: None)
            assert isinstance(asked.found, RoutedRequest)
            decision = asked.found.decision
            found.append((decision.replica_id, decision.reason, decision.rank, decision.claim))
        return found

    plain = decisions(Scene(4, has_book=False), is_side=False)
    assert Scene(4, has_book=False).ask("s").turn is None
    assert decisions(Scene(4), is_side=True) == decisions(Scene(4), is_side=False) == plain


def test_a_turn_of_a_program_that_runs_is_not_refused_after_a_second_in_line() -> None:
    """As other requests are, once an overload stands."""
    scene = Scene()
    scene.table.update_load(
        A, LoadSnapshot(num_running=3, num_pending_tokens=100_000, prefill_seconds_per_token=1e-3)
    )
    delay = scene.holding._fleet("m").delay
    for seconds in (-10.0, -6.0):
        delay.sees(0.0, 100.0, 1, seconds)
    delay.holds(0.0)
    turn = scene.ask("s1", 100, 0.0)
    plain = Asked(None, Asking("m", "red", RoutingRequest(b"x", 100, BLOCK_SIZE), ()))
    plain.found = scene.holding.ask(plain.asking, 0.0, lambda: None)
    assert turn.waits and plain.waits and not turn.held.is_at_gate
    for now in (2.0, 40.0):
        delay.holds(now)
        scene.holding.look_at(plain.held, now)
        scene.holding.look_at(turn.held, now)
    assert isinstance(plain.held.error, Overloaded) and turn.waits
    scene.holding.look_at(turn.held, 301.0)
    assert isinstance(turn.held.error, Overloaded)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_the_books_are_right_and_nobody_waits_for_ever(seed: int) -> None:
    rng, scene, now = random.Random(seed), Scene(2), 0.0
    live: list[Asked] = []
    away = False
    for _ in range(800):
        now += rng.choice([0.0, 0.05, 1.0, 5.0, 15.0])
        match rng.randrange(10):
            case 0 | 1 | 2 | 3 if len(live) < 60:
                with contextlib.suppress(Overloaded, TooLate, NoReplicaAvailable):
                    live.append(
                        scene.ask(
                            f"s{rng.randrange(25)}",
                            rng.choice([10, 1000, HALF, ROOM, 2 * ROOM, 5 * ROOM]),
                            now,
                            tenant=rng.choice(["red", "green"]),
                            agent=rng.choice(["", "", "a", "b"]),
                            deadline=rng.choice([None, None, now + 30.0]),
                        )
                    )
            case 4 | 5 | 6 if live:
                gone = [asked for asked in live if not asked.waits]
                ends = rng.choice(gone or live)
                live.remove(ends)
                scene.end(ends, now)
            case 7 if live and rng.random() < 0.3:
                leaves = live.pop(rng.randrange(len(live)))
                scene.end(leaves, now)
            case 8:
                away = not away and rng.random() < 0.3
                for each in ("r0", "r1") if rng.random() < 0.2 or not away else ("r1",):
                    scene.table.set_stalled(ReplicaId(each), is_stalled=away)
                    if away:
                        scene.holding.absent("m", ReplicaId(each))
            case 9:
                scene.book.forget_old(now)
        for asked in live:
            if asked.waits and rng.random() < 0.5:
                scene.holding.look_at(asked.held, now)
            if asked.waits:
                assert now - asked.held.since <= GATE_SECONDS + 300.0
        assert all(len(asked.calls) <= 1 for asked in live)
        scene.assert_consistent()
    for each in ("r0", "r1"):
        scene.table.set_stalled(ReplicaId(each), is_stalled=False)
    rounds = 0
    while live:
        rounds += 1
        assert rounds < 200
        now += 10.0
        for asked in [each for each in live if not each.waits]:
            live.remove(asked)
            scene.end(asked, now)
        for asked in live:
            scene.holding.look_at(asked.held, now)
    assert scene.num_at_gate == scene.holding.num_waiting == scene.table.loads.num_reserved == 0
    scene.book.forget_old(now + 1e6)
    assert len(scene.book) == 0 and not scene.book._homes
    assert not scene.book.admitted("m").tokens_of and scene.book.admitted("m").num_tokens == 0


def test_one_that_nobody_passes_does_not_keep_a_subagent_from_its_parent(scene: Scene) -> None:
    first = scene.ask("first", ROOM)
    huge, parent = scene.ask("huge", ROOM), scene.ask("s1", 10)
    child = scene.ask("s1", HALF, agent="a")
    huge.program.attained_seconds, child.program.attained_seconds = 500.0, 1000.0
    scene.end(first, UNPASSED_SECONDS - GRACE_SECONDS)
    scene.look(child, UNPASSED_SECONDS + 1.0)
    assert parent.has_gone and child.has_gone and huge.waits
    scene.assert_consistent()
