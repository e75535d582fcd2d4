"""Serving pulls: how many at once, and to whom that does not read."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
from replicas.serving import open_splits, pull_service
from replicas.serving.open_splits import OpenSplits
from replicas.serving.pull_service import PullService
from tests.replicas.kvstore.chunk_images import LAYOUT
from tests.replicas.kvstore.chunk_names import key, name

ID = LAYOUT.digest()
PAYLOAD_BYTES = (2 << 20) + 5
MAX_PULLS = 8


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    arena = Arena(4, PAYLOAD_BYTES, has_table=True)
    for slot, each in enumerate(("a", "ab", "abc")):
        publish(arena, slot, each)
    monkeypatch.setattr(pull_service, "MAX_BYTES", MAX_PULLS * arena.slot_bytes)
    yield arena
    arena.close()


@asynccontextmanager
async def served(
    arena: Arena | None, splits: OpenSplits | None = None
) -> AsyncIterator[tuple[PullService, Any]]:
    """The desk, and the call."""
    shared = None if arena is None else SlotBooks(arena, 128, ID).shared
    reader = None if shared is None else ChunkReader(shared)
    desk = PullService(reader, Epoch("e1"), Counter("sent", "", registry=None), splits)
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


def asking(*paths: str, epoch: str = "e1", layout: bytes = ID, split_id: int = 0) -> PullRequest:
    return PullRequest(Epoch(epoch), layout, tuple(key(each) for each in paths), split_id)


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
    monkeypatch.setattr(pull_service, "MAX_CALLS", MAX_PULLS + 2)
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


@dataclass
class Engine:
    """As far as splits know of one."""

    time: float = 0.0
    num_steps: int = 0
    is_idle: bool = True

    def splits(self) -> OpenSplits:
        return OpenSplits(
            num_steps=lambda: self.num_steps, is_idle=lambda: self.is_idle, clock=lambda: self.time
        )


def test_a_split_may_come_while_it_is_open_and_a_short_time_longer() -> None:
    engine = Engine()
    splits = engine.splits()
    splits.begin(7)
    engine.time = 1000.0
    assert splits.may_come(7, since=0.0)
    splits.end(7)
    assert splits.may_come(7, since=0.0)
    engine.time += open_splits.GRACE_SECONDS
    assert not splits.may_come(7, since=engine.time)
    engine.is_idle = False
    assert splits.may_come(7, since=0.0), "an engine that goes on copies between its steps"
    engine.num_steps += open_splits.GRACE_STEPS
    assert not splits.may_come(7, since=engine.time)
    engine.num_steps = 0
    engine.time += open_splits.MAX_GRACE_SECONDS
    assert not splits.may_come(7, since=engine.time)
    assert splits.num_open == 0


def test_a_split_may_come_later_than_its_pull_and_a_refused_one_does_not() -> None:
    engine = Engine()
    splits = engine.splits()
    assert splits.may_come(7, since=0.0)
    engine.time = open_splits.UNKNOWN_SECONDS
    assert not splits.may_come(7, since=0.0)
    splits.refused(8)
    engine.time += open_splits.GRACE_SECONDS
    assert not splits.may_come(8, since=engine.time)


def test_ended_splits_are_remembered_within_bounds() -> None:
    splits = Engine().splits()
    for split in range(1, 3 * open_splits.MAX_ENDED):
        splits.refused(split)
    assert len(splits._ended) == open_splits.MAX_ENDED and splits.num_open == 0


def publish(arena: Arena, slot: int, each: str) -> None:
    books = SlotBooks(arena, 128, ID)
    books.taken(slot, name(each), (UserTag(each.encode()),) * 4)
    arena.payload(slot)[:8] = each.encode().ljust(8)
    books.filled(slot)


async def num_waiting(desk: PullService, number: int) -> None:
    while desk.num_waiting != number:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.002)


async def test_a_pull_of_a_split_waits_for_each_chunk_and_says_so(arena: Arena) -> None:
    splits = OpenSplits()
    splits.begin(7)
    async with served(arena, splits) as (desk, pull):
        call = pull(asking("a", "abcd", "ab", split_id=7), timeout=60)
        first = [await call.read() for _ in range(3)]
        assert [(part.index, part.has_waited) for part in first] == [(0, False)] * 3
        await num_waiting(desk, 1)
        assert not desk.is_idle and desk._places._value == MAX_PULLS, "a pull that waits has no place"
        publish(arena, 3, "abcd")
        parts = [await call.read() for _ in range(6)]
        assert await call.read() is grpc.aio.EOF
        assert [(part.index, part.has_waited) for part in parts] == [
            *((1, True), (1, False), (1, False)),
            *((2, False), (2, False), (2, False)),
        ]
        assert decode(memoryview(b"".join(part.content for part in parts[:3])), ID, key("abcd"))
        assert desk.num_waiting == 0 and desk.is_idle


@pytest.mark.parametrize("split_id", [7, 8], ids=["ended", "unknown"])
async def test_a_pull_ends_when_its_split_has_or_is_none(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, split_id: int
) -> None:
    monkeypatch.setattr(open_splits, "UNKNOWN_SECONDS", 0.1)
    splits = OpenSplits()
    splits.begin(7)
    async with served(arena, splits) as (desk, pull):
        call = pull(asking("a", "abcd", split_id=split_id), timeout=60)
        await num_waiting(desk, 1)
        splits.end(7)
        assert len([part async for part in call]) == 3
        assert await call.code() is grpc.StatusCode.OK


async def test_waiting_pulls_hold_no_place_and_go_with_their_peers(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_service, "MAX_CALLS", 40)
    splits = OpenSplits()
    splits.begin(7)
    async with served(arena, splits) as (desk, pull):
        waiting = [pull(asking("abcd", split_id=7), timeout=60) for _ in range(39)]
        await num_waiting(desk, 39)
        assert await code(pull(asking("a"), timeout=60)) is grpc.StatusCode.OK
        one_more = pull(asking("abcd", split_id=7), timeout=60)
        await num_waiting(desk, 40)
        assert await code(pull(asking("a"), timeout=60)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in (one_more, *waiting):
            call.cancel()
        await desk.wait_idle()
        assert desk.num_waiting == 0
        assert await code(pull(asking("abcd", split_id=7), timeout=0.2)) is grpc.StatusCode.DEADLINE_EXCEEDED
        await num_waiting(desk, 0)


async def test_memory_that_cannot_be_read_ends_the_pulls_that_wait(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError("it is gone")

    splits = OpenSplits()
    splits.begin(7)
    async with served(arena, splits) as (desk, pull):
        call = pull(asking("abcd", split_id=7), timeout=60)
        await num_waiting(desk, 1)
        monkeypatch.setattr(ChunkReader, "_keys", broken)
        assert await code(call) is grpc.StatusCode.UNKNOWN
        await desk.wait_idle()
