"""Gate: which programs of one model may run at once, so that their KV stays on the devices.

Owns those that wait, and the order in which they are admitted. Programs whose contexts do not fit all evict
each other's KV at every turn, and the fleet computes prompts again instead of serving. So while the contexts
of those admitted fill the fleet, others wait: between turns only.

    admitted                                its turns pass at once
    a subagent of one that is admitted      passes: its parent waits for it
    contexts leave room                     it is admitted
    others pause for long                   they give their room back, if somebody waits
    others were admitted for a quantum      they give way between two turns, if somebody waits

Those that wait go in order: first who has waited for longest of all, if that was long; then by tenants, least
served first; then by the service that programs attained, least first, with ageing.

Least attained service and quanta: "Autellix: An Efficient Serving Engine for LLM Agents as General Programs"
(arXiv:2502.13965), there within an engine.
"""

import math
from collections.abc import Collection, Mapping

from replicas.protocol.status import ReplicaId
from router.programs.book import Program, ProgramBook, Turn
from router.queue.held import Held
from router.routing.table import RoutingTable

GRACE_SECONDS = 20.0
"""A program that has paused for longer gives its room back if somebody waits."""

GATE_SHARE = 1.0
"""Part of the devices' KV that admitted programs may need. Those that share a beginning count it each."""

QUANTUM_SECONDS = 400.0
"""One that was admitted for so long gives way after a turn if somebody waits."""

LONG_SECONDS = 200.0
"""Those that have waited for longer go first, in the order of their coming."""

UNPASSED_SECONDS = 60.0
"""Nobody passes one that has waited for longer and finds no room."""

AGEING = 0.33
"""Seconds of attained service that a second of waiting is worth."""

MAX_CHILDREN = 16
"""Subagents that run on one program's admission at once; others wait like programs."""

PACE_SECONDS = 120.0
"""Time over which the pace of admission is averaged."""

LEAST_PACED_SECONDS = 120.0

MAX_WAITING = 1024
MAX_WAITING_BYTES = 256 << 20

CAPACITY_SECONDS = 1.0
"""Interval at which the fleet's room is added up."""


class Gate:
    def __init__(self, model: str, table: RoutingTable, book: ProgramBook) -> None:
        self._model = model
        self._table = table
        self._book = book
        self._admitted = book.admitted(model)
        self._waiting: list[Held] = []
        self._pace = 0.0
        """Tokens of waiting programs that are admitted a second."""
        self._paced_at = self._busy_since = -math.inf
        """Since then some wait."""
        self._capacity: float = math.inf
        self._capacity_at = -math.inf

    @property
    def waiting(self) -> Collection[Held]:
        return self._waiting

    def passes(self, turn: Turn, now: float) -> bool:
        """Whether the turn goes on at once; its program is admitted then."""
        program = turn.program
        if program.is_crowd:
            return True
        if not self._is_admissible(turn, now):
            return False
        self._book.admit(program, turn.num_tokens, now)
        return True

    def wait(self, held: Held) -> bool:
        """Return whether there is a place for it."""
        num_bytes = sum(each.num_bytes for each in self._waiting) + held.num_bytes
        if len(self._waiting) >= MAX_WAITING or num_bytes > MAX_WAITING_BYTES:
            return False
        held.is_at_gate = True
        if not self._waiting:
            self._pace, self._paced_at, self._busy_since = 0.0, held.since, held.since
        self._waiting.append(held)
        self._book.waits(_program_of(held), held.since)
        return True

    def expected_seconds(self, held: Held, now: float) -> float:
        """Return how long a new program would wait, by the pace at which those before it were admitted.

        One that has begun waits in any case: it goes before new ones.
        """
        if (
            _program_of(held).num_turns > 1
            or not self._waiting
            or now - self._busy_since < LEAST_PACED_SECONDS
        ):
            return 0.0
        pace = self._pace / (1.0 - math.exp((self._busy_since - now) / PACE_SECONDS))
        ahead = sum(each.asking.request.num_tokens for each in self._waiting)
        return (ahead + held.asking.request.num_tokens) / max(pace, 1.0)

    def leave(self, held: Held) -> None:
        """It waits no longer."""
        held.is_at_gate = False
        self._waiting.remove(held)
        self._book.waits(_program_of(held), None)

    def turn_ended(self, program: Program, now: float) -> None:
        """It gives way to those that wait, if it was admitted for long, or its tenant has most."""
        since = program.admitted_at
        if since is None or program.num_running or not (self._waiting or self._admitted.wait_elsewhere):
            return
        quantum = QUANTUM_SECONDS
        if len({held.tenant for held in self._waiting} | {program.tenant}) > 1 and self._has_most(program):
            quantum = GRACE_SECONDS
        if now - since > quantum:
            self._book.dismiss(program)

    def next(self, now: float) -> Held | None:
        """Admit the next one that finds room, and return it."""
        taken = self._taken_by_tenant() if len({held.tenant for held in self._waiting}) > 1 else {}
        self._waiting.sort(key=lambda held: self._order(held, taken, now))
        for held in self._waiting:
            turn = held.asking.turn
            assert turn is not None
            if self._is_admissible(turn, now):
                self.leave(held)
                self._book.waited(turn, now - held.since)
                self._book.admit(turn.program, turn.num_tokens, now)
                self._note_pace(turn.num_tokens, now)
                return held
            if now - held.since > UNPASSED_SECONDS:
                return None
        return None

    def _note_pace(self, num_tokens: int, now: float) -> None:
        """Average over some minutes, from the first one on."""
        self._pace *= math.exp((self._paced_at - now) / PACE_SECONDS)
        self._pace += num_tokens / PACE_SECONDS
        self._paced_at = now

    def _order(self, held: Held, taken: Mapping[str, float], now: float) -> tuple[float, float]:
        waited = now - held.since
        if waited > LONG_SECONDS:
            return (-math.inf, held.since)
        return (taken.get(held.tenant, 0.0), _program_of(held).attained_seconds - AGEING * waited)

    def _taken_by_tenant(self) -> dict[str, float]:
        """Tokens of the programs that are admitted, by their tenants' weights."""
        found: dict[str, float] = {}
        for program, num_tokens in self._admitted.tokens_of.items():
            found[program.tenant] = found.get(program.tenant, 0.0) + num_tokens / program.weight
        return found

    def _has_most(self, program: Program) -> bool:
        """Whether its tenant would have more than another one that waits, without it."""
        taken = self._taken_by_tenant()
        own = taken[program.tenant] - self._admitted.tokens_of[program] / program.weight
        return any(own > taken.get(held.tenant, 0.0) for held in self._waiting)

    def _is_admissible(self, turn: Turn, now: float) -> bool:
        """Another router may have admitted its program while it waited here."""
        program = turn.program
        return program.admitted_at is not None or self._rides(program) or self._fits(turn.num_tokens, now)

    def _rides(self, program: Program) -> bool:
        root = program.root
        if root is None or root.admitted_at is None:
            return False
        return sum(each.root is root for each in self._admitted.tokens_of) < MAX_CHILDREN

    def _fits(self, num_tokens: int, now: float) -> bool:
        """Whether it fits, if those give their room back that have paused for long."""
        admitted = self._admitted
        lacking = admitted.num_tokens + num_tokens - self._room(now)
        if lacking <= 0:
            return True
        idle = [each for each in admitted.tokens_of if each.paused_at is not None]
        if len(idle) == len(admitted.tokens_of):  # nothing runs: one may always
            lacking = min(lacking, admitted.num_tokens)
        idle = [each for each in idle if now - (each.paused_at or 0.0) > GRACE_SECONDS]
        idle.sort(key=lambda each: each.paused_at or 0.0)
        given: list[Program] = []
        for each in idle:
            if lacking <= 0:
                break
            given.append(each)
            lacking -= admitted.tokens_of[each]
        if lacking > 0:
            return False
        for each in given:
            self._book.dismiss(each)
        return True

    def _room(self, now: float) -> float:
        """Return the tokens that the devices keep for programs.

        They are unbounded where some cache's size is unknown, or where evicted KV is loaded again.
        """
        if now - self._capacity_at >= CAPACITY_SECONDS:
            self._capacity_at = now
            self._capacity = GATE_SHARE * sum(map(self._capacity_of, self._table.ready_ids(self._model)))
        return self._capacity

    def _capacity_of(self, replica_id: ReplicaId) -> float:
        num_tokens = self._table.capacity(replica_id)
        if num_tokens is None or self._table.load(replica_id).speeds.host is not None:
            return math.inf
        return num_tokens


def _program_of(held: Held) -> Program:
    turn = held.asking.turn
    assert turn is not None
    return turn.program
