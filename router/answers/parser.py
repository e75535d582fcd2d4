"""AnswerParser: turns a model's text into parts as it arrives.

Owns the text that cannot be emitted yet: the possible beginning of a mark, the blanks before one, an object
that may become a call. The joined parts do not depend on how the text was cut.

All text is kept, except marks, and blanks around reasoning and calls, which clients do not expect. Text that
looks like a call and is none stays text, with its marks. Marks of reasoning count only at the beginning;
reasoning runs to its end mark or to the answer's end. Marks of calls count after it, and inside it only if
nothing follows the calls (`EarlyCalls`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from router.answers.early_calls import MAX_EARLY_CALLS, EarlyCalls, Finding
from router.answers.formats import CALL_BEGIN, CALL_END, PYTHON_TAG, AnswerFormat, ReasoningMarks, ToolSyntax
from router.answers.json_call import JsonCall
from router.answers.parts import CallStart, Part, Reasoning, Text
from router.answers.value_end import FUNCTION_BEGIN
from router.answers.xml_call import XmlCall
from router.shared.literals import num_begun

MAX_HELD_BLANKS = 256
"""Characters of white space that may be dropped before a mark; of a longer run the earlier ones are said."""

PIECE_CHARACTERS = 4096
"""Longer texts are read piece by piece: a rest is copied for each mark in it."""

_SEPARATORS = ("", ";", ",")
"""Separators of calls, dropped at the answer's end."""

_separator = re.compile(r"\s*(?:[;,]\s*)?")

Tools = Sequence[Mapping[str, Any]]
"""Tools in the form of chat templates: `{"type": "function", "function": {"name": …, "parameters": {…}}}`."""

State = Callable[[str, list[Part]], str]
"""Takes what it can of the text, holds back what it must, and returns the rest for the next state."""


def new_parser(
    answer_format: AnswerFormat, *, wants_calls: bool, starts_in_reasoning: bool, tools: Tools = ()
) -> "AnswerParser | None":
    """Return a parser; None if every answer is plain text."""
    if answer_format.reasoning is None and (answer_format.tools is None or not wants_calls):
        return None
    return AnswerParser(
        answer_format, wants_calls=wants_calls, starts_in_reasoning=starts_in_reasoning, tools=tools
    )


class AnswerParser:
    """`feed` the detokenizer's text, `finish` when it is done. For one answer.

    `starts_in_reasoning`: the prompt has opened the mark already. `tools` identify a bare object as a call
    (Llama) and give values their types (Qwen's XML).
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        *,
        wants_calls: bool,
        starts_in_reasoning: bool,
        tools: Tools = (),
    ) -> None:
        self._tools = tools
        self._syntax = answer_format.tools if wants_calls else None
        self._reasoning = answer_format.reasoning or ReasoningMarks()
        self._is_reasoning = starts_in_reasoning and answer_format.reasoning is not None
        self._held = ""
        self._skips_blanks = self._is_reasoning
        self._call: JsonCall | XmlCall | None = None
        self._num_ended_calls = 0
        self._is_in_list = False
        self._early: EarlyCalls | None = None
        self._num_early = 0
        self._has_begun = answer_format.reasoning is None
        self._state: State = self._answer if self._has_begun else self._begin

    @property
    def num_calls(self) -> int:
        """Calls announced so far."""
        return self._num_ended_calls + (self._call is not None and self._call.is_announced)

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text counts as reasoning. A token counts if this is true before or after it was
        fed."""
        return self._is_reasoning

    def reason(self, text: str, out: list[Part], *, is_last: bool = False) -> str:
        """Take the text before the answer, and append its parts. Returns the text from the answer's first
        character on, which must be fed; with `is_last` also what might have led to reasoning."""
        if self._has_begun:
            return text
        text, self._held = self._held + text, ""
        while text and not self._has_begun:
            text = self._state(text, out)
        if is_last and not self._has_begun and not self._is_reasoning:
            self._begin_answer()
            text, self._held = self._held, ""
        return text

    def feed(self, text: str) -> list[Part]:
        out: list[Part] = []
        text = self.reason(text, out)
        for start in range(0, len(text), PIECE_CHARACTERS):
            rest = self._held + text[start : start + PIECE_CHARACTERS]
            self._held = ""
            while rest:
                rest = self._state(rest, out)
        return out

    def finish(self, *, is_whole: bool = True) -> list[Part]:
        """Emit what was held back at the end. `is_whole`: the answer ended by itself."""
        out: list[Part] = []
        if self._early is not None:
            self._finish_early_calls(self._early, out, is_whole=is_whole)
        while self._call is not None:
            rest = self._call.finish(out, is_whole=is_whole)
            self._end_call()
            while rest:
                rest = self._state(rest, out)
        if self._is_reasoning:
            held = self._held.rstrip()
            _say(held.lstrip() if self._skips_blanks else held, Reasoning, out)
        elif not (self._num_ended_calls and self._skips_blanks and self._held.strip() in _SEPARATORS):
            _say(self._held, Text, out)
        self._held = ""
        return out

    # --- reasoning ---

    def _begin(self, text: str, out: list[Part]) -> str:
        """Begin the answer. If the prompt has opened the mark already, the model may repeat it."""
        begun = text.lstrip()
        if len(text) - len(begun) <= MAX_HELD_BLANKS:
            if begun.startswith(self._reasoning.begin):
                self._is_reasoning = self._skips_blanks = True
                text = begun[len(self._reasoning.begin) :]
            elif self._reasoning.begin.startswith(begun):
                return self._hold(text)
        if self._is_reasoning:
            self._state = self._reason
        else:
            self._begin_answer()
        return text

    def _reason(self, text: str, out: list[Part]) -> str:
        is_marked = self._syntax is not None and self._syntax is not ToolSyntax.LLAMA
        looks_for_calls = is_marked and self._num_early < MAX_EARLY_CALLS
        marks = (self._reasoning.end, CALL_BEGIN) if looks_for_calls else (self._reasoning.end,)
        found = self._flow(text, Reasoning, marks, out)
        if found is None:
            return ""
        blanks, mark, rest = found
        if mark == CALL_BEGIN:
            self._num_early += 1
            calls = AnswerParser(
                AnswerFormat(self._syntax), wants_calls=True, starts_in_reasoning=False, tools=self._tools
            )
            self._early = EarlyCalls(blanks + mark, mark, calls, self._reasoning.end)
            self._state = self._in_early_calls
            return rest
        self._is_reasoning = False
        self._state = self._between
        return rest

    def _between(self, text: str, out: list[Part]) -> str:
        """Drop the blanks after reasoning."""
        text = text.lstrip()
        if text:
            self._begin_answer()
        return text

    def _in_early_calls(self, text: str, out: list[Part]) -> str:
        assert self._early is not None
        finding = self._early.feed(text)
        if finding is None:
            return ""
        early, self._early = self._early, None
        if finding is Finding.NO_CALL:
            _say(early.prefix, Reasoning, out)
            self._state = self._reason
        else:
            _say(early.said, Reasoning, out)
            self._is_reasoning = False
            self._begin_answer()
        return early.rest

    def _finish_early_calls(self, early: EarlyCalls, out: list[Part], *, is_whole: bool) -> None:
        calls = early.finish(is_whole=is_whole)
        if calls:
            out += calls
            self._num_ended_calls = sum(type(part) is CallStart for part in calls)
            self._is_reasoning = False
        else:
            _say(early.said, Reasoning, out)

    # --- the answer ---

    def _begin_answer(self) -> None:
        self._has_begun = True
        self._state = self._answer

    def _answer(self, text: str, out: list[Part]) -> str:
        if self._syntax is None:
            self._state = self._plain
        else:
            self._state = self._bare if self._syntax is ToolSyntax.LLAMA else self._marked
        return text

    def _plain(self, text: str, out: list[Part]) -> str:
        self._flow(text, Text, (), out)
        return ""

    def _marked(self, text: str, out: list[Part]) -> str:
        """Read after a call, whose block is still open, perhaps after text. A function without a block is a
        call if it is a known tool's."""
        is_xml = self._syntax is ToolSyntax.QWEN_XML
        marks = (CALL_BEGIN, FUNCTION_BEGIN) if is_xml else (CALL_BEGIN,)
        found = self._flow(text, Text, (*marks, CALL_END) if self._num_ended_calls else marks, out)
        if found is None:
            return ""
        blanks, mark, rest = found
        if mark == CALL_END:
            self._skips_blanks = True
            return rest
        if is_xml:
            is_bare = mark == FUNCTION_BEGIN
            call = XmlCall(self.num_calls, blanks + mark, self._schema_of, self._is_tool, is_bare=is_bare)
            return self._begin_call(call, rest)
        return self._begin_json_call(blanks + mark, rest, is_bare=False, may_be_listed=True)

    def _in_block(self, text: str, out: list[Part]) -> str:
        """Read after a JSON call, where another one of the same block or list may follow."""
        text = text.lstrip()
        start = _end_of_separator(text)
        begun = text[start:]
        if not begun:
            return self._hold(text)
        if begun.startswith("{"):
            return self._begin_json_call(text[:start], begun, is_bare=False)
        self._state = self._marked
        return self._behind_list(text)

    def _behind_list(self, text: str) -> str:
        is_end = self._is_in_list and text.startswith("]")
        self._is_in_list = False
        return text[1:] if is_end else text

    def _bare(self, text: str, out: list[Part]) -> str:
        """Read where Llama may write an object that is a call: at the answer's beginning, and after a
        call."""
        if self._num_ended_calls:
            text = text.lstrip()
            start = _end_of_separator(text)
        else:
            start = len(text) - len(text.lstrip())
        begun = text[start:]
        if start <= MAX_HELD_BLANKS and PYTHON_TAG.startswith(begun) and begun != PYTHON_TAG:
            return self._hold(text)
        if begun.startswith(PYTHON_TAG):
            return self._begin_json_call("", begun[len(PYTHON_TAG) :], is_bare=False, may_be_listed=True)
        if begun.startswith("{") or (begun.startswith("[") and not self._num_ended_calls):
            return self._begin_json_call(text[:start], begun, is_bare=True, may_be_listed=True)
        self._state = self._untagged
        return self._behind_list(text)

    def _untagged(self, text: str, out: list[Part]) -> str:
        """In Llama's text only the mark leads to a call."""
        found = self._flow(text, Text, (PYTHON_TAG,), out)
        if found is None:
            return ""
        return self._begin_json_call(found[0], found[2], is_bare=False, may_be_listed=True)

    # --- calls ---

    def _begin_json_call(self, prefix: str, rest: str, *, is_bare: bool, may_be_listed: bool = False) -> str:
        call = JsonCall(
            self.num_calls,
            prefix,
            is_bare_tool=self._is_tool if is_bare else None,
            may_be_listed=may_be_listed and not self._is_in_list,
        )
        return self._begin_call(call, rest)

    def _begin_call(self, call: JsonCall | XmlCall, rest: str) -> str:
        self._call = call
        self._state = self._in_call
        return rest

    def _in_call(self, text: str, out: list[Part]) -> str:
        assert self._call is not None
        rest = self._call.feed(text, out)
        if self._call.is_done:
            self._end_call()
        return rest

    def _end_call(self) -> None:
        assert self._call is not None
        call, self._call = self._call, None
        is_call = call.is_announced
        self._num_ended_calls += is_call
        self._skips_blanks = is_call
        is_listed = isinstance(call, JsonCall) and call.is_listed
        self._is_in_list = is_call and (self._is_in_list or is_listed)
        if self._syntax is ToolSyntax.LLAMA:
            self._state = self._bare if is_call else self._untagged
        else:
            is_in_block = is_call and self._syntax is ToolSyntax.HERMES
            self._state = self._in_block if is_in_block else self._marked

    def _is_tool(self, name: str) -> bool:
        return name in self._functions or not self._functions

    def _schema_of(self, name: str) -> Any:
        return self._functions.get(name, {}).get("parameters")

    @cached_property
    def _functions(self) -> dict[str, Mapping[str, Any]]:
        functions = [tool.get("function") for tool in self._tools]
        named = [function for function in functions if isinstance(function, Mapping)]
        return {function["name"]: function for function in named if isinstance(function.get("name"), str)}

    # --- what is held and what is said ---

    def _hold(self, text: str) -> str:
        self._held = text
        return ""

    def _flow(
        self, text: str, kind: type[Text] | type[Reasoning], marks: Sequence[str], out: list[Part]
    ) -> tuple[str, str, str] | None:
        """Emit the text up to the first mark; returns the blanks before it, the mark and the text after.
        None, holding back the possible beginning of a mark, if there is none yet."""
        if self._skips_blanks:
            text = text.lstrip()
            self._skips_blanks = not text
        if not marks:
            _say(text, kind, out)
            return None
        starts = [(start, mark) for mark in marks if (start := text.find(mark)) >= 0]
        start, mark = min(starts, default=(len(text) - num_begun(text, marks), ""))
        num_said = max(len(text[:start].rstrip()), start - MAX_HELD_BLANKS)
        _say(text[:num_said], kind, out)
        if not starts:
            self._held = text[num_said:]
            return None
        return text[num_said:start], mark, text[start + len(mark) :]


def _say(text: str, kind: type[Text] | type[Reasoning], out: list[Part]) -> None:
    if text:
        out.append(kind(text))


def _end_of_separator(text: str) -> int:
    """Behind the `;` between two bare calls and the blanks around it."""
    match = _separator.match(text)
    return 0 if match is None else match.end()
