"""OpenAI's messages → messages as chat templates expect them.

Owns the forms that a message may have, the older ones of functions among them, and the places in messages
through which a prompt is to stay cached. Pure.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from router.api.caching import check_breakpoint
from router.api.images import TEXT_KINDS, Images, content_of, read_or_unread
from router.api.json_body import (
    invalid,
    missing,
    read_arguments,
    read_object,
    read_text,
    unsupported,
    wrong_type,
)
from router.errors import InvalidRequest
from router.prompt.images import SentImage
from router.prompt.unread import unread

ROLES = frozenset({"developer", "system", "user", "assistant", "tool", "function"})
PLAIN_ROLES = ("user", "system", "developer")
"""Roles of messages that are plain text and stay unchanged."""

IMAGE_PARTS = ("image_url", "input_image", "computer_screenshot")
ROLES_WITH_IMAGES = ("user", "tool", "function")
ROLES_TOLD = ("assistant", "tool", "function")
"""Roles whose parts are never refused: their conversation has to go on."""
_LEGACY_CALL_ID = "call_{}"
_CONVERTED = ("content", "refusal", "audio", "tool_calls", "function_call", "reasoning", "reasoning_content")


class Messages(NamedTuple):
    """`breakpoints` are the positions of messages that have one, in their order."""

    messages: list[dict[str, Any]]
    breakpoints: list[int]
    images: list[SentImage]


def read_messages(sent: Sequence[dict[str, Any]]) -> Messages:
    """Raises InvalidRequest that names what is wrong where."""
    messages: list[dict[str, Any]] = []
    breakpoints: list[int] = []
    call_ids: set[str] = set()
    images = Images()
    for position, message in enumerate(sent):
        role = message.get("role")
        if len(message) == 2 and role in PLAIN_ROLES and isinstance(message.get("content"), str):
            messages.append(message)
            continue
        path = f"messages[{position}]"
        if not isinstance(role, str) or role not in ROLES:
            raise _wrong_role(path, role)
        read = {key: value for key, value in message.items() if value is not None and key not in _CONVERTED}
        if _has_breakpoint(path, message.get("content")):
            breakpoints.append(position)
        read["content"] = _content(path, message, images)
        if role == "assistant":
            _read_assistant(path, message, read)
            call_ids.update(call["id"] for call in read.get("tool_calls", ()))
        elif role == "tool":
            _check_answer(path, message, call_ids)
        elif role == "function":
            read |= {"role": "tool", "tool_call_id": _LEGACY_CALL_ID.format(message.get("name"))}
        messages.append(read)
    return Messages(messages, breakpoints, images.images)


def _wrong_role(path: str, role: Any) -> InvalidRequest:
    path += ".role"
    if role is None:
        return missing(path)
    if not isinstance(role, str):
        return wrong_type(path, "text")
    return invalid(path, f"'{role[:40]}'. Supported are {', '.join(sorted(ROLES))}.")


def _content(path: str, message: dict[str, Any], images: Images) -> str | list[dict[str, Any]]:
    content = message.get("content")
    path += ".content"
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return content_of(pieces_of(path, content, images, message["role"]))
    if content is not None:
        raise wrong_type(path, "text or a list of parts")
    if message["role"] not in ROLES_TOLD:
        raise missing(path)
    if message.get("audio") is not None:
        return unread({"type": "audio"})
    return _text_of(path.replace(".content", ".refusal"), message.get("refusal"))


def pieces_of(path: str, parts: list[Any], images: Images, role: str) -> list[str | dict[str, Any]]:
    """Texts, and images as parts where there may be any; words for what a tool or an answer has besides."""
    shown = images if role in ROLES_WITH_IMAGES else None
    if role not in ROLES_TOLD:
        return [_piece(f"{path}[{number}]", part, shown) for number, part in enumerate(parts)]
    read = partial(_piece, images=shown)
    return [read_or_unread(f"{path}[{number}]", part, read) for number, part in enumerate(parts)]


def _piece(path: str, part: Any, images: Images | None) -> str | dict[str, Any]:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise wrong_type(path, "an object")
    kind = part.get("type")
    if kind in IMAGE_PARTS and images is not None:
        return images.add_url(f"{path}.image_url", _url(f"{path}.image_url", part))
    if kind not in TEXT_KINDS:
        read = "Text is" if images is None else "Text and images are"
        raise unsupported(f"{path}.type", f"{read} read here; '{path}' is '{kind!s:.40}'.")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise wrong_type(f"{path}.text", "text")
    return text


def _url(path: str, part: dict[str, Any]) -> Any:
    """Chats have it in an object, Responses by itself. `detail` says how much of an image is looked at: here
    it is all that the model's processor makes of it."""
    if part.get("file_id") is not None:
        raise unsupported(path, "There are no files here: send the image as a 'data:' URL.")
    given = part.get("image_url")
    detail = given.get("detail") if isinstance(given, dict) else part.get("detail")
    if detail not in (None, "auto", "low", "high", "original"):
        raise InvalidRequest(f"Invalid value for '{path}.detail'.", parameter=f"{path}.detail")
    return given.get("url") if isinstance(given, dict) else given


def _has_breakpoint(path: str, content: Any) -> bool:
    found = False
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("prompt_cache_breakpoint") is not None:
            check_breakpoint(
                f"{path}.content[{number}].prompt_cache_breakpoint", part["prompt_cache_breakpoint"]
            )
            found = True
    return found


def _read_assistant(path: str, message: dict[str, Any], read: dict[str, Any]) -> None:
    for field in ("reasoning_content", "reasoning"):
        reasoning = _text_of(f"{path}.{field}", message.get(field))
        if reasoning:
            read.setdefault("reasoning_content", reasoning)
    calls = message.get("tool_calls")
    legacy = message.get("function_call")
    if calls:
        read["tool_calls"] = _tool_calls(f"{path}.tool_calls", calls)
    elif legacy is not None:
        function = _function(f"{path}.function_call", legacy)
        call_id = _LEGACY_CALL_ID.format(function["name"])
        read["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
    elif message.get("content") is None and not read["content"] and "reasoning_content" not in read:
        raise invalid(
            f"{path}.content",
            "expected text, got null. Only an assistant's message with 'tool_calls' may be without.",
        )


def _check_answer(path: str, message: dict[str, Any], call_ids: set[str]) -> None:
    call_id = read_text(f"{path}.tool_call_id", message.get("tool_call_id"))
    if call_id not in call_ids:
        raise invalid(
            f"{path}.tool_call_id",
            f"no message before it has a tool call with the id"
            f" '{call_id[:64]}'. Messages with role 'tool' must be a response to a preceding message with"
            " 'tool_calls'.",
        )


def _tool_calls(path: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise wrong_type(path, "a list of objects")
    return [_tool_call(f"{path}[{number}]", call) for number, call in enumerate(calls)]


def _tool_call(path: str, call: Any) -> dict[str, Any]:
    """Read a call. Of other kinds the arguments are all but the name, such as a custom tool's `input`."""
    kind = read_text(f"{path}.type", read_object(path, call).get("type", "function"))
    call_id = read_text(f"{path}.id", call.get("id"))
    function = call.get(kind)
    if kind != "function" and isinstance(function, dict):
        arguments = {name: value for name, value in function.items() if name != "name"}
        function = {"name": function.get("name", kind), "arguments": arguments}
    function = _function(f"{path}.{kind[:40]}", function)
    return {"id": call_id, "type": "function", "function": function}


def _function(path: str, function: Any) -> dict[str, Any]:
    """Arguments travel as JSON in a string; templates write objects out themselves."""
    if function is None:
        raise missing(path)
    name = read_text(f"{path}.name", read_object(path, function).get("name"))
    read = read_arguments(function.get("arguments"))
    if read is None:
        raise wrong_type(f"{path}.arguments", "text")
    return {"name": name, "arguments": read}


def _text_of(path: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise wrong_type(path, "text")
    return value
