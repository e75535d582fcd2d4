"""XmlCall: one tool call that a model writes as `<function=…><parameter=…>…`, read as it comes.

Owns what of it cannot be said yet, and the JSON that comes of it. Values are bare text without quotes or
escapes: what the tool's schema calls a string becomes one, and comes out as it is written; any other is read
as JSON when it is whole, and is a string if it is none. A line break next to a value's marks is not its own.

What turns out to be no call before the function's name is known comes out as text. Where a call breaks off
later its object is closed, and what follows is text; where the answer ends, the object stays open.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from router.answers.parameter_kinds import STRING_ONLY, Kinds, parameter_kinds, value_as_json
from router.answers.parts import CallArguments, CallEnd, CallStart, Part, Text
from router.prompt.literals import num_begun

FUNCTION_BEGIN = "<function="
FUNCTION_END = "</function>"
PARAMETER_BEGIN = "<parameter="
PARAMETER_END = "</parameter>"
VALUE_ENDS = (PARAMETER_END, "\n" + PARAMETER_END)

MAX_SPACE_CHARACTERS = 256
"""Before a function; more of it is text."""

MAX_VALUE_CHARACTERS = 262_144
"""Of a value that waits for its end; a longer one is a string."""

_whole_name = re.compile(r"([^<>\n]{1,256})>")
_begun_name = re.compile(r"[^<>\n]{0,256}")

FindSchema = Callable[[str], Any]
"""A tool's name → the schema of its arguments; None of a tool that there is not."""

State = Callable[[str, list[Part]], str]
"""Takes what it can of the text; returns what the next state is to see."""


class XmlCall:
    """`feed` until `is_done`; `finish` where the answer ends before.

    `prefix` is the text that led to the function, which remains text if this is no call.
    """

    def __init__(self, position: int, prefix: str, find_schema: FindSchema) -> None:
        self.is_done = False
        self.is_announced = False
        self._position = position
        self._unsaid = prefix
        self._find_schema = find_schema
        self._schema: Any = None
        self._num_parameters = 0
        self._kinds: Kinds = None
        self._value: list[str] = []
        self._num_value_characters = 0
        self._held = ""
        self._state: State = self._before_function

    def feed(self, text: str, out: list[Part]) -> str:
        """Appends parts to `out`; returns what follows the function, once it is done."""
        text, self._held = self._held + text, ""
        while text and not self.is_done:
            text = self._state(text, out)
        return text

    def finish(self, out: list[Part]) -> None:
        if not self.is_announced:
            out.append(Text(self._unsaid + self._held))
        else:
            if self._state == self._in_string:
                self._say(_escaped(self._held), out)
            elif self._value:
                self._say(value_as_json("".join(self._value) + self._held, self._kinds), out)
            out.append(CallEnd(self._position))
        self.is_done = True

    def _say(self, text: str, out: list[Part]) -> None:
        """Marks and values come apart; what comes of one text is one part."""
        last = out[-1] if out else None
        if isinstance(last, CallArguments) and last.position == self._position:
            out[-1] = CallArguments(self._position, last.text + text)
        elif text:
            out.append(CallArguments(self._position, text))

    def _hold(self, text: str) -> str:
        self._held = text
        return ""

    def _refuse(self, text: str, out: list[Part]) -> str:
        out.append(Text(self._unsaid))
        self.is_done = True
        return text

    def _close(self, text: str, out: list[Part]) -> str:
        self._say("}", out)
        out.append(CallEnd(self._position))
        self.is_done = True
        return text

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
        self.is_announced = True
        self._schema = self._find_schema(match[1])
        out.append(CallStart(self._position, match[1]))
        self._say("{", out)
        self._state = self._between_parameters
        return text[match.end() :]

    def _between_parameters(self, text: str, out: list[Part]) -> str:
        text = text.lstrip()
        if text.startswith(PARAMETER_BEGIN):
            self._state = self._in_parameter_name
            return text[len(PARAMETER_BEGIN) :]
        if text.startswith(FUNCTION_END):
            return self._close(text[len(FUNCTION_END) :], out)
        if PARAMETER_BEGIN.startswith(text) or FUNCTION_END.startswith(text):
            return self._hold(text)
        return self._close(text, out)

    def _in_parameter_name(self, text: str, out: list[Part]) -> str:
        match = _whole_name.match(text)
        if match is None:
            return self._hold(text) if _begun_name.fullmatch(text) else self._close(text, out)
        self._kinds = parameter_kinds(self._schema, match[1])
        separator = ", " if self._num_parameters else ""
        self._num_parameters += 1
        self._say(f'{separator}"{_escaped(match[1])}": ', out)
        self._state = self._before_value
        return text[match.end() :]

    def _before_value(self, text: str, out: list[Part]) -> str:
        self._state = self._in_value
        if self._kinds == STRING_ONLY:
            self._begin_string(out)
        return text.removeprefix("\n")

    def _begin_string(self, out: list[Part]) -> None:
        self._say('"', out)
        self._state = self._in_string

    def _in_string(self, text: str, out: list[Part]) -> str:
        value, rest = self._until_end(text)
        self._say(_escaped(value), out)
        if rest is None:
            return ""
        self._say('"', out)
        self._state = self._between_parameters
        return rest

    def _in_value(self, text: str, out: list[Part]) -> str:
        value, rest = self._until_end(text)
        self._value.append(value)
        self._num_value_characters += len(value)
        if self._num_value_characters > MAX_VALUE_CHARACTERS:
            self._begin_string(out)
            self._say(_escaped(self._take_value()), out)
            return "" if rest is None else PARAMETER_END + rest
        if rest is None:
            return ""
        self._say(value_as_json(self._take_value(), self._kinds), out)
        self._state = self._between_parameters
        return rest

    def _take_value(self) -> str:
        value = "".join(self._value)
        self._value.clear()
        self._num_value_characters = 0
        return value

    def _until_end(self, text: str) -> tuple[str, str | None]:
        """More of the value, and what follows it; None, holding what may be its end, while it goes on."""
        end = text.find(PARAMETER_END)
        if end >= 0:
            return text[:end].removesuffix("\n"), text[end + len(PARAMETER_END) :]
        num_held = num_begun(text, VALUE_ENDS)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
