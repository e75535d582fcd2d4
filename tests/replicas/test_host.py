"""A whole replica: simulated or scripted engine, real gRPC, real Redis."""

import asyncio
import random
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from replicas.config import ReplicaConfig
from replicas.engine import Engine
from replicas.engines import build_engine
from replicas.errors import EngineDied, LeaseLost, StartupError
from replicas.host import ReplicaHost
from replicas.proof import prove_hashes
from replicas.protocol import replica_pb2 as pb
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from replicas.protocol.frames import Abort, FinishReason, RefusalCode, RequestKey, StepFrame, Submit, UserTag
from replicas.protocol.keys import blocks_key, is_indexed, replicas_key
from replicas.protocol.settings import SettingsError
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState, TokenizerBundle
from tests.redis_server import RedisServer
from tests.replicas.mirror import (
    connect,
    live_announcements,
    read_changes,
    read_record,
    read_set,
    replay,
)
from tests.replicas.router_client import RouterClient, submit
from tests.replicas.scripted_engine import CARD, ScriptedEngine

REPLICA = ReplicaId("r0")
MODEL = "toy_model"


def config(redis_url: str, **settings: Any) -> ReplicaConfig:
    defaults: dict[str, Any] = {
        "replica_id": REPLICA,
        "redis_url": redis_url,
        "engine": "simulated",
        "simulated_hardware": "instant",
        "lease_seconds": 1.0,
        "heartbeat_seconds": 0.05,
        "drain_seconds": 5.0,
    }
    return ReplicaConfig(**(defaults | settings))


def announcing(bare: Submit, block_size: int, index_stride: int) -> Submit:
    """As a router sends it that believes the replica's cache to be empty."""
    hashes = hash_blocks(bare.root, bare.token_ids, block_size)
    ends = {*range(index_stride // block_size - 1, len(hashes), index_stride // block_size), len(hashes) - 1}
    kept = tuple(hashes[end] for end in sorted(ends) if end >= 0)
    return replace(bare, announcement_id=bare.request_id + 1, announced_hashes=kept)


def scripted(engine: Any) -> Callable[[ReplicaConfig], tuple[Engine, TokenizerBundle]]:
    return lambda _: (engine, TokenizerBundle({}))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)


@asynccontextmanager
async def running(host: ReplicaHost) -> AsyncIterator[RouterClient]:
    await host.start()
    async with grpc.aio.insecure_channel(host.address) as channel:
        yield RouterClient(channel)
    await host.stop()


class WatchedEngine:
    """An engine that keeps all events that ever left it, as a second bookkeeper would see them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.events: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> StepFrame:
        frame = self._engine.step()
        self.events.extend(frame.events)
        return frame

    def kept(self, index_stride: int) -> set[BlockHash]:
        """Resident hashes on the stride, or stored as a prompt's end since they became resident."""
        copies: list[BlockHash] = []
        wanted: set[BlockHash] = set()
        size = self._engine.card.block_size
        for event in self.events:
            if isinstance(event, BlockStored):
                copies.extend(event.block_hashes)
                for offset, block_hash in enumerate(event.block_hashes):
                    is_last = offset == len(event.block_hashes) - 1
                    on_stride = is_indexed(event.first_block_index + offset, size, index_stride)
                    if on_stride or (event.ends_prompt and is_last):
                        wanted.add(block_hash)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    copies.remove(block_hash)
                    if block_hash not in copies:
                        wanted.discard(block_hash)
            else:
                assert isinstance(event, AllBlocksCleared)
                copies.clear()
                wanted.clear()
        return wanted


async def test_a_started_replica_is_registered_ready_and_its_index_empty(redis_url: str) -> None:
    host = ReplicaHost(config(redis_url))
    redis = connect(redis_url)
    async with running(host):
        assert host.state is ReplicaState.READY
        record = await read_record(redis, MODEL, REPLICA)
        assert record is not None
        assert (record.epoch, record.address, record.state) == (host.epoch, host.address, ReplicaState.READY)
        assert await redis.smembers(replicas_key(MODEL)) == {REPLICA.encode()}

        async def has_empty_set() -> bool:
            return await read_set(redis, MODEL, REPLICA, host.epoch) == set()

        await until(has_empty_set)
    assert host.state is ReplicaState.STOPPED
    await host.wait_dead()
    assert await read_record(redis, MODEL, REPLICA) is None
    assert await read_set(redis, MODEL, REPLICA, host.epoch) is None
    assert await redis.smembers(replicas_key(MODEL)) == set()
    await redis.aclose()


async def test_after_a_storm_redis_holds_exactly_what_the_engine_keeps(redis_url: str) -> None:
    settings = config(redis_url, num_blocks=64, block_size=4, context_length=200, max_running=8)
    engine, bundle = await asyncio.to_thread(build_engine, settings)
    watched = WatchedEngine(engine)
    host = ReplicaHost(config(redis_url, index_stride=8), build=lambda _: (watched, bundle))
    rng = random.Random(7)
    redis = connect(redis_url)
    async with running(host) as client:
        waiting = set()
        for request_id in range(200):
            start = rng.choice([0, 100, 200, 300])
            prompt = [start + n for n in range(rng.randrange(1, 60))] + [rng.randrange(2000)]
            await client.send(announcing(submit(request_id, prompt, max_tokens=rng.randrange(1, 30)), 4, 8))
            if rng.random() < 0.3:
                await client.send(Abort(request_id))
            else:
                waiting.add(request_id)
        while waiting:
            frame = await client.read()
            assert frame is not None
            waiting -= {delta.key.request_id for delta in frame.deltas if delta.finish_reason is not None}

        async def is_settled() -> bool:
            record = await read_record(redis, MODEL, REPLICA)
            changes = await read_changes(redis, MODEL, host.epoch)
            return (
                record is not None
                and not watched.has_work()
                and record.last_change == changes[-1].number
                and record.load.num_running == 0
            )

        await until(is_settled)
        await asyncio.sleep(0.1)
        expected = watched.kept(index_stride=8)
        assert any(isinstance(event, BlockRemoved) for event in watched.events)
        assert len(expected) > 5
        assert await read_set(redis, MODEL, REPLICA, host.epoch) == expected
        changes = await read_changes(redis, MODEL, host.epoch)
        assert replay(changes) == expected
        assert live_announcements(changes) == {}
        assert sum(len(change.announced) for change in changes) > 20
        listed = [message.hashes async for message in client.stub.ListBlocks(pb.ListBlocksRequest())]
        packed = b"".join(listed)
        assert {packed[at : at + 16] for at in range(0, len(packed), 16)} == expected
        record = await read_record(redis, MODEL, REPLICA)
        assert record is not None
        assert (record.load.num_running, record.load.num_waiting, record.load.num_used_blocks) == (0, 0, 0)
    await redis.aclose()


@pytest.mark.timeout(60)
async def test_when_an_announcement_ends_its_blocks_are_there(redis_url: str) -> None:
    host = ReplicaHost(config(redis_url, index_stride=16, max_batched_tokens=64, max_running=8))
    rng = random.Random(2)
    keys: list[tuple[int, int]] = []
    redis = connect(redis_url)
    async with running(host) as client:
        for request_id in range(1, 150):
            prompt = [rng.randrange(4) * 500 + n for n in range(rng.randrange(16, 400))]
            num_choices = rng.randrange(1, 4)
            keys += [(request_id, choice) for choice in range(num_choices)]
            bare = submit(request_id, prompt, max_tokens=2, num_choices=num_choices)
            await client.send(announcing(bare, 16, 16))
            if request_id % 10 == 0:
                await asyncio.sleep(0.002)
        await client.finish(*keys)

        async def is_over() -> bool:
            record = await read_record(redis, MODEL, REPLICA)
            return record is not None and record.load.num_running == record.load.num_waiting == 0

        await until(is_over)
        held: set[BlockHash] = set()
        live: dict[int, tuple[BlockHash, ...]] = {}
        num_ended = 0
        for change in await read_changes(redis, MODEL, host.epoch):
            held |= set(change.added)
            assert not change.removed
            live |= {it.announcement_id: it.block_hashes for it in change.announced}
            for announcement_id in change.ended:
                num_ended += 1
                assert held.issuperset(live.pop(announcement_id))
        assert live == {}
        assert num_ended > 20
    await redis.aclose()


async def test_the_probe_leaves_no_trace(redis_url: str) -> None:
    host = ReplicaHost(config(redis_url))
    async with running(host) as client:
        await client.send(submit(1))  # shorter than a block, so it adds none
        frame = await client.read()
        while frame is not None and not any(delta.finish_reason for delta in frame.deltas):
            frame = await client.read()
        assert frame is not None
        assert (frame.load.num_used_blocks, frame.load.num_cached_blocks) == (0, 0)
        assert [message async for message in client.stub.ListBlocks(pb.ListBlocksRequest())] == []


async def test_an_engine_that_hashes_otherwise_is_refused_and_never_registers(redis_url: str) -> None:
    engine = ScriptedEngine(corrupt=lambda block_hash: BlockHash(block_hash[::-1]))
    host = ReplicaHost(config(redis_url), build=scripted(engine))
    with pytest.raises(StartupError, match="another hash for block 0"):
        await host.start()
    assert engine.is_closed
    redis = connect(redis_url)
    assert await redis.keys("*") == []
    await redis.aclose()


def test_the_proof_refuses_an_engine_that_reports_nothing() -> None:
    class Silent(ScriptedEngine):
        def step(self) -> StepFrame:
            return replace(super().step(), events=[])

    with pytest.raises(StartupError, match="did not report block 0"):
        prove_hashes(Silent(), random.Random(1))


def test_the_proof_refuses_an_engine_without_room_for_a_block() -> None:
    with pytest.raises(StartupError, match="no room"):
        prove_hashes(ScriptedEngine(card=replace(CARD, num_blocks=1)), random.Random(1))


async def test_a_router_that_vanishes_frees_the_engine(redis_url: str) -> None:
    host = ReplicaHost(config(redis_url, simulated_hardware="h100-8b"))
    redis = connect(redis_url)
    async with running(host):
        async with grpc.aio.insecure_channel(host.address) as channel:
            client = RouterClient(channel)
            await client.send(submit(1, range(100), max_tokens=5000, num_choices=4))
            frame = await client.read()
            while frame is not None and not frame.deltas:
                frame = await client.read()

        async def is_empty() -> bool:
            record = await read_record(redis, MODEL, REPLICA)
            return record is not None and record.load.num_used_blocks == record.load.num_running == 0

        await until(is_empty)
    await redis.aclose()


async def test_drain_finishes_what_runs_refuses_the_rest_and_leaves(redis_url: str) -> None:
    engine = ScriptedEngine()
    host = ReplicaHost(config(redis_url), build=scripted(engine))
    redis = connect(redis_url)
    async with running(host) as client:
        engine.gate.clear()
        await client.send(submit(1, max_tokens=3))
        frame = await client.read()
        while len(engine.added) < 2:  # noqa: ASYNC110 - the first was the probe
            await asyncio.sleep(0.005)
        await client.stub.Drain(pb.DrainRequest())
        while host.state is not ReplicaState.DRAINING:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await client.send(submit(2))
        refused = await client.finish((2, 0))
        assert refused[RequestKey(2, 0)][0].refusal is not None
        record = await read_record(redis, "scripted", REPLICA)
        while record is not None and record.state is not ReplicaState.DRAINING:
            record = await read_record(redis, "scripted", REPLICA)
        engine.gate.set()
        assert len((await client.finish((1, 0)))[RequestKey(1, 0)]) == 3
        while frame is not None:
            frame = await client.read()
        await host.wait_dead()
    assert engine.is_closed
    assert await redis.keys("*replica:*") == []
    await redis.aclose()


async def test_a_drain_does_not_wait_for_ever(redis_url: str) -> None:
    host = ReplicaHost(config(redis_url, drain_seconds=0.1, simulated_hardware="h100-8b"))
    async with running(host) as client:
        await client.send(submit(1, max_tokens=8000))
        await client.read()
        await asyncio.gather(host.drain(), host.drain())
        assert host.state is ReplicaState.STOPPED


async def test_a_dead_engine_ends_its_requests_and_the_replica(redis_url: str) -> None:
    engine = ScriptedEngine(fail_at_step=20)
    host = ReplicaHost(config(redis_url), build=scripted(engine))
    redis = connect(redis_url)
    async with running(host) as client:
        await client.send(submit(1, max_tokens=10**6))
        found = await client.finish((1, 0))
        last = found[RequestKey(1, 0)][-1]
        assert last.finish_reason is FinishReason.ERROR
        assert last.refusal is not None
        assert last.refusal.code is RefusalCode.INTERNAL
        with pytest.raises(EngineDied, match="scripted failure"):
            await host.wait_dead()
    assert await read_record(redis, "scripted", REPLICA) is None
    await redis.aclose()


async def test_serving_goes_on_through_an_outage_of_redis_and_the_index_comes_back(
    own_redis: RedisServer,
) -> None:
    host = ReplicaHost(config(own_redis.url, index_stride=16))
    async with running(host) as client:
        await client.send(submit(1, range(64)))
        await client.finish((1, 0))
        own_redis.kill()
        await client.send(submit(2, range(100, 200)))
        await client.finish((2, 0))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(own_redis.start)
        redis = connect(own_redis.url)

        async def is_back() -> bool:
            held = await read_set(redis, MODEL, REPLICA, host.epoch)
            return (
                held is not None
                and len(held) == 4 + 6
                and await read_record(redis, MODEL, REPLICA) is not None
            )

        await until(is_back)
        await redis.aclose()


async def test_a_replica_starts_and_serves_without_redis_and_registers_when_it_comes(
    own_redis: RedisServer,
) -> None:
    own_redis.kill()
    host = ReplicaHost(config(own_redis.url, lease_seconds=0.2))
    async with running(host) as client:
        await client.send(submit(1))
        await client.finish((1, 0))
        await asyncio.to_thread(own_redis.start)
        redis = connect(own_redis.url)

        async def is_registered() -> bool:
            return await read_record(redis, MODEL, REPLICA) is not None

        await until(is_registered)
        await redis.aclose()


async def test_a_lost_blocks_set_is_written_again_by_the_heartbeat(redis_url: str) -> None:
    host = ReplicaHost(config(redis_url, index_stride=16))
    redis = connect(redis_url)
    async with running(host) as client:
        await client.send(submit(1, range(64)))
        await client.finish((1, 0))

        async def is_written() -> bool:
            held = await read_set(redis, MODEL, REPLICA, host.epoch)
            return held is not None and len(held) == 4

        await until(is_written)
        await redis.flushall()
        await until(is_written)
    await redis.aclose()


async def test_a_replica_restarted_under_its_old_name_replaces_its_dead_predecessor(redis_url: str) -> None:
    redis = connect(redis_url)
    first = ReplicaHost(config(redis_url))
    async with running(first):

        async def has_set() -> bool:
            return await read_set(redis, MODEL, REPLICA, first.epoch) is not None

        await until(has_set)
        dead = await redis.dump(f"kvasir:v1:{{{MODEL}}}:replica:{REPLICA}")
        members = await redis.smembers(blocks_key(MODEL, REPLICA, first.epoch))
    # As a kill would leave it: the record and the set of the old epoch are still there.
    await redis.restore(f"kvasir:v1:{{{MODEL}}}:replica:{REPLICA}", 60_000, dead)
    await redis.sadd(blocks_key(MODEL, REPLICA, first.epoch), *members)
    other = blocks_key(MODEL, ReplicaId("r1"), Epoch("other"))
    await redis.sadd(other, b"\x00")
    second = ReplicaHost(config(redis_url))
    async with running(second):
        record = await read_record(redis, MODEL, REPLICA)
        assert record is not None
        assert record.epoch == second.epoch != first.epoch
        assert await read_set(redis, MODEL, REPLICA, first.epoch) is None
        assert await redis.exists(other)
        assert second.state is ReplicaState.READY
    await redis.aclose()


async def test_the_older_of_two_replicas_with_one_name_steps_down(redis_url: str) -> None:
    older, newer = ReplicaHost(config(redis_url)), ReplicaHost(config(redis_url))
    redis = connect(redis_url)
    async with running(older), running(newer):
        with pytest.raises(LeaseLost, match="another process"):
            await older.wait_dead()
        assert newer.state is ReplicaState.READY
        record = await read_record(redis, MODEL, REPLICA)
        assert record is not None
        assert record.epoch == newer.epoch
        assert await read_set(redis, MODEL, REPLICA, older.epoch) is None
    await redis.aclose()


async def test_metrics_are_served_and_count(redis_url: str) -> None:
    host = ReplicaHost(config(redis_url, metrics_port=0))
    async with running(host) as client:
        for request_id, user in ((1, b"ann"), (2, b"bob")):
            await client.send(replace(submit(request_id, range(64), max_tokens=4), user=UserTag(user)))
            await client.finish((request_id, 0))
        url = f"http://127.0.0.1:{host.metrics_port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["replica_prompt_tokens_total"]) == 128
    assert float(values["replica_cached_tokens_total"]) == 48
    assert float(values["replica_cross_user_tokens_total"]) == 48
    assert [float(values[f'replica_resident_hashes{{tier="{tier}"}}']) for tier in Tier] == [4, 0, 0]
    assert float(values["replica_generated_tokens_total"]) == 8
    assert values["vllm:prefix_cache_queries_total"] == values["replica_prompt_tokens_total"]
    assert values["vllm:prefix_cache_hits_total"] == values["replica_cached_tokens_total"]
    assert float(values["replica_steps_total"]) >= 8


async def test_a_taken_port_is_one_clear_sentence(redis_url: str, free_port: int) -> None:
    async with running(ReplicaHost(config(redis_url, port=free_port))):
        second = ReplicaHost(config(redis_url, replica_id="r1", port=free_port))
        with pytest.raises(StartupError, match=f"cannot listen.*{free_port}"):
            await second.start()


async def test_an_address_that_is_no_redis_is_one_clear_sentence() -> None:
    with pytest.raises(StartupError, match="redis_url"):
        await ReplicaHost(config("http://nowhere")).start()


async def test_stop_before_start_is_harmless_and_start_then_ends_at_once(redis_url: str) -> None:
    host = ReplicaHost(config(redis_url))
    await host.stop()
    await host.start()
    await host.wait_dead()
    assert host.state is ReplicaState.STOPPED


def test_unknown_hardware_is_one_clear_sentence() -> None:
    with pytest.raises(SettingsError, match="simulated_hardware"):
        build_engine(config("redis://x", simulated_hardware="abacus"))
