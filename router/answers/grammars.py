"""Grammars: what an engine holds an answer to, out of what the client wants and how the model says it.

Owns the texts of these grammars, in llguidance's notation. Whether llguidance can follow what a client has
put into one is found by `grammar_check.py`.

A grammar is a list: the first entry is the whole answer in Lark's notation, the others stand in it by name:
`text` for what the answer's text must be, `strict_N` and `loose_N` for the arguments of tool N.

    reasoning up to its end, if the model reasons ─▶ the text, or calls in the model's own syntax

Nothing is held to a grammar where nothing is asked: no format, and tools that may be called or not, all of
them, with whatever arguments. Otherwise a call, once begun, is one of a tool that may be called, with
arguments that follow its schema.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from router.answers.formats import AnswerFormat, ReasoningMarks, ToolSyntax
from router.answers.schemas import answer_schema, arguments_schema
from router.answers.wishes import FormatKind, OutputFormat, ToolChoice, ToolMode
from router.errors import InvalidRequest

MAX_CALLABLE_TOOLS = 256
"""Tools in one grammar."""

TOOL_PARAMETER = "tools[{}].function.parameters"

_SPECIAL_NAME = re.compile(r"<[^<>\s\[\]]+>")
_PYTHON_TAG = "<|python_tag|>"

_HERMES_RULES = r"""
calls: call%(more)s
call: "<tool_call>\n" body "\n</tool_call>"
text_or_calls: %(mixed)s
said_and_called: opened "\n" body "\n</tool_call>"
opened[lazy]: TEXT "<tool_call>"
TEXT: /(?s:.*)/
"""

_LLAMA_RULES = r"""
calls: body%(more)s
text_or_calls: TEXT | %(tag)s calls
TEXT: /(?s:.*)/ & ~/\s*\{\s*"name"(?s:.*)/
"""


class _Tool(NamedTuple):
    number: int
    """Its place among the request's tools."""
    name: str
    schema: Any
    strict: bool

    @property
    def rule(self) -> str:
        return f"{'strict' if self.strict else 'loose'}_{self.number}"


def grammar_for(
    output: OutputFormat | None,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    answer: AnswerFormat,
    *,
    starts_in_reasoning: bool = False,
    special_tokens: Collection[str] = (),
    tool_parameter: str = TOOL_PARAMETER,
) -> str:
    """The grammar of the answer, or "" for any text. Raises InvalidRequest.

    `special_tokens` are the texts of those tokens of the model that stand for no text. `tool_parameter` is
    where a dialect has the schema of a tool's arguments.
    """
    callable_tools = _callable(tools, choice, answer)
    free = output is None and choice.mode is not ToolMode.REQUIRED
    if free and not choice.names and not any(tool.strict for tool in callable_tools):
        return ""
    if free and not callable_tools:
        return ""
    named: list[dict[str, Any]] = []
    if choice.mode is ToolMode.REQUIRED:
        body = "calls"
    elif not callable_tools:
        body = "@text"
    else:
        body = "text_or_calls" if output is None else "@text | calls"
    if output is not None and choice.mode is not ToolMode.REQUIRED:
        named.append({"name": "text", **_text(output)})
    rules = [f"start: {_reasoning_prefix(answer.reasoning, starts_in_reasoning)}answer", f"answer: {body}"]
    rules += _reasoning_rules(answer.reasoning, special_tokens)
    if callable_tools:
        assert answer.tools is not None
        in_pieces = body == "@text | calls"
        rules += _call_rules(answer.tools, callable_tools, choice, special_tokens, in_pieces=in_pieces)
        named += _arguments(callable_tools, tool_parameter)
    whole = {"name": "answer", "lark_grammar": "\n".join(rules) + "\n"}
    return json.dumps({"grammars": [whole, *named]}, ensure_ascii=False)


def _callable(tools: Sequence[Mapping[str, Any]], choice: ToolChoice, answer: AnswerFormat) -> list[_Tool]:
    """The tools that this answer may call. Raises InvalidRequest if it must, and cannot."""
    if choice.mode is ToolMode.NONE:
        return []
    functions = [tool["function"] for tool in tools]
    names = {function["name"] for function in functions}
    for name in choice.names:
        if name not in names:
            raise InvalidRequest(f"there is no tool {name!r} among the tools", parameter="tool_choice")
    if choice.mode is ToolMode.REQUIRED and not functions:
        raise InvalidRequest("a call is required, and there are no tools", parameter="tool_choice")
    if answer.tools is None:
        if choice.mode is ToolMode.REQUIRED:
            raise InvalidRequest("this model's chat template knows no tool calls", parameter="tool_choice")
        return []
    return [
        _Tool(number, function["name"], function.get("parameters"), function.get("strict") is True)
        for number, function in enumerate(functions)
        if not choice.names or function["name"] in choice.names
    ]


def _text(output: OutputFormat) -> dict[str, Any]:
    """What the text must be, as a grammar of its own. Raises InvalidRequest."""
    match output.kind:
        case FormatKind.JSON_OBJECT:
            return {"json_schema": answer_schema({"type": "object"}, output.parameter)}
        case FormatKind.JSON_SCHEMA:
            return {"json_schema": answer_schema(output.schema, output.parameter)}
        case FormatKind.REGEX:
            # As a JSON schema's pattern is written, which must match the whole text.
            return {"lark_grammar": f"start: /{_slashed(output.text)}/\n"}
        case FormatKind.CHOICE:
            if not output.choices:
                raise InvalidRequest("there is nothing to choose from", parameter=output.parameter)
            return {"lark_grammar": f"start: {' | '.join(map(_literal, output.choices))}\n"}
        case FormatKind.GRAMMAR:
            return {"lark_grammar": output.text}


def _slashed(regex: str) -> str:
    """Between slashes: a bare slash or line break in it is escaped, what is escaped already stays."""
    named = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
    return re.sub(r"(?s)\\.|[/\n\r]", lambda found: named.get(found[0], found[0]), regex)


def _reasoning_prefix(marks: ReasoningMarks | None, starts_inside: bool) -> str:
    if marks is None:
        return ""
    return "reasoned SPACE " if starts_inside else f"({_literal(marks.begin)} reasoned SPACE)? "


def _reasoning_rules(marks: ReasoningMarks | None, special_tokens: Collection[str]) -> list[str]:
    if marks is None:
        return []
    space = r"SPACE: /[ \t\r\n]{0,8}/"
    if _is_special(marks.end, special_tokens):
        return [f"reasoned: /(?s:.*)/ {marks.end}", space]
    return [f"reasoned[suffix={_literal(marks.end)}]: /(?s:.*)/", space]


def _call_rules(
    syntax: ToolSyntax,
    tools: Sequence[_Tool],
    choice: ToolChoice,
    special_tokens: Collection[str],
    *,
    in_pieces: bool,
) -> list[str]:
    is_named = choice.mode is ToolMode.REQUIRED and len(choice.names) == 1
    several = choice.parallel and not is_named
    if syntax is ToolSyntax.HERMES:
        rules = _HERMES_RULES % {
            "more": r' ("\n" call)*' if several else "",
            "mixed": "said_and_called* TEXT" if several else "TEXT | said_and_called",
        }
        arguments = "arguments"
    else:
        tag = f"{_PYTHON_TAG}?" if _is_special(_PYTHON_TAG, special_tokens) else ""
        rules = _LLAMA_RULES % {"more": ' ("; " body)*' if several else "", "tag": tag}
        arguments = "parameters"
    bodies = [f'{_head(tool.name, arguments, in_pieces=in_pieces)} @{tool.rule} "}}"' for tool in tools]
    return [*rules.strip().splitlines(), f"body: {' | '.join(bodies)}"]


def _head(name: str, arguments: str, *, in_pieces: bool) -> str:
    """Of a call, up to its arguments; in pieces, so that it can begin like JSON that the text may be."""
    pieces = ["{", '"name"', ": ", json.dumps(name, ensure_ascii=False), ", ", f'"{arguments}"', ": "]
    return " ".join(map(_literal, pieces)) if in_pieces else _literal("".join(pieces))


def _arguments(tools: Sequence[_Tool], tool_parameter: str) -> list[dict[str, Any]]:
    """A grammar for each tool's arguments. Raises InvalidRequest."""
    if len(tools) > MAX_CALLABLE_TOOLS:
        raise InvalidRequest(
            f"there are {len(tools)} tools; a call can be required, or held to strict tools, among "
            f"{MAX_CALLABLE_TOOLS} at most",
            parameter="tools",
        )
    return [
        {
            "name": tool.rule,
            "json_schema": arguments_schema(
                tool.schema, tool_parameter.format(tool.number), strict=tool.strict
            ),
        }
        for tool in tools
    ]


def _is_special(mark: str, special_tokens: Collection[str]) -> bool:
    return mark in special_tokens and _SPECIAL_NAME.fullmatch(mark) is not None


def _literal(text: str) -> str:
    """As Lark quotes it, which is how JSON does."""
    return json.dumps(text)
