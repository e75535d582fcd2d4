"""A replica that is killed, or ended, and comes back under its name on its disk."""

import asyncio
import random
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import Tier
from replicas.protocol.frames import PromptUsage
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.status import ReplicaState
from tests.replicas.mirror import connect, read_record, read_tiers
from tests.replicas.process_replica import REPOSITORY
from tests.replicas.router_client import ROOT, RouterClient, submit
from tests.replicas.whole_replica import MODEL, REPLICA

CHUNK_BYTES = 4096 + 128 * 2560
"""Of the toy model, in float32."""

HOST_CHUNKS, DISK_CHUNKS = 40, 200
"""36 chunks are made: all fit, and those that do not fit into three quarters are written at once."""


def prompt(number: int) -> list[int]:
    """Three chunks and a bit."""
    rng = random.Random(number)
    return [rng.randrange(3, 500) for _ in range(400)]


def chunk_keys(number: int) -> list[BlockHash]:
    return hash_blocks(ROOT, prompt(number), 16)[7::8]


def journal_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("journal.log"))


@asynccontextmanager
async def replica(
    redis_url: str, folder: Path, **changes: object
) -> AsyncIterator[tuple[Process, ReplicaRecord, RouterClient]]:
    """One that is ready, by its own record in Redis."""
    flags: dict[str, object] = {
        "replica-id": REPLICA,
        "engine": "torch",
        "device": "cpu",
        "num-threads": 1,
        "num-blocks": 64,
        "context-length": 600,
        "redis-url": redis_url,
        "host-kv-bytes": HOST_CHUNKS * CHUNK_BYTES,
        "disk-kv-bytes": DISK_CHUNKS * CHUNK_BYTES,
        "disk-reserve-bytes": 0,
        "kv-folder": folder,
        "lease-seconds": 2,
        "heartbeat-seconds": 0.2,
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "replicas",
        *(f"--{name}={value}" for name, value in flags.items()),
        cwd=REPOSITORY,
    )
    redis = connect(redis_url)
    try:
        while not (
            (record := await read_record(redis, MODEL, REPLICA)) and record.state is ReplicaState.READY
        ):
            assert process.returncode is None
            await asyncio.sleep(0.02)
        async with grpc.aio.insecure_channel(record.address) as channel:
            yield process, record, RouterClient(channel)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await redis.delete(f"kvasir:v1:{{{MODEL}}}:replica:{REPLICA}")
        await redis.aclose()


async def ask(client: RouterClient, submit_id: int, number: int) -> tuple[list[int], PromptUsage]:
    await client.send(submit(submit_id, prompt(number), max_tokens=4))
    ((_, deltas),) = (await client.finish((submit_id, 0))).items()
    (usage,) = [delta.usage for delta in deltas if delta.usage is not None]
    return [token for delta in deltas for token in delta.token_ids], usage


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
async def test_a_replica_that_comes_back_hits_on_its_first_request(
    redis_url: str, tmp_path: Path, end: signal.Signals
) -> None:
    redis = connect(redis_url)
    answers: dict[int, list[int]] = {}
    async with replica(redis_url, tmp_path / "kv") as (process, record, client):
        for number in range(12):
            answers[number], usage = await ask(client, number + 1, number)
            assert usage.num_cached_tokens == 0

        while not journal_bytes(tmp_path):  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.02)
        process.send_signal(end)
        await process.wait()
    async with replica(redis_url, tmp_path / "kv") as (_, record, client):
        tiers = await read_tiers(redis, MODEL, REPLICA, record.epoch)
        assert set(tiers.values()) == {Tier.DISK}, "the index was not filled before the replica was ready"
        on_disk = [number for number in range(12) if set(chunk_keys(number)) <= set(tiers)]
        assert len(on_disk) == 12 if end is signal.SIGTERM else on_disk
        for submit_id, number in enumerate(on_disk, 1):
            answer, usage = await ask(client, submit_id, number)
            assert answer == answers[number]
            assert usage.num_cached_tokens == usage.num_disk_tokens == 384
    await redis.aclose()
