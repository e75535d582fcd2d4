"""A server that answers as a test tells it to, on a real socket: for what a good server never does."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

EVENT = b'data: {"choices":[{"index":0,"text":"word"}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":48,"completion_tokens":2,"prompt_tokens_details":'
    b'{"cached_tokens":32,"cross_user_cached_tokens":16}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
HEAD = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nx-kvasir-replica: replica-7\r\n"
    b"x-kvasir-overlap-tokens: 24\r\n\r\n"
)

Reply = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
"""Given the body. A connection ends where the answer closes the writer."""


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def whole(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunk(EVENT) + chunk(EVENT) + chunk(USAGE + DONE) + b"0\r\n\r\n")


@contextlib.asynccontextmanager
async def scripted_server(reply: Reply, heads: dict[int, str] | None = None) -> AsyncIterator[int]:
    """Yields the port. `heads` gets each request's head by its `max_tokens`."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(EOFError, OSError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                if heads is not None:
                    heads[body["max_tokens"]] = head
                await reply(body, writer)
                await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        for writer in writers:
            writer.close()
        server.close()
        await server.wait_closed()
