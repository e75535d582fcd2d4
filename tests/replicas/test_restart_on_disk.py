"""A replica that is killed, or ended, and comes back under its name on its disk."""

import asyncio
import random
import signal
from pathlib import Path

import pytest

from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import Tier
from replicas.protocol.frames import PromptUsage
from tests.replicas.mirror import connect, read_tiers
from tests.replicas.router_client import ROOT, RouterClient, submit
from tests.replicas.test_peer_pull import CHUNK_BYTES, process
from tests.replicas.whole_replica import MODEL, REPLICA

DISK_CHUNKS = 200
"""36 chunks are made: all fit, and those that do not fit into three quarters are written at once."""


def prompt(number: int) -> list[int]:
    """Three chunks and a bit."""
    rng = random.Random(number)
    return [rng.randrange(3, 500) for _ in range(400)]


def chunk_keys(number: int) -> list[BlockHash]:
    return hash_blocks(ROOT, prompt(number), 16)[7::8]


def journal_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("journal.log"))


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
    disk = {"disk_kv_bytes": DISK_CHUNKS * CHUNK_BYTES, "disk_reserve_bytes": 0, "kv_folder": tmp_path / "kv"}
    async with process(redis_url, 0, **disk) as first:
        for number in range(12):
            answers[number], usage = await ask(first.client, number + 1, number)
            assert usage.num_cached_tokens == 0

        while not journal_bytes(tmp_path):  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.02)
        first.process.send_signal(end)
        await first.process.wait()
    async with process(redis_url, 0, **disk) as second:
        tiers = await read_tiers(redis, MODEL, REPLICA, second.record.epoch)
        assert set(tiers.values()) == {Tier.DISK}, "the index was not filled before the replica was ready"
        on_disk = [number for number in range(12) if set(chunk_keys(number)) <= set(tiers)]
        assert len(on_disk) == 12 if end is signal.SIGTERM else on_disk
        for submit_id, number in enumerate(on_disk, 1):
            answer, usage = await ask(second.client, submit_id, number)
            assert answer == answers[number]
            assert usage.num_cached_tokens == usage.num_disk_tokens == 384
    await redis.aclose()
