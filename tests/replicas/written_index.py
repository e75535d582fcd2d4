"""An index writer that runs against a Redis, and what it has written there."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from replicas.index.index_writer import IndexWriter
from replicas.observation.metrics import ReplicaMetrics
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import BlockStored, Tier
from replicas.protocol.status import Epoch, ReplicaId
from tests.replicas.mirror import connect, live_announcements, read_changes, read_set, replay
from tests.replicas.scripted_engine import CARD

MODEL, REPLICA, EPOCH = CARD.name, ReplicaId("r0"), Epoch("e1")


def hashes(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(number.to_bytes(16, "big")) for number in numbers)


def stored(*numbers: int, tier: Tier = Tier.DEVICE) -> BlockStored:
    return BlockStored(hashes(*numbers), 0, tier=tier)


@asynccontextmanager
async def running_writer(
    url: str,
    replica_id: ReplicaId = REPLICA,
    *,
    index_stride: int = CARD.block_size,
    stream_length: int = 100_000,
    stream_bytes: int = 64 << 20,
    metrics: ReplicaMetrics | None = None,
) -> AsyncIterator[IndexWriter]:
    redis = connect(url)
    redis.connection_pool.connection_kwargs["retry"] = Retry(NoBackoff(), 0)
    writer = IndexWriter(
        redis,
        CARD,
        replica_id,
        EPOCH,
        index_stride=index_stride,
        stream_length=stream_length,
        set_ttl_seconds=60,
        metrics=metrics or ReplicaMetrics(CollectorRegistry()),
        stream_bytes=stream_bytes,
        rng=random.Random(0),
        rewrite_spread_seconds=0.05,
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(writer.run())
        yield writer
        task.cancel()
    await redis.aclose()


async def assert_redis_holds(url: str, numbers: Sequence[int], *, with_stream: bool = True) -> None:
    redis = connect(url)
    assert await read_set(redis, MODEL, REPLICA, EPOCH) == set(hashes(*numbers))
    if with_stream:
        assert replay(await read_changes(redis, MODEL, EPOCH)) == set(hashes(*numbers))
    await redis.aclose()


async def announced_in(url: str) -> dict[int, tuple[BlockHash, ...]]:
    redis = connect(url)
    changes = await read_changes(redis, MODEL, EPOCH)
    await redis.aclose()
    return live_announcements(changes)
