"""Two replicas of vLLM, and prompts whose KV the other has: over real gRPC, whatever the peer does.

The one that pulls has its engine in this process, where tests look inside. The other's is in its own.
"""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from replicas.kvstore import plan
from replicas.kvstore.directory import ChunkPlace
from replicas.kvstore.pulling import pull as pull_module
from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import Abort, RequestKey, Submit
from replicas.protocol.pulls import PullPart
from replicas.scheduling.speed_meter import SpeedMeter
from tests.redis_server import RedisServer
from tests.replicas.router_client import RouterClient
from tests.replicas.vllm_engine.peer_replica import CHUNK, Between, Two, Way, peer_replica, two_replicas
from tests.replicas.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

NUM_CHUNKS = 9
NUM_TOKENS = CHUNK * NUM_CHUNKS
NUM_MORE = 40


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(environment: None, shared_redis: RedisServer) -> AsyncIterator[Two]:
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
    assert len(pulling) <= pull_module.NUM_THREADS


def prompt_of(number: int, num_tokens: int = NUM_TOKENS + NUM_MORE) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, 500) for _ in range(num_tokens)]


def another_root(number: int) -> BlockHash:
    """Under which nothing was computed before."""
    return BlockHash(number.to_bytes(16, "big"))


async def test_what_the_other_has_computed_is_pulled_and_gives_the_same_tokens(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replicas.vllm_engine.row_copier import RowCopier

    there, here = two
    num_loaded = 0
    copy_in = RowCopier.copy_in

    def count(self: Any, slots: Any, places: Any, block_ids: Any) -> None:
        nonlocal num_loaded
        num_loaded += len(block_ids)
        copy_in(self, slots, places, block_ids)

    monkeypatch.setattr(RowCopier, "copy_in", count)
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
        assert num_loaded * 32 == (number + 1) * NUM_TOKENS
        computed_here, usage = await here.ask(prompt, root=another_root(number + 1))
        assert computed_here == computed and usage.num_cached_tokens == 0
    await until(lambda: there.metric("replica_sent_chunks_total") == num_sent + 3 * NUM_CHUNKS)
    after = [here.metric(name, way="pull") for name in names]
    assert [after[0] - before[0], after[1] - before[1]] == [3 * NUM_CHUNKS, 3 * NUM_TOKENS]
    answer, usage = await here.ask(prompt_of(2), there.hint(NUM_TOKENS))
    assert answer == (await there.ask(prompt_of(2)))[0]
    assert usage.num_cached_tokens >= NUM_TOKENS
    assert usage.num_pulled_tokens == 0, "it was pulled for another request"


async def test_the_engine_that_is_pulled_from_takes_no_step(two: Two) -> None:
    there, here = two
    prompt = prompt_of(10)
    computed, _ = await there.ask(prompt)
    with there.stopped():
        answer, usage = await here.ask(prompt, there.hint(NUM_TOKENS))
    assert answer == computed
    assert usage.num_pulled_tokens == NUM_TOKENS


def waits(between: Between, parts: Iterator[PullPart], context: Any) -> Iterator[PullPart]:
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


def lies(between: Between, parts: Iterator[PullPart], context: Any) -> Iterator[PullPart]:
    for part in parts:
        if part.index == 3:
            content = bytearray(part.content)
            content[-1000] ^= 1
            part = PullPart(part.index, bytes(content))
        yield part


def stalls(between: Between, parts: Iterator[PullPart], context: Any) -> Iterator[PullPart]:
    for part in parts:
        if part.index == 3:
            between.was_left.wait()
            return
        yield part


def vanishes(between: Between, parts: Iterator[PullPart], context: Any) -> Iterator[PullPart]:
    for part in parts:
        if part.index == 3:
            between.vanish()
            between.was_left.wait()
            return
        yield part


def sends_half(between: Between, parts: Iterator[PullPart], context: Any) -> Iterator[PullPart]:
    for part in parts:
        if part.index == 3:
            yield PullPart(part.index, part.content[: len(part.content) // 2])
            return
        yield part


def refuses(between: Between, parts: Iterator[PullPart], context: Any) -> Iterator[PullPart]:
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no")
    yield from parts


@pytest.mark.parametrize(
    ("way", "reason", "num_chunks"),
    [
        (lies, "damaged", 3),
        (stalls, "late", 3),
        (vanishes, "unreachable", None),
        (sends_half, "damaged", 3),
        (refuses, "refused", 0),
    ],
)
async def test_a_peer_that_fails_costs_time_only(
    two: Two, way: Way, reason: str, num_chunks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = two
    if way is stalls:
        monkeypatch.setattr(pull_module, "MIN_SECONDS", 1.0)
    prompt = prompt_of(first_prompt_of(way))
    computed, _ = await there.ask(prompt)
    failures = {"way": "pull", "reason": reason}
    before = here.metric("replica_tier_failed_moves_total", **failures)
    with Between(there, way) as between:
        answer, usage = await here.ask(prompt, between.hint(NUM_TOKENS))
        assert answer == computed
        assert usage.num_pulled_tokens == usage.num_cached_tokens
        if num_chunks is None:
            assert usage.num_pulled_tokens <= 3 * CHUNK
        else:
            assert usage.num_pulled_tokens == num_chunks * CHUNK
        await until(lambda: here.metric("replica_tier_failed_moves_total", **failures) == before + 1)
        await until(here.is_at_rest)
    again, usage = await here.ask(prompt, there.hint(NUM_TOKENS))
    assert again == computed and usage.num_cached_tokens >= NUM_TOKENS
    prompt = prompt_of(first_prompt_of(way) + 1)
    computed, _ = await there.ask(prompt)
    answer, usage = await here.ask(prompt, there.hint(NUM_TOKENS))
    assert answer == computed and usage.num_pulled_tokens == NUM_TOKENS


def first_prompt_of(way: Way) -> int:
    """Where the numbers of its prompts begin."""
    return 100 + 10 * [lies, stalls, vanishes, sends_half, refuses].index(way)


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
            await router.send(Abort(RequestKey(asked.submit_id, 0)))
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


async def test_a_peer_of_another_block_size_is_refused(two: Two, shared_redis: RedisServer) -> None:
    _, here = two
    before = here.metric("replica_tier_failed_moves_total", way="pull", reason="refused")
    async with peer_replica(shared_redis.url, 2, block_size=64, num_blocks=32) as there:
        prompt = prompt_of(600)
        await there.ask(prompt)
        computed, _ = await here.ask(prompt, root=another_root(600))
        answer, usage = await here.ask(prompt, there.hint(NUM_TOKENS))
        assert answer == computed
        assert (usage.num_cached_tokens, usage.num_pulled_tokens) == (0, 0)
        assert there.metric("replica_sent_chunks_total") == 0
        cards = [each.host._parts.card.kv_layout for each in (here, there) if each.host._parts]
        assert cards[0] and cards[1] and cards[0] != cards[1]

    def num_refused() -> float:
        return here.metric("replica_tier_failed_moves_total", way="pull", reason="refused")

    await until(lambda: num_refused() == before + 1)
