"""StreamReader against a real Redis, next to what redis-py's own client reads."""

import asyncio
import time
from collections.abc import Callable

import pytest
from redis.exceptions import RedisError, ResponseError

from replicas.process.plain_redis import plain_redis
from router.fleet import index_mirror
from router.fleet.index_mirror import ENTRIES_PER_READ, SECONDS_BETWEEN_READS
from router.fleet.stream_reader import StreamReader
from tests.router.index_set_writer import IndexSetWriter
from tests.router.mirrored_index import blocks, level, mirroring, writer
from tests.router.scripted_replica import eventually

__all__ = ["writer"]

KEY = "stream-reader-test"


async def test_it_reads_what_the_client_reads(redis_url: str) -> None:
    async with plain_redis(redis_url) as client, StreamReader(client, KEY) as reader:
        assert list(await reader.read("0-0", count=10, block_seconds=0.01)) == []
        first = await client.xadd(KEY, {b"one": b"\x00\xff", b"two": b""})
        for number in range(3):
            await client.xadd(KEY, {b"number": str(number)})
        for after, count in (("0-0", 10), ("0-0", 2), (first.decode(), 10)):
            ((_, wanted),) = await client.xread({KEY: after}, count=count)
            assert list(await reader.read(after, count=count, block_seconds=0.01)) == wanted
            assert len(wanted) in (2, 3, 4)


async def test_it_waits_for_an_entry_that_comes(redis_url: str) -> None:
    async with plain_redis(redis_url) as client, StreamReader(client, KEY) as reader:
        reading = asyncio.create_task(reader.read("0-0", count=1, block_seconds=30))
        await asyncio.sleep(0.05)  # it may be on its way by now, or not: it reads the entry either way
        await client.xadd(KEY, {b"late": b"yes"})
        ((_, fields),) = await reading
        assert fields == {b"late": b"yes"}


async def test_a_key_that_holds_no_stream_is_said(redis_url: str) -> None:
    async with plain_redis(redis_url) as client, StreamReader(client, KEY) as reader:
        await client.set(KEY, b"text")
        with pytest.raises(ResponseError):
            await reader.read("0-0", count=1, block_seconds=0.01)


async def test_it_never_connects_again(redis_url: str) -> None:
    """Who follows a stream must notice that it was away."""
    async with plain_redis(redis_url) as client:
        async with StreamReader(client, KEY) as reader:
            await reader.read("0-0", count=1, block_seconds=0.01)
            await client.client_kill_filter(_type="normal", skipme=True)
            for _ in range(2):
                with pytest.raises((RedisError, OSError)):
                    await reader.read("0-0", count=1, block_seconds=0.01)
        with pytest.raises(RedisError):
            await reader.read("0-0", count=1, block_seconds=0.01)


async def test_a_mirror_reads_no_more_often_than_it_may(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    """However many changes come one by one."""
    a = writer("a")
    async with plain_redis(redis_url) as client, mirroring(redis_url, a) as (mirror, index):
        await eventually(lambda: mirror.num_resyncs == 1)
        await client.config_resetstat()
        started = time.monotonic()
        for number in range(300):
            a.change(added=blocks(number))
            await asyncio.sleep(0)
        await level(index, a)
        calls = (await client.info("commandstats"))["cmdstat_xread"]["calls"]
        most = (time.monotonic() - started) / SECONDS_BETWEEN_READS
        assert calls <= 1.1 * most + 2
        assert mirror.num_changes == 300


async def test_a_mirror_reads_on_at_once_while_there_is_more(
    redis_url: str, writer: Callable[[str], IndexSetWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a fleet that changes faster would leave it behind for good."""
    a = writer("a")
    monkeypatch.setattr(index_mirror, "SECONDS_BETWEEN_READS", 3.0)
    async with mirroring(redis_url, a) as (mirror, _):
        await eventually(lambda: mirror.num_resyncs == 1)
        for number in range(16 * ENTRIES_PER_READ):
            a.change(added=blocks(number))
        await eventually(lambda: mirror.num_changes == 16 * ENTRIES_PER_READ)
