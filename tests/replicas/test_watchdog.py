"""Replicas whose engine hangs: real gRPC, real Redis, real processes that are stopped."""

import asyncio
import os
import signal

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from replicas.errors import EngineHung
from replicas.host import ReplicaHost
from replicas.observation.metrics import ReplicaMetrics
from replicas.protocol.frames import LoadSnapshot, RequestKey, StepFrame
from replicas.protocol.status import ReplicaState
from replicas.step_watch import PATIENCE
from replicas.watchdog import Watchdog
from tests.replicas.engine_process import engine_children
from tests.replicas.mirror import connect, read_record
from tests.replicas.process_replica import replica
from tests.replicas.router_client import RouterClient, submit
from tests.replicas.scripted_engine import ScriptedEngine
from tests.replicas.waiting import until
from tests.replicas.whole_replica import MODEL, REPLICA, config, running, scripted


async def test_a_step_that_never_returns_ends_the_replica_and_its_requests(redis_url: str) -> None:
    engine = ScriptedEngine()
    host = ReplicaHost(
        config(redis_url, engine_hang_seconds=0.5, metrics_port=0, lease_seconds=600.0),
        build=scripted(engine),
    )
    redis = connect(redis_url)
    async with running(host) as client, grpc.aio.insecure_channel(host.address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())  # type: ignore[no-untyped-call]
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        engine.gate.clear()
        await client.send(submit(1))
        while await client.read() is not None:
            pass
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(EngineHung, match=r"no step has ended for [01]\.\d seconds"):
            await host.wait_dead()
        assert host.state is ReplicaState.STOPPED
        assert await read_record(redis, "scripted", REPLICA) is None
    engine.gate.set()
    await redis.aclose()


async def test_an_idle_engine_may_be_stopped_for_ever(redis_url: str) -> None:
    before = engine_children.engine_children()
    host = ReplicaHost(config(redis_url, engine_process=True, engine_hang_seconds=0.1))
    async with running(host) as client:
        await client.send(submit(1))
        await client.finish((1, 0))
        (child,) = engine_children.engine_children() - before
        child.suspend()
        await asyncio.sleep(0.6)
        assert host.state is ReplicaState.READY
        child.resume()


async def test_a_stopped_engine_process_ends_the_replica_as_a_dead_one_does(redis_url: str) -> None:
    async with replica(redis_url, "--engine-hang-seconds=1", "--max-batched-tokens=257") as (
        process,
        child,
        client,
    ):
        child.suspend()
        while await client.read() is not None:
            pass
        _, stderr = await process.communicate()
    log = stderr.decode()
    assert process.returncode == 1, log
    assert "the engine hangs: it has work, and no step has ended for" in log.splitlines()[-1]
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    redis = connect(redis_url)
    assert await read_record(redis, MODEL, REPLICA) is None
    await redis.aclose()


async def test_a_replica_that_is_stopped_with_its_engine_goes_on_where_it_was(redis_url: str) -> None:
    async with replica(redis_url, "--engine-hang-seconds=1", "--max-batched-tokens=257") as (
        process,
        child,
        client,
    ):
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(process.pid, number)
            os.kill(child.pid, number)
            if number == signal.SIGSTOP:
                await asyncio.sleep(2.0)
        last = (await client.finish((1, 0)))[RequestKey(1, 0)][-1]
        assert last.refusal is None
        process.terminate()
        await process.communicate()


async def test_a_pipe_that_the_engine_does_not_empty_holds_nobody_up(redis_url: str) -> None:
    """Two megabytes of prompts wait in front of it, and routers still hear the heartbeat."""
    before = engine_children.engine_children()
    host = ReplicaHost(config(redis_url, engine_process=True, engine_hang_seconds=600.0))
    async with running(host) as client:
        (child,) = engine_children.engine_children() - before
        child.suspend()
        for number in range(1, 101):
            await client.send(submit(number, [300] * 7000, max_tokens=1))
        frame = await client.read()
        while frame is not None and frame.num_counted_submits < 100:
            frame = await client.read()
        async with grpc.aio.insecure_channel(host.address) as channel:
            other = RouterClient(channel)
            for _ in range(10):
                assert await asyncio.wait_for(other.read(), 10) is not None
        child.resume()
        await client.finish(*((number, 0) for number in range(1, 101)))


async def test_the_silence_of_an_engine_is_a_metric(redis_url: str) -> None:
    engine = ScriptedEngine()
    host = ReplicaHost(config(redis_url, engine_hang_seconds=600.0), build=scripted(engine))
    async with running(host) as client:
        assert host._parts is not None
        registry = host._parts.metrics.registry

        def silence() -> float:
            return registry.get_sample_value("replica_engine_silence_ratio") or 0.0

        engine.gate.clear()
        await client.send(submit(1))
        await until(lambda: silence() > 0)
        engine.gate.set()
        await client.finish((1, 0))
        await until(lambda: silence() == 0)


def test_a_step_of_nothing_but_images_has_the_time_that_encoding_them_takes() -> None:
    watchdog = Watchdog(
        floor_seconds=1.0,
        max_step_tokens=1000,
        seconds_per_token=0.0,
        has_work=lambda: True,
        on_hung=lambda hung: None,
        metrics=ReplicaMetrics(CollectorRegistry()),
    )
    load = LoadSnapshot(prefill_seconds_per_token=1e-3, encode_seconds_per_token=4e-3)
    watchdog.observe(StepFrame(load=load), 0.1)
    assert watchdog._watch.limit_seconds == pytest.approx(PATIENCE * 5.0)
