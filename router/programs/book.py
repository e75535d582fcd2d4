"""ProgramBook: the live programs that a router knows, where each runs, and the room that they will need.

Owns them and their bounds. Knows no prompt's text, no header and no queue. Programs of other routers are in
it as well, as late as news are.

A live program's KV is going to be read again. What all programs at home at a replica need beyond its room
is computed, or loaded, again at their next turns: `claim` says so to the decision. A paused program counts by
the probability that it returns, and only programs that may run count: the others wait until there is room.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from replicas.protocol.blocks import BlockHash
from replicas.protocol.status import ReplicaId
from router.programs.name import ProgramName
from router.programs.pauses import Pause, Pauses

MAX_PROGRAMS = 4096
MAX_TENANTS = 256
"""Tenants whose pauses are counted apart."""

FORGOTTEN_SECONDS = 3600.0
"""A program that has paused for longer is none: the index decides, as for any request."""

ROOM_SHARE = 0.9
"""The part of a cache that programs may need: others' prompts and answers lie there as well."""

MAX_PARALLEL = 4
"""More turns at once are not those of one agent."""

STRANGE_IN_A_ROW = 4
"""A prompt is strange that has less than half of the one before in common with it."""

SUM_SECONDS = 1.0
"""Interval at which a replica's sum is renewed though nothing has happened: weights fall with time."""

_PRIOR = Pauses()
"""Stands in for tenants whose own pauses are not known."""


@dataclass(slots=True)
class Used:
    """Tokens of a program through this router, with its side calls. None: an engine does not say."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = 0
    num_output_tokens: int = 0


class Program:
    """`num_tokens` is the length of its last prompt; `attained_seconds` have its turns, and those of its
    subagents, been served. `root` is the program that began it, if that is known. While `admitted_at` is
    None it may not run. `num_elsewhere` of its turns are open at other routers.

    All routers count in `version` where it ran and paused, and in `num_admissions` whether it may run: who
    has counted further is right.
    """

    __slots__ = (
        *("admitted_at", "attained_seconds", "counted", "home", "key", "middle", "model"),
        *("name", "num_admissions", "num_elsewhere", "num_open", "num_strange", "num_tokens", "num_turns"),
        *("pause", "paused_at", "root", "seen_at", "tenant", "used", "version", "waits_since", "weight"),
    )

    def __init__(self, key: bytes, name: ProgramName, model: str, tenant: str, now: float) -> None:
        self.key, self.name, self.model, self.tenant = key, name, model, tenant
        self.root: Program | None = None
        self.home: ReplicaId | None = None
        self.num_tokens = self.num_turns = self.num_open = self.num_strange = 0
        self.num_elsewhere = self.version = self.num_admissions = 0
        self.weight = 1.0
        self.attained_seconds = 0.0
        self.used = Used()
        self.seen_at = now
        self.paused_at: float | None = None
        self.pause = Pause.UNKNOWN
        self.admitted_at: float | None = None
        self.waits_since: float | None = None
        self.middle: tuple[int, BlockHash] | None = None
        """A block in the middle of its last prompt."""
        self.counted = 0.0
        """Its part of the sum of its home."""

    @property
    def is_crowd(self) -> bool:
        """Whether several agents seem to share its name. Then each turn is a request like any other."""
        return self.num_running > MAX_PARALLEL or self.num_strange >= STRANGE_IN_A_ROW

    @property
    def may_run(self) -> bool:
        return self.admitted_at is not None and not self.is_crowd

    @property
    def num_running(self) -> int:
        """Its open turns, at any router."""
        return self.num_open + self.num_elsewhere

    @property
    def state(self) -> str:
        if self.waits_since is not None:
            return "waiting"
        return "active" if self.num_running else "paused"


class Turn:
    """One request of a program, from its arrival to its end."""

    __slots__ = ("gate_seconds", "num_admitted", "num_tokens", "program", "routed_at")

    def __init__(self, program: Program, num_tokens: int) -> None:
        self.program = program
        self.num_tokens = num_tokens
        self.routed_at: float | None = None
        self.gate_seconds = 0.0
        """Its wait until its program might run, and how many others might when it came."""
        self.num_admitted = 0


class Admitted:
    """The programs of one model that may run, and the tokens of their contexts. `wait_elsewhere` are those
    that wait at other routers, by these."""

    __slots__ = ("num_tokens", "tokens_of", "wait_elsewhere")

    def __init__(self) -> None:
        self.tokens_of: dict[Program, int] = {}
        self.num_tokens = 0
        self.wait_elsewhere: set[tuple[str, Program]] = set()

    def take(self, program: Program, num_tokens: int) -> None:
        self.num_tokens += num_tokens - self.tokens_of.get(program, 0)
        self.tokens_of[program] = num_tokens

    def drop(self, program: Program) -> None:
        self.num_tokens -= self.tokens_of.pop(program, 0)


class _Home:
    __slots__ = ("programs", "room", "summed_at", "tokens")

    def __init__(self) -> None:
        self.programs: set[Program] = set()
        self.tokens = 0.0
        self.room = math.inf
        self.summed_at = -math.inf


class ProgramBook:
    def __init__(self, *, max_programs: int = MAX_PROGRAMS) -> None:
        self._max_programs = max_programs
        self._of: dict[str, OrderedDict[bytes, Program]] = {}
        """By tenant; the least recently seen first."""
        self._num_programs = 0
        self._homes: dict[ReplicaId, _Home] = {}
        self._admitted: dict[str, Admitted] = {}
        """By model."""
        self._pauses: OrderedDict[str, Pauses] = OrderedDict()
        self.num_begun = self.num_forgotten = self.num_moved = self.num_turns_ended = self.num_waited = 0
        self.attained_seconds = self.waited_seconds = 0.0
        """Sums over all turns."""
        self.on_change: Callable[[Program], None] = _ignore
        """Called when another router should know."""

    def __len__(self) -> int:
        return self._num_programs

    def programs(self) -> Iterator[Program]:
        for own in self._of.values():
            yield from own.values()

    def known(self, model: str, tenant: str, name: ProgramName) -> Program | None:
        own = self._of.get(tenant)
        return None if own is None else own.get(name.key(model, tenant))

    def holds(self, program: Program) -> bool:
        own = self._of.get(program.tenant)
        return own is not None and own.get(program.key) is program

    # A turn.

    def begin(
        self,
        model: str,
        tenant: str,
        name: ProgramName,
        num_tokens: int,
        block_hashes: Sequence[BlockHash],
        now: float,
    ) -> Turn:
        """A turn arrives. It must be ended, once."""
        program = self._program(name.key(model, tenant), model, tenant, name, now)
        self._see(program, now)
        self.num_begun += not program.num_turns
        self.runs(program, now)
        if program.middle is not None:
            at, block_hash = program.middle
            is_strange = len(block_hashes) <= at or block_hashes[at] != block_hash
            program.num_strange = program.num_strange + 1 if is_strange else 0
        if block_hashes:
            middle = len(block_hashes) // 2
            program.middle = middle, block_hashes[middle]
        program.num_open += 1
        program.num_turns += 1
        program.num_tokens = num_tokens
        self.renewed(program, now)
        self.on_change(program)
        return Turn(program, num_tokens)

    def routed(self, turn: Turn, replica_id: ReplicaId, now: float) -> None:
        """The turn goes to a replica, which is its program's home from now on."""
        program = turn.program
        turn.routed_at = now
        self.num_moved += program.home not in (None, replica_id)
        self.settle(program, replica_id, now)
        program.version += 1
        self.on_change(program)

    def end(self, turn: Turn, now: float) -> None:
        """The turn has ended, however."""
        program = turn.program
        program.num_open -= 1
        program.version += 1
        program.seen_at = now
        self._of[program.tenant].move_to_end(program.key)
        if turn.routed_at is not None:
            seconds = max(0.0, now - turn.routed_at)
            self.attained_seconds += seconds
            program.attained_seconds += seconds
            if program.root is not None:
                program.root.attained_seconds += seconds
                self.on_change(program.root)
        self.num_turns_ended += 1
        if not program.num_running:
            program.paused_at, program.pause = now, Pause.UNKNOWN
        self.renewed(program, now)
        self.on_change(program)

    def paused(self, program: Program, pause: Pause) -> None:
        """Note how its last turn has ended."""
        program.pause = pause
        self.renewed(program, program.seen_at)
        self.on_change(program)

    def runs(self, program: Program, now: float) -> None:
        """Its pause has ended, if it paused."""
        if program.paused_at is not None:
            self._pauses_of(program.tenant).ended(program.pause, now - program.paused_at)
            program.paused_at = None

    # Which may run.

    def admitted(self, model: str) -> Admitted:
        admitted = self._admitted.get(model)
        if admitted is None:
            admitted = self._admitted[model] = Admitted()
        return admitted

    def num_admitted_tokens(self) -> dict[str, float]:
        return {model: admitted.num_tokens for model, admitted in self._admitted.items()}

    def waited(self, turn: Turn, seconds: float) -> None:
        """The turn has waited for so long until its program might run."""
        turn.gate_seconds = seconds
        self.num_waited += 1
        self.waited_seconds += seconds

    def admit(self, program: Program, num_tokens: int, now: float) -> None:
        """It may run, and needs so much room. Admitting it again says how much it needs now."""
        self.admitted(program.model).take(program, num_tokens)
        if program.admitted_at is None:
            program.admitted_at = now
            program.num_admissions += 1
            self.renewed(program, now)
            self.on_change(program)

    def dismiss(self, program: Program) -> None:
        """It gives its room back, and is admitted anew when it returns."""
        self.admitted(program.model).drop(program)
        program.num_admissions += program.admitted_at is not None
        program.admitted_at = None
        self.renewed(program, program.seen_at)
        self.on_change(program)

    def waits(self, program: Program, since: float | None) -> None:
        """A turn of it waits until it may run, or does no longer."""
        program.waits_since = since
        self.on_change(program)

    # What the decision is told.

    def beyond(
        self, turn: Turn, capacity_of: Callable[[ReplicaId], int | None], now: float
    ) -> dict[ReplicaId, int]:
        """Return, by replica, how many tokens too many its programs need if this one runs there.

        `capacity_of` returns the tokens that a replica's cache holds, None if that is not known. Replicas
        with room are left out.
        """
        found: dict[ReplicaId, int] = {}
        for replica_id, home in self._homes.items():
            if now - home.summed_at >= SUM_SECONDS:
                for each in home.programs:
                    each.counted = self._weight(each, now) * each.num_tokens
                home.tokens = sum([each.counted for each in home.programs])
                capacity = capacity_of(replica_id)
                home.room = math.inf if capacity is None else ROOM_SHARE * capacity
                home.summed_at = now
            others = home.tokens
            if turn.program in home.programs and turn.program.admitted_at is not None:
                others -= turn.program.num_tokens
            over = others + turn.num_tokens - home.room
            if over > 0:
                found[replica_id] = int(over)
        return found

    def _weight(self, program: Program, now: float) -> float:
        if program.admitted_at is None:
            return 0.0
        if program.paused_at is None:
            return 1.0
        pauses = self._pauses.get(program.tenant, _PRIOR)
        return pauses.return_probability(program.pause, now - program.paused_at)

    # Which are kept.

    def forget_replica(self, replica_id: ReplicaId) -> None:
        """Its cache is gone: those at home there have no home."""
        home = self._homes.pop(replica_id, None)
        if home is not None:
            for program in home.programs:
                program.home, program.counted = None, 0.0
                program.version += 1

    def forget_old(self, now: float) -> None:
        for own in list(self._of.values()):
            for program in list(own.values()):
                if now - program.seen_at < FORGOTTEN_SECONDS:
                    break
                if not program.num_open:
                    self.forget(program)

    def forget(self, program: Program) -> None:
        """One with an open turn is kept."""
        own = self._of.get(program.tenant)
        if own is None or own.get(program.key) is not program or program.num_open:
            return
        del own[program.key]
        if not own:
            del self._of[program.tenant]
        self._num_programs -= 1
        self.num_forgotten += 1
        if program.paused_at is not None:
            self._pauses_of(program.tenant).gone(program.pause)
        self.dismiss(program)
        self._leave_home(program)

    # What other routers tell.

    def meet(self, model: str, tenant: str, name: ProgramName, seen_at: float) -> Program | None:
        """Return a program that another router has seen then; None where older ones keep their places."""
        key = name.key(model, tenant)
        is_new = key not in self._of.get(tenant, ())
        if is_new and self._num_programs >= self._max_programs:
            oldest = self._oldest()
            if oldest is None:
                return None
            is_larger = len(self._of[oldest.tenant]) > len(self._of.get(tenant, ())) + 1
            if oldest.seen_at >= seen_at and not is_larger:
                return None
        program = self._program(key, model, tenant, name, seen_at)
        if is_new and self._num_programs > self._max_programs:
            self.forget(program)
            return None
        if seen_at >= program.seen_at:
            self._see(program, seen_at)
        own = self._of[tenant]
        if next(iter(own.values())).seen_at > seen_at:
            own.move_to_end(program.key, last=False)
        return program

    def settle(self, program: Program, home: ReplicaId | None, now: float) -> None:
        """Its home is there from now on."""
        if program.home != home:
            self._leave_home(program)
            program.home = home
            if home is not None:
                self._homes.setdefault(home, _Home()).programs.add(program)
        self.renewed(program, now)

    def _program(self, key: bytes, model: str, tenant: str, name: ProgramName, now: float) -> Program:
        own = self._of.setdefault(tenant, OrderedDict())
        program = own.get(key)
        if program is None:
            self._num_programs += 1
            program = own[key] = Program(key, name, model, tenant, now)
            oldest = self._oldest() if self._num_programs > self._max_programs else None
            if oldest is not None and oldest is not program:
                self.forget(oldest)
        if name.parent is not None and (program.root is None or not self.holds(program.root)):
            parent_key = name.parent_key(model, tenant)
            parent = None if parent_key is None else own.get(parent_key)
            root = parent and (parent.root or parent)
            program.root = None if root is program else root
        return program

    def _see(self, program: Program, now: float) -> None:
        self._of[program.tenant].move_to_end(program.key)
        program.seen_at = now

    def _oldest(self) -> Program | None:
        """Return the oldest of the tenant that has most."""
        largest = max(self._of.values(), key=len)
        return next((each for each in largest.values() if not each.num_open), None)

    def _leave_home(self, program: Program) -> None:
        home = None if program.home is None else self._homes.get(program.home)
        if home is not None:
            home.programs.discard(program)
            home.tokens -= program.counted
            program.counted = 0.0
            if not home.programs:
                del self._homes[program.home]  # type: ignore[arg-type]

    def renewed(self, program: Program, now: float) -> None:
        """Renew its part of its home's sum."""
        home = None if program.home is None else self._homes.get(program.home)
        if home is not None:
            counted = self._weight(program, now) * program.num_tokens
            home.tokens += counted - program.counted
            program.counted = counted

    def _pauses_of(self, tenant: str) -> Pauses:
        pauses = self._pauses.get(tenant)
        if pauses is None:
            pauses = self._pauses[tenant] = Pauses()
            if len(self._pauses) > MAX_TENANTS:
                self._pauses.popitem(last=False)
        self._pauses.move_to_end(tenant)
        return pauses


def _ignore(program: Program) -> None:
    """No listener was set."""
