"""The requested form of an answer: which tools may be called, and what its text must be.

Plain data, in no dialect's words; it travels to the process that prepares large bodies.
"""

import enum
from typing import Any

from msgspec import Struct


class ToolMode(enum.StrEnum):
    NONE = "none"
    """The tools are in the prompt, and none may be called."""
    AUTO = "auto"
    REQUIRED = "required"
    """At least one call, and nothing else."""


class ToolChoice(Struct, frozen=True, omit_defaults=True):
    """`names` are the tools that may be called; empty means all of them. One name that is required is what
    the field calls a named choice. Without `parallel` an answer has one call at most.
    """

    mode: ToolMode = ToolMode.AUTO
    names: tuple[str, ...] = ()
    parallel: bool = True


class FormatKind(enum.StrEnum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


class OutputFormat(Struct, frozen=True, omit_defaults=True):
    """Form of the answer's text. `schema` is a JSON schema, an object or a boolean; `text` a regular
    expression or a grammar (Lark's or GBNF's notation); `choices` the allowed texts. `parameter` is the
    client's field, for errors."""

    kind: FormatKind
    schema: Any = None
    text: str = ""
    choices: tuple[str, ...] = ()
    parameter: str = "response_format"
