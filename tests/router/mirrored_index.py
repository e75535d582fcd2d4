"""A mirror of what tests write to a real Redis, and waiting until it is level."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from replicas.protocol.blocks import BlockHash
from router.fleet.index_mirror import IndexMirror
from router.routing.overlap import PrefixIndex
from tests.router.index_set_writer import IndexSetWriter
from tests.router.scripted_replica import eventually

MODEL = "m"


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def blocks(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(block(number) for number in numbers)


@pytest.fixture
def writer(redis_url: str) -> Iterator[Callable[[str], IndexSetWriter]]:
    writers = []

    def make(replica_id: str) -> IndexSetWriter:
        writers.append(IndexSetWriter(redis_url, MODEL, replica_id))
        return writers[-1]

    yield make
    for made in writers:
        made.close()


@asynccontextmanager
async def mirroring(
    url: str, *writers: IndexSetWriter, audit_seconds: float = 0.1
) -> AsyncIterator[tuple[IndexMirror, PrefixIndex]]:
    index = PrefixIndex(16, 16)
    mirror = IndexMirror(url, MODEL, index, audit_seconds=audit_seconds)
    announce(mirror, *writers)
    task = asyncio.create_task(mirror.run())
    try:
        yield mirror, index
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def announce(mirror: IndexMirror, *writers: IndexSetWriter) -> None:
    mirror.set_live({writer.replica_id: writer.record() for writer in writers})


async def level(index: PrefixIndex, *writers: IndexSetWriter) -> None:
    """Wait until the mirror holds what Redis holds, for each writer."""
    await eventually(lambda: all(index.stored(w.replica_id) == w.members() for w in writers))
