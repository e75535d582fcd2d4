"""Bodies that are announced and not sent, dripped, or too many; and one address cannot take all places."""

import asyncio
import contextlib
import os
import signal

import pytest

from router.errors import BodiesFull
from router.limits.address_shares import AddressShares
from router.limits.body_budget import BodyBudget
from tests.router.http_server import HttpServer, http_server
from tests.router.raw_client import CHAT, connected, post, status_of, wait_for
from tests.router.scripted_dispatch import NEVER, says

FLOOD = "127.0.0.2"
LARGE = CHAT[:-1] + b" " * 500_000 + b"}"
SETTINGS = {"max_body_bytes": 600_000, "body_memory_bytes": 2_000_000}


def num_bytes(server: HttpServer) -> int:
    return server.context.bodies.num_bytes


async def test_bodies_that_are_announced_and_not_sent_take_no_place() -> None:
    async with http_server(max_in_flight=1) as server, contextlib.AsyncExitStack() as stack:
        server.dispatcher.script = says([2])
        for sent in (b"", b"{", CHAT[:-1]) * 5:
            _, writer = await stack.enter_async_context(connected(server.port))
            writer.write(post(CHAT)[: -len(CHAT)] + sent)
        await wait_for(lambda: num_bytes(server) == 5 * len(CHAT))
        assert await status_of(server.port, sent=post()) == 200


async def test_a_body_that_comes_more_slowly_than_its_pace_is_given_up() -> None:
    async with (
        http_server(upload_bytes_per_second=2**30) as server,
        connected(server.port) as (reader, writer),
    ):
        writer.write(post(LARGE)[:1000])

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b" " * 100)
                    await asyncio.sleep(0.1)

        dripping = asyncio.create_task(drip())
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        dripping.cancel()
        await server.wait_idle()


async def test_beyond_the_memory_for_bodies_one_address_is_told_to_come_back_and_others_are_served() -> None:
    async with http_server(**SETTINGS) as server, contextlib.AsyncExitStack() as stack:
        server.dispatcher.script = says([2])
        for _ in range(2):  # of an address's million
            _, writer = await stack.enter_async_context(connected(server.port, local_host=FLOOD))
            writer.write(post(LARGE)[:-150_000])
        await wait_for(lambda: num_bytes(server) > 600_000)
        async with connected(server.port, local_host=FLOOD) as (reader, writer):
            writer.write(post(LARGE))
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1\r\n" in answer and b"connection: close\r\n" in answer
        assert b'"code":"bodies_full"' in answer
        assert await status_of(server.port, sent=post()) == 200
        text = server.context.metrics.render().decode()
        assert "router_body_bytes_limit 2000000.0" in text
        assert "router_refused_bodies_total 1.0" in text
        await stack.aclose()
        await server.wait_idle()


async def test_a_body_that_grows_beyond_what_is_left_is_refused_on_its_way() -> None:
    async with http_server(**SETTINGS) as server, contextlib.AsyncExitStack() as stack:
        _, writer = await stack.enter_async_context(connected(server.port))
        writer.write(post(LARGE)[:-1])
        async with connected(server.port) as (reader, chunked):
            chunked.write(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
            await wait_for(lambda: num_bytes(server) > 499_000)
            for _ in range(55):
                chunked.write(b"2710\r\n" + b" " * 10_000 + b"\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 503")
        await wait_for(lambda: num_bytes(server) < 501_000)


def test_what_is_taken_of_an_address_is_bounded_and_given_back() -> None:
    budget = BodyBudget(1000, address_share=0.5)
    with budget.hold("a") as first, budget.hold("a") as second, budget.hold("b") as other:
        first.take(400)
        second.expect(100)
        with pytest.raises(BodiesFull):
            second.expect(101)
        other.take(500)
        first.give_back()
        second.take(500)
        with budget.hold(None) as unknown, pytest.raises(BodiesFull):
            unknown.take(1)
    assert budget.num_bytes == 0
    assert budget.num_refused == 2


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
