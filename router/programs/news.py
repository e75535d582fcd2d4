"""ProgramNews: the programs at each router, as the routers tell each other.

Owns which program is told when, and which turns are open at other routers. Pure: transport and time are the
caller's. A message says how programs stand, not what has changed, so it may be lost, late or repeated. It
tells times as seconds ago: no router's clock is another's.

    home, pause, admission, tokens      the router that has counted further is right: all come to the same
    open turns                          are told every few seconds, and have ended once they are not
    all else that was told              is told again at long intervals, by one of those that know it
"""

from collections import OrderedDict
from itertools import islice
from typing import Annotated

from msgspec import Meta, Struct, msgpack

from replicas.protocol.status import ReplicaId
from router.programs.book import FORGOTTEN_SECONDS, Program, ProgramBook
from router.programs.name import ProgramName
from router.programs.pauses import Pause

MAX_ENTRIES = 512
"""In one message; the rest waits for the next one."""

MAX_CHARACTERS = 512
"""Length of one name. A program with a longer one is not told."""

MAX_MESSAGE_CHARACTERS = 32_768
"""No program is added to a message whose names are longer together."""

HEARTBEAT_SECONDS = 2.0
"""Interval at which open turns are told again."""

QUIET_SECONDS = 4.0 + HEARTBEAT_SECONDS
"""Open turns that are not told for this long have ended."""

REFRESH_SECONDS = 60.0
"""Interval at which a program without open turns is told again."""

_Text = Annotated[str, Meta(max_length=MAX_CHARACTERS)]
_Count = Annotated[int, Meta(ge=0, le=2**48)]
_MAX_SECONDS = 1e9
_Seconds = Annotated[float, Meta(ge=0.0, le=_MAX_SECONDS)]


class Entry(Struct, frozen=True, array_like=True):
    """One program. `num_open` of its turns are open at the router that sends it, and it may wait there.

    The seconds are those since its pause has begun, and since it was admitted.
    """

    model: _Text
    tenant: _Text
    source: _Text
    field: _Text
    session: _Text
    agent: _Text
    parent: _Text | None
    parent_session: _Text | None
    salt: _Text
    weight: Annotated[float, Meta(gt=0.0, le=1e9)]
    version: _Count
    home: _Text | None
    num_turns: _Count
    num_tokens: _Count
    attained_seconds: _Seconds
    num_open: _Count
    waits: bool
    pause: Pause
    paused_seconds: _Seconds | None
    num_admissions: _Count
    admitted_seconds: _Seconds | None

    @property
    def name(self) -> ProgramName:
        return ProgramName(
            self.source,
            self.field,
            self.session,
            self.agent,
            self.parent,
            self.parent_session,
            salt=self.salt,
        )


class News(Struct, frozen=True, array_like=True):
    router_id: Annotated[str, Meta(max_length=64)]
    entries: Annotated[tuple[Entry, ...], Meta(max_length=MAX_ENTRIES)]


encode_news = msgpack.Encoder().encode
decode_news = msgpack.Decoder(News).decode


class ProgramNews:
    """Makes `book` note changed programs from now on."""

    def __init__(self, book: ProgramBook, router_id: str) -> None:
        self.router_id = router_id
        self.num_passed_over = 0
        """Programs that were heard of and found no room, or that cannot be told."""
        self._book = book
        self._changed: dict[Program, None] = {}
        self._running: OrderedDict[Program, float] = OrderedDict()
        self._resting: OrderedDict[Program, float] = OrderedDict()
        """Programs that we have told, and when: with open turns here, and without."""
        self._open: OrderedDict[tuple[str, Program], tuple[int, float]] = OrderedDict()
        """Turns at other routers, and when they were told last."""
        self._heard_at: dict[str, float] = {}
        book.on_change = self._note

    @property
    def num_routers(self) -> int:
        """Other routers that sent something lately."""
        return len(self._heard_at)

    def tell(self, now: float) -> News | None:
        """Return the next message, or None if there is nothing to tell."""
        self._tell_again(self._running, HEARTBEAT_SECONDS, now)
        self._tell_again(self._resting, REFRESH_SECONDS, now)
        entries: list[Entry] = []
        num_characters = 0
        for program in list(islice(self._changed, MAX_ENTRIES)):
            if num_characters > MAX_MESSAGE_CHARACTERS:
                break
            del self._changed[program]
            if not self._book.holds(program):
                continue
            length = _length(program)
            if length is None:
                self.num_passed_over += 1
                continue
            num_characters += length
            entries.append(_told(program, now))
            self._resting.pop(program, None)
            told = self._running if program.num_open else self._resting
            told[program] = now
        return News(self.router_id, tuple(entries)) if entries else None

    def untell(self, news: News) -> None:
        """Take back a message that was not sent."""
        for entry in news.entries:
            program = self._book.known(entry.model, entry.tenant, entry.name)
            if program is not None:
                self._note(program)

    def hear(self, news: News, now: float) -> None:
        """`now` is when it was sent, by the same clock as everything else."""
        if news.router_id == self.router_id:
            return
        self._heard_at[news.router_id] = now
        for entry in news.entries:
            seconds = entry.paused_seconds or 0.0
            program = None
            if seconds < FORGOTTEN_SECONDS:
                program = self._book.meet(entry.model, entry.tenant, entry.name, now - seconds)
            if program is None:
                self.num_passed_over += 1
            else:
                self._hear(news.router_id, program, entry, now)

    def forget_quiet(self, now: float) -> None:
        """Drop routers that are silent, and turns that are not told any more."""
        for router_id, at in list(self._heard_at.items()):
            if not _is_within(now - at, QUIET_SECONDS):
                del self._heard_at[router_id]
        while self._open:
            (router_id, program), (_, at) = next(iter(self._open.items()))
            if _is_within(now - at, QUIET_SECONDS):
                break
            self._set_open(router_id, program, 0, False, now)
            if not program.num_running and program.paused_at is None:
                program.paused_at, program.pause = now, Pause.UNKNOWN
                self._book.renewed(program, now)

    def _note(self, program: Program) -> None:
        for told in (self._running, self._resting):
            told.pop(program, None)
        if self._book.holds(program):
            self._changed[program] = None
        else:
            self._changed.pop(program, None)

    def _tell_again(self, told: OrderedDict[Program, float], seconds: float, now: float) -> None:
        while told:
            program, at = next(iter(told.items()))
            if _is_within(now - at, seconds):
                break
            self._note(program)

    def _hear(self, router_id: str, program: Program, entry: Entry, now: float) -> None:
        own = _standing(program)
        self._hear_open(router_id, program, entry, now)
        self._hear_pause(program, entry, now)
        self._hear_use(program, entry, now)
        self._hear_admission(program, entry, now)
        told, merged = _standing_of(entry), _standing(program)
        if told != merged:  # who told it does not know all that we do
            if program not in self._running and program not in self._changed:
                self._resting.setdefault(program, now)
        elif own != merged or router_id > self.router_id:
            self._resting.pop(program, None)

    def _hear_open(self, router_id: str, program: Program, entry: Entry, now: float) -> None:
        self._set_open(router_id, program, entry.num_open, entry.waits, now)
        if entry.num_open:
            self._book.runs(program, now)

    def _set_open(self, router_id: str, program: Program, num_open: int, waits: bool, now: float) -> None:
        key = router_id, program
        before, _ = self._open.pop(key, (0, 0.0))
        program.num_elsewhere += num_open - before
        if num_open:
            self._open[key] = num_open, now
        waiting = self._book.admitted(program.model).wait_elsewhere
        if waits and num_open:
            waiting.add(key)
        else:
            waiting.discard(key)

    def _hear_pause(self, program: Program, entry: Entry, now: float) -> None:
        is_newer = entry.version > program.version
        if (entry.version, entry.home or "") > (program.version, program.home or ""):
            program.version = entry.version
            self._book.settle(program, None if entry.home is None else ReplicaId(entry.home), now)
        if program.num_running:
            return
        if entry.paused_seconds is not None and (is_newer or program.paused_at is None):
            program.paused_at, program.pause = now - entry.paused_seconds, entry.pause
        elif program.paused_at is None:
            program.paused_at = now  # where it runs is not known yet
        elif entry.version == program.version and program.pause is Pause.UNKNOWN:
            program.pause = entry.pause
        self._book.renewed(program, now)

    def _hear_use(self, program: Program, entry: Entry, now: float) -> None:
        program.attained_seconds = max(program.attained_seconds, entry.attained_seconds)
        if (entry.num_turns, entry.num_tokens) > (program.num_turns, program.num_tokens):
            program.num_turns, program.num_tokens = entry.num_turns, entry.num_tokens
            program.weight = entry.weight
            if program.admitted_at is not None:
                self._book.admitted(program.model).take(program, program.num_tokens)
            self._book.renewed(program, now)

    def _hear_admission(self, program: Program, entry: Entry, now: float) -> None:
        is_admitted = entry.admitted_seconds is not None
        own = program.num_admissions, program.admitted_at is not None
        if (entry.num_admissions, is_admitted) <= own:
            return
        program.num_admissions = entry.num_admissions
        admitted = self._book.admitted(program.model)
        if entry.admitted_seconds is not None:
            program.admitted_at = now - entry.admitted_seconds
            admitted.take(program, program.num_tokens)
        elif program.admitted_at is not None and program.num_open:  # its turn has passed here meanwhile
            program.num_admissions += 1
            self._note(program)
        else:
            program.admitted_at = None
            admitted.drop(program)
        self._book.renewed(program, now)


def _told(program: Program, now: float) -> Entry:
    name = program.name
    return Entry(
        program.model,
        program.tenant,
        name.source,
        name.field,
        name.session,
        name.agent,
        name.parent,
        name.parent_session,
        name.salt,
        min(1e9, max(1e-9, program.weight)),
        program.version,
        program.home,
        program.num_turns,
        program.num_tokens,
        min(_MAX_SECONDS, program.attained_seconds),
        program.num_open,
        program.waits_since is not None,
        program.pause,
        _seconds_since(program.paused_at, now),
        program.num_admissions,
        _seconds_since(program.admitted_at, now),
    )


def _length(program: Program) -> int | None:
    """Return the characters of its names, None if they cannot be sent."""
    name = program.name
    texts = (program.model, program.tenant, name.source, name.field, name.session, name.agent, name.salt)
    length = 0
    for text in (*texts, name.parent or "", name.parent_session or "", program.home or ""):
        if len(text) > MAX_CHARACTERS or not text.isprintable():
            return None
        length += len(text)
    return length


_Standing = tuple[int, str, int, int, int, bool, float]


def _standing(program: Program) -> _Standing:
    return (
        program.version,
        program.home or "",
        program.num_turns,
        program.num_tokens,
        program.num_admissions,
        program.admitted_at is not None,
        min(_MAX_SECONDS, program.attained_seconds),
    )


def _standing_of(entry: Entry) -> _Standing:
    return (
        entry.version,
        entry.home or "",
        entry.num_turns,
        entry.num_tokens,
        entry.num_admissions,
        entry.admitted_seconds is not None,
        entry.attained_seconds,
    )


def _seconds_since(at: float | None, now: float) -> float | None:
    return None if at is None else min(_MAX_SECONDS, max(0.0, now - at))


def _is_within(passed: float, seconds: float) -> bool:
    """Whether less has passed. A clock that has gone back says nothing."""
    return 0.0 <= passed < seconds
