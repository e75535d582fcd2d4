"""Clients that speak to a router over a bare socket, well or badly."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable

CHAT = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}).encode()
STREAMED = CHAT[:-1] + b', "stream": true}'


def post(body: bytes = CHAT, *, version: str = "1.1", path: str = "/v1/chat/completions") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@contextlib.asynccontextmanager
async def connected(
    port: int, *, local_host: str = "127.0.0.1", receive_bytes: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """`receive_bytes` is what the system takes in for a client that does not read."""
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.setblocking(False)
    client.bind((local_host, 0))
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    limit = 2**16 if receive_bytes is None else receive_bytes
    reader, writer = await asyncio.open_connection(sock=client, limit=limit)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (nobody else can tell)
        await asyncio.sleep(0.005)


async def status_of(port: int, *, local_host: str = "127.0.0.1", sent: bytes = b"") -> int:
    """Of what is answered to `sent`, or to GET /health."""
    async with connected(port, local_host=local_host) as (reader, writer):
        writer.write(sent or b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        return int((await reader.readline()).split()[1])
