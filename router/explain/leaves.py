"""Leaves: the texts, numbers and keys of a body that a chat template may write, each with its path.

Owns which parts of a body are written into prompts, in every dialect, and in which order templates write
them. Knows no template: how a leaf looks in a prompt is a list of forms that it may have there.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from router.prompt.unread import LATER_TOOLS, is_silent, noun_of, unread

Path = tuple[str | int, ...]

LONGEST_WORD = 16
"""Length of types that Gemini writes in capitals."""

TOOL_FIELDS = ("tools", "functions")
SYSTEM_FIELDS = ("systemInstruction", "system_instruction", "system", "instructions")
TURN_FIELDS = ("messages", "input", "contents", "prompt")

NEVER_WRITTEN = frozenset(
    {
        "cache_control",
        "prompt_cache_breakpoint",
        "signature",
        "thoughtSignature",
        "thought_signature",
        "encrypted_content",
        "executableCode",
        "executable_code",
        "codeExecutionResult",
        "code_execution_result",
        "toolCall",
        "tool_call",
        "toolResponse",
        "tool_response",
        "strict",
        "annotations",
        "logprobs",
        "status",
        "type",
    }
)
"""Fields of dialects that no prompt has; within a schema or arguments they are names like any other."""

_NESTED = frozenset({"tools", "functionDeclarations", "function_declarations"})

RESULTS = ("functionResponse", "function_response")
"""The name in them is there to find the call."""

FREE_FIELDS = frozenset(
    {"parameters", "parametersJsonSchema", "parameters_json_schema", "input_schema", "arguments", "input"}
    | {"args", "response"}
)
"""Fields with the client's own JSON: a schema, the arguments of a call, a function's result."""

_WRITTEN_FIRST = (
    "role reasoning reasoning_content thinking summary name title source description text content output"
    " tool_calls function_call parameters"
)
FIELD_ORDER = {name: place for place, name in enumerate(_WRITTEN_FIRST.split())}
"""The order in which templates write the fields of a message or tool, whatever the client's is."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """`forms` are how it may stand in a prompt, the likeliest first. `element` is the message, tool or block
    that it belongs to. `is_text` tells texts and keys, which stand in quotes where they are part of JSON."""

    path: Path
    forms: tuple[str, ...]
    element: Path
    is_key: bool = False
    is_text: bool = True
    is_told: bool = False
    """Its words stand for a block, if the model could not read it."""


def leaves_of(body: Mapping[str, Any]) -> tuple[list[Leaf], list[Leaf]]:
    """Return the leaves of tools, and of system texts and turns: templates write one group before, or inside,
    the other."""
    tools = [leaf for name in TOOL_FIELDS if name in body for leaf in _elements((name,), body[name])]
    tools += _later_tools(body)
    turns = [
        leaf
        for name in (*SYSTEM_FIELDS, *TURN_FIELDS)
        if name in body
        for leaf in _elements((name,), body[name])
    ]
    return tools, turns


def spelled(path: Path) -> str:
    """Format a path for people: `tools[3].function.description`. Names with dots or brackets are quoted."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step and not set(step) & set(".[]\"' \n"):
            text += f".{step}" if text else step
        else:
            text += f"[{json.dumps(step, ensure_ascii=False)}]"
    return text


def steps_of(path: str) -> Path:
    """Return the inverse of `spelled`."""
    steps: list[str | int] = []
    for name, index, quoted in re.findall(r'([^.\[\]]+)|\[(\d+)\]|\[("(?:[^"\\]|\\.)*")\]', path):
        steps.append(int(index) if index else json.loads(quoted) if quoted else name)
    return tuple(steps)


def _elements(path: Path, value: Any) -> Iterator[Leaf]:
    if not isinstance(value, list):
        yield from _walk(path, value, path, is_free=False)
        return
    for number, item in enumerate(value):
        here = (*path, number)
        inner = _NESTED.intersection(item) if path[0] in TOOL_FIELDS and isinstance(item, dict) else ()
        if inner:  # of what holds tools, nothing but these is written
            for name in inner:
                yield from _elements((*here, name), item[name])
            continue
        yield from _walk(here, item, here, is_free=path[0] in TOOL_FIELDS and _is_chat_tool(path, item))


def _later_tools(body: Mapping[str, Any]) -> Iterator[Leaf]:
    """Tools that a conversation adds are written with the others."""
    for path, item in _items(("input",), body.get("input")):
        if item.get("type") in LATER_TOOLS:
            yield from _elements((*path, "tools"), item.get("tools"))
    for path, message in _items(("messages",), body.get("messages")):
        for inner, block in _items((*path, "content"), message.get("content")):
            change = block.get("tool")
            if block.get("type") == "tool_addition" and isinstance(change, dict):
                yield from _walk(
                    (*inner, "tool", "definition"), change.get("definition"), inner, is_free=False
                )


def _items(path: Path, value: Any) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for number, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict):
            yield (*path, number), item


def _is_chat_tool(path: Path, item: Any) -> bool:
    """OpenAI's chats have tools as templates expect them: they are written as they came, keys and all."""
    return path[0] == "functions" or (isinstance(item, dict) and isinstance(item.get("function"), dict))


def _walk(path: Path, value: Any, element: Path, *, is_free: bool) -> Iterator[Leaf]:
    if isinstance(value, str):
        if not is_free and path[-1] in ("arguments", "input") and value.lstrip().startswith(("{", "[")):
            yield from _json_text(path, value, element)
        elif value:
            yield Leaf(path, text_forms(value), element)
    elif isinstance(value, dict):
        kind = None if is_free else value.get("type")
        if not is_free and noun_of(value) is not None:
            yield Leaf(path, (unread(value),), element, is_told=True)
            if kind not in ("compaction", "document"):
                return
        if isinstance(kind, str) and (is_silent(kind) or kind in ("tool_addition", "tool_removal")):
            return
        fields = list(value.items()) if is_free else sorted(value.items(), key=_rank)
        for name, item in fields:
            if is_free:
                yield Leaf((*path, name), _key_forms(name), element, is_key=True)
            elif name in NEVER_WRITTEN or (name == "name" and path[-1] in RESULTS):
                continue
            here = (*path, name)
            yield from _walk(here, item, element, is_free=is_free or _is_free(name, item, path))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _walk((*path, number), item, element, is_free=is_free)
    elif value is not None or is_free:
        yield Leaf(path, _scalar_forms(value), element, is_text=False)


def _is_free(name: str, value: Any, path: Path) -> bool:
    return name in FREE_FIELDS and isinstance(value, dict) and bool(path)


def _json_text(path: Path, value: str, element: Path) -> Iterator[Leaf]:
    """Arguments that travel as JSON in a text: templates write the object, so its own leaves are places."""
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        read = None
    if isinstance(read, dict) and read:
        yield from _walk(path, read, element, is_free=True)
    else:
        yield Leaf(path, text_forms(value), element)


def _rank(item: tuple[str, Any]) -> int:
    return FIELD_ORDER.get(item[0], len(FIELD_ORDER))


def text_forms(value: str) -> tuple[str, ...]:
    """Return the text as it is, escaped as in JSON, and either one stripped."""
    bare = value.strip()
    texts = [value] if not bare or bare == value else [value, bare]
    forms = dict.fromkeys(texts)
    if not value.isprintable() or '"' in value or "\\" in value:
        forms |= dict.fromkeys(json.dumps(text, ensure_ascii=False)[1:-1] for text in texts)
    if not value.isascii():
        forms |= dict.fromkeys(json.dumps(text)[1:-1] for text in texts)
    if len(bare) <= LONGEST_WORD and bare.isupper():  # Gemini's types
        forms[bare.lower()] = None
    return tuple(forms)


def _key_forms(name: str) -> tuple[str, ...]:
    return (json.dumps(name, ensure_ascii=False) + ":", name) if name else ('"":',)


def _scalar_forms(value: Any) -> tuple[str, ...]:
    written = json.dumps(value)
    return (written,) if written == str(value) else (written, str(value))
