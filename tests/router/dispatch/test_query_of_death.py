"""Prompts that kill replicas, and prompts that were only there: who is refused, and after how many deaths."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from replicas.protocol.frames import RefusalCode, TokenDelta
from router.dispatch.generation_run import GenerationRun
from router.errors import GenerationFailed
from router.generation import Generation
from tests.router.dispatched_fleet import (
    GENERATION,
    PROMPT,
    DispatchedFleet,
    assert_complete,
    changed,
    fleet,
    generate,
    tokens_of,
)
from tests.router.scripted_replica import ScriptedReplica, eventually

__all__ = ["fleet"]

DEADLY = 49_999
"""A replica that computes this token dies."""

DEADLY_GENERATION = changed(GENERATION, token_ids=[*PROMPT, DEADLY], bucket=b"deadly")


@pytest.fixture
async def mortals(fleet: DispatchedFleet) -> AsyncIterator[DispatchedFleet]:
    for number in range(6):
        replica = await fleet.add(f"r{number}")
        replica.script.deadly_token = DEADLY
        replica.script.step_seconds = 0.005
    yield fleet


def num_killed(fleet: DispatchedFleet) -> int:
    return sum(replica.was_killed for replica in fleet.replicas.values())


async def test_a_prompt_that_kills_is_tried_once_more_and_then_refused(mortals: DispatchedFleet) -> None:
    with pytest.raises(GenerationFailed, match="Replicas have died"):
        await generate(mortals, DEADLY_GENERATION)
    assert num_killed(mortals) == 2
    assert mortals.dispatcher.suspects.num_condemned == 1


@pytest.mark.parametrize("num_choices", [1, 4])
async def test_it_is_remembered_however_it_is_asked_again(mortals: DispatchedFleet, num_choices: int) -> None:
    for seed in range(4):
        sampling = replace(GENERATION.sampling, seed=seed, temperature=seed / 10)
        again = changed(DEADLY_GENERATION, sampling=sampling, num_choices=num_choices, bucket=bytes([seed]))
        with pytest.raises(GenerationFailed):
            await generate(mortals, again)
    assert num_killed(mortals) == 2


async def test_a_client_that_leaves_after_a_death_and_comes_back_kills_no_third_replica(
    mortals: DispatchedFleet,
) -> None:
    leaving = asyncio.create_task(generate(mortals, DEADLY_GENERATION))
    await eventually(lambda: mortals.dispatcher.suspects.has_any)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    for _ in range(3):
        with pytest.raises(GenerationFailed):
            await generate(mortals, DEADLY_GENERATION)
    assert num_killed(mortals) <= 2


async def test_copies_of_a_deadly_prompt_at_one_replica_kill_one_more_between_them(
    fleet: DispatchedFleet,
) -> None:
    first = await fleet.add("r0")
    first.script.holding = True
    tasks = [asyncio.create_task(generate(fleet, DEADLY_GENERATION)) for _ in range(50)]
    await eventually(lambda: first.num_live == 50)
    for number in range(1, 5):
        await fleet.add(f"r{number}")
    for replica in fleet.replicas.values():
        replica.script.deadly_token = DEADLY
    first.script.holding = False
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {GenerationFailed}
    assert num_killed(fleet) == 2


async def test_others_in_flight_with_a_deadly_prompt_are_all_answered(mortals: DispatchedFleet) -> None:
    answers = [asyncio.create_task(generate(mortals, innocent(n))) for n in range(100)]
    await eventually(lambda: sum(replica.num_live for replica in mortals.replicas.values()) > 50)
    with pytest.raises(GenerationFailed):
        await generate(mortals, DEADLY_GENERATION)
    late = [asyncio.create_task(generate(mortals, innocent(n))) for n in range(100, 120)]
    for deltas in await asyncio.gather(*answers, *late):
        assert_complete(deltas, 1)
    assert num_killed(mortals) == 2
    with pytest.raises(GenerationFailed):
        await generate(mortals, DEADLY_GENERATION)


def innocent(number: int) -> Generation:
    return changed(GENERATION, token_ids=[*PROMPT, number], bucket=str(number).encode())


@pytest.mark.parametrize("is_computed", [True, False], ids=["running", "not begun"])
async def test_a_replica_lost_with_a_thousand_requests_costs_none_of_them(
    fleet: DispatchedFleet, is_computed: bool
) -> None:
    dying = await fleet.add("r0")
    dying.script.holding = True
    answers = [asyncio.create_task(generate(fleet, innocent(n))) for n in range(1000)]
    await eventually(lambda: dying.num_live == 1000)
    for number in (1, 2):
        await fleet.add(f"r{number}")
    if is_computed:
        dying.script.holding = False
        dying.script.step_seconds = 0.05
        await eventually(lambda: dying.num_tokens_sent >= 5000)
    await dying.kill()
    for deltas in await asyncio.gather(*answers):
        assert_complete(deltas, 1)
    suspects = fleet.dispatcher.suspects
    assert (suspects.num_remembered, suspects.num_on_trial, suspects.num_condemned) == (0, 0, 0)


async def test_of_a_thousand_requests_the_one_that_kills_is_found(mortals: DispatchedFleet) -> None:
    for replica in mortals.replicas.values():
        replica.script.holding = True
    tasks = [asyncio.create_task(generate(mortals, innocent(n))) for n in range(1000)]
    await eventually(lambda: sum(replica.num_live for replica in mortals.replicas.values()) == 1000)
    deadly = asyncio.create_task(generate(mortals, DEADLY_GENERATION))
    await eventually(lambda: num_live(mortals) == 1001)
    for replica in mortals.replicas.values():
        replica.script.holding = False
        replica.script.step_seconds = 0.001
    for deltas in await asyncio.gather(*tasks):
        assert_complete(deltas, 1)
    with pytest.raises(GenerationFailed):
        await deadly
    assert num_killed(mortals) == 2


def num_live(fleet: DispatchedFleet) -> int:
    return sum(replica.num_live for replica in fleet.replicas.values())


async def test_an_engine_that_says_that_it_failed_counts_as_a_death(fleet: DispatchedFleet) -> None:
    for number in range(4):
        replica = await fleet.add(f"r{number}")
        replica.script.refusal = RefusalCode.ENGINE_FAILED
    with pytest.raises(GenerationFailed, match="Replicas have died"):
        await generate(fleet)
    assert sum(len(replica.submits) for replica in fleet.replicas.values()) == 2


async def test_a_stream_that_is_resumed_and_kills_again_at_the_same_token_is_refused(
    mortals: DispatchedFleet,
) -> None:
    for replica in mortals.replicas.values():
        replica.script.dies_at_position = 10
    with pytest.raises(GenerationFailed):
        await generate(mortals)
    assert num_killed(mortals) == 2


async def test_a_suspect_that_survives_is_suspected_no_more(fleet: DispatchedFleet) -> None:
    for number in range(3):
        (await fleet.add(f"r{number}")).script.step_seconds = 0.01

    async def kill(run: GenerationRun) -> None:
        await fleet.replicas[run.replica_id].kill()

    deltas: list[TokenDelta] = await generate(fleet, after_first=kill)
    assert_complete(deltas, 1)
    assert tokens_of(deltas)
    suspects = fleet.dispatcher.suspects
    assert (suspects.num_remembered, suspects.num_on_trial, suspects.num_condemned) == (0, 0, 0)


async def test_a_replica_that_was_told_to_leave_and_did_not_wait_blames_nobody(
    fleet: DispatchedFleet,
) -> None:
    leaving, staying = await fleet.add("r0"), await fleet.add("r1")
    for replica in (leaving, staying):
        replica.script.holding = True
    task = asyncio.create_task(generate(fleet))
    await eventually(lambda: num_live(fleet) == 1)
    serving = fleet.serving_replica()
    fleet.clients[serving.replica_id].is_draining = True
    await serving.kill()
    other: ScriptedReplica = staying if serving is leaving else leaving
    other.script.holding = False
    assert_complete(await task, 1)
    assert not fleet.dispatcher.suspects.has_any
