"""One client address cannot take all places: of requests, of large bodies, of the line before those."""

import asyncio
import contextlib
import os
import signal

from router.limits.address_shares import AddressShares
from tests.router.http_server import http_server
from tests.router.raw_client import CHAT, connected, post, status_of, wait_for
from tests.router.scripted_dispatch import NEVER, says

FLOOD = "127.0.0.2"
LARGE = CHAT[:-1] + b" " * 300_000 + b"}"


async def test_an_address_with_its_share_of_requests_is_told_to_come_back_and_others_are_served() -> None:
    async with http_server(max_in_flight=4) as server, contextlib.AsyncExitStack() as stack:
        server.dispatcher.script = lambda generation: [NEVER]
        for _ in range(2):
            _, writer = await stack.enter_async_context(connected(server.port, local_host=FLOOD))
            writer.write(post())
        await wait_for(lambda: server.context.in_flight.num == 2)
        async with connected(server.port, local_host=FLOOD) as (reader, writer):
            writer.write(post().replace(b"host:", b"connection: close\r\nhost:"))
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 429") and b"requests of this address" in answer
        server.dispatcher.script = says([2])
        assert await status_of(server.port, sent=post()) == 200
        await stack.aclose()
        await server.wait_idle()
        assert await status_of(server.port, local_host=FLOOD, sent=post()) == 200


async def test_a_flood_of_large_bodies_from_one_address_holds_up_no_other() -> None:
    async with http_server(max_connections=512) as server, contextlib.AsyncExitStack() as stack:
        server.dispatcher.script = says([2])
        assert await status_of(server.port, sent=post(LARGE)) == 200
        worker = server.context.worker
        assert worker._process is not None
        os.kill(worker._process.pid, signal.SIGSTOP)
        try:
            flood = [
                await stack.enter_async_context(connected(server.port, local_host=FLOOD)) for _ in range(40)
            ]
            for _, writer in flood:
                writer.write(post(LARGE))
            await wait_for(lambda: worker.num_refused == 40 - 1 - 32)
            assert (worker.places.line.num_working, worker.places.line.num_waiting) == (1, 32)
            other = asyncio.create_task(status_of(server.port, sent=post(LARGE)))
            await wait_for(lambda: worker.places.line.num_working == 2)
        finally:
            os.kill(worker._process.pid, signal.SIGCONT)
        assert await other == 200
        await stack.aclose()
        await server.wait_idle()
        assert (worker.places.line.num_working, worker.places.line.num_waiting) == (0, 0)


def test_a_share_is_at_least_one_and_without_an_address_only_the_whole_counts() -> None:
    shares = AddressShares(3, address_share=0.1)
    assert shares.has_room(FLOOD)
    shares.add(FLOOD)
    assert not shares.has_room(FLOOD) and shares.has_room("127.0.0.3")
    shares.add(None, 2)
    assert not shares.has_room(None)
    shares.add(FLOOD, -1)
    assert shares.has_room(FLOOD) and not shares.has_room(FLOOD, 2)
