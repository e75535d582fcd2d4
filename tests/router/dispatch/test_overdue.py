"""Replicas that live and compute nothing: their requests move, and honest work is left alone."""

import asyncio

import pytest
from msgspec.structs import replace

from replicas.protocol.frames import LoadSnapshot
from router.dispatch.overdue import OverdueWatch
from router.dispatch.progress_monitor import STEPS_OF_PATIENCE, UNMEASURED_FACTOR, ProgressMonitor
from tests.router.dispatched_fleet import (
    GENERATION,
    DispatchedFleet,
    assert_complete,
    changed,
    fleet,
    generate,
    long_generation,
)
from tests.router.scripted_replica import eventually

__all__ = ["fleet"]

MEASURED = LoadSnapshot(
    num_running=1, num_used_blocks=10, prefill_seconds_per_token=1e-4, decode_step_seconds=0.01
)


def test_a_replica_that_computes_nothing_hangs_after_the_set_time() -> None:
    pulse = ProgressMonitor(60.0)
    assert [pulse.look(MEASURED, 5, {1: 0, 2: 7}, now) for now in (0.0, 30.0, 59.0)] == [(False, set())] * 3
    assert pulse.look(MEASURED, 5, {1: 0, 2: 7}, 60.0) == (True, {1, 2})


def test_a_server_that_writes_an_answer_as_a_whole_has_longer() -> None:
    pulse = ProgressMonitor(60.0, relays=True)
    waiting = replace(MEASURED, num_running=0, num_waiting=1, num_pending_tokens=50)
    assert [pulse.look(waiting, 5, {1: 0}, now) for now in (0.0, 70.0, 599.0)] == [(False, set())] * 3
    assert pulse.look(waiting, 5, {1: 0}, 600.0) == (True, {1})


def test_one_with_a_queue_hangs_as_well() -> None:
    pulse = ProgressMonitor(60.0)
    queue = replace(MEASURED, num_waiting=50, num_pending_tokens=5_000)
    pulse.look(queue, 5, {1: 0}, 0.0)
    assert pulse.look(replace(queue, num_waiting=51), 5, {1: 0}, 60.0) == (True, {1})


def test_a_queue_that_moves_is_waited_for() -> None:
    pulse = ProgressMonitor(60.0)
    queue = replace(MEASURED, num_waiting=50, num_pending_tokens=5_000)
    for second in range(0, 100_000, 50):
        assert pulse.look(queue, second, {1: 0}, float(second)) == (False, set())


def test_a_long_prefill_that_moves_is_waited_for() -> None:
    pulse = ProgressMonitor(60.0)
    for second in range(0, 10_000, 50):
        load = replace(MEASURED, num_pending_tokens=1, num_used_blocks=second)
        assert pulse.look(load, 0, {1: 0}, float(second)) == (False, set())


def test_a_step_has_many_times_what_the_measured_speed_makes_of_it() -> None:
    slow = replace(MEASURED, num_pending_tokens=100_000, prefill_seconds_per_token=1e-3)
    assert ProgressMonitor(60.0).patience(slow) == pytest.approx(STEPS_OF_PATIENCE * 100)
    seeing = replace(slow, num_pending_image_tokens=4_000, encode_seconds_per_token=1e-2)
    assert ProgressMonitor(60.0).patience(seeing) == pytest.approx(STEPS_OF_PATIENCE * 140)


def test_a_first_compilation_has_many_times_the_set_time() -> None:
    assert ProgressMonitor(60.0).patience(LoadSnapshot()) == UNMEASURED_FACTOR * 60.0


def test_a_request_that_gets_nothing_while_nothing_waits_has_been_forgotten() -> None:
    pulse = ProgressMonitor(60.0)
    for second in range(0, 60, 10):
        assert pulse.look(MEASURED, second, {1: 3, 2: second}, float(second)) == (False, set())
    assert pulse.look(MEASURED, 60, {1: 3, 2: 60}, 60.0) == (False, {1})


def test_a_request_that_came_late_has_all_of_its_time() -> None:
    pulse = ProgressMonitor(60.0)
    pulse.look(MEASURED, 5, {1: 0}, 0.0)
    pulse.look(MEASURED, 5, {1: 0, 2: 0}, 50.0)
    assert pulse.look(MEASURED, 5, {1: 0, 2: 0}, 61.0) == (True, {1})


async def test_requests_leave_a_replica_that_hangs_and_go_on_elsewhere(fleet: DispatchedFleet) -> None:
    hanging = await fleet.add("r0")
    hanging.script.load = MEASURED
    hanging.script.step_seconds = 0.01
    generations = [
        changed(GENERATION, token_ids=[*GENERATION.token_ids, number], num_choices=2) for number in range(10)
    ]
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(OverdueWatch(fleet.dispatcher, 0.5).run())
        answers = [tasks.create_task(generate(fleet, generation)) for generation in generations]
        await eventually(lambda: hanging.num_tokens_sent >= 40)
        hanging.script.holding = True
        await fleet.add("r1")
        for answer in answers:
            assert_complete(await answer, 2)
        assert fleet.dispatcher.num_overdue > 0
        assert not fleet.table.has_ready("toy", exclude=["r1"])
        hanging.script.holding = False
        await eventually(lambda: fleet.table.has_ready("toy", exclude=["r1"]))
        watch.cancel()


async def test_honest_work_is_left_where_it_is(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.load = MEASURED
    replica.script.step_seconds = 0.05
    await fleet.add("r1")
    watch = OverdueWatch(fleet.dispatcher, 10.0)
    async with fleet.dispatcher.run(long_generation()) as run:
        for _ in range(10):
            await anext(run)
            watch.look()
    assert fleet.dispatcher.num_overdue == 0
