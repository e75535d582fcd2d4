"""ObjectPrefix: how far an incremental text is the beginning of one JSON object.

Owns the point where the text stops being JSON, and the complete part of the object up to there. Pure.
"""

import re
from enum import Enum, auto

MAX_DEPTH = 1000
"""Nesting of objects and lists, as in `is_object`."""

MAX_SCALAR_CHARACTERS = 8192
"""Length of a number, which is parsed again with each piece."""

_space = re.compile(r"[ \t\r\n]*")
_string_run = re.compile(r'[^"\\\x00-\x1f]*')
_begun_escape = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{0,4})')
_whole_escape = re.compile(r"\\(?:[^u]|u.{4})")
_scalar_run = re.compile(r"[-+.0-9a-zA-Z]*")
_scalar = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_begun_scalar = re.compile(
    r"t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?"
    r"|-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][-+]?[0-9]*)?)?"
)


class _Next(Enum):
    """Tokens that may follow, after blanks."""

    OBJECT = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    VALUE = auto()
    VALUE_OR_END = auto()
    COMMA_OR_END = auto()
    NOTHING = auto()


_KEYS = frozenset({_Next.KEY, _Next.KEY_OR_END})
_VALUES = frozenset({_Next.VALUE, _Next.VALUE_OR_END})
_ENDS = frozenset({_Next.KEY_OR_END, _Next.VALUE_OR_END, _Next.COMMA_OR_END})


class ObjectPrefix:
    """`feed` it the text. It takes nothing from the first character on that is invalid in JSON."""

    __slots__ = ("_closing", "_is_broken", "_is_key", "_next", "_num_complete", "_num_taken", "_token")

    def __init__(self) -> None:
        self._next = _Next.OBJECT
        self._closing: list[str] = []
        """Brackets that close the open ones, innermost last."""
        self._token = ""
        """A scalar that may go on. Of a string only its quote, and an escape that has begun."""
        self._is_key = False
        self._is_broken = False
        self._num_taken = 0
        self._num_complete = 0
        """Characters up to a possible end of all open values: after a value, or an opening bracket."""

    def feed(self, text: str) -> str:
        """Take the leading text that continues an object."""
        at = 0
        while at < len(text) and not self._is_broken:
            if not self._token:
                at = self._begin(text, at)
            elif self._token[0] == '"':
                at = self._in_string(text, at)
            else:
                at = self._in_scalar(text, at)
        self._num_taken += at
        return text[:at]

    def completed(self, text: str) -> str:
        """Return the object of all complete values. `text` is the text fed."""
        if self._next is _Next.OBJECT:
            return "{}"
        num_complete = self._num_taken if _scalar.fullmatch(self._token) else self._num_complete
        return text[:num_complete] + "".join(reversed(self._closing))

    def _begin(self, text: str, at: int) -> int:
        """Up to behind the first character of the next token."""
        at = _end(_space, text, at)
        if at == len(text):
            return at
        mark, wanted = text[at], self._next
        if mark == '"' and (wanted in _KEYS or wanted in _VALUES):
            self._token, self._is_key = mark, wanted in _KEYS
        elif mark == ":" and wanted is _Next.COLON:
            self._next = _Next.VALUE
        elif mark == "," and wanted is _Next.COMMA_OR_END:
            self._next = _Next.KEY if self._closing[-1] == "}" else _Next.VALUE
        elif mark in "]}" and wanted in _ENDS and self._closing[-1] == mark:
            self._closing.pop()
            self._complete(at + 1)
        elif mark == "{" and (wanted in _VALUES or wanted is _Next.OBJECT):
            self._open("}", _Next.KEY_OR_END, at + 1)
        elif mark == "[" and wanted in _VALUES:
            self._open("]", _Next.VALUE_OR_END, at + 1)
        elif wanted in _VALUES and mark in "-0123456789tfn":
            self._token = mark
        else:
            self._is_broken = True
        return at if self._is_broken else at + 1

    def _open(self, closing: str, wanted: _Next, at: int) -> None:
        if len(self._closing) == MAX_DEPTH:
            self._is_broken = True
            return
        self._closing.append(closing)
        self._complete(at)
        self._next = wanted

    def _complete(self, at: int) -> None:
        self._num_complete = self._num_taken + at
        self._next = _Next.COMMA_OR_END if self._closing else _Next.NOTHING

    def _in_string(self, text: str, at: int) -> int:
        if len(self._token) > 1:
            return self._in_escape(text, at)
        at = _end(_string_run, text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._token = '"\\'
        elif text[at] == '"':
            self._token = ""
            if self._is_key:
                self._next = _Next.COLON
            else:
                self._complete(at + 1)
        else:  # a control character
            self._is_broken = True
            return at
        return at + 1

    def _in_escape(self, text: str, at: int) -> int:
        escape = self._token[1:] + text[at]
        if not _begun_escape.fullmatch(escape):
            self._is_broken = True
            return at
        self._token = '"' if _whole_escape.fullmatch(escape) else '"' + escape
        return at + 1

    def _in_scalar(self, text: str, at: int) -> int:
        end = _end(_scalar_run, text, at)
        scalar = self._token + text[at:end]
        num_begun = min(_end(_begun_scalar, scalar, 0), MAX_SCALAR_CHARACTERS)
        at += num_begun - len(self._token)
        self._token = scalar[:num_begun]
        if at < len(text):
            if at == end and _scalar.fullmatch(self._token):
                self._token = ""
                self._complete(at)
            else:
                self._is_broken = True
        return at


def completed_object(text: str) -> str:
    """Complete an object that breaks off with the values that are whole, as readers of partial JSON do."""
    prefix = ObjectPrefix()
    return prefix.completed(prefix.feed(text))


def _end(pattern: "re.Pattern[str]", text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None
    return found.end()
