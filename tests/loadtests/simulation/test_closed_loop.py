"""Sessions in a closed loop: who waits for whom, whatever becomes of the replicas."""

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from loadtests.reports.report import RequestRecord, Slo
from loadtests.simulation.closed_loop import ClosedLoop, LoopResult
from loadtests.simulation.fleet import RETRY
from loadtests.simulation.jobs import run_sessions
from loadtests.simulation.options import FleetOptions, Kill
from loadtests.simulation.request import HashedRequest
from loadtests.simulation.shape import ReplicaShape, TierShape
from loadtests.workloads.sessions import Session, SessionFile, SessionTurn
from replicas.simulated_engine.hardware import CostModel
from router.queue.held import QueueRules
from router.routing.policies import POLICIES
from tests.loadtests.simulation.builders import NO_DELAYS, PLAIN, new_fleet

BLOCK = 10


def turn(*block_ids: int, rest: int = 0, out: int = 3, think: float = 0.0, ends: bool = False) -> SessionTurn:
    return SessionTurn(len(block_ids) * BLOCK + rest, out, think, ends, block_ids)


def session(
    name: str, *turns: SessionTurn, lane: int = 0, after: float = 0.0, parent: tuple[str, int] | None = None
) -> Session:
    of, number = (None, None) if parent is None else parent
    return Session(name, lane, after, "main" if parent is None else "helper", of, number, turns)


def loop_file(*sessions: Session) -> SessionFile:
    return SessionFile("few", BLOCK, sessions)


def random_sessions(seed: int, *, num_lanes: int = 2, sessions_per_lane: int = 2) -> SessionFile:
    """Lanes of sessions that grow, some with subagents, also of subagents; a head is common to all."""
    rng = random.Random(seed)
    free = iter(range(1, 10**6))

    def turns(count: int) -> tuple[SessionTurn, ...]:
        ids, made = [0], []
        for _ in range(count):
            ids = [*ids[: rng.randint(max(1, len(ids) - 1), len(ids))], *(next(free) for _ in range(3))]
            made.append(
                turn(*ids, rest=rng.randrange(1, BLOCK), out=rng.randint(1, 9), think=rng.uniform(0.1, 5))
            )
        return tuple(made)

    sessions: list[Session] = []

    def add(name: str, lane: int, parent: tuple[str, int] | None, depth: int) -> None:
        found = session(name, *turns(rng.randint(1, 5)), lane=lane, after=rng.uniform(0.1, 4), parent=parent)
        sessions.append(found)
        for number in range(rng.randrange(3) if depth else 0):
            add(f"{name}.{number}", lane, (name, rng.randrange(len(found.turns))), depth - 1)

    for lane in range(num_lanes):
        for number in range(sessions_per_lane):
            add(f"{lane}-{number}", lane, None, 2)
    return loop_file(*sessions)


@dataclass
class Watched:
    """What was sent, and what became of it."""

    sent: list[tuple[float, HashedRequest]] = field(default_factory=list)
    answered: list[tuple[HashedRequest, RequestRecord, float]] = field(default_factory=list)
    result: LoopResult = field(default_factory=LoopResult)

    def ready_at(self) -> dict[str, list[float]]:
        found = defaultdict(list)
        for request, record, _ in self.answered:
            found[request.trace.session].append(record.arrival_seconds)
        return found

    def ended_at(self) -> dict[str, list[float]]:
        found = defaultdict(list)
        for request, _, ended_at in self.answered:
            found[request.trace.session].append(ended_at)
        return found


def watch(file: SessionFile, options: FleetOptions, seed: int = 1) -> Watched:
    fleet, found = new_fleet(options, seed), Watched()
    loop = ClosedLoop(fleet, file, random.Random(seed))
    submit = fleet.submit

    def submitted(request: HashedRequest) -> None:
        found.sent.append((fleet.now, request))
        submit(request)

    fleet.submit = submitted  # type: ignore[method-assign]
    ended = loop._ended

    def noted(request: HashedRequest, record: RequestRecord, num_device_tokens: int) -> None:
        if record.error is None:
            found.answered.append((request, record, fleet.now))
        ended(request, record, num_device_tokens)

    loop._ended = noted  # type: ignore[method-assign]
    loop.serve()
    found.result = loop.result
    return found


def one_at_a_time(num_blocks: int = 10_000) -> FleetOptions:
    shape = ReplicaShape(PLAIN, num_blocks, BLOCK, max_batched_tokens=8192, max_running=1)
    return FleetOptions(shape, num_replicas=1, delays=NO_DELAYS)


def twin(file: SessionFile) -> dict[str, list[tuple[float, float]]]:
    """When each turn was ready and ended: one replica that forgets nothing and takes one turn after another.

    Looks through all sessions for the turn that has been ready for longest, again and again.
    """
    by_id = {each.id: each for each in file.sessions}
    times: dict[str, list[tuple[float, float]]] = {each.id: [] for each in file.sessions}
    seen: set[int] = set()
    free_at = 0.0

    def end(each: Session) -> float | None:
        return times[each.id][-1][1] if len(times[each.id]) == len(each.turns) else None

    def ready(each: Session) -> float | None:
        """None while it is not known yet."""
        number = len(times[each.id])
        if number == len(each.turns):
            return None
        if number == 0 and each.parent is not None and each.parent_turn is not None:
            answers = times[each.parent][each.parent_turn :]
            return answers[0][1] + each.after_seconds if answers else None
        if number == 0:
            lane = [other for other in file.sessions if other.lane == each.lane and other.parent is None]
            place = lane.index(each)
            before = 0.0 if place == 0 else end(lane[place - 1])
            return None if before is None else before + each.after_seconds
        children = [
            other for other in file.sessions if (other.parent, other.parent_turn) == (each.id, number - 1)
        ]
        ends = [times[each.id][-1][1], *map(end, children)]
        if None in ends:
            return None
        return max(at for at in ends if at is not None) + each.turns[number].think_seconds

    while True:
        waiting = [(at, each.id) for each in file.sessions if (at := ready(each)) is not None]
        if not waiting:
            return times
        at, name = min(waiting)
        now = by_id[name].turns[len(times[name])]
        num_known = 0
        while num_known < len(now.block_ids) and now.block_ids[num_known] in seen:
            num_known += 1
        seen.update(now.block_ids)
        num_cached = min(num_known, (now.num_input_tokens - 1) // BLOCK) * BLOCK
        seconds = PLAIN.a + PLAIN.b * (now.num_input_tokens - num_cached)
        free_at = max(free_at, at) + seconds + PLAIN.d0 * (now.num_output_tokens - 1)
        times[name].append((at, free_at))


@pytest.mark.parametrize("seed", range(12))
def test_a_loop_on_one_replica_is_a_line_that_is_searched_by_hand(seed: int) -> None:
    file = random_sessions(seed, num_lanes=1 + seed % 3)
    found = watch(file, one_at_a_time())
    expected = twin(file)
    for name, ready in found.ready_at().items():
        assert ready == pytest.approx([at for at, _ in expected[name]]), name
    for name, ended in found.ended_at().items():
        assert ended == pytest.approx([at for _, at in expected[name]]), name
    assert set(found.ready_at()) == set(expected)


def test_a_turn_names_its_program_and_how_its_answer_ends() -> None:
    file = loop_file(
        session("a", turn(0), turn(0, 1), turn(0, 1, 2, ends=True)),
        session("a.0", turn(50), turn(50, ends=True), parent=("a", 0)),
        session("a.0.0", turn(60), parent=("a.0", 0)),
    )
    sent = [request for _, request in watch(file, one_at_a_time()).sent]
    named = {request.trace.session: request.program for request in sent}
    assert {(it.source, it.field, it.session) for it in named.values() if it} == {
        ("simulated", "session", "a")
    }
    agents = {name: (it.agent, it.parent) for name, it in named.items() if it}
    assert agents == {"a": ("", None), "a.0": ("a.0", ""), "a.0.0": ("a.0.0", "a.0")}
    child, parent = named["a.0.0"], named["a.0"]
    assert child is not None and parent is not None and child.parent_key("m", "t") == parent.key("m", "t")
    ends = defaultdict(list)
    for request in sent:
        ends[request.trace.session].append(request.ends_user_turn)
    assert ends == {"a": [False, True, None], "a.0": [True, None], "a.0.0": [None]}


def test_a_session_alone_takes_the_time_of_an_idle_fleet() -> None:
    """Its subagents, one at a time, and those that begin at its end, included."""
    file = loop_file(
        session(
            "a",
            turn(0, 1, 2, rest=3, out=40),
            turn(0, 1, out=1, think=2.0),
            turn(0, 1, 2, 9, out=30, think=4.0, rest=9),
            after=7.0,
        ),
        session("a.0", turn(0, 50, out=9), turn(0, 50, 51, out=2, think=1.0), after=0.5, parent=("a", 0)),
        session("a.0.0", turn(60, 61, out=300), after=3.0, parent=("a.0", 0)),
        session("a.1", turn(70, out=8), after=100.0, parent=("a", 2)),
    )
    cost = CostModel(a=0.02, b=1e-3, c=1e-5, d0=5e-3, d1=1e-5)
    shape = ReplicaShape(cost, 10_000, BLOCK, max_batched_tokens=8192, max_running=8)
    own = [replace(each, turns=tuple(unshared(each, it) for it in each.turns)) for each in file.sessions]
    figures = run_sessions(
        loop_file(*own), FleetOptions(shape, num_replicas=1, delays=NO_DELAYS), 1, Slo()
    ).figures
    assert figures["slowdown_mean"] == figures["slowdown_max"] == pytest.approx(1.0, rel=1e-9)
    assert figures["good_share"] == figures["good_both"] == 1.0
    # The common block of all is computed once.
    figures = run_sessions(file, FleetOptions(shape, num_replicas=1, delays=NO_DELAYS), 1, Slo()).figures
    mean = figures["slowdown_mean"]
    assert mean is not None and 0.99 < mean < 1.0


def unshared(session: Session, turn: SessionTurn) -> SessionTurn:
    return replace(turn, block_ids=tuple(1000 * len(session.id) + each for each in turn.block_ids))


BUSY = ReplicaShape(
    CostModel(a=0.01, b=0.02, c=0.0, d0=5e-3, d1=1e-6), 40, BLOCK, max_batched_tokens=64, max_running=4
)


@pytest.mark.parametrize("policy", [*POLICIES, "perfect"])
def test_every_session_ends_whatever_dies_and_equal_seeds_give_equal_figures(policy: str) -> None:
    file = random_sessions(3, num_lanes=6)
    options = FleetOptions(
        BUSY,
        num_replicas=3,
        num_routers=2,
        policy=policy,
        queue=QueueRules(),
        kills=(Kill(1, 6.0, 60.0, keeps_disk=False), Kill(0, 12.0), Kill(2, 7.0, 70.0)),
    )
    first, second, other = (watch(file, options, seed) for seed in (1, 1, 2))
    assert first.sent == second.sent and first.result == second.result
    assert first.sent != other.sent
    for found in (first, other):
        assert len(found.result.sessions) == len(file.sessions)
        assert len(found.answered) == sum(len(each.turns) for each in file.sessions)
        assert found.result.num_refusals == len(found.sent) - len(found.answered) > 0
        outputs = {each.id: [it.num_output_tokens for it in each.turns] for each in file.sessions}
        got = defaultdict(list)
        for request, record, _ in found.answered:
            got[request.trace.session].append(record.num_output_tokens)
        assert got == outputs


def test_a_refused_turn_is_sent_again_ever_later_and_waits_from_when_it_was_ready() -> None:
    options = replace(one_at_a_time(), kills=(Kill(0, 2.0, 400.0),))
    found = watch(loop_file(session("a", turn(0), turn(0, 1, think=3.0))), options)
    first, *times = [at for at, _ in found.sent]
    gaps = [later - before - RETRY.wait_seconds for before, later in pairwise(times)]
    assert len(gaps) == found.result.num_refusals > 6
    for number, gap in enumerate(gaps):
        longest = min(8.0, 0.5 * 2**number)
        assert 0.75 * longest <= gap <= longest
    assert len({round(gap, 6) for gap in gaps}) == len(gaps)
    (_, record, _) = found.answered[1]
    assert record.arrival_seconds == times[0]
    assert record.ttft_seconds is not None and first + record.ttft_seconds > 390


@pytest.mark.parametrize(
    ("num_blocks", "tiers", "cached", "on_device", "num_recomputed"),
    [
        (100, None, 1.0, 1.0, 0.0),
        (4, None, 1 / 3, 1 / 3, 20.0),
        (4, TierShape(1, host_bytes=1e6, chunk_tokens=BLOCK), 1.0, 1 / 3, 0.0),
    ],
)
def test_repeatable_tokens_are_counted_by_where_they_were_found(
    num_blocks: int, tiers: TierShape | None, cached: float, on_device: float, num_recomputed: float
) -> None:
    """Of 30 repeatable tokens 10 are read while they are there; then another session needs all blocks."""
    file = loop_file(
        session("a", turn(0, 1, rest=5), turn(0, 1, 2, rest=5, think=20.0)),
        session("b", turn(0, rest=5), lane=1, after=4.0),
        session("c", turn(6, 7, 8, rest=5), lane=2, after=10.0),
    )
    shape = ReplicaShape(PLAIN, num_blocks, BLOCK, max_batched_tokens=8192, max_running=1, tiers=tiers)
    options = FleetOptions(shape, num_replicas=1, delays=NO_DELAYS)
    figures = run_sessions(file, options, 1, Slo()).figures
    assert (figures["repeatable_cached"], figures["repeatable_device"]) == (cached, on_device)
    assert figures["num_recomputed_tokens"] == num_recomputed
    assert figures["imbalance_requests"] == 1.0


def test_sessions_and_turns_a_minute_are_those_of_the_clock() -> None:
    """A prompt of a block takes 0.6 s, and nobody meets anybody."""
    pauses = [turn(0, out=1, think=59.4) for _ in range(30)]
    file = loop_file(session("a", *pauses), session("b", turn(5, out=1), lane=1, after=2000.0))
    figures = run_sessions(file, one_at_a_time(), 1, Slo()).figures
    assert figures["session_mean"] == pytest.approx((29 * 60 + 0.6 + 0.6) / 2)
    assert figures["session_p90"] == pytest.approx(29 * 60 + 0.6, rel=0.11)
    assert figures["turns_per_minute"] == 1.0
    assert [figures["ttft_p50"], figures["ttft_max"]] == pytest.approx([0.6, 0.6])
