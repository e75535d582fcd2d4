"""The tools of OpenAI's Responses, and which of them may be called → those of a ChatRequest.

Owns which kinds there are, and the names by which a model knows functions in namespaces. Pure.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from router.answers.wishes import ToolChoice, ToolMode
from router.api.field_table import MOST_NAMED
from router.api.json_body import invalid, read_object, read_text, unsupported, wrong_type
from router.api.openai.tools import (
    check_choice,
    check_function,
    check_number,
    simple_choice,
    wrong_choice,
)
from router.api.responses.input import SpacedName
from router.prompt.unread import LATER_TOOLS

SERVED_BY_OTHERS = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_preview",
    }
)
"""Kinds that say nothing to a model here. A kind may end in the date of its version."""

_VERSION = re.compile(r"_\d{4}_\d{2}_\d{2}$")

FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


class OfferedTools(NamedTuple):
    """`names` are those that the model knows functions in namespaces by; they are the functions' own
    wherever no other has the same. `unknown_kinds` are counted as fields that are not known."""

    tools: list[dict[str, Any]]
    names: dict[SpacedName, str]
    unknown_kinds: list[str]


def offered_tools(sent: Sequence[Any], items: Sequence[Any] = ()) -> OfferedTools:
    """Return the functions, which a model can call: those sent, and those that `items` of the input have
    added or changed. Other kinds run at their server, and there is none here. Raises InvalidRequest for what
    is no tool, and for a function whose kind is misspelt."""
    unknown: list[str] = []
    found = list(_functions("tools", sent, unknown))
    later = list(_later(items, unknown))
    if later:
        found = list(
            {(space, function["name"]): (space, function) for space, function in found + later}.values()
        )
    check_number("tools", found)
    counts = Counter(function["name"] for _, function in found)
    tools: list[dict[str, Any]] = []
    names: dict[SpacedName, str] = {}
    for space, function in found:
        name = function["name"]
        if space and counts[name] > 1:
            name = f"{space}.{name}"
        if space:
            names[space, function["name"]] = name
        fields = {key: function[key] for key in FUNCTION_FIELDS if function.get(key) is not None}
        tools.append({"type": "function", "function": {**fields, "name": name}})
    return OfferedTools(tools, names, unknown)


def _later(items: Sequence[Any], unknown: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for position, item in enumerate(items):
        match item:
            case {"tools": list(tools), "type": str(kind)} if kind in LATER_TOOLS:
                yield from _functions(f"input[{position}].tools", tools, unknown)


def _functions(field: str, sent: Sequence[Any], unknown: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each with the namespace that it is in, if it is in one."""
    for number, tool in enumerate(sent):
        path = f"{field}[{number}]"
        kind = _kind(path, tool, unknown)
        if kind == "function":
            check_function(path, tool)
            yield "", tool
        elif kind == "namespace":
            check_function(path, {"name": tool.get("name"), "description": tool.get("description")})
            inner = tool.get("tools")
            if not isinstance(inner, list):
                raise wrong_type(f"{path}.tools", "a list")
            for place, function in enumerate(inner):
                inner_path = f"{path}.tools[{place}]"
                if _kind(inner_path, function, unknown) == "function":
                    check_function(inner_path, function)
                    yield tool["name"], function


def _kind(path: str, tool: Any, unknown: list[str]) -> str:
    kind = read_text(f"{path}.type", read_object(path, tool).get("type"))
    if kind in ("function", "namespace") or _VERSION.sub("", kind) in SERVED_BY_OTHERS:
        return kind
    is_choice = path.startswith("tools")  # what a search has found stays in the conversation
    if is_choice and not {"parameters", "function", "tools"}.isdisjoint(tool):
        raise unsupported(
            f"{path}.type",
            f"Invalid value for '{path}.type': '{kind[:40]}'. What a model can call is a 'function', or a"
            " 'namespace' of them.",
        )
    if len(unknown) < MOST_NAMED:
        unknown.append(f"tools.{kind}")
    return kind


def tool_choice(asked: Any, offered: OfferedTools, *, parallel: bool) -> ToolChoice:
    """Raises InvalidRequest for a tool that is not offered."""
    choice = simple_choice(asked, parallel=parallel) or _choice(asked, offered, parallel)
    check_choice("tool_choice", choice, offered.tools, "has a function")
    return choice


def _choice(asked: Any, offered: OfferedTools, parallel: bool) -> ToolChoice:
    match asked:
        case {"type": "function", "name": str()}:
            return ToolChoice(ToolMode.REQUIRED, (_name(asked, offered),), parallel=parallel)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            names = tuple(_name(tool, offered) for tool in tools if _is_function(tool))
            if not names:
                path = "tool_choice.tools"
                raise invalid(path, "it has no function.")
            return ToolChoice(ToolMode(mode), names, parallel=parallel)
        case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
            raise unsupported("tool_choice", f"Only functions can be chosen, not a tool '{kind[:40]}'.")
    raise wrong_choice("tool_choice")


def _is_function(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("name"), str)


def _name(tool: dict[str, Any], offered: OfferedTools) -> str:
    space, name = tool.get("namespace"), tool["name"]
    return offered.names.get((space, name), name) if isinstance(space, str) else str(name)
