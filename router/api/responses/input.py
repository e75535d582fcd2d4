"""The input of OpenAI's Responses → messages as chat templates expect them.

Owns the kinds of items, and how those that one answer consists of (reasoning, a message, calls) become one
message of the assistant again. Pure.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from router.api.caching import check_breakpoint
from router.api.images import Images, content_of
from router.api.json_body import (
    invalid,
    missing,
    read_arguments,
    read_object,
    read_text,
    unsupported,
    wrong_type,
)
from router.api.openai.messages import pieces_of
from router.errors import InvalidRequest
from router.large_bodies.body_weight import MOST_BYTES
from router.prompt.unread import is_silent, unread

USER_ROLES = ("user", "system", "developer")
ROLES = (*USER_ROLES, "assistant")

_NAMED = ("function_call", "custom_tool_call", "mcp_call")
CALLS = (*_NAMED, "apply_patch_call", "computer_call", "local_shell_call", "shell_call")
"""Calls of tools that run at the client, and those that have their output with them. `_NAMED` have a name."""
OUTPUTS = frozenset(f"{kind}_output" for kind in CALLS)

_WITHOUT_PARTS = ("mcp_call", "shell_call_output")
"""Kinds whose output is data, with types of its own."""

_ASKED_IN = ("input", "action", "actions", "operation")
"""Fields with what a call asks for."""

PACKED = "kvasir-reasoning-1:"
"""Prefix of our `encrypted_content`. It holds the reasoning's text, which the item also has in the clear: it
is no secret from the client, and some clients send back only this."""

SpacedName = tuple[str, str]
"""A function's namespace, possibly empty, and its name there."""


class Conversation:
    """Feed it the items in their order. `breakpoints` are the positions of messages that have one. `names`
    are those that the model knows functions in namespaces by."""

    def __init__(self, names: Mapping[SpacedName, str] | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.breakpoints: list[int] = []
        self.images = Images()
        self._names = names or {}
        self._answer: dict[str, Any] | None = None

    def add(self, path: str, item: Any) -> None:
        """Raises InvalidRequest that names what is wrong where."""
        kind = read_object(path, item).get("type", "message")
        if not isinstance(kind, str):
            raise wrong_type(f"{path}.type", "text")
        if kind == "message":
            self._add_message(path, item)
        elif kind == "reasoning":
            self._add_reasoning(path, item)
        elif kind in CALLS:
            self._add_call(path, item, kind)
            if kind == "mcp_call":
                self._add_output(path, item, kind)
        elif kind in OUTPUTS:
            self._add_output(path, item, kind)
        elif kind in ("compaction", "image_generation_call"):
            self._add_message(path, {"role": "assistant", "content": unread(item)})
        elif kind == "item_reference":
            raise _unknown_item(path, item)
        elif not is_silent(kind) and (item.get("role") in USER_ROLES or item.get("id") is None):
            raise unsupported(f"{path}.type", f"Items of type '{kind[:40]}' are not supported.")

    def _add_message(self, path: str, item: dict[str, Any]) -> None:
        role = read_text(f"{path}.role", item.get("role"))
        if role not in ROLES:
            raise invalid(f"{path}.role", f"'{role[:40]}'. Supported are {', '.join(ROLES)}.")
        content = item.get("content")
        if role != "assistant":
            self._add(f"{path}.content", {"role": role}, content)
            return
        text = self._content(f"{path}.content", content, role)
        answer = self._answer
        if answer is None or (answer["content"] and "tool_calls" not in answer):
            answer = self._begin_answer()
        answer["content"] += text
        self._note_breakpoint(f"{path}.content", content)

    def _add(self, path: str, message: dict[str, Any], content: Any) -> None:
        """A message that is not the assistant's."""
        self._answer = None
        self.messages.append({**message, "content": self._content(path, content, message["role"])})
        self._note_breakpoint(path, content)

    def _add_output(self, path: str, item: dict[str, Any], kind: str) -> None:
        """Some say only whether they went well, and some have parts that are no blocks."""
        output = item.get("output")
        if output is None:
            output = item.get("error") or item.get("status") or ""
        parts = [output] if isinstance(output, dict) else output
        if isinstance(parts, list):
            output = [
                json.dumps(part, ensure_ascii=False)
                if isinstance(part, dict) and ("type" not in part or kind in _WITHOUT_PARTS)
                else part
                for part in parts
            ]
        call_id = _call_id(path, item, kind)
        self._add(f"{path}.output", {"role": "tool"} | ({"tool_call_id": call_id} if call_id else {}), output)

    def _content(self, path: str, content: Any, role: str) -> Any:
        """Parts where there are images, else text: of the assistant always text."""
        if isinstance(content, str):
            return content
        if content is None:
            raise missing(path)
        if not isinstance(content, list):
            raise wrong_type(path, "text or a list of parts")
        return content_of(pieces_of(path, content, self.images, role))

    def _add_reasoning(self, path: str, item: dict[str, Any]) -> None:
        answer = self._answer
        if answer is None or answer["content"] or "tool_calls" in answer:
            answer = self._begin_answer()
        text = _reasoning(path, item)
        if text:
            answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def _add_call(self, path: str, item: dict[str, Any], kind: str) -> None:
        call_id = read_text(f"{path}.call_id", _call_id(path, item, kind))
        name = kind.removesuffix("_call")
        if kind in _NAMED:
            name = read_text(f"{path}.name", item.get("name"))
        space = item.get("namespace")
        if isinstance(space, str):
            name = self._names.get((space, name), name)
        arguments: Any = {field: item[field] for field in _ASKED_IN if item.get(field) is not None}
        if kind in ("function_call", "mcp_call"):
            if "arguments" not in item:
                raise missing(f"{path}.arguments")
            arguments = read_arguments(item["arguments"])
            if arguments is None:
                raise wrong_type(f"{path}.arguments", "text")
        function = {"name": name, "arguments": arguments}
        answer = self._answer or self._begin_answer()
        answer.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _begin_answer(self) -> dict[str, Any]:
        self._answer = {"role": "assistant", "content": ""}
        self.messages.append(self._answer)
        return self._answer

    def _note_breakpoint(self, path: str, content: Any) -> None:
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("prompt_cache_breakpoint") is not None:
                place = f"{path}[{number}].prompt_cache_breakpoint"
                check_breakpoint(place, part["prompt_cache_breakpoint"])
                self.breakpoints.append(len(self.messages) - 1)


def _call_id(path: str, item: dict[str, Any], kind: str) -> str | None:
    call_id = item.get("call_id")
    if call_id is None and kind in ("local_shell_call_output", "mcp_call"):
        call_id = item.get("id")
    return None if call_id is None else read_text(f"{path}.call_id", call_id)


def _reasoning(path: str, item: dict[str, Any]) -> str:
    """Read reasoning, in the clear or as we packed it. Other servers' encrypted reasoning is empty here."""
    texts: list[str] = []
    content = item.get("content")
    if content is not None and not isinstance(content, list):
        raise wrong_type(f"{path}.content", "a list of parts")
    for number, part in enumerate(content or ()):
        read_object(f"{path}.content[{number}]", part)
        texts.append(read_text(f"{path}.content[{number}].text", part.get("text")))
    packed = item.get("encrypted_content")
    if not texts and isinstance(packed, str):
        return _unpacked(packed)
    return "".join(texts)


def packed_reasoning(text: str) -> str:
    return PACKED + base64.b64encode(text.encode()).decode()


def _unpacked(packed: str) -> str:
    if not packed.startswith(PACKED):
        return ""
    try:
        return base64.b64decode(packed[len(PACKED) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _unknown_item(path: str, item: dict[str, Any]) -> InvalidRequest:
    item_id = item.get("id")
    return InvalidRequest(
        f"There is no item '{item_id!s:.64}' here: what stored responses have answered can be referred to,"
        f" in requests of up to {MOST_BYTES // 2**10} KiB.",
        parameter=f"{path}.id",
        code="item_not_found",
    )
