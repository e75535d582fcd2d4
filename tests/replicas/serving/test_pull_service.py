"""Serving pulls: how many at once, and to whom that does not read."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from prometheus_client import Counter

from replicas.kvstore.arena import Arena
from replicas.kvstore.layout import decode
from replicas.kvstore.pulling.chunk_reader import ChunkReader
from replicas.kvstore.slot_books import SlotBooks
from replicas.protocol.frames import UserTag
from replicas.protocol.pulls import PullRequest
from replicas.protocol.service import path
from replicas.protocol.status import Epoch
from replicas.protocol.wire import decode_pull_part, encode
from replicas.serving import pull_service
from replicas.serving.pull_service import MAX_PULLS, PullService
from tests.replicas.kvstore.chunk_images import LAYOUT
from tests.replicas.kvstore.chunk_names import key, name

ID = LAYOUT.digest()
PAYLOAD_BYTES = (2 << 20) + 5


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(4, PAYLOAD_BYTES, has_table=True)
    books = SlotBooks(arena, 128, ID)
    for slot, each in enumerate(("a", "ab", "abc")):
        books.taken(slot, name(each), (UserTag(each.encode()),) * 4)
        arena.payload(slot)[:8] = each.encode().ljust(8)
        books.filled(slot)
    yield arena
    arena.close()


@asynccontextmanager
async def served(arena: Arena | None) -> AsyncIterator[tuple[PullService, Any]]:
    """The desk, and the call."""
    shared = None if arena is None else SlotBooks(arena, 128, ID).shared
    reader = None if shared is None else ChunkReader(shared)
    desk = PullService(reader, Epoch("e1"), Counter("sent", "", registry=None))
    server = grpc.aio.server()
    service, _, method = path("Pull").removeprefix("/").partition("/")
    handler = grpc.unary_stream_rpc_method_handler(desk.serve, response_serializer=encode)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield desk, channel.unary_stream(path("Pull"), encode, decode_pull_part)
    await server.stop(0)
    desk.close()


def asking(*paths: str, epoch: str = "e1", layout: bytes = ID) -> PullRequest:
    return PullRequest(Epoch(epoch), layout, tuple(key(each) for each in paths))


async def code(call: Any) -> grpc.StatusCode:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_chunks_go_in_parts_up_to_the_first_that_is_not_there(arena: Arena) -> None:
    async with served(arena) as (_, pull):
        parts = [part async for part in pull(asking("a", "ab", "abcd", "abc"), timeout=30)]
        images = [b"".join(part.content for part in parts if part.index == index) for index in range(4)]
        assert all(len(part.content) <= 1 << 20 for part in parts)
        assert [decode(memoryview(each), ID, key("ab"[: n + 1])).name for n, each in enumerate(images[:2])]
        assert images[2:] == [b"", b""]


@pytest.mark.parametrize(
    "request_", [asking("a", epoch="e0"), asking("a", layout=bytes(16))], ids=["epoch", "layout"]
)
async def test_another_incarnation_or_layout_is_refused(arena: Arena, request_: PullRequest) -> None:
    async with served(arena) as (_, pull):
        assert await code(pull(request_)) is grpc.StatusCode.FAILED_PRECONDITION
    async with served(None) as (_, pull):
        assert await code(pull(asking("a"))) is grpc.StatusCode.FAILED_PRECONDITION


async def test_peers_that_do_not_read_take_a_bounded_number_of_pulls_and_a_bounded_time(
    arena: Arena,
) -> None:
    async with served(arena) as (desk, pull):
        stalled = [pull(asking(*["a", "ab", "abc"] * 30), timeout=3) for _ in range(MAX_PULLS)]
        for call in stalled:
            await call.read()
        assert await code(pull(asking("a"), timeout=30)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        while desk._num_pulls:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.05)
        assert await code(pull(asking("a"), timeout=30)) is grpc.StatusCode.OK
        for call in stalled:
            call.cancel()


async def test_a_pull_waits_for_its_turn_and_begins_when_another_ends(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_service, "WAIT_SECONDS", 30.0)
    monkeypatch.setattr(pull_service, "MAX_WAITING", 2)
    async with served(arena) as (desk, pull):
        stalled = [pull(asking(*["a", "ab", "abc"] * 30), timeout=60) for _ in range(MAX_PULLS)]
        for call in stalled:
            await call.read()
        waiting = pull(asking("a"), timeout=60)
        gone = pull(asking("a"), timeout=60)
        await num_pulls(desk, MAX_PULLS + 2)
        assert await code(pull(asking("a"), timeout=60)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        gone.cancel()
        await num_pulls(desk, MAX_PULLS + 1)
        assert not desk.is_idle
        stalled.pop().cancel()
        assert await code(waiting) is grpc.StatusCode.OK
        for call in stalled:
            call.cancel()
        await desk.wait_idle()
        assert desk._num_pulls == 0 and desk._places._value == MAX_PULLS


async def num_pulls(desk: PullService, number: int) -> None:
    while desk._num_pulls != number:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("seconds", [None, 600.0])
async def test_a_pull_without_a_near_deadline_is_refused(arena: Arena, seconds: float | None) -> None:
    async with served(arena) as (_, pull):
        assert await code(pull(asking("a"), timeout=seconds)) is grpc.StatusCode.INVALID_ARGUMENT
