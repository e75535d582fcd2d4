"""A client of Messages by hand: what it asks, and what it makes of whole answers and of streams."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
from jiter import from_json

from tests.router.thinking_model import MODEL

THINKS = "<think>\nShe wants the weather.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Århus"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("weather", "time")]
ASKED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 1000,
    "messages": [{"role": "user", "content": "How is the weather?"}],
}
MINUTES = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
VERSION = {"anthropic-version": "2023-06-01"}


async def whole(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/messages", json=ASKED | fields)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


async def events(http: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await http.post("/v1/messages", json=ASKED | fields | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for frame in answer.text.removesuffix("\n\n").split("\n\n"):
        named, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert named == f"event: {event['type']}"
        found.append(event)
    return found


def joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream, and that its events come in order."""
    first, *rest, delta, last = events
    assert (first["type"], delta["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    message: dict[str, Any] = first["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    block: dict[str, Any] | None = None
    arguments = ""
    for event in rest:
        assert event["index"] == len(message["content"])
        match event["type"]:
            case "content_block_start":
                assert block is None
                block, arguments = event["content_block"], ""
            case "content_block_delta":
                assert block is not None
                match event["delta"]:
                    case {"type": "text_delta", "text": text}:
                        block["text"] += text
                    case {"type": "thinking_delta", "thinking": text}:
                        block["thinking"] += text
                    case {"type": "signature_delta", "signature": text}:
                        block["signature"] += text
                    case {"type": "input_json_delta", "partial_json": text}:
                        arguments += text
                    case other:
                        raise AssertionError(other)
            case "content_block_stop":
                assert block is not None
                if block["type"] == "tool_use" and arguments:  # as Anthropic's SDK reads them
                    block["input"] = from_json(arguments.encode(), partial_mode=True)
                message["content"].append(block)
                block = None
    assert block is None
    return message | delta["delta"] | {"usage": message["usage"] | delta["usage"]}


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Without what is new each time; where it has to be something, that is checked."""
    assert message["id"].startswith("msg_")
    content = []
    for block in message["content"]:
        if block["type"] == "tool_use":
            assert block["id"].startswith("toolu_")
            block = {**block, "id": ""}
        if block["type"] == "thinking":
            assert block["signature"]
            block = {**block, "signature": ""}
        content.append(block)
    return {**message, "id": "", "content": content}
