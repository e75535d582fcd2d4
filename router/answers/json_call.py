"""JsonCall: reads a tool call that a model writes as a JSON object, incrementally.

Owns the part that cannot be emitted yet. A call is announced once its name is known and its arguments begin;
then arguments stream as the model writes them, with raw control characters in strings escaped. An object that
is no call is emitted as text. If a call breaks off later, it ends there with the arguments so far, and the
rest is text.
"""

import json
import re
from collections.abc import Callable

from router.answers.json_strings import ControlEscaper, is_object
from router.answers.parts import CallArguments, CallEnd, CallStart, Part, Text

MAX_NAME_CHARACTERS = 256
"""For a name or a key; longer ones are not a call's."""

MAX_UNSAID_CHARACTERS = 65_536
"""Length of an object that may still become a call, as when its arguments precede its name."""

NAME_KEY = "name"
ARGUMENTS_KEYS = frozenset({"arguments", "parameters"})
OTHER_BARE_KEYS = frozenset({"type", "id"})

_space = re.compile(r"[ \t\r\n]*")
_string_run = re.compile(r'[^"\\]*')
_short_string_run = re.compile(r'[^"\\\x00-\x1f]*')
_nested_run = re.compile(r'[^"{}\[\]<]*')
_scalar_run = re.compile(r"[^\s,}<]*")
_unescapable = re.compile(
    r'(?:[^\\]++|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)
LONGEST_ESCAPE = len("\\ud83d\\ude00")

State = Callable[[str, int], int]
"""Reads the text from a place on; returns the place up to which it has read."""


class JsonCall:
    """`feed` until `is_done`; `finish` if the text ends before.

    `prefix` is the text that led to the object, which remains text if this is no call. An object without a
    mark is a bare one: it may have only a call's keys, and `is_bare_tool` tells whether its name is a tool's.
    It may be the first of a list, if it `may_be_listed`; `is_listed` says that it is.
    """

    def __init__(
        self,
        position: int,
        prefix: str,
        *,
        is_bare_tool: Callable[[str], bool] | None,
        may_be_listed: bool = False,
    ) -> None:
        self.is_done = False
        self.is_announced = False
        self.is_listed = False
        self._may_be_listed = may_be_listed
        self._position = position
        self._is_bare_tool = is_bare_tool
        self._unsaid = [prefix]
        self._num_unsaid = len(prefix)
        self._arguments: list[str] = []
        self._escaper = ControlEscaper()
        self._out: list[Part] = []
        self._state: State = self._open
        self._key = ""
        self._short = ""
        self._name: str | None = None
        self._has_begun_arguments = False
        self._has_ended_arguments = False
        self._is_in_arguments = False
        self._is_in_string = False
        self._is_escaped = False
        self._depth = 0
        self._raw_escape = ""

    def feed(self, text: str, out: list[Part]) -> str:
        """Append parts to `out`; returns the text after the object, once it is done."""
        self._out = out
        while text:
            end = len(text) if self.is_announced else MAX_UNSAID_CHARACTERS - self._num_unsaid
            piece = text[:end]
            at = self._read(piece)
            text = text[at:]
            if not self.is_announced:
                self._unsaid.append(piece[:at])
                self._num_unsaid += at
                if self._num_unsaid >= MAX_UNSAID_CHARACTERS:
                    self._fail()
                if self.is_done:
                    return self._say_unsaid() + text
            if self.is_done:
                return text
        return ""

    def _read(self, text: str) -> int:
        at = 0
        while at < len(text) and not self.is_done:
            at = self._state(text, at)
        return at

    def finish(self, out: list[Part], *, is_whole: bool) -> str:
        """Finish at the answer's end, natural or cut off: an unfinished object is broken either way."""
        self._out = out
        self._fail()
        if not self.is_announced:
            blanks = self._say_unsaid()
            if blanks:
                out.append(Text(blanks))
        return ""

    def _fail(self) -> None:
        self.is_done = True
        if self.is_announced and not self._has_ended_arguments:
            self._out.append(CallEnd(self._position, is_whole=False))

    def _say_unsaid(self) -> str:
        """Emit held-back text except the blanks at its end, which it returns: they may precede another
        call."""
        unsaid = "".join(self._unsaid)
        text = unsaid.rstrip()
        if text:
            self._out.append(Text(text))
        return unsaid[len(text) :]

    # --- the object ---

    def _open(self, text: str, at: int) -> int:
        at = _skip_space(text, at)
        if self._may_be_listed and not self.is_listed and text.startswith("[", at):
            self.is_listed = True
            return at + 1
        return self._after(text, at, "{", self._before_key)

    def _before_key(self, text: str, at: int) -> int:
        at = _skip_space(text, at)
        if text.startswith("}", at):
            return self._close(at)
        self._short = ""
        return self._after(text, at, '"', self._in_key)

    def _in_key(self, text: str, at: int) -> int:
        at, is_whole = self._read_short(text, at)
        if is_whole:
            self._key = self._short
            self._state = self._before_colon
        return at

    def _before_colon(self, text: str, at: int) -> int:
        return self._after(text, _skip_space(text, at), ":", self._before_value)

    def _before_value(self, text: str, at: int) -> int:
        at = _skip_space(text, at)
        if at == len(text):
            return at
        first = text[at]
        if self._key == NAME_KEY and self._name is None:
            self._short = ""
            return self._after(text, at, '"', self._in_name)
        if self._key in ARGUMENTS_KEYS and not self._has_begun_arguments:
            return self._begin_arguments(text, at, first)
        if self._is_bare_tool is not None and not self.is_announced and self._key not in OTHER_BARE_KEYS:
            self._fail()
            return at
        return self._begin_value(at, first)

    def _after_value(self, text: str, at: int) -> int:
        at = _skip_space(text, at)
        if text.startswith("}", at):
            return self._close(at)
        return self._after(text, at, ",", self._before_key)

    def _close(self, at: int) -> int:
        """At the object's last brace. A call without arguments has an empty object of them."""
        if not self._has_begun_arguments and self._name is not None:
            self._has_begun_arguments = True
            self._announce()
            self._end_arguments()
        if not self.is_announced:
            self._fail()
            return at
        self.is_done = True
        return at + 1

    def _after(self, text: str, at: int, expected: str, state: State) -> int:
        """On to the next state behind the expected character; any other one is a failure."""
        if at == len(text):
            return at
        if text[at] != expected:
            self._fail()
            return at
        self._state = state
        return at + 1

    # --- its name ---

    def _in_name(self, text: str, at: int) -> int:
        at, is_whole = self._read_short(text, at)
        if is_whole:
            if not self._short or (self._is_bare_tool is not None and not self._is_bare_tool(self._short)):
                self._fail()
                return at
            self._name = self._short
            self._state = self._after_value
            self._announce()
        return at

    def _read_short(self, text: str, at: int) -> tuple[int, bool]:
        """Read a key or a name; neither has escapes or control characters."""
        end = min(_end(_short_string_run, text, at), at + MAX_NAME_CHARACTERS + 1 - len(self._short))
        self._short += text[at:end]
        if len(self._short) > MAX_NAME_CHARACTERS or (end < len(text) and text[end] != '"'):
            self._fail()
            return end, False
        return (end, False) if end == len(text) else (end + 1, True)

    # --- values ---

    def _begin_arguments(self, text: str, at: int, first: str) -> int:
        """Begin the arguments: an object, or one written in a string; null is an empty one."""
        if first not in '{"n':
            self._fail()
            return at
        self._has_begun_arguments = self._is_in_arguments = True
        self._announce()
        return self._begin_value(at, first)

    def _begin_value(self, at: int, first: str) -> int:
        if first == '"':
            self._state = self._in_string_value
            return at + 1
        self._state = self._in_nested if first in "{[" else self._in_scalar
        return at

    def _in_scalar(self, text: str, at: int) -> int:
        end = _end(_scalar_run, text, at)
        if end < len(text):
            self._end_value()
        return end

    def _in_string_value(self, text: str, start: int) -> int:
        at, is_whole = self._read_string(text, start)
        if self._is_in_arguments:
            self._say(self._unescaped(text[start : at - is_whole], is_whole))
        if is_whole:
            self._end_value()
        return at

    def _in_nested(self, text: str, start: int) -> int:
        at = start
        while at < len(text):
            if self._is_in_string:
                at, is_whole = self._read_string(text, at)
                self._is_in_string = not is_whole
                continue
            at = _end(_nested_run, text, at)
            if at == len(text) or text[at] == "<":  # outside a string there is none in JSON
                break
            self._is_in_string = text[at] == '"'
            self._depth += (text[at] in "{[") - (text[at] in "}]")
            at += 1
            if not self._depth:
                break
        if self._is_in_arguments:
            self._say(text[start:at])
        if not self._depth:
            self._end_value()
        elif at < len(text):
            self._fail()
        return at

    def _read_string(self, text: str, at: int) -> tuple[int, bool]:
        """Return the place behind the string's closing quote and True, or the text's end."""
        if self._is_escaped:
            self._is_escaped = False
            at += 1
        while True:
            at = _end(_string_run, text, at)
            if at == len(text):
                return at, False
            if text[at] == '"':
                return at + 1, True
            at += 2
            if at > len(text):
                self._is_escaped = True
                return len(text), False

    def _unescaped(self, piece: str, is_whole: bool) -> str:
        """Unescape a string's complete escapes. Other backslashes stay."""
        raw = self._raw_escape + piece
        said: list[str] = []
        at = 0
        while at < len(raw):
            end = _end(_unescapable, raw, at)
            said.append(json.loads(f'"{raw[at:end]}"', strict=False))
            at = end
            if at < len(raw):
                if not is_whole and len(raw) - at < LONGEST_ESCAPE:
                    break
                said.append(raw[at])
                at += 1
        self._raw_escape = raw[at:]
        return "".join(said)

    def _end_value(self) -> None:
        self._state = self._after_value
        if self._is_in_arguments:
            self._is_in_arguments = False
            self._end_arguments()

    # --- what is said ---

    def _announce(self) -> None:
        if self._name is None or not self._has_begun_arguments:
            return
        self.is_announced = True
        self._unsaid.clear()
        self._out.append(CallStart(self._position, self._name))
        if self._arguments:
            self._out.append(CallArguments(self._position, "".join(self._arguments)))
        if self._has_ended_arguments:
            self._say_end()

    def _say(self, text: str) -> None:
        if not text:
            return
        text = self._escaper.feed(text)
        self._arguments.append(text)
        if self.is_announced:
            self._out.append(CallArguments(self._position, text))

    def _end_arguments(self) -> None:
        if not self._arguments:
            self._say("{}")
        self._has_ended_arguments = True
        if self.is_announced:
            self._say_end()

    def _say_end(self) -> None:
        self._out.append(CallEnd(self._position, is_whole=is_object("".join(self._arguments))))


def _end(run: "re.Pattern[str]", text: str, at: int) -> int:
    """Return the end of a possibly empty run at a position."""
    match = run.match(text, at)
    return at if match is None else match.end()


def _skip_space(text: str, at: int) -> int:
    return _end(_space, text, at)
