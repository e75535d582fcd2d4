"""ClosedLoop: sessions of agents on a simulated fleet, where each turn waits for the answer before it.

Owns when a turn is ready, which session a lane serves next, and how refused turns are sent again. Knows no
replica, no router and no figure.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.errors import ClusterError
from loadtests.reports.report import RequestRecord
from loadtests.simulation.fleet import FleetResult, VirtualFleet
from loadtests.simulation.request import HashedRequest, hashed
from loadtests.workloads import TraceRequest
from loadtests.workloads.sessions import Session, SessionFile
from replicas.protocol.blocks import BlockHash
from router.programs.name import ProgramName

if TYPE_CHECKING:
    import random

FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS, BACKOFF_JITTER = 0.5, 8.0, 0.25
"""The Python clients of OpenAI and Anthropic: twice as long each time, less up to a quarter by chance. They
give up after two retries; agents around them go on, as sessions here do."""

MOST_REFUSALS = 1000
"""A turn that is refused more often will never be taken."""


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """`record` is that of the attempt that was answered; its times count from when the turn was ready.

    The beginning of the prompt that earlier turns of any session had is repeatable.
    """

    record: RequestRecord
    ended_at: float
    num_repeatable_tokens: int
    num_device_tokens: int


@dataclass(frozen=True, slots=True)
class ServedSession:
    session: Session
    began_at: float
    ended_at: float


@dataclass(slots=True)
class LoopResult:
    """In the order of their ends."""

    turns: list[ServedTurn] = field(default_factory=list)
    sessions: list[ServedSession] = field(default_factory=list)
    num_refusals: int = 0


@dataclass(slots=True, eq=False)
class _VirtualProgram:
    """A session while it runs. `number` is that of its next turn, or of the one that is being answered."""

    session: Session
    name: ProgramName
    parent: "_VirtualProgram | None"
    began_at: float
    number: int = 0
    ready_at: float = 0.0
    num_repeatable_tokens: int = 0
    num_refusals: int = 0
    """Refusals of its present turn."""
    num_children: int = 0
    """Subagents for which its next turn waits."""

    @property
    def has_ended(self) -> bool:
        return self.number == len(self.session.turns)


class ClosedLoop:
    """Drives a new fleet. `rng` decides the clients' jitter and the numbers of blocks.

    The numbers decide which replica is first in a prefix's affinity order, which is chance.
    """

    def __init__(self, fleet: VirtualFleet, file: SessionFile, rng: "random.Random") -> None:
        self.result = LoopResult()
        self._fleet = fleet
        self._file = file
        self._rng = rng
        lanes: defaultdict[int, list[Session]] = defaultdict(list)
        self._children: defaultdict[tuple[str, int], list[Session]] = defaultdict(list)
        for session in file.sessions:
            if session.parent is None or session.parent_turn is None:
                lanes[session.lane].append(session)
            else:
                self._children[session.parent, session.parent_turn].append(session)
        self._lanes = {lane: iter(sessions) for lane, sessions in lanes.items()}
        self._sent: dict[int, _VirtualProgram] = {}
        self._num_sent = 0
        self._seen: set[int] = set()
        self._hashes: dict[int, BlockHash] = {}
        ids = (each for session in file.sessions for turn in session.turns for each in turn.block_ids)
        first_free_id = max(ids, default=-1) + 1
        self._shift = rng.getrandbits(64)
        self._own_ids = {session.id: first_free_id + n for n, session in enumerate(file.sessions)}
        """By session, the id of its prompts' last blocks where they are partial: no others share them."""

    def serve(self) -> FleetResult:
        """Serve every session to its end. Once per loop. Raises ClusterError if a turn is never answered."""
        self._fleet.on_end = self._ended
        for lane in self._lanes:
            self._begin_next(lane)
        served = self._fleet.serve([])
        assert len(self.result.sessions) == len(self._file.sessions), "a session is left"
        return served

    def _begin_next(self, lane: int) -> None:
        session = next(self._lanes[lane], None)
        if session is not None:
            name = ProgramName("simulated", "session", session.id)
            self._begin_later(session, name, None)

    def _begin_later(self, session: Session, name: ProgramName, parent: _VirtualProgram | None) -> None:
        begins_at = self._fleet.now + session.after_seconds
        program = _VirtualProgram(session, name, parent, begins_at)
        self._fleet.at(begins_at, lambda: self._be_ready(program))

    def _be_ready(self, program: _VirtualProgram) -> None:
        turn = program.session.turns[program.number]
        num_seen_tokens = turn.num_leading_blocks(self._seen) * self._file.block_tokens
        program.num_repeatable_tokens = min(num_seen_tokens, turn.num_input_tokens - 1)
        self._seen.update(turn.block_ids)
        program.ready_at = self._fleet.now
        program.num_refusals = 0
        self._send(program)

    def _send(self, program: _VirtualProgram) -> None:
        session = program.session
        turn, *later = session.turns[program.number : program.number + 2]
        is_whole = turn.num_input_tokens % self._file.block_tokens == 0
        block_ids = turn.block_ids if is_whole else (*turn.block_ids, self._own_ids[session.id])
        trace = TraceRequest(
            arrival_seconds=program.ready_at,
            num_input_tokens=turn.num_input_tokens,
            num_output_tokens=turn.num_output_tokens,
            prefix_ids=tuple(self._shift + block_id for block_id in block_ids),
            user="",
            session=session.id,
        )
        number, self._num_sent = self._num_sent, self._num_sent + 1
        self._sent[number] = program
        request = hashed(
            number,
            trace,
            self._file.block_tokens,
            self._hashes,
            program=program.name,
            ends_user_turn=later[0].ends_user_turn if later else None,
        )
        self._fleet.submit(request)

    def _ended(self, request: HashedRequest, record: RequestRecord, num_device_tokens: int) -> None:
        program, now = self._sent.pop(request.number), self._fleet.now
        if record.error is not None:
            self._send_again(program, record.error)
            return
        repeatable = program.num_repeatable_tokens
        self.result.turns.append(ServedTurn(record, now, repeatable, num_device_tokens))
        children = self._children[program.session.id, program.number]
        program.number += 1
        if program.has_ended:
            self._end(program)
        elif children:
            program.num_children = len(children)
        else:
            self._pause(program)
        for session in children:
            name = ProgramName(
                "simulated", "session", program.name.session, session.id, parent=program.name.agent
            )
            self._begin_later(session, name, program)

    def _send_again(self, program: _VirtualProgram, error: str) -> None:
        if program.num_refusals == MOST_REFUSALS:
            raise ClusterError(
                f"turn {program.number} of session {program.session.id} was refused {MOST_REFUSALS} times,"
                f" at last for: {error}"
            )
        seconds = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0**program.num_refusals)
        program.num_refusals += 1
        self.result.num_refusals += 1
        seconds *= 1 - BACKOFF_JITTER * self._rng.random()
        self._fleet.at(self._fleet.now + seconds, lambda: self._send(program))

    def _pause(self, program: _VirtualProgram) -> None:
        seconds = program.session.turns[program.number].think_seconds
        self._fleet.at(self._fleet.now + seconds, lambda: self._be_ready(program))

    def _end(self, program: _VirtualProgram) -> None:
        self.result.sessions.append(ServedSession(program.session, program.began_at, self._fleet.now))
        parent = program.parent
        if parent is None:
            self._begin_next(program.session.lane)
        elif not parent.has_ended:
            parent.num_children -= 1
            if parent.num_children == 0:
                self._pause(parent)
