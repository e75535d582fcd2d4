"""Replicas that die or refuse on cue: what dispatch tries again, resumes elsewhere, or gives up."""

import asyncio
import random
import time
from typing import Any

import pytest
from msgspec import structs

from replicas.protocol.frames import RefusalCode, TokenDelta
from router.dispatch.generation_run import GenerationRun
from router.dispatch.retries import RetryPolicy
from router.dispatch.suspects import STORM_DEATHS
from router.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    InvalidRequest,
    NoReplicaAvailable,
    Overloaded,
)
from tests.router.dispatched_fleet import (
    GENERATION,
    PROMPT,
    DispatchedFleet,
    assert_complete,
    changed,
    expected_tokens,
    fleet,
    generate,
    tokens_of,
)
from tests.router.scripted_replica import eventually

__all__ = ["fleet"]


@pytest.mark.parametrize("death", ["kill", "silence"])
async def test_a_replica_lost_before_the_first_token_is_invisible(fleet: DispatchedFleet, death: str) -> None:
    if death == "silence":
        fleet.stall_seconds = 0.5
    for name in ("r0", "r1"):
        (await fleet.add(name)).script.holding = True
    task = asyncio.create_task(generate(fleet, changed(GENERATION, num_choices=2)))
    await eventually(lambda: any(replica.num_live for replica in fleet.replicas.values()))
    dying = fleet.serving_replica()
    for replica in fleet.replicas.values():
        replica.script.holding = False
    dying.script.silent = True
    if death == "kill":
        await dying.kill()
    assert_complete(await task, num_choices=2)
    other = next(replica for replica in fleet.replicas.values() if replica is not dying)
    assert [(submit.num_choices, submit.num_output_tokens) for submit in other.submits] == [(2, 0)]
    statistics = fleet.dispatcher
    assert (statistics.num_retries, statistics.num_resumes, statistics.num_lost) == (1, 0, 1)


async def test_what_is_passed_on_is_not_sent_again_when_its_replica_dies(fleet: DispatchedFleet) -> None:
    for name in ("r0", "r1"):
        (await fleet.add(name)).script.holding = True
    task = asyncio.create_task(generate(fleet, changed(GENERATION, body=b"{}", route="/rerank")))
    await eventually(lambda: any(replica.num_live for replica in fleet.replicas.values()))
    dying = fleet.serving_replica()
    for replica in fleet.replicas.values():
        replica.script.holding = False
    dying.script.silent = True
    await dying.kill()
    with pytest.raises(GenerationFailed, match="could not be resumed"):
        await task
    assert sum(len(replica.submits) for replica in fleet.replicas.values()) == 1


@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("death", ["stream", "kill"])
async def test_a_replica_lost_in_mid_stream_is_resumed_elsewhere(
    fleet: DispatchedFleet, death: str, num_choices: int, listens: bool
) -> None:
    for name in ("r0", "r1"):
        (await fleet.add(name)).script.step_seconds = 0.01

    async def die(run: GenerationRun) -> None:
        dying = fleet.replicas[run.replica_id]
        if death == "kill":
            await dying.kill()
        else:
            dying.script.die_after_tokens = dying.num_tokens_sent + 3 * num_choices + 1

    generation = changed(GENERATION, num_choices=num_choices)
    deltas = await generate(fleet, generation, after_first=die, heard=[] if listens else None)
    assert_complete(deltas, num_choices)
    statistics = fleet.dispatcher
    assert (statistics.num_retries, statistics.num_resumes, statistics.num_lost) == (0, num_choices, 1)


async def test_every_attempt_announces_what_is_missing_of_the_prompt_under_an_id_of_its_own(
    fleet: DispatchedFleet,
) -> None:
    replicas = [await fleet.add(f"r{number}") for number in range(2)]
    for replica in replicas:
        replica.script.step_seconds = 0.01

    async def kill(run: GenerationRun) -> None:
        await fleet.serving_replica().kill()

    sampling = structs.replace(GENERATION.sampling, temperature=0.6, unsaid=("top_p",))
    deltas = await generate(fleet, changed(GENERATION, sampling=sampling), after_first=kill)
    assert tokens_of(deltas) == expected_tokens()
    first, resumed = (replica.submits[0] for replica in replicas)
    assert first.sampling == resumed.sampling == sampling
    assert max(first.num_output_tokens, resumed.num_output_tokens) > 0
    assert first.announced_hashes == resumed.announced_hashes == tuple(GENERATION.block_hashes)
    assert first.announcement_id != resumed.announcement_id


@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_a_choice_with_all_its_tokens_whose_end_is_lost_ends_for_its_length(
    fleet: DispatchedFleet, num_choices: int, listens: bool
) -> None:
    for name in ("r0", "r1"):
        replica = await fleet.add(name)
        replica.script.step_seconds = 0.001
        replica.script.die_after_tokens = num_choices * GENERATION.sampling.max_tokens
        replica.script.alter = _without_ends
    generation = changed(GENERATION, num_choices=num_choices)
    deltas = await generate(fleet, generation, heard=[] if listens else None)
    assert_complete(deltas, num_choices)
    assert sum(len(replica.submits) for replica in fleet.replicas.values()) == 1


def _without_ends(frame: list[Any]) -> None:
    for delta in frame[0]:
        delta[2] = None


async def test_finished_choices_are_not_resumed(fleet: DispatchedFleet) -> None:
    for name in ("r0", "r1"):
        (await fleet.add(name)).script.step_seconds = 0.01
    deltas: list[TokenDelta] = []
    async with fleet.dispatcher.run(changed(GENERATION, num_choices=2)) as run:
        async for batch in run:
            deltas += batch
            if run.num_attempts == 1 and len(tokens_of(deltas, 0)) >= 5:
                run.abort_choice(0)
                await fleet.replicas[run.replica_id].kill()
        resumed_on = fleet.replicas[run.replica_id]
    assert len(resumed_on.submits) == 1
    assert resumed_on.submits[0].sampling.seed == 8
    assert tokens_of(deltas, 1) == expected_tokens(1)


async def test_a_generation_survives_several_losses(fleet: DispatchedFleet) -> None:
    for name in ("r0", "r1", "r2"):
        (await fleet.add(name)).script.step_seconds = 0.01
    deltas: list[TokenDelta] = []
    async with fleet.dispatcher.run(GENERATION) as run:
        async for batch in run:
            deltas += batch
            if len(deltas) >= 5 * run.num_attempts and run.num_attempts < 3:
                await fleet.replicas[run.replica_id].kill()
        assert run.num_attempts == 3
    assert_complete(deltas, 1)


async def test_when_every_replica_is_dead_the_client_is_told_within_bounds(fleet: DispatchedFleet) -> None:
    for name in ("r0", "r1"):
        await (await fleet.add(name)).kill()
    with pytest.raises(NoReplicaAvailable):
        await generate(fleet)


async def test_when_no_replica_is_left_to_resume_on_the_generation_has_failed(fleet: DispatchedFleet) -> None:
    for name in ("r0", "r1"):
        (await fleet.add(name)).script.step_seconds = 0.01

    async def kill_all(run: GenerationRun) -> None:
        for replica in fleet.replicas.values():
            await replica.kill()

    with pytest.raises(GenerationFailed):
        await generate(fleet, after_first=kill_all)


async def test_a_request_that_kills_replicas_is_not_tried_on_all_of_them(fleet: DispatchedFleet) -> None:
    for n in range(6):
        (await fleet.add(f"r{n}")).script.die_after_tokens = 0
    for client in fleet.clients.values():
        await eventually(lambda client=client: client.lost is not None)  # type: ignore[misc]
    fleet.serving.clear()
    for replica in fleet.replicas.values():
        replica.script.die_after_tokens = None
        replica.script.refusal = RefusalCode.INTERNAL
        fleet.connect(replica)
    with pytest.raises(GenerationFailed):
        await generate(fleet)
    assert sum(len(replica.submits) for replica in fleet.replicas.values()) == 4


@pytest.mark.parametrize("code", [RefusalCode.DRAINING, RefusalCode.OVERLOADED])
async def test_a_replica_that_refuses_is_passed_over(fleet: DispatchedFleet, code: RefusalCode) -> None:
    for name in ("r0", "r1"):
        (await fleet.add(name)).script.holding = True
    async with fleet.dispatcher.run(GENERATION) as run:
        home = fleet.replicas[run.replica_id]
    home.script.refusal = code
    for replica in fleet.replicas.values():
        replica.script.holding = False
    deltas = await generate(fleet, changed(GENERATION, num_choices=2))
    assert_complete(deltas, 2)
    assert fleet.dispatcher.num_lost == 0


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (RefusalCode.DRAINING, NoReplicaAvailable),
        (RefusalCode.OVERLOADED, Overloaded),
        (RefusalCode.CONTEXT_LENGTH_EXCEEDED, ContextLengthExceeded),
        (RefusalCode.INVALID_REQUEST, InvalidRequest),
    ],
)
async def test_a_refusal_by_all_is_the_matching_error(
    fleet: DispatchedFleet, code: RefusalCode, error: type[Exception]
) -> None:
    (await fleet.add("r0")).script.refusal = code
    with pytest.raises(error):
        await generate(fleet, changed(GENERATION, num_choices=2))


async def test_a_replica_without_an_open_client_is_passed_over(fleet: DispatchedFleet) -> None:
    for name in ("r0", "r1"):
        await fleet.add(name)
    async with fleet.dispatcher.run(GENERATION) as run:
        home = run.replica_id
    client = fleet.clients.pop(home)
    async with fleet.dispatcher.run(GENERATION) as run:
        assert run.replica_id != home
        assert run.num_attempts == 1
    await client.close()


async def test_an_invalid_request_is_not_tried_elsewhere(fleet: DispatchedFleet) -> None:
    for name in ("r0", "r1"):
        (await fleet.add(name)).script.refusal = RefusalCode.INVALID_REQUEST
    with pytest.raises(InvalidRequest, match="refused: invalid_request"):
        await generate(fleet)
    assert sum(len(replica.submits) for replica in fleet.replicas.values()) == 1


async def test_a_request_waits_a_little_for_a_model_whose_first_replica_is_just_joining(
    fleet: DispatchedFleet,
) -> None:
    fleet.dispatcher.retry = RetryPolicy(first_wait_seconds=0.2)
    task = asyncio.create_task(generate(fleet))
    await eventually(lambda: fleet.dispatcher.num_running == 1)
    await fleet.add("r0")
    assert_complete(await task, 1)


async def test_a_request_waits_a_little_for_a_replica_that_is_just_reconnecting(
    fleet: DispatchedFleet,
) -> None:
    replica = await fleet.add("r0")
    await fleet.clients[replica.replica_id].close()
    fleet.dispatcher.retry = RetryPolicy(first_wait_seconds=0.2)
    task = asyncio.create_task(generate(fleet))
    await eventually(lambda: fleet.dispatcher.num_running == 1)
    fleet.connect(replica)
    assert_complete(await task, 1)


@pytest.mark.timeout(60)
async def test_after_a_storm_of_losses_and_cancellations_every_counter_is_zero(
    fleet: DispatchedFleet,
) -> None:
    rng = random.Random(4)
    fleet.dispatcher.retry = RetryPolicy(max_attempts=10, first_wait_seconds=0.05)
    for n in range(3):
        (await fleet.add(f"r{n}")).script.step_seconds = 0.002
    answers: list[tuple[int, list[TokenDelta]]] = []
    for _ in range(STORM_DEATHS):  # replicas have died before, of something else
        fleet.dispatcher.suspects.blame([], time.monotonic())

    async def one_request(seed: int) -> None:
        num_choices = seed % 3 + 1
        generation = changed(
            GENERATION, num_choices=num_choices, bucket=str(seed).encode(), token_ids=[*PROMPT, seed]
        )
        await asyncio.sleep(seed * 0.01)
        answers.append((num_choices, await generate(fleet, generation)))

    requests = [asyncio.create_task(one_request(seed)) for seed in range(150)]
    num_cancelled = 0
    while not all(request.done() for request in requests):
        await asyncio.sleep(rng.uniform(0.0, 0.04))
        if rng.random() < 0.2:
            replica = rng.choice(list(fleet.replicas.values()))
            await replica.kill()
            await eventually(lambda: fleet.clients[replica.replica_id].lost is not None)  # noqa: B023
            await replica.start()
            fleet.connect(replica)
        elif num_cancelled < 100:
            num_cancelled += rng.choice(requests).cancel()
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    failures = [
        outcome
        for outcome in outcomes
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError)
    ]
    assert failures == []
    assert len(answers) >= 20
    for num_choices, deltas in answers:
        assert_complete(deltas, num_choices)
    assert fleet.dispatcher.num_resumes > 0
    fleet.assert_nothing_reserved()
    await eventually(lambda: all(replica.num_live == 0 for replica in fleet.replicas.values()))
