"""Servers that say which data-parallel ranks they have, and nothing else."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class NamedServer:
    """`answer` is the body that it gives; None closes the connection, "hangs" never answers, and "drips"
    never ends."""

    def __init__(self, port: int, answer: str | None) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.answer = answer
        self.status = 200
        self.is_compressed = False
        self.lacks = ""
        """A path that it does not know."""
        self.num_asked = 0
        self.last_head = ""


async def _drip(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x")
        await asyncio.sleep(0.01)


@asynccontextmanager
async def named_server(answer: str | None = "{}") -> AsyncIterator[NamedServer]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        named.last_head = (await reader.readuntil(b"\r\n\r\n")).decode()
        named.num_asked += 1
        if named.answer == "hangs":
            await reader.read()
        elif named.answer == "drips":
            dripping = asyncio.create_task(_drip(writer))
            await reader.read()
            dripping.cancel()
        elif named.lacks and f"GET {named.lacks} " in named.last_head:
            writer.write(b"HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        elif named.answer is not None:
            body = named.answer.encode()
            head = f"HTTP/1.1 {named.status} OK\r\nconnection: close\r\n"
            if named.is_compressed:
                body, head = gzip.compress(body), f"{head}content-encoding: gzip\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    named = NamedServer(server.sockets[0].getsockname()[1], answer)
    try:
        yield named
    finally:
        server.close()
