"""The lease, where Redis stops answering in the middle of a heartbeat."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from replicas.observation.metrics import ReplicaMetrics
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState
from replicas.registration import Registration
from tests.redis_server import RedisServer
from tests.replicas.mirror import connect, read_record

MODEL = "toy_model"
REPLICA = ReplicaId("r0")
LEASE_SECONDS = 0.4


class EmptyIndex:
    set_key = "nothing"

    def check(self, number: int, num_members: int) -> None:
        pass

    async def make_room(self) -> None:
        pass


class Lease:
    """A registration whose record is read between the look at the old one and the writing of the new."""

    def __init__(self, redis: Any, server: RedisServer) -> None:
        self._server = server
        self.num_beats = 0
        self.must_pause = False
        self.metrics = ReplicaMetrics(CollectorRegistry())
        self.registration = Registration(
            redis,
            MODEL,
            REPLICA,
            Epoch("1-one"),
            record=self._record,
            index=EmptyIndex(),
            lease_seconds=LEASE_SECONDS,
            heartbeat_seconds=0.02,
            set_ttl_seconds=10,
            on_lost=lambda lost: None,
            metrics=self.metrics,
        )

    def _record(self) -> ReplicaRecord:
        self.num_beats += 1
        if self.must_pause:
            self._server.pause()
            self.must_pause = False
        return ReplicaRecord(
            REPLICA, Epoch("1-one"), "127.0.0.1:1", ReplicaState.READY, "digest", 0, LoadSnapshot()
        )


def counted(lease: Lease, name: str) -> float:
    return lease.metrics.registry.get_sample_value(name) or 0.0


@asynccontextmanager
async def paused_in_a_heartbeat(server: RedisServer) -> AsyncIterator[Lease]:
    redis = connect(server.url)
    lease = Lease(redis, server)
    task = asyncio.create_task(lease.registration.run())
    try:
        await lease.registration.wait_registered()
        lease.must_pause = True
        while lease.must_pause:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
        yield lease
    finally:
        server.resume()
        task.cancel()
        await asyncio.wait([task])
        await redis.aclose()


async def test_a_heartbeat_in_whose_middle_redis_hangs_is_given_up(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with paused_in_a_heartbeat(own_redis) as lease:
        while "serving on without it" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        own_redis.resume()
        num_beats = lease.num_beats
        while lease.num_beats < num_beats + 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert counted(lease, "replica_lease_failures_total") >= 1
        assert counted(lease, "replica_lease_renewals_total") >= 2
        redis = connect(own_redis.url)
        while await read_record(redis, MODEL, REPLICA) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await redis.aclose()


async def test_a_lease_ends_with_its_task_where_the_client_swallows_the_cancellation(
    own_redis: RedisServer,
) -> None:
    async with connect(own_redis.url) as redis:
        lease = Lease(redis, own_redis)
        beat, is_beating = lease.registration._beat, asyncio.Event()

        async def swallowing() -> bool:
            done = await beat()
            is_beating.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)
            return done

        lease.registration._beat = swallowing  # type: ignore[method-assign]
        running = asyncio.create_task(lease.registration.run())
        await is_beating.wait()
        running.cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()
