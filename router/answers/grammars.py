"""Grammars: the rules for an answer, from the client's wishes and the model's syntax.

Owns the texts of these grammars, in llguidance's notation. `grammar_check.py` finds whether llguidance can
follow a client's part.

A grammar is a list: the first entry is the whole answer in Lark's notation, the others have names in it:
`text` for the answer's text, `strict_N` and `loose_N` for the arguments of tool N, or, with another number
after it, for one of them.

    reasoning up to its end, if the model reasons ─▶ the text, or calls in the model's own syntax

Without a wish there is no grammar: no format, and all tools optional with any arguments. Otherwise a call,
once begun, is one of an allowed tool, with arguments that follow its schema.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from router.answers.call_grammars import CallableTool, call_rules
from router.answers.formats import AnswerFormat, ReasoningMarks
from router.answers.literals import is_special, literal, mark, slashed, with_ascii_classes
from router.answers.schemas import answer_schema
from router.answers.wishes import FormatKind, OutputFormat, ToolChoice, ToolMode
from router.errors import InvalidRequest

MAX_CALLABLE_TOOLS = 256
"""Tools in one grammar."""

TOOL_PARAMETER = "tools[{}].function.parameters"


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
    """Return the grammar of the answer, or "" for any text. Raises InvalidRequest.

    `special_tokens` are those of the marks that are added to the model's vocabulary: llguidance takes none
    of them for text. `tool_parameter` is where a dialect has the schema of a tool's arguments.
    """
    callable_tools = _callable(tools, choice, answer, tool_parameter)
    free = output is None and choice.mode is not ToolMode.REQUIRED
    if free and not choice.names and not any(tool.strict for tool in callable_tools):
        return ""
    if free and not callable_tools:
        return ""
    if len(callable_tools) > MAX_CALLABLE_TOOLS:
        raise InvalidRequest(
            f"there are {len(callable_tools)} tools; an answer can be held to {MAX_CALLABLE_TOOLS} at most",
            parameter="tools",
        )
    named: list[dict[str, Any]] = []
    if choice.mode is ToolMode.REQUIRED:
        body = "calls"
    elif not callable_tools:
        body = "@text"
    else:
        body = "text_or_calls" if output is None else "@text | calls"
    if output is not None and choice.mode is not ToolMode.REQUIRED:
        named.append({"name": "text", **_text(output)})
    prefix = _reasoning_prefix(answer.reasoning, starts_in_reasoning, special_tokens)
    rules = [f"start: {prefix}answer", f"answer: {body}"]
    rules += _reasoning_rules(answer.reasoning, special_tokens)
    if callable_tools:
        assert answer.tools is not None
        is_named = choice.mode is ToolMode.REQUIRED and len(choice.names) == 1
        its_rules, its_named = call_rules(
            answer.tools,
            callable_tools,
            special_tokens,
            several=choice.parallel and not is_named,
            beside_json=body == "@text | calls",
        )
        rules += its_rules
        named += its_named
    whole = {"name": "answer", "lark_grammar": "\n".join(rules) + "\n"}
    return json.dumps({"grammars": [whole, *named]}, ensure_ascii=False)


def _callable(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice, answer: AnswerFormat, tool_parameter: str
) -> list[CallableTool]:
    """Return the tools that this answer may call. Raises InvalidRequest if it must, and cannot."""
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
        CallableTool(
            number,
            function["name"],
            function.get("parameters"),
            function.get("strict") is True,
            tool_parameter.format(number),
        )
        for number, function in enumerate(functions)
        if not choice.names or function["name"] in choice.names
    ]


def _text(output: OutputFormat) -> dict[str, Any]:
    """Write the text's form as a grammar of its own. Raises InvalidRequest."""
    match output.kind:
        case FormatKind.JSON_OBJECT:
            return {"json_schema": answer_schema({"type": "object"}, output.parameter)}
        case FormatKind.JSON_SCHEMA:
            return {"json_schema": answer_schema(output.schema, output.parameter)}
        case FormatKind.REGEX:
            # As a JSON schema's pattern is written, which must match the whole text.
            return {"lark_grammar": f"start: {slashed(with_ascii_classes(output.text))}\n"}
        case FormatKind.CHOICE:
            if not output.choices:
                raise InvalidRequest("there is nothing to choose from", parameter=output.parameter)
            return {"lark_grammar": f"start: {' | '.join(map(literal, output.choices))}\n"}
        case FormatKind.GRAMMAR:
            return {"lark_grammar": output.text}


def _reasoning_prefix(
    marks: ReasoningMarks | None, starts_inside: bool, special_tokens: Collection[str]
) -> str:
    if marks is None:
        return ""
    return "reasoned SPACE " if starts_inside else f"({mark(marks.begin, special_tokens)} reasoned SPACE)? "


def _reasoning_rules(marks: ReasoningMarks | None, special_tokens: Collection[str]) -> list[str]:
    if marks is None:
        return []
    space = r"SPACE: /[ \t\r\n]{0,8}/"
    if is_special(marks.end, special_tokens):
        return [f"reasoned: /(?s:.*)/ {marks.end}", space]
    return [f"reasoned[suffix={literal(marks.end)}]: /(?s:.*)/", space]
