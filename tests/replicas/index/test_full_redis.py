"""A Redis with little memory, and none to spare: leases stay, the index gives way and comes back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, nullcontext
from random import Random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis.exceptions import OutOfMemoryError

from replicas.index import redis_room
from replicas.index.index_writer import IndexWriter
from replicas.index.redis_room import NoRoom, RedisRoom
from replicas.observation.metrics import ReplicaMetrics
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import BlockStored
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import ReplicaRecord, events_key
from replicas.protocol.status import ReplicaId, ReplicaState
from replicas.registration import Registration
from router.fleet.registry_source import RegistrySource
from tests.redis_server import RedisServer
from tests.replicas.mirror import connect, read_record, read_set
from tests.replicas.waiting import until
from tests.replicas.written_index import EPOCH, MODEL, REPLICA, running_writer

pytestmark = pytest.mark.alone  # leases lapse where a starved Redis does not answer in time

LEASE_SECONDS = 1.0
MEBIBYTE = 1 << 20


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_room, "LOOK_SECONDS", 0.1)


@asynccontextmanager
async def replica(
    url: str, replica_id: ReplicaId = REPLICA
) -> AsyncIterator[tuple[IndexWriter, ReplicaMetrics]]:
    """The two of a replica's parts that write to Redis."""
    redis = connect(url)
    metrics = ReplicaMetrics(CollectorRegistry())
    async with running_writer(url, replica_id, metrics=metrics) as writer:
        registration = Registration(
            redis,
            MODEL,
            replica_id,
            EPOCH,
            record=lambda: ReplicaRecord(
                *(replica_id, EPOCH, "127.0.0.1:1", ReplicaState.READY, "digest"),
                *(writer.last_change, LoadSnapshot()),
            ),
            index=writer,
            lease_seconds=LEASE_SECONDS,
            heartbeat_seconds=0.1,
            set_ttl_seconds=60,
            on_lost=lambda lost: None,
            metrics=metrics,
        )
        task = asyncio.create_task(registration.run())
        try:
            yield writer, metrics
        finally:
            task.cancel()
            await asyncio.wait([task])
            await redis.aclose()


async def limit(redis: Any, spare_bytes: int) -> None:
    used = (await redis.info("memory"))["used_memory"]
    await redis.config_set("maxmemory", used + spare_bytes)


async def fill(redis: Any) -> None:
    """With what is not ours, until nothing fits any more."""
    size, number = 256 * 1024, 0
    while size >= 16:
        try:
            await redis.set(f"other:{number}", bytes(size))
            number += 1
        except OutOfMemoryError:
            size //= 2


def many(first: int, count: int) -> BlockStored:
    return BlockStored(tuple(BlockHash(n.to_bytes(16, "big")) for n in range(first, first + count)), 0)


def value(metrics: ReplicaMetrics, name: str) -> float:
    return metrics.registry.get_sample_value(name) or 0.0


async def found_by_a_new_router(url: str) -> set[str]:
    views = RegistrySource(url, 0.05).views()
    async with asyncio.timeout(30):
        view = await anext(views)
    await views.aclose()  # type: ignore[attr-defined]
    return set(view.get(MODEL, {}))


async def until_redis(redis: Any, condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_leases_stay_in_a_redis_that_others_have_filled_and_the_index_comes_back(
    own_redis: RedisServer,
) -> None:
    async with aclosing(connect(own_redis.url)) as redis, replica(own_redis.url) as (writer, metrics):
        writer.observe([many(0, 1000)])
        await until(lambda: writer.is_settled)
        await until_redis(redis, lambda: read_record(redis, MODEL, REPLICA))
        await limit(redis, 2 * MEBIBYTE)
        for _ in range(6):
            await fill(redis)
            writer.observe([many(10_000, 100)])
            await asyncio.sleep(LEASE_SECONDS / 2)
        assert await read_record(redis, MODEL, REPLICA) is not None
        assert await found_by_a_new_router(own_redis.url) == {REPLICA}
        await until(lambda: value(metrics, "replica_index_withheld") == 1)
        await until(lambda: value(metrics, "replica_redis_memory_ratio") > 0.9)  # with its next look
        # Now nothing at all can be written, whoever gives way: the lease lasts as it is.
        await redis.config_set("maxmemory", (await redis.info("memory"))["used_memory"] // 2)
        await asyncio.sleep(3 * LEASE_SECONDS)
        assert await read_record(redis, MODEL, REPLICA) is not None
        assert value(metrics, "replica_lease_prolongations_total") > 0
        # Whoever filled it goes: the index is written again, by itself.
        await redis.config_set("maxmemory", 200 * MEBIBYTE)
        await until(lambda: writer.is_settled)
        assert await read_set(redis, MODEL, REPLICA, EPOCH) == writer.block_hashes
        assert value(metrics, "replica_index_withheld") == 0


@pytest.mark.parametrize(
    ("ratio", "share", "may_write"),
    [(0.8, 0.9, True), (0.87, 0.6, False), (0.87, 0.1, True), (0.91, 0.1, False), (0.95, 0.0, False)],
)
async def test_of_a_redis_that_fills_up_those_are_the_first_to_go_that_hold_much_of_it(
    own_redis: RedisServer, ratio: float, share: float, may_write: bool
) -> None:
    async with aclosing(connect(own_redis.url)) as redis:
        await redis.set("other", bytes(20 * MEBIBYTE))
        used = (await redis.info("memory"))["used_memory"]
        await redis.config_set("maxmemory", int(used / ratio))
        metrics = ReplicaMetrics(CollectorRegistry())
        room = RedisRoom(redis, "events", stream_bytes=1, rng=Random(1), metrics=metrics)
        with nullcontext() if may_write else pytest.raises(NoRoom):
            await room.check(int(share * used))
        assert value(metrics, "replica_redis_memory_ratio") == pytest.approx(ratio, abs=0.01)


async def test_an_index_that_is_too_large_for_redis_leaves_room_for_leases(own_redis: RedisServer) -> None:
    names = [ReplicaId(f"r{number}") for number in range(3)]
    async with (
        aclosing(connect(own_redis.url)) as redis,
        replica(own_redis.url, names[0]) as (first, first_metrics),
        replica(own_redis.url, names[1]) as (second, second_metrics),
    ):
        await limit(redis, 3 * MEBIBYTE)
        for start in range(0, 60_000, 2000):
            first.observe([many(start, 2000)])
            second.observe([many(start, 2000)])
            await asyncio.sleep(0.02)
        await until(
            lambda: (
                value(first_metrics, "replica_index_withheld")
                + value(second_metrics, "replica_index_withheld")
                > 0
            )
        )
        await asyncio.sleep(1.5 * LEASE_SECONDS)
        assert await found_by_a_new_router(own_redis.url) == set(names[:2])
        async with replica(own_redis.url, names[2]):  # and there is room for another one's
            await until_redis(redis, lambda: read_record(redis, MODEL, names[2]))
            assert await found_by_a_new_router(own_redis.url) == set(names)


async def test_the_stream_is_bounded_by_bytes_however_large_entries_are_and_whoever_writes_them(
    own_redis: RedisServer,
) -> None:
    bound = 512 * 1024
    most = 0
    async with (
        aclosing(connect(own_redis.url)) as redis,
        running_writer(own_redis.url, ReplicaId("small"), stream_bytes=bound) as small,
        running_writer(own_redis.url, ReplicaId("large"), stream_bytes=bound) as large,
    ):
        for turn in range(150):
            small.observe([many(turn, 1)])
            large.announce(turn, many(turn, 1024).block_hashes)  # 16 KiB: a prompt of 128k tokens
            await until(lambda: small.is_settled and large.is_settled)
            most = max(most, await redis.memory_usage(events_key(MODEL), samples=0) or 0)
        length = await redis.xlen(events_key(MODEL))
    assert bound / 4 < most < 2.5 * bound
    assert length > 10
