"""AnswerFormat: how a model marks its reasoning and its tool calls, as its chat template shows.

Owns the marks and how they are found out. Text is turned into parts by `parser.py`, and held to them by
`grammars.py`.
"""

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

CALL_BEGIN = "<tool_call>"
CALL_END = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class ToolSyntax(enum.StrEnum):
    HERMES = "hermes"
    """`<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`, once for each call: Hermes, Qwen 2.5 and
    Qwen 3."""
    LLAMA = "llama"
    """`{"name": …, "parameters": {…}}` and nothing else, perhaps after `<|python_tag|>`; several are
    separated by `;`: Llama 3.1 to 3.3."""
    QWEN_XML = "qwen_xml"
    """`<tool_call>\\n<function=…>\\n<parameter=…>\\n…\\n</parameter>\\n</function>\\n</tool_call>`, once for
    each call; values are text, which the tool's schema gives a type: Qwen3-Coder, Qwen 3.5."""


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    begin: str = "<think>"
    end: str = "</think>"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """None where the model has no such thing, or none that is known here."""

    tools: ToolSyntax | None = None
    reasoning: ReasoningMarks | None = None

    def marks(self, *, wants_calls: bool) -> frozenset[str]:
        """Return the marks that an answer's text must show, even if a mark is a special token."""
        marks: set[str] = set()
        if self.reasoning is not None:
            marks |= {self.reasoning.begin, self.reasoning.end}
        if wants_calls and self.tools is ToolSyntax.LLAMA:
            marks.add(PYTHON_TAG)
        elif wants_calls and self.tools is not None:
            marks |= {CALL_BEGIN, CALL_END}
        return frozenset(marks)


PLAIN = AnswerFormat()

KNOWN_REASONING = (
    ReasoningMarks(),
    ReasoningMarks("[THINK]", "[/THINK]"),  # Magistral
    ReasoningMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
)

_NAME_KEY = re.compile(r"""\\?["']name\\?["']""")
_ARGUMENTS_KEY = re.compile(r"""\\?["']arguments\\?["']""")
_PARAMETERS_KEY = re.compile(r"""\\?["']parameters\\?["']""")


def answer_format(template_sources: Iterable[str], added_tokens: Iterable[str] = ()) -> AnswerFormat:
    """Derive the format from all of the checkpoint's chat templates and the tokenizer's added tokens.

    Llama's calls have no mark in the vocabulary, and Hermes' mark is used by others too (GLM's, with
    `<arg_key>` inside), so a syntax is recognised by its mark and by its content in the template.
    """
    source = "\n".join(template_sources)
    return AnswerFormat(_tool_syntax(source), _reasoning_marks(source, frozenset(added_tokens)))


def starts_in_reasoning(prompt_tail: str, marks: ReasoningMarks | None) -> bool:
    """Whether the rendered prompt ends with an opened mark: the answer's first words are reasoning then."""
    return marks is not None and prompt_tail.rstrip().endswith(marks.begin)


def _tool_syntax(source: str) -> ToolSyntax | None:
    if CALL_BEGIN in source and CALL_END in source and "<arg_key>" not in source:
        if "<function=" in source and "<parameter=" in source:
            return ToolSyntax.QWEN_XML
        if _NAME_KEY.search(source) and _ARGUMENTS_KEY.search(source):
            return ToolSyntax.HERMES
        return None
    is_llama = PYTHON_TAG in source or "ipython" in source
    if is_llama and _NAME_KEY.search(source) and _PARAMETERS_KEY.search(source):
        return ToolSyntax.LLAMA
    return None


def _reasoning_marks(source: str, added_tokens: frozenset[str]) -> ReasoningMarks | None:
    for marks in KNOWN_REASONING:
        if marks.end in source or {marks.begin, marks.end} <= added_tokens:
            return marks
    return None
