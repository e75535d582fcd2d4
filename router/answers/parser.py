"""AnswerParser: what a model says → parts, as it comes.

Owns what is not yet safe to say: the possible beginning of a mark, the blanks before one, an object that may
become a call. Joined, the parts are the same however the text was cut on its way here.

Nothing that the model says is lost, but for marks and for the blanks around reasoning and calls, which
clients do not expect. What looks like a call and turns out to be none is text, marks and all. Marks of
reasoning count at the answer's beginning alone, and reasoning goes on to its end mark, or to the answer's
end; marks of calls count behind it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from router.answers.formats import CALL_BEGIN, CALL_END, PYTHON_TAG, AnswerFormat, ReasoningMarks, ToolSyntax
from router.answers.json_call import JsonCall
from router.answers.parts import Part, Reasoning, Text
from router.answers.xml_call import XmlCall
from router.prompt.literals import num_begun

MAX_HELD_BLANKS = 256
"""Characters of white space that may be dropped before a mark; of a longer run the earlier ones are said."""

PIECE_CHARACTERS = 4096
"""Longer texts are read piece by piece: a rest is copied for each mark in it."""

_separator = re.compile(r"\s*(?:;\s*)?")

Tools = Sequence[Mapping[str, Any]]
"""As chat templates have them: `{"type": "function", "function": {"name": …, "parameters": {…}}}`."""

State = Callable[[str, list[Part]], str]
"""Takes what it can of the text and holds back what it must; returns what the next state is to see."""


def new_parser(
    answer_format: AnswerFormat, *, wants_calls: bool, starts_in_reasoning: bool, tools: Tools = ()
) -> "AnswerParser | None":
    """None where every answer is text and nothing else."""
    if answer_format.reasoning is None and (answer_format.tools is None or not wants_calls):
        return None
    return AnswerParser(
        answer_format, wants_calls=wants_calls, starts_in_reasoning=starts_in_reasoning, tools=tools
    )


class AnswerParser:
    """`feed` what the detokenizer says, `finish` when it is done. For one answer.

    `starts_in_reasoning` says that the prompt has opened the mark already. `tools` name a bare object as a
    call (Llama) and give values their types (Qwen's XML).
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
        self._has_begun = answer_format.reasoning is None
        self._state: State = self._answer if self._has_begun else self._begin

    @property
    def num_calls(self) -> int:
        """Announced so far."""
        return self._num_ended_calls + (self._call is not None and self._call.is_announced)

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is taken for reasoning. A token counts as reasoning if this is so before or
        after it was fed."""
        return self._is_reasoning

    def reason(self, text: str, out: list[Part], *, is_last: bool = False) -> str:
        """Takes what comes before the answer, and appends its parts. Returns the text from the answer's first
        character on, which is to be fed; with `is_last` also what might have led to reasoning."""
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

    def finish(self) -> list[Part]:
        """What was held back, when nothing follows any more."""
        out: list[Part] = []
        if self._call is not None:
            self._call.finish(out)
            self._end_call()
        elif self._is_reasoning:
            held = self._held.rstrip()
            _say(held.lstrip() if self._skips_blanks else held, Reasoning, out)
        elif not (self._num_ended_calls and self._held.strip() == ";"):
            _say(self._held, Text, out)
        self._held = ""
        return out

    # --- reasoning ---

    def _begin(self, text: str, out: list[Part]) -> str:
        """Where the prompt has opened the mark already, the model may repeat it."""
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
        found = self._flow(text, Reasoning, (self._reasoning.end,), out)
        if found is None:
            return ""
        self._is_reasoning = False
        self._state = self._between
        return found[2]

    def _between(self, text: str, out: list[Part]) -> str:
        """The blanks behind reasoning are nobody's."""
        text = text.lstrip()
        if text:
            self._begin_answer()
        return text

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
        """After a call the block that it stood in is still to be closed, perhaps behind text."""
        marks = (CALL_BEGIN, CALL_END) if self._num_ended_calls else (CALL_BEGIN,)
        found = self._flow(text, Text, marks, out)
        if found is None:
            return ""
        blanks, mark, rest = found
        if mark == CALL_END:
            self._skips_blanks = True
            return rest
        prefix = blanks + mark
        if self._syntax is ToolSyntax.QWEN_XML:
            return self._begin_call(XmlCall(self.num_calls, prefix, self._schema_of), rest)
        return self._begin_call(JsonCall(self.num_calls, prefix, is_bare_tool=None), rest)

    def _bare(self, text: str, out: list[Part]) -> str:
        """Where Llama may write an object that is a call: at the answer's beginning, and behind a call."""
        if self._num_ended_calls:
            text = text.lstrip()
            start = _end_of_separator(text)
        else:
            start = len(text) - len(text.lstrip())
        begun = text[start:]
        if start <= MAX_HELD_BLANKS and PYTHON_TAG.startswith(begun) and begun != PYTHON_TAG:
            return self._hold(text)
        if begun.startswith(PYTHON_TAG):
            call = JsonCall(self.num_calls, "", is_bare_tool=None)
            return self._begin_call(call, begun[len(PYTHON_TAG) :])
        if begun.startswith("{"):
            call = JsonCall(self.num_calls, text[:start], is_bare_tool=self._is_tool)
            return self._begin_call(call, begun)
        self._state = self._untagged
        return text

    def _untagged(self, text: str, out: list[Part]) -> str:
        """In Llama's text only the mark leads to a call."""
        found = self._flow(text, Text, (PYTHON_TAG,), out)
        if found is None:
            return ""
        return self._begin_call(JsonCall(self.num_calls, found[0], is_bare_tool=None), found[2])

    # --- calls ---

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
        is_call, self._call = self._call.is_announced, None
        self._num_ended_calls += is_call
        self._skips_blanks = is_call
        if self._syntax is ToolSyntax.LLAMA:
            self._state = self._bare if is_call else self._untagged
        else:
            self._state = self._marked

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
        """Says the text up to the first mark; returns the blanks before it, the mark and what follows. None,
        holding back what may lead to a mark, where there is none yet."""
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
