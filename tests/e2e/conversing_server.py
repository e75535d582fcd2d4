"""A stand-in server that clients ask by themselves: chats, completions, messages and responses, as text.

It renders and tokenises as vLLM does. The words of an answer are a function of the prompt's text alone.
"""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import jinja2
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from replicas.toy_model import checkpoint_directory
from tests.replicas.remote_engine.stand_in import StandIn

NO_SALT = "nobody"


class ConversingServer(StandIn):
    def __init__(self) -> None:
        text = (checkpoint_directory(None) / "chat_template.jinja").read_text(encoding="utf-8")
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(text)
        self.event_seconds = 0.0
        """Time between two events of a stream."""
        super().__init__()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def routes(self) -> list[Route]:
        say = [Route(path, self._say, methods=["POST"]) for path in ANSWERS if path != "/v1/completions"]
        return [*super().routes(), *say]

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        return await (self._say(request) if isinstance(body["prompt"], str) else super().complete(request))

    async def _say(self, request: Request) -> Response:
        path, body = request.url.path, await request.json()
        self.bodies.append(body)
        if self.fault == "full":
            return JSONResponse({"error": {"message": "too many requests"}}, 503)
        text = body["prompt"] if "prompt" in body else self._rendered(body)
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        num_cached = self.store(tokens, body.get("cache_salt", NO_SALT), None)
        digest = hashlib.sha256(text.encode()).hexdigest()
        words = [f"{digest[place : place + 4]} " for place in range(0, 4 * NUM_WORDS, 4)]
        whole, events = ANSWERS[path](words, len(tokens), num_cached)
        if not body.get("stream"):
            return JSONResponse(whole)
        return StreamingResponse(self._stream(events), media_type="text/event-stream")

    def _rendered(self, body: dict[str, Any]) -> str:
        messages = body.get("messages") or [{"role": "user", "content": body["input"]}]
        return self._template.render(messages=messages, add_generation_prompt=True, tools=None)

    async def _stream(self, events: list[dict[str, Any]]):  # type: ignore[no-untyped-def]
        self.num_open += 1
        try:
            for event in events:
                yield f"data: {json.dumps(event)}\n\n"
                await asyncio.sleep(self.event_seconds)
        finally:
            self.num_open -= 1


NUM_WORDS = 5
Said = tuple[dict[str, Any], list[dict[str, Any]]]


def _openai_usage(num_prompt: int, num_cached: int) -> dict[str, Any]:
    details = {"cached_tokens": num_cached}
    return {"prompt_tokens": num_prompt, "completion_tokens": NUM_WORDS, "prompt_tokens_details": details}


def _chat(words: list[str], num_prompt: int, num_cached: int) -> Said:
    usage = _openai_usage(num_prompt, num_cached)
    message = {"role": "assistant", "content": "".join(words)}
    whole = {"id": "chatcmpl-1", "choices": [{"index": 0, "message": message}], "usage": usage}
    events: list[dict[str, Any]] = [
        {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": word}}]} for word in words
    ]
    return whole, [*events, {"id": "chatcmpl-1", "choices": [], "usage": usage}]


def _completion(words: list[str], num_prompt: int, num_cached: int) -> Said:
    usage = _openai_usage(num_prompt, num_cached)
    whole = {"id": "cmpl-1", "choices": [{"index": 0, "text": "".join(words)}], "usage": usage}
    events: list[dict[str, Any]] = [
        {"id": "cmpl-1", "choices": [{"index": 0, "text": word}]} for word in words
    ]
    return whole, [*events, {"id": "cmpl-1", "choices": [], "usage": usage}]


def _message(words: list[str], num_prompt: int, num_cached: int) -> Said:
    usage = {"input_tokens": num_prompt - num_cached, "cache_read_input_tokens": num_cached}
    usage["output_tokens"] = NUM_WORDS
    content = [{"type": "text", "text": "".join(words)}]
    whole = {"id": "msg_1", "type": "message", "content": content, "usage": usage}
    start = {"type": "message_start", "message": {"id": "msg_1", "usage": {**usage, "output_tokens": 0}}}
    deltas: Iterator[dict[str, Any]] = (
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": word}} for word in words
    )
    return whole, [start, *deltas, {"type": "message_delta", "usage": usage}]


def _response(words: list[str], num_prompt: int, num_cached: int) -> Said:
    details = {"cached_tokens": num_cached}
    usage = {"input_tokens": num_prompt, "output_tokens": NUM_WORDS, "input_tokens_details": details}
    text = {"type": "output_text", "text": "".join(words)}
    whole = {"id": "resp_1", "output": [{"type": "message", "content": [text]}], "usage": usage}
    deltas = [{"type": "response.output_text.delta", "delta": word} for word in words]
    created = {"type": "response.created", "response": {"id": "resp_1", "usage": None}}
    return whole, [created, *deltas, {"type": "response.completed", "response": whole}]


ANSWERS = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/messages": _message,
    "/v1/responses": _response,
}
