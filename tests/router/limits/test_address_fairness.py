"""One client address cannot take all places: of requests, of large bodies, of the line before those."""

import asyncio
import contextlib
import os
import signal

import pytest

from router.large_bodies.offload_queue import OffloadQueue, QueueFull
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
        offload = server.context.offload
        assert offload._process is not None
        os.kill(offload._process.pid, signal.SIGSTOP)
        try:
            flood = [
                await stack.enter_async_context(connected(server.port, local_host=FLOOD)) for _ in range(40)
            ]
            for _, writer in flood:
                writer.write(post(LARGE))
            await wait_for(lambda: offload.num_refused == 40 - 1 - 32)
            assert (offload.num_working, offload.num_waiting) == (1, 32)
            other = asyncio.create_task(status_of(server.port, sent=post(LARGE)))
            await wait_for(lambda: offload.num_working == 2)
        finally:
            os.kill(offload._process.pid, signal.SIGCONT)
        assert await other == 200
        await stack.aclose()
        await server.wait_idle()
        assert (offload.num_working, offload.num_waiting) == (0, 0)


def queue(wait_seconds: float = 5.0) -> OffloadQueue:
    return OffloadQueue(num_places=4, most_waiting=8, wait_seconds=wait_seconds, address_share=0.5)


class Worker:
    """Has a place until it is told to leave."""

    def __init__(self, queue: OffloadQueue, address: str | None) -> None:
        self._leave = asyncio.Event()
        self.is_working = False
        self.task = asyncio.create_task(self._run(queue, address))

    async def _run(self, queue: OffloadQueue, address: str | None) -> None:
        async with queue.place(address):
            self.is_working = True
            await self._leave.wait()

    async def leave(self) -> None:
        self._leave.set()
        await self.task
        await asyncio.sleep(0.01)


async def test_others_go_before_an_address_that_has_its_share_and_it_goes_on_in_order() -> None:
    places = queue()
    flood = [Worker(places, FLOOD) for _ in range(4)]
    await asyncio.sleep(0)
    others = [Worker(places, "127.0.0.3"), Worker(places, None)]
    await asyncio.sleep(0.01)
    assert [worker.is_working for worker in (*flood, *others)] == [True, True, False, False, True, True]
    late = Worker(places, "127.0.0.4")  # all places are taken
    await asyncio.sleep(0.01)
    assert (places.num_working, places.num_waiting) == (4, 3)
    await others[0].leave()
    assert late.is_working and not flood[2].is_working
    await flood[0].leave()
    assert flood[2].is_working and not flood[3].is_working
    for worker in (flood[1], flood[2], flood[3], others[1], late):
        await worker.leave()
    assert (places.num_working, places.num_waiting) == (0, 0)


async def test_those_that_leave_the_line_or_wait_in_vain_give_their_places_back() -> None:
    places = queue(wait_seconds=0.05)
    working = [Worker(places, FLOOD) for _ in range(2)]
    await asyncio.sleep(0)
    gone = Worker(places, FLOOD)
    await asyncio.sleep(0.01)
    gone.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone.task
    assert places.num_waiting == 0
    with pytest.raises(QueueFull):
        await Worker(places, FLOOD).task
    called = Worker(places, FLOOD)
    await asyncio.sleep(0.01)
    leaving = asyncio.create_task(working[0].leave())
    while places.num_waiting:  # noqa: ASYNC110
        await asyncio.sleep(0)
    called.task.cancel()  # it has been called, and has not come yet
    with pytest.raises(asyncio.CancelledError):
        await called.task
    await leaving
    assert places.num_working == 1
    await working[1].leave()
    assert (places.num_working, places.num_waiting) == (0, 0)


def test_a_share_is_at_least_one_and_without_an_address_only_the_whole_counts() -> None:
    shares = AddressShares(3, address_share=0.1)
    assert shares.has_room(FLOOD)
    shares.add(FLOOD)
    assert not shares.has_room(FLOOD) and shares.has_room("127.0.0.3")
    shares.add(None, 2)
    assert not shares.has_room(None)
    shares.add(FLOOD, -1)
    assert shares.has_room(FLOOD) and not shares.has_room(FLOOD, 2)
