"""LoggedRequest: one line of a log of request bodies, read.

Owns which forms a line may have: a body, or a wrapper with the body and what is known of its request; and how
a body's dialect is told from its fields where no path says it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

WRAPPED = ("body", "request", "request_body")
PATHS = ("path", "url", "endpoint", "route")
TENANTS = ("tenant", "organization", "org", "user", "user_id")
TIMES = ("time", "timestamp", "ts", "created_at")

CHAT, COMPLETION, MESSAGES, RESPONSES, GEMINI = "chat", "completion", "messages", "responses", "gemini"

_ENDINGS = {
    "/chat/completions": CHAT,
    "/completions": COMPLETION,
    "/messages": MESSAGES,
    "/responses": RESPONSES,
}
_GENERATING = ":generateContent", ":streamGenerateContent"
_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"})


class BadLine(ValueError):
    """The line is no request. The message is a sentence without its number."""


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """`kind` is the dialect, as readers of bodies have it. `tenant` is who asks, if the line says so."""

    kind: str
    body: dict[str, Any]
    tenant: str | None = None
    time: Any = None


def read_line(line: bytes) -> LoggedRequest:
    """Raises BadLine."""
    try:
        read = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine("it is not JSON") from error
    if not isinstance(read, dict):
        raise BadLine("it is not a JSON object")
    wrapped = next((name for name in WRAPPED if isinstance(read.get(name), dict | str)), None)
    if wrapped is None:
        return LoggedRequest(_kind_of(read, ""), read)
    body = read[wrapped]
    if isinstance(body, str):
        try:
            body = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadLine(f"its {wrapped} is not JSON") from error
        if not isinstance(body, dict):
            raise BadLine(f"its {wrapped} is not a JSON object")
    path = _first(read, PATHS)
    return LoggedRequest(
        _kind_of(body, path or ""), _with_model(body, path or ""), _first(read, TENANTS), _any(read, TIMES)
    )


def _first(read: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((value for name in names if isinstance(value := read.get(name), str) and value), None)


def _any(read: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((read[name] for name in names if name in read), None)


def _kind_of(body: Mapping[str, Any], path: str) -> str:
    path = path.partition("?")[0].rstrip("/")
    for ending, kind in _ENDINGS.items():
        if path.endswith(ending):
            return kind
    if path.endswith(_GENERATING) or "contents" in body:
        return GEMINI
    if "messages" in body:
        return MESSAGES if _is_anthropic(body) else CHAT
    if "input" in body:
        return RESPONSES
    if "prompt" in body:
        return COMPLETION
    raise BadLine("it has neither messages, nor input, contents or a prompt")


def _is_anthropic(body: Mapping[str, Any]) -> bool:
    if body.keys() & {"system", "anthropic_version", "thinking", "context_management"}:
        return True
    if any(isinstance(tool, dict) and "input_schema" in tool for tool in _listed(body.get("tools"))):
        return True
    return any(block.get("type") in _BLOCKS or "cache_control" in block for block in _blocks(body))


def _blocks(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for message in _listed(body.get("messages")):
        for block in _listed(message.get("content") if isinstance(message, dict) else None):
            if isinstance(block, dict):
                yield block


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _with_model(body: dict[str, Any], path: str) -> dict[str, Any]:
    """Gemini's paths name the model, and its bodies do not."""
    name = path.partition("/models/")[2].partition(":")[0]
    return {**body, "model": name} if name and "model" not in body else body
