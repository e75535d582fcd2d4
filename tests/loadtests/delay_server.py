"""A server of streamed chats with known delays, against which a load generator's figures are held.

Owns the times of what it sent, by its own clock, and its accidents on request. Answers mean nothing.
"""

import asyncio
import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MODEL = "delayed"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
HANG_SECONDS = 3600.0

Body = dict[str, Any]


@dataclass(slots=True)
class DelayServer:
    """`fate` says what becomes of a request: whole, refused, cut, hang, or failed."""

    first_seconds: float = 0.0
    gap_seconds: float = 0.0
    fate: Callable[[int, Body], str] = lambda _number, _body: "whole"
    num_cached: Callable[[Body], int] = lambda _body: 0
    url: str = ""
    bodies: list[Body] = field(default_factory=list)
    ttft_seconds: list[float] = field(default_factory=list)
    """From the request's last byte until its first token was written."""
    itl_seconds: list[float] = field(default_factory=list)
    most_in_flight: int = 0
    stop: Callable[[], None] = lambda: None
    """While it runs: no connection from now on, and none of those that there are."""
    _num_in_flight: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            with contextlib.suppress(EOFError, OSError, asyncio.CancelledError):
                while not writer.is_closing():
                    await self._exchange(reader, writer)
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if head.startswith("get "):
            return await self._models(writer)
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self._num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._num_in_flight)
        try:
            await self._answer(body, writer)
        finally:
            self._num_in_flight -= 1

    async def _models(self, writer: asyncio.StreamWriter) -> None:
        content = json.dumps({"data": [{"id": MODEL, "max_model_len": 8192}]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content))
        await writer.drain()

    async def _answer(self, body: Body, writer: asyncio.StreamWriter) -> None:
        began = time.perf_counter()
        fate = self.fate(len(self.bodies), body)
        self.bodies.append(body)
        if fate == "refused":
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}")
            return await writer.drain()
        writer.write(
            HEAD + _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        )
        written: list[float] = []
        for number in range(body["max_tokens"] if fate == "whole" else 2):
            await _sleep_until(began + self.first_seconds + number * self.gap_seconds)
            writer.write(_delta({"content": "word "}))
            written.append(time.perf_counter())
        if fate == "hang":
            await asyncio.sleep(HANG_SECONDS)
        if fate == "cut":
            return writer.close()
        if fate == "failed":
            writer.write(_event({"error": {"message": "it broke"}}))
        self.ttft_seconds.append(written[0] - began)
        self.itl_seconds += [later - earlier for earlier, later in itertools.pairwise(written)]
        writer.write(_event(self._usage(body, len(written))) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()

    def _usage(self, body: Body, num_output_tokens: int) -> Body:
        usage = {
            "prompt_tokens": num_words(body),
            "completion_tokens": num_output_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.num_cached(body),
                "cross_user_cached_tokens": 0,
            },
        }
        return {"choices": [], "usage": usage}


@contextlib.contextmanager
def running(server: DelayServer) -> Iterator[DelayServer]:
    """Serves from a thread of its own."""
    loop = asyncio.new_event_loop()
    started, ended = threading.Event(), asyncio.Event()

    async def serve() -> None:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        server.stop = stop
        started.set()
        await ended.wait()
        listener.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # transports close a step later

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(ended.set)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        stop()
        thread.join()
        loop.close()


def num_words(body: Body) -> int:
    return sum(len(message["content"].split()) for message in body["messages"])


async def _sleep_until(seconds: float) -> None:
    await asyncio.sleep(max(0.0, seconds - time.perf_counter()))


def _event(content: Body) -> bytes:
    return _chunk(b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n")


def _delta(delta: Body) -> bytes:
    return _event({"choices": [{"index": 0, "delta": delta}]})


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
