"""A whole replica in a test: its settings, an engine of the test's own, a router that talks to it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from replicas.config import ReplicaConfig
from replicas.engine import Engine
from replicas.host import ReplicaHost
from replicas.protocol.status import ReplicaId, TokenizerBundle
from tests.replicas.router_client import RouterClient

REPLICA = ReplicaId("r0")
MODEL = "toy_model"


def config(redis_url: str, **settings: Any) -> ReplicaConfig:
    defaults: dict[str, Any] = {
        "replica_id": REPLICA,
        "redis_url": redis_url,
        "engine": "simulated",
        "simulated_hardware": "instant",
        "lease_seconds": 10.0,
        "heartbeat_seconds": 0.05,
        "drain_seconds": 5.0,
    }
    return ReplicaConfig(**(defaults | settings))


def scripted(engine: Any) -> Callable[[ReplicaConfig], tuple[Engine, TokenizerBundle]]:
    return lambda _: (engine, TokenizerBundle({}))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)


@asynccontextmanager
async def running(host: ReplicaHost) -> AsyncIterator[RouterClient]:
    await host.start()
    try:
        async with grpc.aio.insecure_channel(host.address) as channel:
            yield RouterClient(channel)
    finally:
        await host.stop()
