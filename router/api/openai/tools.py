"""OpenAI's tools, and which of them may be called → those of a ChatRequest.

Owns what a function may look like, for every dialect that has functions, and the forms of `tool_choice` and
of its older name `function_call`. Pure.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from router.answers.wishes import ToolChoice, ToolMode
from router.api.json_body import invalid, missing, read_object, read_text, unsupported, wrong_type
from router.errors import InvalidRequest

MAX_TOOLS = 1024

_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")


class ToolFields(NamedTuple):
    """The fields of one request, as they came."""

    tools: Sequence[Any] | None = None
    functions: Sequence[Any] | None = None
    tool_choice: Any = None
    function_call: Any = None
    parallel: bool = True


def tools_of(fields: ToolFields) -> list[dict[str, Any]]:
    """Return the tools for a ChatRequest. Raises InvalidRequest that names the error and its path."""
    if fields.tools and fields.functions:
        raise InvalidRequest("Only one of 'tools' and 'functions' is allowed.", parameter="functions")
    check_number("tools", fields.tools or ())
    check_number("functions", fields.functions or ())
    for number, tool in enumerate(fields.tools or ()):
        _check_tool(f"tools[{number}]", tool)
    for number, function in enumerate(fields.functions or ()):
        check_function(f"functions[{number}]", function)
    return [*(fields.tools or ())] or [
        {"type": "function", "function": function} for function in fields.functions or ()
    ]


def check_number(parameter: str, tools: Sequence[Any]) -> None:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"Invalid '{parameter}': {len(tools)} of them, but at most {MAX_TOOLS} are allowed.",
            parameter=parameter,
        )


def check_function(path: str, function: Any, schema: str = "parameters") -> None:
    """`function` has a name, and what else it has is of the right type; `schema` is the field with that of
    its arguments."""
    name = read_text(f"{path}.name", read_object(path, function).get("name"))
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"Invalid '{path}.name': a name has 1 to 128 letters of the English alphabet,"
            " digits, '_', '-', '.' and ':'.",
            parameter=f"{path}.name",
        )
    for field, kind, expected in (
        ("description", str, "text"),
        (schema, dict, "an object"),
        ("strict", bool, "true or false"),
    ):
        value = function.get(field)
        if value is not None and not isinstance(value, kind):
            raise wrong_type(f"{path}.{field}", expected)


def tool_choice_of(fields: ToolFields, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    """Parse the tool choice; `tools` come from `tools_of` the same fields. Raises InvalidRequest for a tool
    that is not among them."""
    if fields.tool_choice is not None:
        parameter, asked = "tool_choice", fields.tool_choice
    else:
        parameter, asked = "function_call", fields.function_call
        if isinstance(asked, dict):
            asked = {"type": "function", "function": asked}
    parallel = fields.parallel and not fields.functions
    choice = simple_choice(asked, parallel=parallel) or _tool_choice(parameter, asked, parallel)
    check_choice(parameter, choice, tools, "are given")
    return choice


def simple_choice(asked: Any, *, parallel: bool) -> ToolChoice | None:
    """Parse a one-word tool choice, common to OpenAI's routes; None for anything else."""
    match asked:
        case None | "auto":
            return ToolChoice(parallel=parallel)
        case "none":
            return ToolChoice(ToolMode.NONE)
        case "required":
            return ToolChoice(ToolMode.REQUIRED, parallel=parallel)
    return None


def wrong_choice(parameter: str) -> InvalidRequest:
    return invalid(
        parameter, "it is 'none', 'auto', 'required', a function to call or the tools that are allowed."
    )


def check_choice(parameter: str, choice: ToolChoice, tools: Sequence[dict[str, Any]], lacking: str) -> None:
    """`lacking` says of 'tools' what is needed for a call. Raises InvalidRequest."""
    if choice.mode is ToolMode.REQUIRED and not tools:
        raise invalid(parameter, f"a tool can only be called where 'tools' {lacking}.")
    known = {tool["function"]["name"] for tool in tools}
    for name in choice.names:
        if name not in known:
            raise invalid(parameter, f"there is no tool '{name:.64}' among the tools of this request.")


def _check_tool(path: str, tool: Any) -> None:
    kind = read_object(path, tool).get("type")
    if kind is None:
        raise missing(f"{path}.type")
    if kind != "function":
        raise unsupported(f"{path}.type", f"Only tools of type 'function' are supported, not '{kind!s:.40}'.")
    if tool.get("function") is None:
        raise missing(f"{path}.function")
    check_function(f"{path}.function", tool["function"])


def _tool_choice(parameter: str, asked: Any, parallel: bool) -> ToolChoice:
    match asked:
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice(ToolMode.REQUIRED, (name,), parallel=parallel)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)},
        }:
            return ToolChoice(ToolMode(mode), _allowed_names(tools), parallel=parallel)
    raise wrong_choice(parameter)


def _allowed_names(tools: list[Any]) -> tuple[str, ...]:
    names: list[str] = []
    for number, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str(name)}}:
                names.append(name)
            case _:
                path = f"tool_choice.allowed_tools.tools[{number}]"
                raise invalid(path, "expected a function.")
    if not names:
        path = "tool_choice.allowed_tools.tools"
        raise invalid(path, "at least one tool is needed.")
    return tuple(names)
