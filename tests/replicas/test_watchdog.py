"""Engines that hang: how that is seen, and what becomes of the replica."""

import asyncio
import os
import signal
import sys
import textwrap
from asyncio.subprocess import Process
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from replicas.errors import EngineHung
from replicas.host import ReplicaHost
from replicas.observation.metrics import ReplicaMetrics
from replicas.protocol.frames import LoadSnapshot, RequestKey, StepFrame
from replicas.protocol.status import ReplicaState
from replicas.step_watch import PATIENCE, StepWatch
from replicas.watchdog import Watchdog
from tests.replicas.engine_process import engine_children
from tests.replicas.mirror import connect, read_record
from tests.replicas.process_replica import replica
from tests.replicas.router_client import RouterClient, submit
from tests.replicas.scripted_engine import ScriptedEngine
from tests.replicas.standing_replica import STANDING_TOKENS
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


def watch(floor: float = 30.0, *, max_step_tokens: int = 2048, seconds_per_token: float = 0.0) -> StepWatch:
    return StepWatch(floor, 1.0, max_step_tokens, seconds_per_token)


def hangs_after(watch: StepWatch, *, from_second: int = 0) -> int | None:
    """With a look every second and no step, in how many seconds; None: not within a day."""
    for second in range(86_400):
        if watch.look(float(from_second + second), has_work=True):
            return second
    return None


def test_an_engine_with_work_and_without_an_end_of_a_step_hangs_after_the_floor() -> None:
    assert hangs_after(watch()) == 31


def test_work_that_is_taken_back_does_not_hide_a_hang() -> None:
    """Requests come, wait for nothing and are aborted, and others come."""
    one = watch()
    looks = [one.look(float(second), has_work=second % 5 == 0) for second in range(60)]
    assert looks.index(True) == 31


@pytest.mark.parametrize(
    ("rate", "tokens", "limit"),
    [(3e-5, 8192, 30.0), (0.02, 2048, 5 * 0.02 * 2048), (0.0, 2048, 30.0), (0.02, 0, 30.0)],
)
def test_a_slow_engine_may_take_as_long_as_a_few_whole_steps(rate: float, tokens: int, limit: float) -> None:
    one = watch(max_step_tokens=tokens)
    one.step_ended(0.5, rate)
    assert one.limit_seconds == pytest.approx(limit)


def test_what_the_proof_measured_holds_until_a_prompt_was_measured_and_only_so_far() -> None:
    one = watch(seconds_per_token=0.02)
    assert one.limit_seconds == pytest.approx(2 * 0.02 * 2048)
    slow_start = watch(seconds_per_token=10.0)  # a first compilation lies in it
    assert slow_start.limit_seconds == pytest.approx(600.0)
    slow_start.step_ended(0.5, 0.0)
    assert slow_start.limit_seconds == pytest.approx(600.0)
    slow_start.step_ended(0.5, 3e-5)
    assert slow_start.limit_seconds == pytest.approx(30.0)


def test_a_long_step_makes_patient_for_a_while() -> None:
    one = watch()
    one.step_ended(20.0, 0.0)
    assert one.limit_seconds == pytest.approx(100.0)
    for _ in range(5000):
        one.step_ended(0.01, 0.0)
    assert one.limit_seconds == pytest.approx(30.0)


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """The machine slept for an hour, or the whole process was stopped."""
    one = watch()
    one.look(0.0, has_work=True)
    assert not one.look(3600.0, has_work=True)
    assert one.silent_seconds <= 2.0
    assert hangs_after(one, from_second=3601) == 28


@given(
    st.lists(
        st.tuples(st.floats(0.0, 100.0), st.booleans(), st.one_of(st.none(), st.floats(1e-6, 50.0))),
        max_size=60,
    )
)
def test_it_hangs_only_after_looks_for_the_whole_limit_without_a_step(
    happenings: list[tuple[float, bool, float | None]],
) -> None:
    one, now, seen, had_work = watch(), 0.0, 0.0, False
    for passed, has_work, step in happenings:
        now += passed
        if step is not None:
            one.step_ended(step, 0.0)
        hung = one.look(now, has_work=has_work)
        seen = 0.0 if step is not None else seen + min(passed, 2.0)
        had_work = has_work or (had_work and step is None)
        if hung:
            assert had_work
            assert seen > 30.0 and seen >= one.silent_seconds > one.limit_seconds >= 30.0


REPOSITORY = Path(__file__).parents[2]

PROGRAM = """
import asyncio, ctypes, threading, time
from replicas.process.standstill import end_on_standstill

def hold_lock(): ctypes.PyDLL(None).sleep(600)
def let_go(): time.sleep(600)

async def main():
    async with end_on_standstill(0.5):
        await asyncio.sleep(1.0)
        threading.Thread(target={work}, daemon=True).start()
        await asyncio.sleep(1.5)
    time.sleep(1.0)  # nothing is watched any more
    print("went on", flush=True)

asyncio.run(main())
"""


async def started(*arguments: str) -> Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=pipe, stderr=pipe, cwd=REPOSITORY
    )


async def test_what_holds_pythons_lock_ends_the_process_and_is_named() -> None:
    process = await started("-c", textwrap.dedent(PROGRAM.format(work="hold_lock")))
    async with asyncio.timeout(20):
        said, complaint = await process.communicate()
    assert (process.returncode, said) == (1, b"")
    assert b"Timeout" in complaint and b"in hold_lock" in complaint


async def test_what_only_takes_long_ends_nothing() -> None:
    process = await started("-c", textwrap.dedent(PROGRAM.format(work="let_go")))
    said, complaint = await process.communicate()
    assert (process.returncode, said, complaint) == (0, b"went on\n", b"")


async def test_a_replica_whose_engine_holds_pythons_lock_ends(redis_url: str) -> None:
    flags = [f"--replica-id={REPLICA}", f"--redis-url={redis_url}", "--standstill-seconds=1"]
    process = await started("-m", "tests.replicas.standing_replica", *flags)
    redis = connect(redis_url)
    while (record := await read_record(redis, "scripted", REPLICA)) is None:
        assert process.returncode is None
        await asyncio.sleep(0.02)
    async with grpc.aio.insecure_channel(record.address) as channel:
        client = RouterClient(channel)
        await client.send(submit(1, max_tokens=STANDING_TOKENS))
        async with asyncio.timeout(20):
            _, complaint = await process.communicate()
    assert process.returncode == 1
    assert b"in stand_still" in complaint
    await redis.aclose()
