"""Two replica processes, one of which is killed while it sends, or receives, KV."""

import asyncio
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
from msgspec.structs import replace

from replicas.protocol.frames import PromptUsage
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.pulls import PullHint
from replicas.protocol.status import ReplicaId, ReplicaState
from tests.replicas.mirror import connect, read_record
from tests.replicas.process_replica import REPOSITORY
from tests.replicas.router_client import RouterClient, submit
from tests.replicas.test_peer_pull import NUM_CHUNKS, TIERS, prompt
from tests.replicas.whole_replica import MODEL

NUM_PROMPTS = 4


@dataclass
class Running:
    process: Process
    record: ReplicaRecord
    client: RouterClient

    @property
    def hint(self) -> PullHint:
        record = self.record
        return PullHint(record.replica_id, record.epoch, record.address, 128 * NUM_CHUNKS)

    async def ask(
        self, *numbers: int, pull: PullHint | None = None
    ) -> list[tuple[list[int], PromptUsage | None]]:
        """All at once."""
        for number in numbers:
            asked = submit(number + 1, prompt(number), max_tokens=4)
            greedy = replace(asked.sampling, temperature=0.0)
            await self.client.send(replace(asked, pull=pull, sampling=greedy))
        found = await self.client.finish(*((number + 1, 0) for number in numbers))
        return [
            (
                [token for delta in deltas for token in delta.token_ids],
                next((delta.usage for delta in deltas if delta.usage is not None), None),
            )
            for _, deltas in sorted(found.items())
        ]


@asynccontextmanager
async def process(redis_url: str, number: int) -> AsyncIterator[Running]:
    replica_id = ReplicaId(f"r{number}")
    flags = {
        **TIERS,
        "replica_id": replica_id,
        "redis_url": redis_url,
        "pull_bytes_per_second": 1e9,
        "lease_seconds": 2,
        "heartbeat_seconds": 0.2,
    }
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "replicas"),
        *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items()),
        cwd=REPOSITORY,
    )
    redis = connect(redis_url)
    try:
        while not (
            (record := await read_record(redis, MODEL, replica_id)) and record.state is ReplicaState.READY
        ):
            assert started.returncode is None
            await asyncio.sleep(0.02)
        async with grpc.aio.insecure_channel(record.address) as channel:
            yield Running(started, record, RouterClient(channel))
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()
        await redis.delete(f"kvasir:v1:{{{MODEL}}}:replica:{replica_id}")
        await redis.aclose()


@pytest.mark.parametrize(
    "delay", [0.03, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.0, 0.1))]
)
async def test_a_peer_that_is_killed_while_it_sends_costs_time_only(redis_url: str, delay: float) -> None:
    numbers = range(NUM_PROMPTS)
    async with process(redis_url, 0) as there, process(redis_url, 1) as here:
        expected = [answer for number in numbers for answer, _ in await there.ask(number)]
        asking = asyncio.create_task(here.ask(*numbers, pull=there.hint))
        await asyncio.sleep(delay)
        there.process.kill()
        assert [answer for answer, _ in await asking] == expected
        assert here.process.returncode is None


@pytest.mark.slow
async def test_a_replica_that_is_killed_while_it_pulls_harms_nobody(redis_url: str) -> None:
    async with process(redis_url, 0) as there:
        expected = [answer for number in range(NUM_PROMPTS) for answer, _ in await there.ask(number)]
        for delay in (0.02, 0.08):
            async with process(redis_url, 1) as here:
                asking = asyncio.create_task(here.ask(*range(NUM_PROMPTS), pull=there.hint))
                await asyncio.sleep(delay)
                here.process.kill()
                await here.process.wait()
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        async with process(redis_url, 1) as here:
            answers = await here.ask(*range(NUM_PROMPTS), pull=there.hint)
            assert [answer for answer, _ in answers] == expected
            pulled = [usage.num_pulled_tokens for _, usage in answers if usage is not None]
            assert max(pulled) == 128 * NUM_CHUNKS
