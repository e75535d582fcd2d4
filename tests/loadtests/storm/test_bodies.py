"""The worst bodies beside a storm: each outcome is counted as what it is, and sending ends with the storm."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from loadtests.storm import bodies as storm_bodies
from loadtests.storm.bodies import HANG, RESET, StormBodies

Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server_that(answer: Behaviour) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}")
    await writer.drain()


async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def hang(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


@pytest.mark.parametrize(("answer", "outcome"), [(refuse, "400"), (reset, RESET), (hang, HANG)])
async def test_an_outcome_is_counted_as_what_it_is(
    answer: Behaviour, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storm_bodies, "PAUSE_SECONDS", 0.01)
    async with server_that(answer) as url:
        bodies = StormBodies(url, "toy", num_bytes=64, patience_seconds=0.5)
        async with bodies.beside():
            while not bodies.outcomes:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
    assert set(bodies.outcomes) == {outcome}
    assert bool(bodies.hung) == (outcome == HANG)
    num_sent = bodies.outcomes.total()
    await asyncio.sleep(0.1)
    assert bodies.outcomes.total() == num_sent, "nothing is sent once the storm is over"
