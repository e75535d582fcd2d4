"""Two replicas of vLLM, and prompts whose KV the other has: over real gRPC, whatever the peer does.

The one that pulls has its engine in this process, where tests look inside. The other's is in its own.
"""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import pytest_asyncio
from msgspec.structs import replace

from replicas.config import ReplicaConfig
from replicas.engine_process.build import build_engine
from replicas.host import ReplicaHost
from replicas.kvstore import plan
from replicas.kvstore.directory import ChunkPlace
from replicas.kvstore.layout import file_bytes
from replicas.kvstore.pulling import pull as pull_module
from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import Abort, PromptUsage, StepFrame, Submit
from replicas.protocol.pulls import PullHint, PullPart
from replicas.scheduling.speed_meter import SpeedMeter
from tests.redis_server import RedisServer
from tests.replicas.between import Between, dies, freezes
from tests.replicas.router_client import ROOT, RouterClient, submit
from tests.replicas.splitting import (
    Side,
    Tally,
    compare,
    first_part,
    greedy,
    is_at_rest,
    new_root,
    new_split,
    random_request,
    second_part,
)
from tests.replicas.vllm_engine.conftest import OneEngine
from tests.replicas.vllm_engine.tiered_run import BLOCK_BYTES
from tests.replicas.waiting import until
from tests.replicas.whole_replica import config

if TYPE_CHECKING:
    from replicas.vllm_engine.engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CHUNK = 128
"""A step's tokens, too: so an engine computes a prompt in the same steps, however much of it was there."""

SETTINGS: dict[str, Any] = {
    "engine": "vllm",
    "num_threads": 1,
    "num_blocks": 64,
    "context_length": 1300,
    "max_batched_tokens": CHUNK,
    "dtype": "float32",
    "max_running": 16,
    "host_kv_bytes": 40 * file_bytes(4 * 2 * BLOCK_BYTES),
    "pull_bytes_per_second": 1e9,
    "role": "decode",
    "lease_seconds": 600.0,
}


@dataclass
class PeerReplica:
    host: ReplicaHost
    engine: Any
    channel: grpc.aio.Channel
    client: RouterClient
    frames: list[StepFrame]
    """Those of an engine in this process."""
    last_id: int = 0

    def hint(self, num_tokens: int, **other: Any) -> PullHint:
        record = self.host.record()
        return replace(PullHint(record.replica_id, record.epoch, record.address, num_tokens), **other)

    def submit(
        self,
        prompt: list[int],
        pull: PullHint | None = None,
        *,
        root: BlockHash = ROOT,
        max_tokens: int = 6,
    ) -> Submit:
        self.last_id += 1
        asked = submit(self.last_id, prompt, max_tokens=max_tokens)
        greedy = replace(asked.sampling, temperature=0.0)
        return replace(asked, root=root, pull=pull, sampling=greedy)

    async def answer(self, *asked: Submit) -> list[tuple[list[int], PromptUsage]]:
        """All at once."""
        await self.client.send(*asked)
        return await self.finish(*asked)

    async def finish(self, *asked: Submit) -> list[tuple[list[int], PromptUsage]]:
        """Of what was sent before."""
        found = await self.client.finish(*((each.submit_id, 0) for each in asked))
        answers: list[tuple[list[int], PromptUsage]] = []
        for _, deltas in sorted(found.items()):
            (usage,) = [delta.usage for delta in deltas if delta.usage is not None]
            answers.append(([token for delta in deltas for token in delta.token_ids], usage))
        return answers

    async def ask(
        self, prompt: list[int], pull: PullHint | None = None, **fields: Any
    ) -> tuple[list[int], PromptUsage]:
        (answer,) = await self.answer(self.submit(prompt, pull, **fields))
        return answer

    def metric(self, name: str, **labels: str) -> float:
        assert self.host._parts is not None
        return self.host._parts.metrics.registry.get_sample_value(name, labels) or 0.0

    def is_at_rest(self) -> bool:
        """An engine in this process holds no block, slot, pin, request or transfer."""
        engine: VllmEngine = self.engine
        tier = engine._tier
        assert tier is not None and self.host._parts is not None
        return (
            not (engine._live or tier.chains or self.host._parts.server.num_requests)
            and engine.core.num_free_blocks == engine.core.num_blocks
            and is_at_rest(tier.store)
        )


Two = tuple[PeerReplica, PeerReplica]
"""The one that is pulled from, and the one that pulls."""


@asynccontextmanager
async def peer_replica(redis_url: str, number: int, **settings: Any) -> AsyncIterator[PeerReplica]:
    built: list[Any] = []
    frames: list[StepFrame] = []

    def build(config: ReplicaConfig) -> Any:
        engine, bundle = build_engine(config)
        built.append(engine)
        if not config.has_engine_process:
            _keep_frames(engine, frames)
        return engine, bundle

    host = ReplicaHost(config(redis_url, **{**SETTINGS, "replica_id": f"r{number}", **settings}), build=build)
    await host.start()
    try:
        async with grpc.aio.insecure_channel(host.address) as channel:
            yield PeerReplica(host, built[0], channel, RouterClient(channel), frames)
    finally:
        await host.stop()


@asynccontextmanager
async def two_replicas(redis_url: str, **settings: Any) -> AsyncIterator[Two]:
    """The engine of the one that pulls is in this process, that of the other in its own."""
    async with AsyncExitStack() as stack:
        there = asyncio.create_task(stack.enter_async_context(peer_replica(redis_url, 0, **settings)))
        pulling = peer_replica(redis_url, 1, engine_process=False, **settings)
        here = await stack.enter_async_context(pulling)
        yield await there, here


def _keep_frames(engine: Any, frames: list[StepFrame]) -> None:
    step = engine.step

    def kept() -> StepFrame:
        frame: StepFrame = step()
        frames.append(frame)
        return frame

    engine.step = kept


NUM_CHUNKS = 9
NUM_TOKENS = CHUNK * NUM_CHUNKS
NUM_MORE = 40


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(one_engine: OneEngine, shared_redis: RedisServer) -> AsyncIterator[Two]:
    one_engine.close()
    async with two_replicas(shared_redis.url) as both:
        yield both


@pytest_asyncio.fixture(loop_scope="module")
async def two(replicas: Two, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Two]:
    """Computing counts as slow, so that it never is the better way, and nothing is given up because the
    machine is.
    """
    monkeypatch.setattr(plan, "MIN_PATIENCE_SECONDS", 300.0)
    monkeypatch.setattr(pull_module, "MIN_SECONDS", 300.0)
    monkeypatch.setattr(SpeedMeter, "prefill_seconds_per_token", 1.0)
    _, here = replicas
    here.frames.clear()
    yield replicas
    await until(here.is_at_rest)
    pulling = [thread for thread in threading.enumerate() if thread.name == "kv-pull"]
    assert len(pulling) <= pull_module.NUM_THREADS + pull_module.MAX_BINDING


def prompt_of(number: int, num_tokens: int = NUM_TOKENS + NUM_MORE) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, 500) for _ in range(num_tokens)]


def another_root(number: int) -> BlockHash:
    """Under which nothing was computed before."""
    return BlockHash(number.to_bytes(16, "big"))


async def test_what_the_other_has_computed_is_pulled_and_gives_the_same_tokens(two: Two) -> None:
    there, here = two
    cards = [each.host._parts.card for each in two if each.host._parts is not None]
    assert [(card.role, card.splits_by) for card in cards] == [("decode", "pull")] * 2
    names = ("replica_tier_moves_total", "replica_tier_moved_tokens_total")
    before = [here.metric(name, way="pull") for name in names]
    num_sent = there.metric("replica_sent_chunks_total")
    for number in range(3):
        prompt = prompt_of(number)
        computed, usage = await there.ask(prompt)
        assert usage.num_cached_tokens == 0
        here.frames.clear()
        answer, usage = await here.ask(prompt, there.hint(NUM_TOKENS))
        assert answer == computed
        assert usage.num_prompt_tokens == NUM_TOKENS + NUM_MORE
        assert usage.num_pulled_tokens == usage.num_slower_tier_tokens == usage.num_cached_tokens
        assert usage.num_cached_tokens == NUM_TOKENS
        assert usage.num_disk_tokens == 0
        assert sum(frame.num_prefill_tokens for frame in here.frames) == NUM_MORE
        computed_here, usage = await here.ask(prompt, root=another_root(number + 1))
        assert computed_here == computed and usage.num_cached_tokens == 0
    await until(lambda: there.metric("replica_sent_chunks_total") == num_sent + 3 * NUM_CHUNKS)
    after = [here.metric(name, way="pull") for name in names]
    assert [after[0] - before[0], after[1] - before[1]] == [3 * NUM_CHUNKS, 3 * NUM_TOKENS]
    answer, usage = await here.ask(prompt_of(2), there.hint(NUM_TOKENS))
    assert answer == (await there.ask(prompt_of(2)))[0]
    assert usage.num_cached_tokens >= NUM_TOKENS
    assert usage.num_pulled_tokens == 0, "it was pulled for another request"


def waits(between: Between, parts: Iterator[PullPart]) -> Iterator[PullPart]:
    """After three chunks, until it may go on."""
    for part in parts:
        if part.index == 3:
            between.may_go_on.wait()
        yield part


async def test_a_request_is_scheduled_when_its_chunks_have_come_and_others_meanwhile(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replicas.vllm_engine.lower_tier import LowerTier

    there, here = two
    prompt = prompt_of(20)
    computed, _ = await there.ask(prompt)
    found: list[tuple[list[ChunkPlace | None], int]] = []
    started = LowerTier.started

    def spy(tier: LowerTier, request_id: str) -> None:
        chain = tier.chains[request_id]
        places = [tier.store.directory.place(name.key) for name in chain.names()]
        started(tier, request_id)
        found.append((places, chain.num_found_tokens))

    monkeypatch.setattr(LowerTier, "started", spy)
    with Between(there, waits) as between:
        asked = here.submit(prompt, between.hint(NUM_TOKENS))
        await here.client.send(asked)
        await until(lambda: between.num_sent == 3)
        other = RouterClient(here.channel)
        short = here.submit(prompt_of(21, 20))
        await other.send(short)
        await other.finish((short.submit_id, 0))
        assert [num_found for _, num_found in found] == [0], "only the other one has been scheduled"
        other.call.cancel()
        between.may_go_on.set()
        ((answer, usage),) = await here.finish(asked)
    assert answer == computed
    assert usage.num_pulled_tokens == NUM_TOKENS
    assert found[1:] == [([ChunkPlace.HOST] * NUM_CHUNKS, NUM_TOKENS)]


def lies(between: Between, parts: Iterator[PullPart]) -> Iterator[PullPart]:
    for part in parts:
        if part.index == 3:
            content = bytearray(part.content)
            content[-1000] ^= 1
            part = PullPart(part.index, bytes(content))
        yield part


async def test_a_peer_that_lies_costs_time_only(two: Two) -> None:
    there, here = two
    prompt = prompt_of(100)
    computed, _ = await there.ask(prompt)
    failures = {"way": "pull", "reason": "damaged"}
    before = here.metric("replica_tier_failed_moves_total", **failures)
    with Between(there, lies) as between:
        answer, usage = await here.ask(prompt, between.hint(NUM_TOKENS))
        assert answer == computed
        assert usage.num_pulled_tokens == usage.num_cached_tokens == 3 * CHUNK
        await until(lambda: here.metric("replica_tier_failed_moves_total", **failures) == before + 1)
        await until(here.is_at_rest)
    again, usage = await here.ask(prompt, there.hint(NUM_TOKENS))
    assert again == computed and usage.num_cached_tokens >= NUM_TOKENS


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_client_that_leaves_while_its_prompt_is_pulled_leaves_nothing(
    two: Two, is_told: bool
) -> None:
    """By an abort, or with its router, whose stream ends."""
    there, here = two
    prompt = prompt_of(200 + is_told)
    computed, _ = await there.ask(prompt)
    with Between(there, waits) as between:
        asked = here.submit(prompt, between.hint(NUM_TOKENS))
        router = RouterClient(here.channel)
        await router.send(asked)
        await until(lambda: between.num_sent == 3)
        assert not here.is_at_rest()
        if is_told:
            await router.send(Abort(asked.submit_id))
        else:
            router.call.cancel()
        await until(lambda: not here.engine._live and not here.engine._tier.chains)
        assert here.engine.core.num_free_blocks == here.engine.core.num_blocks
        between.may_go_on.set()
        await until(here.is_at_rest)
    router.call.cancel()
    answer, usage = await here.ask(prompt)
    assert answer == computed
    assert (usage.num_cached_tokens, usage.num_slower_tier_tokens) == (NUM_TOKENS, NUM_TOKENS)


async def test_both_answer_a_storm_as_one_that_finds_nothing(two: Two) -> None:
    """Their devices hold 2,048 tokens each, the prompts have ten times as many."""
    rng = random.Random(7)
    shared = [prompt_of(300 + n, NUM_TOKENS) for n in range(4)]
    prompts = [
        [*rng.choice(shared)[: rng.randrange(100, NUM_TOKENS)], *prompt_of(400 + n, rng.randrange(1, 60))]
        for n in range(32)
    ]
    there, _ = two
    alone = [there.submit(prompt, root=another_root(500 + n)) for n, prompt in enumerate(prompts)]
    expected = await there.answer(*alone)
    assert not any(usage.num_cached_tokens for _, usage in expected)
    num_sent = there.metric("replica_sent_chunks_total")
    num_pulled = 0
    for first in range(0, 32, 8):
        asked: dict[int, list[tuple[int, Submit]]] = {0: [], 1: []}
        for n in rng.sample(range(32), 8) + list(range(first, first + 8)):
            to = rng.randrange(2)
            hint = two[1 - to].hint(len(prompts[n]) // CHUNK * CHUNK)
            asked[to].append((n, two[to].submit(prompts[n], hint if hint.num_tokens else None)))
        answers = await asyncio.gather(*(two[to].answer(*(each for _, each in asked[to])) for to in (0, 1)))
        for to in (0, 1):
            for (n, _), (answer, usage) in zip(asked[to], answers[to], strict=True):
                assert answer == expected[n][0]
                num_pulled += usage.num_pulled_tokens * to
    assert num_pulled
    assert there.metric("replica_sent_chunks_total") * CHUNK >= num_sent * CHUNK + num_pulled


def sides(two: Two) -> tuple[Side, Side]:
    there, here = two
    return Side(there.host, there.client), Side(here.host, here.client)


async def test_a_split_answers_as_the_undivided_request(two: Two) -> None:
    there, here = sides(two)
    number, rng = 100, random.Random(7)
    tally = Tally()
    while tally.num < number:
        await compare(there, here, rng, rng.choice((1, 1, 1, 5)), lambda: random_request(rng, 1200), tally)
    assert tally.num_to_the_bit and tally.num_pulled_tokens
    await until(lambda: not there.has_open_splits)


@pytest.mark.parametrize(("way", "wait_seconds"), [(freezes, 2.0), (dies, 50.0), (lies, 50.0)])
async def test_a_prefiller_that_fails_costs_time_only(two: Two, way: Any, wait_seconds: float) -> None:
    there, here = sides(two)
    asked, split = greedy(prompt_of(600)), new_split()
    with Between(there, way) as between:
        hint = between.hint(NUM_TOKENS, split_id=split, wait_seconds=wait_seconds)
        sent = await here.send(replace(asked, pull=hint))
        await there.ask(first_part(asked, split))
        ((answers, usage),) = await here.answers(sent)
    assert usage.num_pulled_tokens == 3 * CHUNK
    assert usage.num_lost_tokens == NUM_TOKENS - 3 * CHUNK
    ((expected, _),) = await here.ask(replace(asked, root=new_root()))
    assert answers[0].tokens == expected[0].tokens


async def test_the_decoder_need_not_wait_for_a_split_that_has_ended(two: Two) -> None:
    there, here = sides(two)
    asked, split = greedy(prompt_of(601)), new_split()
    sent = await here.send(second_part(asked, there, split))
    refused = await there.send(replace(first_part(asked, split), num_choices=1000))
    await there.client.finish((refused.submit_id, 0))
    ((_, usage),) = await here.answers(sent)
    assert (usage.num_pulled_tokens, usage.num_lost_tokens) == (0, NUM_TOKENS)


@pytest.mark.parametrize("is_running", [False, True])
async def test_a_client_that_leaves_leaves_nothing(two: Two, is_running: bool) -> None:
    there, here = sides(two)
    asked, split = greedy(prompt_of(602 + is_running), max_tokens=100), new_split()
    sent = await here.send(second_part(asked, there, split))
    if is_running:
        await there.ask(first_part(asked, split))
        await until(lambda: two[1].engine.core.num_running == 1)
    else:
        await until(lambda: there.metric("replica_waiting_pulls") == 1)
    await here.abort(sent)
    await until(lambda: two[1].is_at_rest() and not there.has_open_splits)
