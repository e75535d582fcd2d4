"""A slow, obvious twin of the parser: it has the whole answer, and reads calls with `json` and expressions.

It knows well-formed calls and texts that are none from their first character on. Of anything else it says
that it does not know.
"""

import json
import re
from typing import Any

from router.answers.formats import ToolSyntax
from router.answers.parts import Part, Reasoning, Text
from tests.router.answers.spoken import TOOLS, call, joined

NAMES = {tool["function"]["name"] for tool in TOOLS}


class Unknown(Exception):
    """The twin has no opinion."""


def slow_parts(syntax: ToolSyntax | None, text: str, *, has_reasoning: bool, is_opened: bool) -> list[Part]:
    parts: list[Part] = []
    if has_reasoning:
        match = re.match(r"\s*<think>", text)
        if match is not None:
            text, is_opened = text[match.end() :], True
        if is_opened:
            reasoning, mark, text = text.partition("</think>")
            if syntax in (ToolSyntax.HERMES, ToolSyntax.QWEN_XML) and "<tool_call>" in reasoning:
                raise Unknown
            parts.append(Reasoning(reasoning.strip()))
            if not mark:
                return [part for part in parts if part.text.strip()]  # type: ignore[union-attr]
            text = text.lstrip()
    if syntax is None:
        parts.append(Text(text))
    elif syntax is ToolSyntax.LLAMA:
        parts += _bare(text)
    else:
        parts += _marked(syntax, text)
    return joined(part for part in parts if not isinstance(part, Text | Reasoning) or part.text)


def _marked(syntax: ToolSyntax, text: str) -> list[Part]:
    parts: list[Part] = []
    num_calls = 0
    said = ""
    while True:
        match = re.search("<tool_call>" + ("|</tool_call>" if num_calls else ""), text)
        if syntax is ToolSyntax.QWEN_XML and "<function=" in text[: match and match.start()]:
            raise Unknown
        if match is None:
            return [*parts, Text(said + text)]
        before, rest = text[: match.start()], text[match.end() :]
        if match[0] == "</tool_call>":
            parts.append(Text((said + before).rstrip()))
            said, text = "", rest.lstrip()
            continue
        found = _xml(rest) if syntax is ToolSyntax.QWEN_XML else _object(rest)
        if found is None:
            said, text = said + before + match[0], rest
            continue
        name, arguments, after = found
        parts.append(Text((said + before).rstrip()))
        parts += call(num_calls, name, arguments)
        num_calls += 1
        said, text = "", after.lstrip()
        if syntax is ToolSyntax.HERMES and text[:1] in ("{", ",", ";"):
            raise Unknown


def _object(text: str) -> tuple[str, str, str] | None:
    """A call's name, its arguments as written, what follows. None if what is there is surely no call."""
    begun = text.lstrip()
    if not begun:
        raise Unknown
    if begun[0] == "[":
        raise Unknown
    if begun[0] != "{":
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(begun)
    except ValueError:
        raise Unknown from None
    if set(value) != {"name", "arguments"} or not isinstance(value["name"], str):
        raise Unknown
    source = re.search(r'"arguments": (.*?)(, "name": "[^"]*")?}$', begun[:end], re.DOTALL)
    if source is None or not re.fullmatch(r"\w+", value["name"]):
        raise Unknown
    arguments = value["arguments"]
    if isinstance(arguments, dict):
        return value["name"], source[1], begun[end:]
    if isinstance(arguments, str) and arguments:
        return value["name"], arguments, begun[end:]
    raise Unknown


def _bare(text: str) -> list[Part]:
    if text.lstrip().startswith(("<", "[")) or "<|python_tag|>" in text:
        raise Unknown
    parts: list[Part] = []
    num_calls = 0
    while text.lstrip().startswith("{"):
        found = _object(text)
        if found is None or found[0] not in NAMES:
            raise Unknown
        parts += call(num_calls, found[0], found[1])
        num_calls += 1
        rest = found[2].lstrip()
        if rest.startswith((",", "]")):
            raise Unknown
        text = rest.removeprefix(";").lstrip() if rest.removeprefix(";").lstrip()[:1] in ("{", "") else rest
    return [*parts, Text(text)]


def _xml(text: str) -> tuple[str, str, str] | None:
    begun = text.lstrip()
    if not begun or ("<function=".startswith(begun[:10]) and len(begun) < 10):
        raise Unknown
    if not begun.startswith("<function="):
        return None
    parameter = r"\s*<parameter=(\w+)>((?:(?!</parameter>).)*)</parameter>"
    function = re.match(rf"<function=(\w+)>((?:{parameter})*)\s*</function>", begun, re.DOTALL)
    if function is None:
        raise Unknown
    arguments: list[str] = []
    for name, value in re.findall(parameter, function[2], re.DOTALL):
        if "<" in value:
            raise Unknown
        value = value.removeprefix("\n").removesuffix("\n")
        arguments.append(f'"{name}": {_typed(function[1], name, value)}')
    return function[1], "{" + ", ".join(arguments) + "}", begun[function.end() :]


def _typed(tool: str, name: str, value: str) -> str:
    schema: Any = {"text": str, "count": int, "list": list, "flag": bool}.get(name) if tool in NAMES else None
    if schema is str:
        return json.dumps(value, ensure_ascii=False)
    try:
        parsed = json.loads(value)
    except ValueError:
        if value.strip() in ("True", "False"):
            raise Unknown from None
        return json.dumps(value, ensure_ascii=False)
    if name == "maybe" and tool in NAMES and not isinstance(parsed, str | None):
        return json.dumps(value, ensure_ascii=False)
    return value.strip()
