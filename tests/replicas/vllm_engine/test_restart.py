"""A replica of vLLM that is killed, engine process and all, and comes back under its name on its disk."""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from replicas.kvstore.layout import file_bytes
from replicas.protocol.blocks import hash_blocks
from replicas.protocol.events import Tier
from replicas.protocol.frames import PromptUsage
from tests.replicas.mirror import connect, read_tiers
from tests.replicas.router_client import ROOT, RouterClient, submit
from tests.replicas.test_restart_on_disk import journal_bytes, replica
from tests.replicas.whole_replica import MODEL, REPLICA

pytestmark = pytest.mark.vllm

SLOT_BYTES = file_bytes(4 * 40_960)
SETTINGS = {
    "engine": "vllm",
    "block_size": 32,
    "host_kv_bytes": 76 * SLOT_BYTES,
    "disk_kv_bytes": 200 * SLOT_BYTES,
    "context_length": 1800,
    "heartbeat_seconds": 0.5,
}
NUM_PROMPTS, NUM_CHUNKS = 6, 12
"""They fit into host memory, but not into the three quarters that are not written to the disk: the first is
written. It is so long that reading should beat computing.
"""
JOURNAL_BYTES = 64 * NUM_CHUNKS
"""Of the chunks of one."""


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, 500) for _ in range(NUM_CHUNKS * 128 + 20)]


async def ask(client: RouterClient, submit_id: int, number: int) -> tuple[list[int], PromptUsage]:
    await client.send(submit(submit_id, prompt(number), max_tokens=4))
    ((_, deltas),) = (await client.finish((submit_id, 0))).items()
    (usage,) = [delta.usage for delta in deltas if delta.usage is not None]
    return [token for delta in deltas for token in delta.token_ids], usage


def memory_of_ours() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "vllm" in name or "kvasir" in name}


async def test_a_vllm_that_is_killed_comes_back_with_what_its_disk_has(
    environment: None, redis_url: str, tmp_path: Path
) -> None:
    before = memory_of_ours()
    redis = connect(redis_url)
    answers: list[list[int]] = []
    async with replica(redis_url, tmp_path / "kv", **SETTINGS) as (process, record, client):
        for number in range(NUM_PROMPTS):
            answer, usage = await ask(client, number + 1, number)
            assert usage.num_cached_tokens == 0
            answers.append(answer)
        while journal_bytes(tmp_path) < JOURNAL_BYTES:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        await process.wait()
    assert memory_of_ours() <= before
    async with replica(redis_url, tmp_path / "kv", **SETTINGS) as (_, record, client):
        tiers = await read_tiers(redis, MODEL, REPLICA, record.epoch)
        assert set(tiers.values()) == {Tier.DISK}
        keys = [hash_blocks(ROOT, prompt(number), 32)[3::4] for number in range(NUM_PROMPTS)]
        on_disk = [number for number in range(NUM_PROMPTS) if set(keys[number]) <= set(tiers)]
        assert on_disk
        for submit_id, number in enumerate(on_disk, 1):
            answer, usage = await ask(client, submit_id, number)
            assert answer == answers[number]
            # What lies on disk is read where that is sooner, which a busy machine may see otherwise.
            assert usage.num_disk_tokens == usage.num_slower_tier_tokens == usage.num_cached_tokens
    await redis.aclose()
