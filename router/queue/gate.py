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
from collections import Counter
from collections.abc import Collection, Mapping

from replicas.protocol.status import ReplicaId
from router.programs.book import Program, ProgramBook, Turn
from router.programs.pauses import Pause
from router.queue.held import Held
from router.routing.table import RoutingTable

GRACE_SECONDS = 20.0
"""A program that has paused for longer gives its room back if somebody waits."""

GATE_SHARE = 1.0
"""Part of the devices' KV that admitted programs may need. Those that share a beginning count it each."""

QUANTUM_SECONDS = 400.0
"""A program that was admitted for longer gives way after a turn if others wait."""

LONG_SECONDS = 200.0
"""Programs that have waited for longer go first, in the order of their coming."""

UNPASSED_SECONDS = 60.0
"""No program passes another that has waited for longer and finds no room."""

AGEING = 0.33
"""Seconds of attained service that a second of waiting is worth."""

CHEAP_SECONDS = 1.25
"""A context that is computed again sooner than this is not worth a wait, but in an overload."""

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

    def passes(self, turn: Turn, now: float, *, is_overload: bool) -> bool:
        """Whether the turn goes on at once; its program is admitted then if there is room.

        Outside an overload a context that is soon computed again does not wait for room.
        """
        program = turn.program
        if program.is_crowd:
            return True
        if program.admitted_at is None:
            children = self._children(now)
            if not self._is_free(program, children) and (
                self._would_pass(program, children, now) or not self._fits(turn.num_tokens, now)
            ):  # one that passes is not admitted: those that wait would never find room
                return not is_overload and turn.num_tokens * self._token_seconds() < CHEAP_SECONDS
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
        turn = _turn_of(held)
        program, turn.num_admitted = turn.program, len(self._admitted.tokens_of)
        if program.waits_since is None:
            self._book.waits(program, held.since)
        return True

    def expected_seconds(self, held: Held, now: float) -> float:
        """Return how long a new program would wait, by the pace at which those before it were admitted.

        One that has begun waits in any case: it goes before new ones.
        """
        program = _turn_of(held).program
        if (
            program.home is not None
            or program.attained_seconds
            or not self._waiting
            or now - self._busy_since < LEAST_PACED_SECONDS
        ):
            return 0.0
        pace = self._pace * math.exp((self._paced_at - now) / PACE_SECONDS)
        pace /= 1.0 - math.exp((self._busy_since - now) / PACE_SECONDS)
        ahead = sum(each.asking.request.num_tokens for each in self._waiting)
        return (ahead + held.asking.request.num_tokens) / max(pace, 1.0)

    def leave(self, held: Held) -> None:
        """It waits no longer."""
        held.is_at_gate = False
        self._waiting.remove(held)
        program = _turn_of(held).program
        others = self._waiting if program.num_open > 1 else ()
        since = min((each.since for each in others if _turn_of(each).program is program), default=None)
        self._book.waits(program, since)

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
        taken, children, most = self._taken_by_tenant(), self._children(now), self._most(now)
        self._waiting.sort(
            key=lambda held: self._order(_turn_of(held).program, held.since, taken, children, now)
        )
        for held in self._waiting:
            turn = _turn_of(held)
            is_free = self._is_free(turn.program, children)
            if is_free or (turn.num_tokens <= most and self._fits(turn.num_tokens, now)):
                self.leave(held)
                self._book.waited(turn, now - held.since)
                if not turn.program.is_crowd:
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

    def _order(
        self,
        program: Program,
        since: float,
        taken: Mapping[str, float],
        children: Mapping[Program, int],
        now: float,
    ) -> tuple[float, float]:
        if self._is_free(program, children):  # another of its turns was admitted meanwhile, or its parent
            return (-math.inf, -math.inf)
        waited = now - since
        if waited > LONG_SECONDS:
            return (-math.inf, since)
        return (taken.get(program.tenant, 0.0), program.attained_seconds - AGEING * waited)

    def _would_pass(self, program: Program, children: Mapping[Program, int], now: float) -> bool:
        """Whether a program that comes now would pass another that none may pass."""
        old = [held for held in self._waiting if now - held.since > UNPASSED_SECONDS]
        if not old:
            return False
        taken = self._taken_by_tenant()
        own = self._order(program, now, taken, children, now)
        return any(
            self._order(_turn_of(held).program, held.since, taken, children, now) <= own for held in old
        )

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

    def _children(self, now: float) -> Counter[Program]:
        """Count the subagents that run, by the program that began them."""
        roots = [(each, each.root) for each in self._admitted.tokens_of if each.root is not None]
        return Counter(root for each, root in roots if not _has_paused(each, now))

    def _is_free(self, program: Program, children: Mapping[Program, int]) -> bool:
        """Whether its turns need no room of their own."""
        if program.is_crowd or program.admitted_at is not None:
            return True
        root = program.root
        return root is not None and root.admitted_at is not None and children.get(root, 0) < MAX_CHILDREN

    def _most(self, now: float) -> float:
        """Return the tokens of the largest context that fits, if those give their room back that have paused
        for long. Where no other one is left, any does."""
        tokens_of = self._admitted.tokens_of
        idle = [num_tokens for each, num_tokens in tokens_of.items() if _has_paused(each, now)]
        if len(idle) == len(tokens_of):
            return math.inf
        return self._room(now) - self._admitted.num_tokens + sum(idle)

    def _fits(self, num_tokens: int, now: float) -> bool:
        """Whether it fits; programs that have paused for long give back what it needs."""
        admitted = self._admitted
        lacking = admitted.num_tokens + num_tokens - self._room(now)
        if lacking <= 0:
            return True
        if num_tokens > self._most(now):
            return False
        idle = [each for each in admitted.tokens_of if _has_paused(each, now)]
        for each in sorted(idle, key=lambda each: each.paused_at or 0.0):
            if lacking <= 0:
                break
            lacking -= admitted.tokens_of[each]
            self._book.dismiss(each)
        return True

    def _room(self, now: float) -> float:
        """Return the tokens that the devices keep for programs.

        They are unbounded where some cache's size is unknown, or where evicted KV is loaded again. While no
        replica is ready they are what they were: who finds none is not to wait here.
        """
        if now - self._capacity_at >= CAPACITY_SECONDS:
            self._capacity_at = now
            found = [self._capacity_of(each) for each in self._table.ready_ids(self._model)]
            if found:
                self._capacity = GATE_SHARE * sum(found)
        return self._capacity

    def _token_seconds(self) -> float:
        """Seconds per prompt token at some replica; most take about as long."""
        some = next(iter(self._table.ready_ids(self._model)), None)
        return 0.0 if some is None else self._table.load(some).prefill_seconds_per_token or 0.0

    def _capacity_of(self, replica_id: ReplicaId) -> float:
        num_tokens = self._table.capacity(replica_id)
        if num_tokens is None or self._table.load(replica_id).speeds.host is not None:
            return math.inf
        return num_tokens


def _turn_of(held: Held) -> Turn:
    assert held.asking.turn is not None
    return held.asking.turn


def _has_paused(program: Program, now: float) -> bool:
    """Whether it has paused for long. A subagent that calls no tool has told its parent all, and ended."""
    if program.paused_at is None:
        return False
    has_ended = program.root is not None and program.pause is Pause.USER
    return has_ended or now - program.paused_at > GRACE_SECONDS
