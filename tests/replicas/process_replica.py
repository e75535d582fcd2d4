"""`python -m replicas` with an engine process, and a request in it that takes a while."""

import asyncio
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil

from tests.replicas.mirror import connect, read_record
from tests.replicas.router_client import RouterClient, submit
from tests.replicas.whole_replica import MODEL, REPLICA

REPOSITORY = Path(__file__).parents[2]

LONG_LEASE_SECONDS = 600.0
"""It outlives the test's time limit, so a record that is gone did not run out."""


@asynccontextmanager
async def replica(redis_url: str, *more: str) -> AsyncIterator[tuple[Process, psutil.Process, RouterClient]]:
    """The process, its engine's, and a router whose request 1 has had its first tokens."""
    flags = [f"--replica-id={REPLICA}", "--engine=simulated", "--engine-process=true"]
    flags += [f"--redis-url={redis_url}", f"--lease-seconds={LONG_LEASE_SECONDS}", *more]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "replicas", *flags, stderr=asyncio.subprocess.PIPE, cwd=REPOSITORY
    )
    redis = connect(redis_url)
    while (record := await read_record(redis, MODEL, REPLICA)) is None:
        assert process.returncode is None
        await asyncio.sleep(0.02)
    (child,) = psutil.Process(process.pid).children()
    async with grpc.aio.insecure_channel(record.address) as channel:
        client = RouterClient(channel)
        await client.send(submit(1, range(64), max_tokens=150))  # long enough for its speed to be measured
        frame = await client.read()
        while frame is not None and not frame.deltas:
            frame = await client.read()
        yield process, child, client
    await redis.aclose()
