"""EarlyCalls: calls that a model begins before it has ended its reasoning.

Owns the text since the first call's mark, until its kind is known. A model that forgets to end its reasoning
calls and says no more; one that thinks of a call continues to think, or ends its reasoning and answers. So it
is calls if nothing else follows, and reasoning otherwise: nothing is called twice.
"""

import enum
from collections.abc import Iterable
from typing import Protocol

from router.answers.parts import CallEnd, Part, Text
from router.shared.literals import num_begun

MAX_EARLY_CALLS = 16
"""Marks of calls in one answer's reasoning that are looked into."""

MAX_EARLY_CHARACTERS = 262_144
"""Held-back characters; more of them count as reasoning."""


class CallsParser(Protocol):
    """Parser of an answer without reasoning."""

    def feed(self, text: str) -> list[Part]: ...
    def finish(self, *, is_whole: bool) -> list[Part]: ...


class Finding(enum.Enum):
    NO_CALL = enum.auto()
    """Reasoning goes on behind the mark, with `rest`."""
    THOUGHT = enum.auto()
    """All of `said` is reasoning, which has ended; the answer is `rest`."""


class EarlyCalls:
    """`feed` until there is a result; `finish` if the answer ends before. `prefix` is the mark and the blanks
    before it."""

    def __init__(self, prefix: str, mark: str, parser: CallsParser, end_mark: str) -> None:
        self.prefix = prefix
        self.rest = ""
        self._said = [prefix]
        self._num_characters = 0
        self._parser = parser
        self._end_mark = end_mark
        self._held = ""
        self._parts: list[Part] = []
        self._is_closed = False
        self._has_failed = False
        self._take(parser.feed(mark))

    @property
    def said(self) -> str:
        return "".join(self._said).rstrip()

    def feed(self, text: str) -> Finding | None:
        if not self._is_closed:
            text = self._held + text
            end = text.find(self._end_mark)
            end_of_piece = end if end >= 0 else len(text) - num_begun(text, (self._end_mark,))
            self._read(text[:end_of_piece])
            self._held = text[end_of_piece:]
            if end >= 0:
                self._take(self._parser.finish(is_whole=False))
                self._has_failed |= not self._parts
            if self._has_failed or self._num_characters > MAX_EARLY_CHARACTERS:
                self.rest = "".join(self._said[1:]) + self._held
                return Finding.NO_CALL
            if end < 0:
                return None
            self._is_closed = True
            text = self._held[len(self._end_mark) :]
            self._held = ""
        self.rest = text.lstrip()
        return Finding.THOUGHT if self.rest else None

    def finish(self, *, is_whole: bool) -> list[Part]:
        """Return the calls; none if the text is no call, or was cut off."""
        if not self._is_closed:
            self._read(self._held)
            self._take(self._parser.finish(is_whole=is_whole))
        return self._parts if is_whole and not self._has_failed else []

    def _read(self, text: str) -> None:
        self._said.append(text)
        self._num_characters += len(text)
        self._take(self._parser.feed(text))

    def _take(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if type(part) is Text:
                self._has_failed |= bool(part.text.strip())
            else:
                self._has_failed |= type(part) is CallEnd and not part.is_whole
                self._parts.append(part)
