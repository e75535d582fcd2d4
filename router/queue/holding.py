"""Holding: sends requests to their replicas at once, unless the fleet is overloaded; then it holds some back.

Owns which are held. While a fleet carries its load nothing waits here: a replica batches better than a router
with a delayed view. In an overload each request is aimed at the replica of its routing decision, counting
what goes before it in fair order; while that has no room, the request waits in its line. The next one is
chosen when there is room, as late as possible; the first of each line is decided again now and then, in case
another replica is better by now.

    the fleet carries its load               it goes at once, unless it is due soon or the batch is full
    its replica has room                     it goes at once
    its replica has no room                  it waits in line
    its first token would come too late      it is refused at once
    it waited in line until it was too late  it is refused then

Programs that do not fit into the fleet's room all at once wait before that, at the gate (`gate.py`). A turn
of one that may run is not refused for its wait in line.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from replicas.protocol.blocks import BlockHash
from replicas.protocol.status import ReplicaId
from router.caller import Tenant
from router.errors import NoReplicaAvailable, Overloaded, RouterError, TooLate, UnknownModel
from router.programs.book import ProgramBook, Turn
from router.programs.name import ProgramName
from router.queue.fair_queue import FairQueue
from router.queue.gate import Gate
from router.queue.held import Asking, Held, HoldingCounts, QueueRules
from router.queue.pace import Pace
from router.queue.room import Room
from router.queue.shares import LEAST_SPARED, Shares
from router.queue.standing_delay import TARGET_SECONDS, StandingDelay
from router.queue.work import Charge, prompt_work
from router.routing.decision import Claim, Decision
from router.routing.load import ReplicaLoad
from router.routing.table import Choice, RoutedRequest, RoutingTable
from router.shared.instruments import Instrument, counter, gauge

ASK_AGAIN_SECONDS = 0.1
"""Interval at which a line's first request without room checks for a better replica."""

LOOK_SECONDS = 0.02
"""Between two looks at a line whose replica is full: none of it can go, only be late or ask again."""

MAX_MOVES = 3
"""Moves between lines; then it stays."""

NUM_FIRSTS = 4
"""Tenants of a line whose first requests are looked at, where that of the first has no room."""

MAX_PASSED = 16
"""Requests of other tenants that may pass a first one that finds no room."""

NUM_RELEASES = 16
"""Most releases from one line per message of its replica."""

LONGEST_RETRY_SECONDS = 60.0

AT_GATE = ReplicaId("")
"""The line of those that wait at the gate."""

TURN_SECONDS = 300.0
"""Longest hold of a turn whose program may run."""

GATE_SECONDS = 400.0
"""Longest wait of a turn whose program may not."""

BURST_SECONDS = 30.0
"""Longest hold until an overload stands, and if requests are held for another reason: replicas were away, a
batch is full, or others are due soon."""

URGENT_SECONDS = 30.0
"""A request due within this time is held wherever its replica has no room, so that it is refused in time, and
so that others waiting with it keep their shares. Later deadlines count in an overload."""


@dataclass(slots=True)
class _Fleet:
    """Held requests of one model, and their pace. `orphans` are lines whose replica takes nothing."""

    queue: FairQueue
    pace: Pace
    orphans: set[ReplicaId]
    shares: Shares
    delay: StandingDelay
    gate: Gate | None = None
    looked_at: dict[ReplicaId, float] = field(default_factory=dict)
    """Last time that a line was checked by a waiter; it is not checked more often than asking again, however
    many wait."""
    served_at: dict[ReplicaId, float] = field(default_factory=dict)
    """Last report of a line's replica that was acted upon."""


class Holding:
    """`new_queue` makes the queue of a model, with its bounds. Without `programs` each request is one by
    itself."""

    def __init__(
        self,
        table: RoutingTable,
        rules: QueueRules,
        new_queue: Callable[[], FairQueue] = FairQueue,
        programs: ProgramBook | None = None,
        has_gate: bool = True,
    ) -> None:
        self.rules = rules
        self.counts = HoldingCounts()
        self.programs = programs
        self._has_gate = has_gate and programs is not None
        self._table = table
        self._room = Room(table, rules.target_seconds)
        self._new_queue = new_queue
        self._fleets: dict[str, _Fleet] = {}
        self._num_asked = 0

    # A request comes.

    def ask(
        self, asking: Asking, now: float, call: Callable[[], None], *, exclude: Collection[ReplicaId] = ()
    ) -> RoutedRequest | Held:
        """Raises TooLate or Overloaded for one that would wait too long, UnknownModel, NoReplicaAvailable."""
        self._num_asked += 1
        fleet, turn = self._fleet(asking.model), asking.turn
        if turn is not None and self.programs is not None:
            if fleet.gate is None:
                self.programs.admit(turn.program, turn.num_tokens, now)
            elif not fleet.gate.passes(turn, now, is_overload=fleet.delay.is_overload(now)):
                held = self._held(AT_GATE, asking, call, 0.0, now)
                return self._wait_at_gate(fleet.gate, held, exclude)
        return self._go_or_hold(fleet, asking, call, exclude, now)

    def _go_or_hold(
        self,
        fleet: _Fleet,
        asking: Asking,
        call: Callable[[], None],
        exclude: Collection[ReplicaId],
        now: float,
        held: Held | None = None,
    ) -> RoutedRequest | Held:
        """`held` is the request, if it has waited at the gate."""
        try:
            choice = self._choose(fleet, asking, exclude, now)
        except NoReplicaAvailable:
            if not self._table.has_ready(asking.model):
                fleet.delay.holds(now)  # the first replica that comes back is not to get all that waited
            raise
        line, num_uncached = self._line_of(choice.decision, asking.request.num_tokens)
        work = prompt_work(asking.request.num_tokens, choice.decision.num_found_tokens)
        if self._may_pass(fleet, asking, line, now):
            if asking.deadline is not None:
                self._must_be_in_time(asking, asking.deadline, line, num_uncached, now)
            fleet.queue.counters.passes(asking.tenant, asking.weight, work)
            fleet.shares.gives(asking.tenant, asking.weight, work, now)
            self.counts.num_passed += 1
            return self._act(choice, asking, now)
        held = held or self._held(line, asking, call, work, now)
        held.line, held.work, held.exclude = line, work, exclude
        fleet.delay.holds(now)
        self._stand_in_line(fleet, held, num_uncached, now)
        self.counts.num_held += 1
        self._serve(fleet, line, now, caller=held)
        if held.error is not None:
            raise held.error
        return held if held.routed is None else held.routed

    def _line_of(self, decision: Decision, num_tokens: int) -> tuple[ReplicaId, int]:
        """Return the replica at which the request waits longer, of a split's two, and the tokens that are
        computed there."""
        there, room = decision.replica_id, self._room
        if decision.split is None:
            return there, num_tokens - decision.overlap_tokens
        if room.wait_seconds(there, num_tokens) > room.wait_seconds(decision.computed_at, num_tokens):
            return there, num_tokens - decision.overlap_tokens
        return decision.computed_at, num_tokens - decision.num_found_tokens

    def _held(
        self, line: ReplicaId, asking: Asking, call: Callable[[], None], work: float, now: float
    ) -> Held:
        return Held(line, asking, call, work=work, order=self._num_asked, now=now)

    def charge(self, asking: Asking, routed: RoutedRequest, held: Held | None) -> Charge:
        """Return the request's charge at release; a `held` one pays what was expected when it came."""
        num_tokens, replica_id = asking.request.num_tokens, routed.decision.computed_at
        num_cached = routed.decision.num_found_tokens
        prompt_seconds = self._room.prompt_seconds(replica_id, asking.request, num_tokens - num_cached)
        fleet = self._fleet(asking.model)
        counters = fleet.queue.counters
        if asking.other_seconds:
            counters.charge(asking.tenant, asking.other_seconds / self._room.token_seconds(replica_id))
        return Charge(
            counters,
            asking.tenant,
            num_tokens=num_tokens,
            work=prompt_work(num_tokens, num_cached) if held is None else held.work,
            wait_seconds=max(0.0, self._room.wait_seconds(replica_id, num_tokens) - prompt_seconds),
            prompt_seconds=prompt_seconds,
            shares=fleet.shares,
            num_places=asking.request.num_choices,
        )

    def withdraw(self, held: Held) -> None:
        """Drop a request that was abandoned. One that was routed meanwhile is returned."""
        if held.routed is not None:
            held.routed.close()
            self._fleet(held.asking.model).queue.counters.charge(held.tenant, -held.work)
            held.routed = None
        elif not held.is_out:
            self._leave(self._fleet(held.asking.model), held)

    # Programs.

    def begin_turn(
        self,
        model: str,
        tenant: Tenant,
        name: ProgramName,
        num_tokens: int,
        block_hashes: Sequence[BlockHash],
        now: float,
    ) -> Turn | None:
        """Return a turn that is to be ended; None for a side call, or without a book."""
        if self.programs is None or name.is_side:
            return None
        turn = self.programs.begin(model, tenant.name, name, num_tokens, block_hashes, now)
        turn.program.weight = tenant.weight
        return turn

    def turn_moves(self, turn: Turn, routed: RoutedRequest, now: float) -> None:
        """A turn goes somewhere without having asked: tried again, or resumed."""
        assert self.programs is not None
        self.programs.routed(turn, routed.decision.replica_id, now)

    def end_turn(self, turn: Turn, now: float) -> None:
        """A turn has ended, whatever its end was: its program pauses, and may give way to those that wait."""
        assert self.programs is not None
        program = turn.program
        self.programs.end(turn, now)
        fleet = self._fleets.get(program.model)
        if fleet is not None and fleet.gate is not None:
            fleet.gate.turn_ended(program, now)
            self._open_gate(fleet, fleet.gate, now)

    def _wait_at_gate(self, gate: Gate, held: Held, exclude: Collection[ReplicaId]) -> Held:
        """Raises TooLate and Overloaded."""
        asking, now = held.asking, held.since
        held.exclude = exclude
        held.latest_start = now + GATE_SECONDS
        if asking.deadline is not None:
            held.latest_start = min(held.latest_start, asking.deadline)  # how much is cached is not known yet
        expected = gate.expected_seconds(held, now)
        if now + expected > held.latest_start:
            self.counts.num_refused_at_once += 1
            raise self._too_long(asking, expected, held.latest_start - now)
        if not gate.wait(held):
            self.counts.num_refused_full += 1
            raise Overloaded(
                "Too many programs wait. Try again later.", retry_after_seconds=self._retry_after(expected)
            )
        return held

    def _open_gate(self, fleet: _Fleet, gate: Gate, now: float) -> None:
        """Let those go that may."""
        while gate.waiting and (held := gate.next(now)) is not None:
            try:
                found = self._go_or_hold(fleet, held.asking, held.call, held.exclude, now, held)
            except RouterError as error:
                held.is_out, held.error = True, error
            else:
                if isinstance(found, RoutedRequest):
                    held.is_out, held.routed = True, found
            if held.is_out:
                held.call()

    # A replica says something.

    def changed(self, model: str, replica_id: ReplicaId, now: float) -> None:
        """The replica may have room now."""
        fleet = self._fleets.get(model)
        if fleet is None or not fleet.queue.num_waiting:
            return
        if fleet.orphans:
            fleet.orphans.discard(replica_id)
            for line in tuple(fleet.orphans):
                self._serve(fleet, line, now)
                if not fleet.queue.num_in_line(line):
                    fleet.orphans.discard(line)
        if now - fleet.served_at.get(replica_id, -math.inf) < LOOK_SECONDS and self._room.is_full(replica_id):
            return
        fleet.served_at[replica_id] = now
        self._serve(fleet, replica_id, now)

    def absent(self, model: str, replica_id: ReplicaId) -> None:
        """Re-aim the requests waiting for a replica that takes nothing now, a few at a time."""
        if self.programs is not None:
            self.programs.forget_replica(replica_id)
        fleet = self._fleets.get(model)
        if fleet is None:
            return
        fleet.served_at.pop(replica_id, None)
        if fleet.queue.num_in_line(replica_id):
            fleet.orphans.add(replica_id)

    def look_at(self, held: Held, now: float) -> None:
        """Check whether its time is over, or its replica has room without having said so."""
        if not held.is_out:
            fleet = self._fleet(held.asking.model)
            if held.is_late(now):
                self._refuse(fleet, held, now)
            elif now - fleet.looked_at.get(held.line, -math.inf) >= ASK_AGAIN_SECONDS:
                fleet.looked_at[held.line] = now
                if held.is_at_gate:
                    assert fleet.gate is not None
                    self._open_gate(fleet, fleet.gate, now)
                else:
                    self._serve(fleet, held.line, now)

    def oldest_seconds(self, now: float) -> float:
        since = [fleet.queue.oldest_since() for fleet in self._fleets.values()]
        return max((max(0.0, now - each) for each in since if each is not None), default=0.0)

    def instruments(self, clock: Callable[[], float]) -> Iterator[Instrument]:
        """Totals of all models' queues; the spread is the widest."""
        fleets, counts = self._fleets, self.counts
        yield gauge(
            "router_queue_waiting",
            "Requests that are held until a replica has room",
            lambda: self.num_waiting,
        )
        yield gauge("router_queue_bytes", "Memory of the prompts of held requests", lambda: self.num_bytes)
        yield gauge(
            "router_queue_oldest_seconds",
            "Wait of the request that has been held longest",
            lambda: self.oldest_seconds(clock()),
        )
        yield gauge(
            "router_queue_tenants",
            "Tenants of which requests are held",
            lambda: self.num_active_tenants,
        )
        yield gauge(
            "router_queue_counter_spread_tokens",
            "What the tenant of held requests that was given most had more than the one given least, in "
            "tokens of work by weight",
            lambda: max((fleet.queue.counters.spread() for fleet in fleets.values()), default=0.0),
        )
        yield counter("router_queue_held_total", "Requests that have been held", lambda: counts.num_held)
        yield counter(
            "router_queue_released_total",
            "Held requests that have gone to a replica",
            lambda: counts.num_released,
        )
        yield counter(
            "router_queue_seconds_total",
            "Time that requests were held until they went to a replica",
            lambda: counts.held_seconds,
        )
        yield counter(
            "router_queue_refusals_total",
            "Requests refused because they would have waited too long (too_long), have (too_late), or too "
            "many waited (full)",
            lambda: {
                "too_long": counts.num_refused_at_once,
                "too_late": counts.num_refused_late,
                "full": counts.num_refused_full,
            },
            "cause",
        )

    @property
    def num_bytes(self) -> int:
        return sum(fleet.queue.num_bytes for fleet in self._fleets.values())

    @property
    def num_active_tenants(self) -> int:
        return sum(fleet.queue.counters.num_active for fleet in self._fleets.values())

    @property
    def num_waiting(self) -> int:
        return sum(fleet.queue.num_waiting for fleet in self._fleets.values())

    @property
    def waiting_by_model(self) -> Mapping[str, tuple[int, int]]:
        """How many are held for each model, in line or at the gate, and the memory of their prompts."""
        found: dict[str, tuple[int, int]] = {}
        for model, fleet in self._fleets.items():
            at_gate = () if fleet.gate is None else fleet.gate.waiting
            found[model] = (
                fleet.queue.num_waiting + len(at_gate),
                fleet.queue.num_bytes + sum(held.num_bytes for held in at_gate),
            )
        return found

    def at_gate(self) -> Iterator[Held]:
        """Return the requests whose programs may not run yet."""
        for fleet in self._fleets.values():
            if fleet.gate is not None:
                yield from fleet.gate.waiting

    def num_waiting_for(self, model: str) -> int:
        fleet = self._fleets.get(model)
        return 0 if fleet is None else fleet.queue.num_waiting

    # How it is done.

    def _serve(self, fleet: _Fleet, line: ReplicaId, now: float, caller: Held | None = None) -> None:
        for _ in range(NUM_RELEASES):
            if not self._serve_one(fleet, line, now, caller):
                return

    def _serve_one(self, fleet: _Fleet, line: ReplicaId, now: float, caller: Held | None) -> bool:
        """Release one request; returns whether any left the line. One that needs more room than there is lets
        some others go first."""
        passed: list[Held] = []
        for held in fleet.queue.firsts(line, NUM_FIRSTS):
            assert isinstance(held, Held)
            if held.is_late(now):
                self._refuse(fleet, held, now, caller)
                return True
            is_ready = self._table.is_ready(line, adapter=held.asking.adapter)
            has_room = is_ready and self._has_room(fleet, held.asking, line, now)
            asks_again = not passed and now - held.asked_at >= ASK_AGAIN_SECONDS
            if not is_ready or has_room or asks_again:
                held.asked_at = now
                if self._try(fleet, held, now, may_stay=has_room, caller=caller):
                    for each in passed:
                        each.num_passed += 1
                    return True
            if self._is_batch_full(fleet, held.asking, line, now) and not self._room.has_full_batch(line):
                continue  # the places are left for others: any number of them may pass
            if held.num_passed >= MAX_PASSED:
                return False
            passed.append(held)
        return False

    def _try(self, fleet: _Fleet, held: Held, now: float, *, may_stay: bool, caller: Held | None) -> bool:
        """Decide on it again. False if it stays first in its line."""
        line = held.line
        try:
            choice = self._choose(fleet, held.asking, held.exclude, now, held)
            there, num_uncached = self._line_of(choice.decision, held.asking.request.num_tokens)
            if not self._has_room(fleet, held.asking, there, now):
                if there == line:
                    return False
                if held.num_moves < MAX_MOVES or not may_stay:
                    self._move(fleet, held, there)
                    return True
                others = [each for each in self._table.replica_ids(held.asking.model) if each != line]
                choice = self._choose(fleet, held.asking, others, now, held)
                there, num_uncached = self._line_of(choice.decision, held.asking.request.num_tokens)
        except (NoReplicaAvailable, UnknownModel):
            return False
        if self._is_in_vain(held, there, num_uncached, now):
            self._refuse(fleet, held, now, caller)
            return True
        held.routed = self._act(choice, held.asking, now)
        fleet.queue.goes(held)
        fleet.shares.gives(held.tenant, held.weight, held.work, now)
        held.is_out = True
        fleet.pace.released(line, held.work, now, others_wait=fleet.queue.num_in_line(line) > 0)
        self.counts.num_released += 1
        self.counts.held_seconds += now - held.since
        if held is not caller:
            held.call()
        return True

    def _act(self, choice: Choice, asking: Asking, now: float) -> RoutedRequest:
        if asking.turn is not None and self.programs is not None:
            self.programs.routed(asking.turn, choice.decision.replica_id, now)
        return choice.act()

    def _may_pass(self, fleet: _Fleet, asking: Asking, line: ReplicaId, now: float) -> bool:
        delay, room = fleet.delay, self._room
        if fleet.queue.num_waiting:
            delay.holds(now)
        elif not delay.is_overload(now) and (
            asking.deadline is None or asking.deadline - now >= URGENT_SECONDS
        ):
            num_tokens = asking.request.num_tokens
            wait = least = room.wait_seconds(line, num_tokens)
            num_replicas = self._table.num_replicas(asking.model)
            if wait > TARGET_SECONDS:  # a look at all replicas, which most requests are spared
                replica_ids = self._table.replica_ids(asking.model)
                least = min((room.wait_seconds(each, num_tokens) for each in replica_ids), default=wait)
            if not delay.sees(wait, least, num_replicas, now) and not self._is_batch_full(
                fleet, asking, line, now
            ):
                return True
        return not fleet.queue.num_in_line(line) and self._has_room(fleet, asking, line, now)

    def _is_batch_full(self, fleet: _Fleet, asking: Asking, line: ReplicaId, now: float) -> bool:
        """Whether no place is free there that this tenant may take."""
        room = self._room
        if not room.has_full_batch(line, LEAST_SPARED):  # as for most who come, whatever their share
            return False
        spared = fleet.shares.spared_places(asking.tenant, now, has_others=asking.has_others)
        return room.has_full_batch(line, spared)

    def _has_room(self, fleet: _Fleet, asking: Asking, line: ReplicaId, now: float) -> bool:
        if self._is_batch_full(fleet, asking, line, now):
            return False
        spared = fleet.shares.spared(asking.tenant, now)
        return self._room.is_there(line, asking.request.num_tokens, spared=spared)

    def _choose(
        self,
        fleet: _Fleet,
        asking: Asking,
        exclude: Collection[ReplicaId],
        now: float,
        held: Held | None = None,
    ) -> Choice:
        """Choose a replica; `held` is first in its line, with nothing before it there."""
        load_of: Callable[[ReplicaId], ReplicaLoad] | None = None
        if fleet.queue.num_waiting:
            pace = fleet.pace.seconds_per_token

            def load_of(replica_id: ReplicaId) -> ReplicaLoad:
                load = self._table.load(replica_id)
                if held is not None and replica_id == held.line:
                    return load
                ahead = self._work_ahead(fleet, asking, replica_id)
                if not ahead:
                    return load
                if pace is not None:
                    ahead *= max(1.0, pace / self._room.token_seconds(replica_id))
                return structs.replace(load, num_pending_tokens=load.num_pending_tokens + int(ahead))

        request, turn = asking.request, asking.turn
        if turn is not None and self.programs is not None and not turn.program.is_crowd:
            beyond = self.programs.beyond(turn, self._table.capacity, now)
            claim = Claim(
                turn.program.home, beyond, turn.program.num_turns, turn.gate_seconds, turn.num_admitted
            )
            request = structs.replace(request, claim=claim)
        return self._table.choose(
            asking.model,
            request,
            asking.block_hashes,
            exclude=exclude,
            adapter=asking.adapter,
            load_of=load_of,
        )

    def _work_ahead(self, fleet: _Fleet, asking: Asking, line: ReplicaId) -> float:
        return fleet.queue.work_ahead(line, asking.tenant, weight=asking.weight, priority=asking.priority)

    def _stand_in_line(self, fleet: _Fleet, held: Held, num_uncached: int, now: float) -> None:
        asking, line = held.asking, held.line
        pace = fleet.pace.seconds_per_token or self._room.token_seconds(line)
        wait_seconds = self._work_ahead(fleet, asking, line) * pace
        if asking.deadline is None:
            prompt_seconds = self._room.prompt_seconds(line, asking.request, num_uncached)
            may_run = asking.turn is not None and asking.turn.program.may_run
            longest = TURN_SECONDS if may_run else self.rules.longest_seconds
            if not fleet.delay.is_standing(now):
                longest = max(longest, BURST_SECONDS)
            left = allowed = max(longest, prompt_seconds)
        else:
            left = asking.deadline - now - self._service_seconds(line, asking, num_uncached)
            allowed = self.rules.margin * left
        held.latest_start = now + left
        if wait_seconds > allowed:
            self.counts.num_refused_at_once += 1
            ahead = self._room.wait_seconds(line, asking.request.num_tokens)
            raise self._too_long(asking, wait_seconds + ahead, allowed)
        lost = fleet.queue.enter(held)
        if lost is None:
            self.counts.num_refused_full += 1
            raise Overloaded(
                "Too many requests wait. Try again shortly.",
                retry_after_seconds=self._retry_after(wait_seconds),
            )
        for each in lost:
            assert isinstance(each, Held)
            self.counts.num_refused_full += 1
            self._is_refused(
                fleet,
                each,
                Overloaded(
                    "Too many requests of this tenant wait. Try again shortly.",
                    retry_after_seconds=1.0,  # how long the other one would wait is not its business
                ),
            )

    def _must_be_in_time(
        self, asking: Asking, deadline: float, line: ReplicaId, num_uncached: int, now: float
    ) -> None:
        """Refuse a request that would be too late. An idle replica tries any request: its speed may be
        unknown."""
        if not self._table.load(line).num_requests:
            return
        seconds = self._service_seconds(line, asking, num_uncached)
        if now + seconds > deadline:
            self.counts.num_refused_at_once += 1
            raise self._too_long(asking, seconds, deadline - now)

    def _is_in_vain(self, held: Held, replica_id: ReplicaId, num_uncached: int, now: float) -> bool:
        deadline = held.asking.deadline
        if deadline is None or not self._table.load(replica_id).num_requests:
            return False
        seconds = self._service_seconds(replica_id, held.asking, num_uncached)
        return now + seconds > deadline

    def _service_seconds(self, replica_id: ReplicaId, asking: Asking, num_uncached: int) -> float:
        """Until it has computed this prompt, which is next there."""
        return self._room.wait_seconds(replica_id, asking.request.num_tokens) + self._room.prompt_seconds(
            replica_id, asking.request, num_uncached
        )

    def _too_long(self, asking: Asking, expected: float, allowed: float) -> RouterError:
        retry_after = self._retry_after(expected - max(0.0, allowed))
        if asking.deadline is None:
            return Overloaded(
                f"This request would wait for about {expected:.0f} s. Try again later.",
                retry_after_seconds=retry_after,
            )
        return TooLate(
            "This request would not be answered in time: too much is before it. Try again later.",
            retry_after_seconds=retry_after,
        )

    def _refuse(self, fleet: _Fleet, held: Held, now: float, caller: Held | None = None) -> None:
        """It has waited until it was too late."""
        self._leave(fleet, held)
        self.counts.num_refused_late += 1
        error = self._too_long(held.asking, now - held.since, 0.0)
        self._is_refused(fleet, held, error, is_told=held is not caller)

    def _is_refused(self, fleet: _Fleet, held: Held, error: RouterError, *, is_told: bool = True) -> None:
        held.is_out = True
        held.error = error
        if is_told:
            held.call()

    def _leave(self, fleet: _Fleet, held: Held) -> None:
        held.is_out = True
        if held.is_at_gate:
            assert fleet.gate is not None
            fleet.gate.leave(held)
            return
        fleet.queue.leave(held)
        if not fleet.queue.num_in_line(held.line):
            fleet.pace.emptied(held.line)

    def _move(self, fleet: _Fleet, held: Held, line: ReplicaId) -> None:
        before = held.line
        fleet.queue.move(held, line)
        if not fleet.queue.num_in_line(before):
            fleet.pace.emptied(before)

    def _retry_after(self, seconds: float) -> float:
        return min(LONGEST_RETRY_SECONDS, max(1.0, seconds))

    def _fleet(self, model: str) -> _Fleet:
        fleet = self._fleets.get(model)
        if fleet is None:
            fleet = self._fleets[model] = _Fleet(self._new_queue(), Pace(), set(), Shares(), StandingDelay())
            if self.programs is not None and self._has_gate:
                fleet.gate = Gate(model, self._table, self.programs)
        return fleet
