"""The engine loop in the engine's process, and the whole replica around it, when either process dies."""

import asyncio
import queue
import signal

import grpc
import psutil
import pytest
from msgspec import structs

from replicas.engine import Engine
from replicas.engine_process.build import build_engine
from replicas.engine_process.parent import EngineProcess
from replicas.engine_process.process_loop import ProcessLoop, drive
from replicas.errors import EngineDied
from replicas.host import ReplicaHost
from replicas.protocol.frames import (
    FinishReason,
    RefusalCode,
    RequestKey,
    StepFrame,
    TokenDelta,
)
from tests.replicas.engine_process.engine_children import config, engine_children, process, wait_gone
from tests.replicas.mirror import connect, read_record
from tests.replicas.process_replica import LONG_LEASE_SECONDS, replica
from tests.replicas.router_client import RouterClient, submit
from tests.replicas.whole_replica import MODEL, REPLICA, running

__all__ = ["process"]


class Heard:
    """What a loop says, for a test to wait for."""

    def __init__(self) -> None:
        self.frames: queue.SimpleQueue[StepFrame] = queue.SimpleQueue()
        self.deaths: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def loop(self, engine: Engine) -> ProcessLoop:
        loop = drive(engine, lambda frame, _: self.frames.put(frame), self.deaths.put)
        assert isinstance(loop, ProcessLoop)
        loop.start()
        return loop

    def deltas(self, num_finished: int) -> list[list[TokenDelta]]:
        """Of each frame, up to the one with which so many choices have finished."""
        deltas: list[list[TokenDelta]] = []
        while sum(delta.finish_reason is not None for step in deltas for delta in step) < num_finished:
            deltas.append(self.frames.get().deltas)
        return deltas


def test_choices_that_are_submitted_together_begin_in_one_step(process: EngineProcess) -> None:
    heard = Heard()
    loop = heard.loop(process)
    prompt = [5] * 40
    asked = submit(1, prompt, max_tokens=4, num_choices=8)
    assert loop.submit(1, asked)
    steps = heard.deltas(num_finished=8)
    assert [len(deltas) for deltas in steps] == [8] * 4
    assert loop.stop()
    assert not loop.submit(2, asked)


def test_an_aborted_request_is_forgotten_by_the_engine() -> None:
    engine, _ = build_engine(config(simulated_hardware="h100-8b"))  # too slow to finish it before it hears
    heard = Heard()
    loop = heard.loop(engine)
    loop.submit(1, submit(1, [5] * 20, max_tokens=900))
    heard.frames.get()
    loop.abort(RequestKey(1, 0))
    loop.submit(2, submit(2, [6] * 20))
    last = heard.deltas(num_finished=1)[-1]
    assert [(delta.key, delta.finish_reason) for delta in last] == [(RequestKey(2, 0), FinishReason.LENGTH)]
    assert loop.stop()


def test_a_refusal_is_the_last_delta_of_its_request(process: EngineProcess) -> None:
    heard = Heard()
    loop = heard.loop(process)
    loop.submit(1, structs.replace(submit(1, [5]), adapter="tuned"))
    ((delta,),) = heard.deltas(num_finished=1)
    assert delta.refusal is not None and delta.refusal.error is not None
    assert (delta.refusal.code, delta.refusal.error.status) == (RefusalCode.INVALID_REQUEST, 404)
    assert loop.stop()


def test_an_engine_that_raises_ends_its_requests_and_the_loop() -> None:
    engine, _ = build_engine(config(simulated_hardware="h100-8b", simulated_speed=1e-320))
    heard = Heard()
    loop = heard.loop(engine)
    loop.submit(1, submit(1, [5] * 20))
    ((delta,),) = heard.deltas(num_finished=1)
    assert delta.refusal is not None
    assert delta.refusal.code is RefusalCode.ENGINE_FAILED
    assert "OverflowError" in str(heard.deaths.get())
    assert not loop.submit(1, submit(1, [5] * 20))
    assert loop.stop()


def test_an_engine_that_does_not_end_its_step_is_killed() -> None:
    engine, _ = build_engine(config(simulated_hardware="h100-8b", simulated_speed=1e-6))
    assert isinstance(engine, EngineProcess)
    heard = Heard()
    loop = heard.loop(engine)
    loop.submit(1, submit(1, [5] * 20))
    assert loop.stop(0.1)
    assert not psutil.pid_exists(engine.pid)
    assert heard.deaths.empty()


@pytest.mark.parametrize("under_load", [True, False])
async def test_a_killed_child_ends_the_lease_at_once(redis_url: str, under_load: bool) -> None:
    host = ReplicaHost(
        config(
            replica_id=REPLICA,
            redis_url=redis_url,
            simulated_hardware="h100-8b",
            num_blocks=None,
            lease_seconds=LONG_LEASE_SECONDS,
        )
    )
    redis = connect(redis_url)
    before = engine_children()
    await host.start()
    assert await read_record(redis, MODEL, REPLICA) is not None
    (child,) = engine_children() - before
    async with grpc.aio.insecure_channel(host.address) as channel:
        client = RouterClient(channel)
        if under_load:
            await client.send(submit(1, max_tokens=8000))
            frame = await client.read()
            while frame is not None and not frame.deltas:
                frame = await client.read()
        child.kill()
        if under_load:
            last = (await client.finish((1, 0)))[RequestKey(1, 0)][-1]
            assert last.finish_reason is FinishReason.ERROR
            assert last.refusal is not None
            assert last.refusal.code is RefusalCode.ENGINE_FAILED
        with pytest.raises(EngineDied, match="was ended by SIGKILL"):
            await host.wait_dead()
    assert await read_record(redis, MODEL, REPLICA) is None
    assert engine_children() <= before
    await redis.aclose()


async def test_the_load_counts_a_request_once(redis_url: str) -> None:
    """Of 164 tokens, the first step computes 64; it takes long, and so does the next."""
    host = ReplicaHost(
        config(
            replica_id=REPLICA,
            redis_url=redis_url,
            simulated_hardware="h100-8b",
            simulated_speed=0.02,
            max_batched_tokens=64,
        )
    )
    async with running(host) as client:
        await client.send(submit(1, range(164)))
        frame = await client.read()
        while frame is not None and frame.load.num_running == 0:
            frame = await client.read()
        assert frame is not None
        assert frame.num_counted_submits == 1
        assert (frame.load.num_running, frame.load.num_waiting, frame.load.num_pending_tokens) == (1, 0, 100)


async def test_a_replica_whose_engine_process_is_killed_exits_with_one_sentence(redis_url: str) -> None:
    async with replica(redis_url) as (process, child, _):
        child.kill()
        _, stderr = await process.communicate()
    log = stderr.decode()
    assert process.returncode == 1, log
    assert f"its process {child.pid} was ended by SIGKILL" in log.splitlines()[-1]
    redis = connect(redis_url)
    assert await read_record(redis, MODEL, REPLICA) is None
    await redis.aclose()


async def test_sigterm_drains_a_replica_with_an_engine_process(redis_url: str) -> None:
    async with replica(redis_url) as (process, child, _):
        process.send_signal(signal.SIGTERM)
        _, stderr = await process.communicate()
    log = stderr.decode()
    assert process.returncode == 0, log
    assert "draining requests=1" in log
    assert "Traceback" not in log
    assert not child.is_running()


async def test_a_killed_replica_takes_its_engine_process_with_it(redis_url: str) -> None:
    async with replica(redis_url) as (process, child, _):
        process.kill()
        await process.wait()
        await asyncio.to_thread(wait_gone, child.pid)
        await process.communicate()  # who held its log open has gone
