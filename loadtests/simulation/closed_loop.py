"""ClosedLoop: sessions of agents on a virtual fleet, each turn sent after the answer before it and a pause.

Owns where every session is. All are served to the end whatever the policy, so mean times of sessions compare;
the time of the last one's end says little, since one lane decides it.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loadtests.figures import percentiles
from loadtests.reports.report import RequestRecord
from loadtests.simulation.fleet import FleetResult, VirtualFleet
from loadtests.simulation.request import HashedRequest, bucket_of_trace, hashes_of
from loadtests.workloads import TraceRequest
from loadtests.workloads.sessions import Session, SessionFile, SessionTurn
from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import NO_USER
from replicas.simulated_engine.hardware import CostModel
from router.programs.name import ProgramName
from router.programs.pauses import Pause

if TYPE_CHECKING:
    import random

LONGEST_BACKOFF_SECONDS = 30.0
"""Between two tries of a refused turn, as clients double it from 1 s on."""

STEADY_SECONDS = (300.0, 1500.0)
"""Turns a minute are counted between these: all lanes are busy by then, and still."""


@dataclass(eq=False, slots=True)
class _Running:
    """A session that has begun. `ready_at` is when its present turn was first sent."""

    session: Session
    root: str
    parent: "_Running | None" = None
    next_turn: int = 0
    began_at: float = 0.0
    ready_at: float = 0.0
    num_tries: int = 0
    num_children: int = 0
    """Subagents that its next turn waits for."""
    number: int = 0
    num_repeatable_tokens: int = 0

    @property
    def turn(self) -> SessionTurn:
        return self.session.turns[self.next_turn]

    @property
    def has_ended(self) -> bool:
        return self.next_turn == len(self.session.turns)


@dataclass(slots=True)
class _Counts:
    ttft: list[float] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)
    num_repeatable: int = 0
    num_cached: int = 0
    """Of the repeatable ones."""
    num_refused: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of each session that is no subagent's, and its slowdown, if it had no subagents."""
    slowdowns: list[float] = field(default_factory=list)
    replicas: Counter[str] = field(default_factory=Counter)


class ClosedLoop:
    """Once per fleet. `rng` spreads the tries of refused turns."""

    def __init__(self, fleet: VirtualFleet, file: SessionFile, cost: CostModel, rng: "random.Random") -> None:
        self._fleet = fleet
        self._cost = cost
        self._rng = rng
        self._block_tokens = file.block_tokens
        self._lanes: dict[int, list[Session]] = defaultdict(list)
        self._children: dict[str, list[Session]] = defaultdict(list)
        for session in file.sessions:
            if session.parent is None:
                self._lanes[session.lane].append(session)
            else:
                self._children[session.parent].append(session)
        self._hashes: dict[int, BlockHash] = {}
        self._seen: set[int] = set()
        self._running: dict[int, _Running] = {}
        self._num_sent = 0
        self._num_left = len(file.sessions)
        self._counts = _Counts()
        fleet.on_end = self._answered

    @property
    def num_turns_ended(self) -> int:
        return len(self._counts.ttft)

    def run(self) -> tuple[dict[str, float | None], FleetResult]:
        """Return the figures of all sessions, and what the fleet says of all requests."""
        result = self._fleet.work(self._begin_lanes)
        assert not self._num_left, "sessions are left, and nothing is going to happen"
        return self._figures(), result

    def _begin_lanes(self) -> None:
        for lane in self._lanes.values():
            self._begin_next(lane)

    def _begin_next(self, lane: list[Session]) -> None:
        if lane:
            session = lane.pop(0)
            running = _Running(session, session.id)
            self._fleet.after(session.after_seconds, lambda: self._begin(running))

    def _begin(self, running: _Running) -> None:
        running.began_at = self._fleet.now
        self._ready(running)

    def _ready(self, running: _Running) -> None:
        """Its next turn is sent, for the first time."""
        running.ready_at, running.num_tries = self._fleet.now, 0
        ids = running.turn.block_ids
        num_known = next((place for place, each in enumerate(ids) if each not in self._seen), len(ids))
        self._seen.update(ids)
        running.num_repeatable_tokens = min(num_known * self._block_tokens, running.turn.num_input_tokens - 1)
        self._send(running)

    def _send(self, running: _Running) -> None:
        turn, session = running.turn, running.session
        trace = TraceRequest(
            running.ready_at,
            turn.num_input_tokens,
            turn.num_output_tokens,
            turn.block_ids or (-1 - self._num_sent,),
            "",
            running.root,
        )
        name = ProgramName(
            "simulated",
            "id",
            running.root,
            "" if running.parent is None else session.id,
            None if running.parent is None else _agent(running.parent),
        )
        number, self._num_sent = self._num_sent, self._num_sent + 1
        self._running[number] = running
        self._fleet.submit(
            HashedRequest(
                number,
                trace,
                hashes_of(turn.block_ids, self._hashes),
                bucket_of_trace(trace, self._block_tokens),
                NO_USER,
                program=name,
                pause=self._pause_after(running),
            )
        )

    def _pause_after(self, running: _Running) -> Pause:
        place, turns = running.next_turn + 1, running.session.turns
        if place == len(turns) or turns[place].ends_user_turn:
            return Pause.USER
        return Pause.TOOL

    def _answered(self, request: HashedRequest, record: RequestRecord) -> None:
        running, now = self._running.pop(request.number), self._fleet.now
        if record.error is not None:
            self._counts.num_refused += 1
            seconds = min(LONGEST_BACKOFF_SECONDS, 2.0**running.num_tries) * (0.5 + self._rng.random())
            running.num_tries += 1
            self._fleet.after(seconds, lambda: self._send(running))
            return
        self._note(running, record, now)
        number = running.next_turn
        running.next_turn += 1
        for child in self._children.get(running.session.id, ()):
            if child.parent_turn == number:
                running.num_children += not running.has_ended
                begun = _Running(child, running.root, running)
                self._fleet.after(child.after_seconds, lambda begun=begun: self._begin(begun))  # type: ignore[misc]
        if running.has_ended:
            self._end(running, now)
        elif not running.num_children:
            self._pause(running)

    def _pause(self, running: _Running) -> None:
        self._fleet.after(running.turn.think_seconds, lambda: self._ready(running))

    def _end(self, running: _Running, now: float) -> None:
        self._num_left -= 1
        parent, session = running.parent, running.session
        if parent is None:
            seconds = now - running.began_at
            self._counts.seconds.append(seconds)
            if session.id not in self._children:
                self._counts.slowdowns.append(seconds / self._idle_seconds(session.turns))
            self._begin_next(self._lanes[session.lane])
        elif parent.num_children:
            parent.num_children -= 1
            if not parent.num_children and not parent.has_ended:
                self._pause(parent)

    def _note(self, running: _Running, record: RequestRecord, now: float) -> None:
        counts = self._counts
        assert record.ttft_seconds is not None and record.replica is not None
        counts.ttft.append(record.ttft_seconds)
        counts.ended_at.append(now)
        counts.num_repeatable += running.num_repeatable_tokens
        counts.num_cached += min(record.num_cached_tokens or 0, running.num_repeatable_tokens)
        counts.replicas[record.replica] += 1

    def _idle_seconds(self, turns: Sequence[SessionTurn]) -> float:
        """Return the time of a session on an idle fleet that has its earlier turns cached."""
        cost, seconds, num_before = self._cost, 0.0, 0
        for turn in turns:
            num_tokens = turn.num_input_tokens
            num_new = max(1, num_tokens - min(num_before, num_tokens - 1))
            seconds += turn.think_seconds + cost.a + cost.b * num_new
            seconds += cost.c * num_new * (num_tokens - num_new / 2)
            seconds += turn.num_output_tokens * (cost.d0 + cost.d1 * num_tokens)
            num_before = num_tokens // self._block_tokens * self._block_tokens
        return seconds

    def _figures(self) -> dict[str, float | None]:
        counts = self._counts
        start, end = STEADY_SECONDS
        num_steady = sum(start <= each < end for each in counts.ended_at)
        ttft, num_replicas = percentiles(counts.ttft), len(self._fleet.hosts)
        return {
            "session_mean": statistics.fmean(counts.seconds),
            "session_p90": percentiles(counts.seconds).p90,
            "slowdown_mean": statistics.fmean(counts.slowdowns) if counts.slowdowns else None,
            "slowdown_max": max(counts.slowdowns, default=None),
            "turns_a_minute": 60 * num_steady / (end - start),
            "ttft_mean": statistics.fmean(counts.ttft),
            "ttft_p50": ttft.p50,
            "ttft_p90": ttft.p90,
            "ttft_p99": ttft.p99,
            "ttft_max": max(counts.ttft),
            "repeatable_hit_rate": counts.num_cached / counts.num_repeatable
            if counts.num_repeatable
            else None,
            "recomputed_tokens": (counts.num_repeatable - counts.num_cached) / 1e6,
            "imbalance_requests": max(counts.replicas.values()) * num_replicas / len(counts.ttft),
            "num_refused": counts.num_refused,
        }


def _agent(running: _Running) -> str:
    return "" if running.parent is None else running.session.id
