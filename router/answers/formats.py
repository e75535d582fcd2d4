"""AnswerFormat: how a model marks its reasoning and its tool calls, as its chat template shows.

Owns the marks. Text is turned into parts by `parser.py`, and held to them by `grammars.py`.
"""

import enum
from dataclasses import dataclass


class ToolSyntax(enum.StrEnum):
    HERMES = "hermes"
    """`<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`, once for each call: Hermes, Qwen 2.5 and 3."""
    LLAMA = "llama"
    """`{"name": …, "parameters": {…}}` and nothing else, perhaps after `<|python_tag|>`; several are parted by
    `;`: Llama 3.1 to 3.3."""


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    begin: str = "<think>"
    end: str = "</think>"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """None where the model has no such thing, or none that is known here."""

    tools: ToolSyntax | None = None
    reasoning: ReasoningMarks | None = None
