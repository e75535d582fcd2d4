"""XmlCall: one tool call that a model writes as `<function=…><parameter=…>…`, read as it comes.

Owns what of it cannot be said yet, and the JSON that comes of it. Values are bare text without quotes or
escapes: what the tool's schema calls a string becomes one, and comes out as it is written; any other is read
as JSON when it is whole, and is a string if it is none. A line break next to a value's marks is not its own.

Models leave marks out. A value that `</parameter>` does not end is ended by the mark that ought to follow,
where the mark cannot be text of the value (`ValueEnd`), or by the answer's end. What stands between
parameters and is none comes out as text behind the call.

What turns out to be no call before the function's name is known comes out as text. Where a call breaks off
later, as at a parameter without a readable name, its object stays open, and what follows is text.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from router.answers.formats import CALL_BEGIN, CALL_END
from router.answers.parameter_kinds import (
    STRING_ONLY,
    Kinds,
    has_parameter,
    may_have_parameter,
    parameter_kinds,
    value_as_json,
)
from router.answers.parts import CallArguments, CallEnd, CallStart, Part, Text
from router.answers.value_end import FUNCTION_BEGIN, FUNCTION_END, PARAMETER_END, ValueEnd
from router.shared.literals import num_begun

PARAMETER = "<parameter"
BETWEEN_PARAMETERS = (PARAMETER, PARAMETER_END, FUNCTION_END, CALL_BEGIN, CALL_END)

MAX_SPACE_CHARACTERS = 256
"""Before a function; more of it is text."""

MAX_STRAY_CHARACTERS = 1024
"""Text between parameters; more of it means that the call has broken off."""

MAX_VALUE_CHARACTERS = 262_144
"""Length of a value that waits for its end; a longer one is a string."""

_whole_name = re.compile(r"([^<>\n]{1,256})([>\n])")
_begun_name = re.compile(r"[^<>\n]{0,256}")
_whole_head = re.compile(r"<parameter(?:[ \t]*=|[ \t]+name[ \t]*=)([^<>\n]{1,256})([>\n])")
_begun_head = re.compile(r"<parameter[^<>\n]{0,300}")
_around_name = " \t\"'"

FindSchema = Callable[[str], Any]
"""Tool name → schema of its arguments; None for an unknown tool."""

State = Callable[[str, list[Part]], str]
"""Takes what it can of the text; returns the rest for the next state."""


class XmlCall:
    """`feed` until `is_done`; `finish` where the answer ends before.

    `prefix` is the text that led to the function, which remains text if this is no call. A bare function, to
    which no `<tool_call>` led, ends its prefix with `<function=`: it is a call only if its name `is_tool`'s
    and a parameter or its end comes next.
    """

    def __init__(
        self,
        position: int,
        prefix: str,
        find_schema: FindSchema,
        is_tool: Callable[[str], bool],
        *,
        is_bare: bool = False,
    ) -> None:
        self.is_done = False
        self.is_announced = False
        self._position = position
        self._unsaid = prefix
        self._find_schema = find_schema
        self._is_tool = is_tool
        self._is_bare = is_bare
        self._name = ""
        self._schema: Any = None
        self._given: set[str] = set()
        self._kinds: Kinds = None
        self._end = ValueEnd(self._is_next_parameter)
        self._value: list[str] = []
        self._num_value_characters = 0
        self._stray = ""
        self._held = ""
        self._is_over = False
        self._state: State = self._in_function_name if is_bare else self._before_function

    def feed(self, text: str, out: list[Part]) -> str:
        """Append parts to `out`; returns the text after the function, once it is done."""
        text, self._held = self._held + text, ""
        while text and not self.is_done:
            text = self._state(text, out)
        return text

    def finish(self, out: list[Part], *, is_whole: bool) -> str:
        """Finish at the answer's end: a natural one ends the call too. Returns the text after it."""
        text, self._held = self._held, ""
        if not self.is_announced:
            out.append(Text(self._unsaid + text))
            self.is_done = True
            return ""
        if is_whole:
            self._is_over = True
            while text and not self.is_done:
                text = self._state(text, out)
            if not self.is_done:
                self._end_value(out)
                self._close("", out)
            return text
        if self._state == self._in_string:
            self._say(_escaped(text), out)
        elif self._value:
            self._say(value_as_json("".join(self._value) + text, self._kinds), out)
        self._break_off("", out)
        return ""

    def _say(self, text: str, out: list[Part]) -> None:
        """Emit text. Marks and values arrive separately; one text gives one part."""
        last = out[-1] if out else None
        if isinstance(last, CallArguments) and last.position == self._position:
            out[-1] = CallArguments(self._position, last.text + text)
        elif text:
            out.append(CallArguments(self._position, text))

    def _hold(self, text: str) -> str:
        assert not self._is_over
        self._held = text
        return ""

    def _refuse(self, text: str, out: list[Part]) -> str:
        out.append(Text(self._unsaid))
        self.is_done = True
        return text

    def _close(self, text: str, out: list[Part]) -> str:
        self._say("}", out)
        return self._end_call(text, out, is_whole=True)

    def _break_off(self, text: str, out: list[Part]) -> str:
        return self._end_call(text, out, is_whole=False)

    def _end_call(self, text: str, out: list[Part], *, is_whole: bool) -> str:
        out.append(CallEnd(self._position, is_whole))
        if self._stray:
            out.append(Text(self._stray))
        self.is_done = True
        return text

    # --- the function ---

    def _before_function(self, text: str, out: list[Part]) -> str:
        begun = text.lstrip()
        num_space = len(text) - len(begun)
        if num_space <= MAX_SPACE_CHARACTERS:
            if begun.startswith(FUNCTION_BEGIN):
                self._unsaid += text[: num_space + len(FUNCTION_BEGIN)]
                self._state = self._in_function_name
                return begun[len(FUNCTION_BEGIN) :]
            if FUNCTION_BEGIN.startswith(begun):
                return self._hold(text)
        return self._refuse(text, out)

    def _in_function_name(self, text: str, out: list[Part]) -> str:
        match = _whole_name.match(text)
        if match is None:
            return self._hold(text) if _begun_name.fullmatch(text) else self._refuse(text, out)
        self._name = match[1] if self._is_tool(match[1]) else match[1].strip(_around_name)
        if (self._is_bare or match[2] == "\n") and not self._is_tool(self._name):
            return self._refuse(text, out)
        self._unsaid += match[0]
        if self._is_bare:
            self._state = self._before_body
        else:
            self._announce(out)
        return text[match.end() :]

    def _before_body(self, text: str, out: list[Part]) -> str:
        begun = text.lstrip()
        if len(text) - len(begun) <= MAX_SPACE_CHARACTERS:
            if begun.startswith((PARAMETER, FUNCTION_END)):
                self._announce(out)
                return begun
            if PARAMETER.startswith(begun) or FUNCTION_END.startswith(begun):
                return self._hold(text)
        return self._refuse(text, out)

    def _announce(self, out: list[Part]) -> None:
        self.is_announced = True
        self._schema = self._find_schema(self._name)
        out.append(CallStart(self._position, self._name))
        self._say("{", out)
        self._state = self._between_parameters

    # --- its parameters ---

    def _between_parameters(self, text: str, out: list[Part]) -> str:
        text = text.lstrip()
        marks = [(at, mark) for mark in BETWEEN_PARAMETERS if (at := text.find(mark)) >= 0]
        start, mark = min(marks, default=(len(text) - num_begun(text, BETWEEN_PARAMETERS), ""))
        if start > MAX_STRAY_CHARACTERS:
            return self._break_off(text, out)
        if not mark and not self._is_over:
            return self._hold(text)
        if not mark:
            start = len(text)
        self._stray += text[:start]
        rest = text[start + len(mark) :]
        if mark == PARAMETER:
            self._state = self._in_head
            return text[start:]
        if mark == FUNCTION_END:
            return self._close(rest, out)
        return rest if mark in ("", PARAMETER_END) else self._close(text[start:], out)

    def _in_head(self, text: str, out: list[Part]) -> str:
        """A line break ends the name, too: models forget the bracket."""
        match = _whole_head.match(text)
        if match is None:
            is_begun = not self._is_over and _begun_head.fullmatch(text)
            return self._hold(text) if is_begun else self._break_off(text, out)
        name = self._parameter_name(match[1])
        self._kinds = parameter_kinds(self._schema, name)
        self._say(f'{", " if self._given else ""}"{_escaped(name)}": ', out)
        self._given.add(name)
        rest = text[match.end() :]
        self._end.begin(is_block=match[2] == "\n")
        self._state = self._in_value if match[2] == "\n" else self._before_value
        return rest

    def _before_value(self, text: str, out: list[Part]) -> str:
        self._end.begin(is_block=text.startswith("\n"))
        self._state = self._in_value
        return text.removeprefix("\n")

    def _is_next_parameter(self, head: str) -> bool | None:
        """Whether a head within a value is one of the parameters that the tool may have and this call has not
        yet; None if it is not whole yet."""
        match = _whole_head.match(head)
        if match is None:
            return None if not self._is_over and _begun_head.fullmatch(head) else False
        name = self._parameter_name(match[1])
        return match[2] == ">" and name not in self._given and may_have_parameter(self._schema, name)

    def _parameter_name(self, written: str) -> str:
        """Models put names into quotes; but a name may have them, too."""
        return written if has_parameter(self._schema, written) else written.strip(_around_name)

    # --- values ---

    def _in_value(self, text: str, out: list[Part]) -> str:
        if self._kinds == STRING_ONLY:
            self._begin_string(out)
            return text
        value, rest = self._until_end(text)
        self._value.append(value)
        self._num_value_characters += len(value)
        if self._num_value_characters > MAX_VALUE_CHARACTERS:
            self._begin_string(out)
            self._say(_escaped(self._take_value()), out)
            if rest is not None:
                self._end_value(out)
            return rest or ""
        if rest is None:
            return ""
        self._end_value(out)
        return rest

    def _in_string(self, text: str, out: list[Part]) -> str:
        value, rest = self._until_end(text)
        self._say(_escaped(value), out)
        if rest is None:
            return ""
        self._end_value(out)
        return rest

    def _begin_string(self, out: list[Part]) -> None:
        self._say('"', out)
        self._state = self._in_string

    def _end_value(self, out: list[Part]) -> None:
        if self._state == self._in_string:
            self._say('"', out)
        elif self._state in (self._in_value, self._before_value):
            if self._kinds == STRING_ONLY:
                self._say('""', out)
            else:
                self._say(value_as_json(self._take_value(), self._kinds), out)
        self._state = self._between_parameters

    def _take_value(self) -> str:
        value = "".join(self._value)
        self._value.clear()
        self._num_value_characters = 0
        return value

    def _until_end(self, text: str) -> tuple[str, str | None]:
        """Return more of the value, and the text after it; None, holding its possible end, while it
        continues."""
        value, rest, held = self._end.find(text, is_over=self._is_over)
        self._held = held
        return value, rest


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
