"""A server that takes no tokens: OpenAI's chats and completions and Anthropic's messages, in text.

It remembers the texts that it was sent, and tells how much of a prompt begins like one of them, in words.
Faults are switched on by name.
"""

import asyncio
import gzip
import json
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

SERVED_NAME = "wordy"


class TextServer:
    def __init__(self) -> None:
        self.fault = ""
        self.served_name = SERVED_NAME
        self.other_names: list[str] = []
        self.adapters: list[str] = []
        self.owner = "library"
        self.num_slots: int | None = None
        self.usage: dict[str, Any] = {}
        """What it says of usage instead of the truth."""
        self.tells_cached = True
        self.bodies: list[bytes] = []
        self.num_open = 0
        self.timings: dict[str, Any] = {}
        self._words: list[list[str]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        config = uvicorn.Config(
            Starlette(routes=self.routes()),
            host="127.0.0.1",
            port=self.port,
            log_config=None,  # the loggers are those of all tests
            ws="none",
            lifespan="off",
        )
        self._http = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._http.run, daemon=True)
        self._thread.start()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._models),
            Route("/props", self._properties),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/messages", self._messages, methods=["POST"]),
        ]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._http.should_exit = self._http.force_exit = True
        self._thread.join()

    def forget(self) -> None:
        self._words.clear()

    async def _models(self, request: Request) -> Response:
        if self.fault == "hangs" or self.fault == "is busy":
            await asyncio.sleep(600)
        if self.fault == "is loading":
            return JSONResponse({"error": {"message": "loading the model"}}, 503)
        if self.fault == "drips":
            return StreamingResponse(_forever(b" ", seconds=0.1), media_type="application/json")
        names = [self.served_name, *self.other_names]
        models = [
            {"id": name, "root": "/models/wordy", "meta": {"n_ctx": 4096}, "owned_by": self.owner}
            for name in names
        ]
        models += [{"id": name, "parent": self.served_name} for name in self.adapters]
        return JSONResponse({"object": "list", "data": models})

    async def _properties(self, request: Request) -> Response:
        return JSONResponse({} if self.num_slots is None else {"total_slots": self.num_slots})

    async def _chat(self, request: Request) -> Response:
        content = await request.body()
        body = json.loads(content)
        if "messages" not in body:
            return JSONResponse({"error": {"message": "messages are missing"}}, 400)
        self.bodies.append(content)
        wrong = self._wrong()
        if wrong is not None:
            return wrong
        num_words, num_cached = self._look_up(json.dumps(body["messages"]).split())
        said = [f"word{number} " for number in range(body.get("max_tokens", 4))]
        usage: dict[str, Any] = {"prompt_tokens": num_words, "completion_tokens": len(said)}
        if self.tells_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
        usage |= self.usage
        if not body.get("stream"):
            choice = {"index": 0, "message": {"content": "".join(said)}, "finish_reason": "stop"}
            answer = {"id": "theirs", "odd": [1, 2.50], "choices": [choice], "usage": usage}
            if self.timings:
                answer["timings"] = self.timings
            return JSONResponse(answer)
        has_usage = (body.get("stream_options") or {}).get("include_usage")
        stream = self._stream(said, usage if has_usage else None)
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _stream(self, said: list[str], usage: dict[str, Any] | None) -> AsyncIterator[bytes]:
        self.num_open += 1
        try:
            if self.fault == "pings":
                yield b": ping\n\n"
                await asyncio.sleep(0.3)
            for number, word in enumerate(said):
                if self.fault == "is busy":
                    await asyncio.sleep(0.1)
                if self.fault == "breaks off" and number == 2:
                    return
                if self.fault == "stalls" and number == 2:
                    await asyncio.sleep(60)
                yield event({"choices": [{"index": 0, "delta": {"content": word}}]})
            if self.fault == "forgets its end":
                return
            yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
            if self.fault == "breaks off after its end":
                raise ConnectionError("on purpose")
            if usage is not None:
                yield event({"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
            if self.fault == "lingers":
                await asyncio.sleep(600)
        finally:
            self.num_open -= 1

    async def _messages(self, request: Request) -> Response:
        content = await request.body()
        body = json.loads(content)
        if "messages" not in body:
            return JSONResponse({"type": "error", "error": {"message": "messages are missing"}}, 400)
        self.bodies.append(content)
        num_words, num_cached = self._look_up(json.dumps(body["messages"]).split())
        usage = {
            "input_tokens": num_words - num_cached,
            "cache_read_input_tokens": num_cached,
            "output_tokens": 1,
        }
        said = [{"type": "text", "text": "hello"}]
        return JSONResponse({"id": "theirs", "content": said, "stop_reason": "end_turn", "usage": usage})

    def _wrong(self) -> Response | None:
        stream = {"media_type": "text/event-stream"}
        match self.fault:
            case "is compressed":
                bomb = gzip.compress(bytes(2**24))
                return Response(bomb, headers={"content-encoding": "gzip"}, **stream)
            case "sends an endless line":
                return StreamingResponse(_forever(b"data: {" + b" " * 2**16), **stream)
            case "sends endless events":
                return StreamingResponse(_forever(event({"choices": [], "odd": " " * 2**16})), **stream)
            case "sends endless comments":
                return StreamingResponse(_forever(b": \n\n" * 2**10), **stream)
            case "answers HTML":
                return HTMLResponse("<p>a proxy</p>")
            case "redirects":
                return RedirectResponse("http://127.0.0.1:1/")
            case "is full":
                return JSONResponse({"error": {"message": "no slot is free"}}, 503)
            case "refuses":
                return JSONResponse({"error": {"message": "audio is not understood"}}, 400)
        return None

    def _look_up(self, words: list[str]) -> tuple[int, int]:
        shared = [_num_shared(words, known) for known in self._words]
        self._words.append(words)
        return len(words), min(max([0, *shared]), len(words) - 1)


async def _forever(piece: bytes, *, seconds: float = 0.0) -> AsyncIterator[bytes]:
    while True:
        yield piece
        await asyncio.sleep(seconds)


def _num_shared(one: list[str], other: list[str]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
