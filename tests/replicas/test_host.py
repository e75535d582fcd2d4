"""A whole replica: simulated or scripted engine, real gRPC, real Redis."""

import asyncio
import random
import urllib.request
from collections.abc import Collection, Iterator
from dataclasses import replace

import grpc
import pytest
from msgspec import structs

from replicas.engine_process.build import build_engine
from replicas.errors import EngineDied, StartupError
from replicas.host import ReplicaHost
from replicas.process.settings import SettingsError
from replicas.proof import prove_hashes
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import Tier
from replicas.protocol.frames import FinishReason, RefusalCode, RequestKey, StepFrame, UserTag
from replicas.protocol.keys import replicas_key
from replicas.protocol.status import ModelCard, ReplicaState
from replicas.protocol.wire import DescribeRequest, Nothing, decode_description
from tests.replicas.mirror import connect, read_record, read_set
from tests.replicas.remote_engine.stand_in import StandIn
from tests.replicas.router_client import RouterClient, submit
from tests.replicas.scripted_engine import CARD, ScriptedEngine
from tests.replicas.whole_replica import MODEL, REPLICA, config, running, scripted, until


@pytest.fixture
def server() -> Iterator[StandIn]:
    server = StandIn()
    yield server
    server.close()


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


async def test_the_probe_leaves_no_trace(redis_url: str) -> None:
    host = ReplicaHost(config(redis_url))
    async with running(host) as client:
        await client.send(submit(1))  # shorter than a block, so it adds none
        frame = await client.read()
        while frame is not None and not any(delta.finish_reason for delta in frame.deltas):
            frame = await client.read()
        assert frame is not None
        assert (frame.load.num_used_blocks, frame.load.num_cached_blocks) == (0, 0)
        assert [message async for message in client.stub.list_blocks(Nothing())] == []


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
            return structs.replace(super().step(), events=[])

    with pytest.raises(StartupError, match="did not report block 0"):
        prove_hashes(Silent(), random.Random(1))


def test_the_proof_refuses_an_engine_without_room_for_a_block() -> None:
    with pytest.raises(StartupError, match="no room"):
        prove_hashes(ScriptedEngine(card=replace(CARD, num_blocks=1)), random.Random(1))


async def test_names_that_change_are_in_the_card_and_its_digest_in_the_lease(
    redis_url: str, server: StandIn
) -> None:
    own = ("gpt-5", "gpt-4o", "served")
    host = ReplicaHost(config(redis_url, engine="remote", engine_url=server.url, model_aliases=own))
    redis = connect(redis_url)
    async with running(host) as client:

        async def described() -> ModelCard:
            return decode_description(await client.stub.describe(DescribeRequest())).card

        first = await described()
        assert first.aliases == ("gpt-5", "gpt-4o")
        for adapters in ({"later": "/adapters/later"}, {}):
            server.other_names, server.adapters = ["gpt-4o", "theirs"], adapters

            async def is_told(adapters: Collection[str] = adapters) -> bool:
                card, record = await described(), await read_record(redis, "served", REPLICA)
                names = [adapter.name for adapter in card.adapters]
                return names == [*adapters] and record is not None and record.card_digest == card.digest()

            async with asyncio.timeout(60):
                await until(is_told)
            later = await described()
            assert later.aliases == ("gpt-5", "gpt-4o", "theirs")
            assert replace(later, aliases=first.aliases, adapters=first.adapters) == first
    await redis.aclose()


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
        num_probes = len(engine.added)
        await client.send(submit(1, max_tokens=3))
        frame = await client.read()
        while len(engine.added) == num_probes:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await client.stub.drain(Nothing())
        while frame is not None and not frame.is_draining:
            frame = await client.read()
        assert host.state is ReplicaState.DRAINING
        await client.say_that_it_knows()
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
        assert last.refusal.code is RefusalCode.ENGINE_FAILED
        with pytest.raises(EngineDied, match="scripted failure"):
            await host.wait_dead()
    assert await read_record(redis, "scripted", REPLICA) is None
    await redis.aclose()


async def test_metrics_are_served_and_count(redis_url: str) -> None:
    host = ReplicaHost(config(redis_url, metrics_port=0))
    async with running(host) as client:
        for submit_id, user in ((1, b"ann"), (2, b"bob")):
            bare = submit(submit_id, range(64), max_tokens=4)
            await client.send(structs.replace(bare, user=UserTag(user)))
            await client.finish((submit_id, 0))
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


async def test_stop_before_start_is_harmless_and_start_then_ends_at_once(redis_url: str) -> None:
    host = ReplicaHost(config(redis_url))
    await host.stop()
    await host.start()
    await host.wait_dead()
    assert host.state is ReplicaState.STOPPED


def test_unknown_hardware_is_one_clear_sentence() -> None:
    with pytest.raises(SettingsError, match="simulated_hardware"):
        build_engine(config("redis://x", simulated_hardware="abacus"))
