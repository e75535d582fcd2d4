"""Generations through dispatch over real gRPC: tokens, images, and replicas that die or refuse."""

import asyncio
import gc
import os
import random
import time
import weakref
from dataclasses import replace
from typing import Any

import grpc
import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from replicas.protocol.blocks import ImageTokens
from replicas.protocol.frames import RefusalCode, TokenDelta, UserTag
from replicas.protocol.images import media_hash
from replicas.protocol.media import MEDIA_PART_BYTES
from replicas.protocol.pulls import PullHint
from replicas.protocol.status import Adapter, Epoch, ReplicaId
from router.dispatch.generation_run import GenerationRun
from router.dispatch.retries import RetryPolicy
from router.dispatch.suspects import STORM_DEATHS
from router.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    InvalidRequest,
    NoReplicaAvailable,
    Overloaded,
    RouterError,
    TooLate,
)
from router.fleet.image_traffic import FAILURES
from router.fleet.image_uploads import MAX_UPLOADS
from router.generation import Generation
from router.observation.metrics import RouterMetrics
from router.prompt.images import Media
from router.queue.work import Charge
from router.routing.decision import Decision
from tests.router.dispatched_fleet import (
    GENERATION,
    PROMPT,
    ROOT,
    DispatchedFleet,
    assert_complete,
    changed,
    expected_tokens,
    generate,
    long_generation,
    tokens_of,
)
from tests.router.scripted_replica import eventually


@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_generation_yields_every_token_of_every_choice_once(
    fleet: DispatchedFleet, num_choices: int, listens: bool
) -> None:
    (await fleet.add("r0")).script.step_seconds = 0.01
    heard: list[TokenDelta] = []
    generation = changed(GENERATION, num_choices=num_choices)
    deltas = await generate(fleet, generation, heard=heard if listens else None)
    assert_complete(deltas, num_choices)
    assert bool(heard) == listens
    assert fleet.replicas[ReplicaId("r0")].submits[0].token_ids() == PROMPT


async def test_what_a_listener_does_not_take_comes_by_iteration(fleet: DispatchedFleet) -> None:
    (await fleet.add("r0")).script.step_seconds = 0.01
    deltas: list[TokenDelta] = []
    num_asked = 0

    def take_every_other(delta: TokenDelta) -> bool:
        nonlocal num_asked
        num_asked += 1
        if num_asked % 2:
            deltas.append(delta)
        return num_asked % 2 == 1

    async with fleet.dispatcher.run(GENERATION) as run:
        run.listen(take_every_other)
        async for batch in run:
            deltas += batch
    assert_complete(deltas, 1)
    assert num_asked > 2


async def test_a_run_that_has_ended_leaves_nothing_to_the_garbage_collector(fleet: DispatchedFleet) -> None:
    (await fleet.add("r0")).script.step_seconds = 0.01
    ended: list[weakref.ref[GenerationRun]] = []

    async def remember(run: GenerationRun) -> None:
        ended.append(weakref.ref(run))

    gc.disable()
    try:
        await generate(fleet, after_first=remember, heard=[])
        assert ended[0]() is None
    finally:
        gc.enable()


async def test_what_a_listener_raises_ends_its_own_run_alone(fleet: DispatchedFleet) -> None:
    (await fleet.add("r0")).script.step_seconds = 0.01

    def fail(delta: TokenDelta) -> bool:
        raise KeyError("no such piece")

    other = asyncio.create_task(generate(fleet))
    async with fleet.dispatcher.run(GENERATION) as run:
        run.listen(fail)
        with pytest.raises(KeyError, match="no such piece"):
            async for _ in run:
                pass
    assert_complete(await other, 1)


async def test_a_run_says_who_serves_it(fleet: DispatchedFleet) -> None:
    await fleet.add("r0")
    async with fleet.dispatcher.run(GENERATION) as run:
        assert (run.replica_id, run.decision.replica_id, run.num_attempts) == ("r0", "r0", 1)
        assert fleet.dispatcher.num_running == 1


async def test_the_prefill_reservation_ends_with_the_first_token(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.holding = True
    async with fleet.dispatcher.run(GENERATION) as run:
        await eventually(lambda: replica.num_live == 1)
        assert fleet.table.num_predictions == 1
        replica.script.holding = False
        await anext(run)
        assert fleet.table.num_predictions == 0
        assert fleet.table.loads.num_reserved == 1


async def test_an_aborted_choice_ends_and_the_others_go_on(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.step_seconds = 0.002
    deltas: list[TokenDelta] = []
    async with fleet.dispatcher.run(changed(GENERATION, num_choices=3)) as run:
        async for batch in run:
            deltas += batch
            if len(tokens_of(deltas, 1)) >= 3:
                run.abort_choice(1)
                run.abort_choice(1)
    assert tokens_of(deltas, 0) == expected_tokens(0)
    assert tokens_of(deltas, 2) == expected_tokens(2)
    assert len(tokens_of(deltas, 1)) < 20
    await eventually(lambda: replica.num_aborts == 1)


async def test_what_had_come_for_a_choice_before_it_was_aborted_is_not_handed_out(
    fleet: DispatchedFleet,
) -> None:
    replica = await fleet.add("r0")
    replica.script.step_seconds = 0.002
    async with fleet.dispatcher.run(long_generation(num_choices=2)) as run:
        await anext(run)
        client = fleet.clients[run.replica_id]
        num_frames = client.num_frames
        await eventually(lambda: client.num_frames > num_frames + 5)
        run.abort_choice(1)
        deltas = list(await anext(run))
    assert len(tokens_of(deltas, 0)) > 1
    assert tokens_of(deltas, 1) == []


async def test_a_run_ends_when_its_last_choice_is_aborted(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.step_seconds = 0.002
    async with fleet.dispatcher.run(long_generation(num_choices=2)) as run:
        await anext(run)
        run.abort_choice(0)
        run.abort_choice(1)
        with pytest.raises(StopAsyncIteration):
            await anext(run)
        assert fleet.table.loads.num_reserved == 0
    await eventually(lambda: replica.num_live == 0)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_cancelled_run_gives_everything_back(fleet: DispatchedFleet, stage: str) -> None:
    replica = await fleet.add("r0")
    replica.script.step_seconds = 0.005
    replica.script.holding = stage == "prefill"
    task = asyncio.create_task(generate(fleet, long_generation(num_choices=2)))
    await eventually(lambda: replica.num_live == 2 and (stage == "prefill" or replica.num_tokens_sent > 6))
    assert fleet.table.loads.num_reserved == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    fleet.assert_nothing_reserved()
    await eventually(lambda: replica.num_live == 0)


async def test_a_run_cancelled_while_it_waits_for_a_replica_gives_everything_back(
    fleet: DispatchedFleet,
) -> None:
    replica = await fleet.add("r0")
    fleet.dispatcher.retry = RetryPolicy(first_wait_seconds=60)
    fleet.table.set_draining(replica.replica_id)
    task = asyncio.create_task(generate(fleet))
    await eventually(lambda: fleet.dispatcher.num_running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    fleet.assert_nothing_reserved()


ADAPTER = Adapter("sql", "f1")
ADAPTED = changed(GENERATION, adapter=ADAPTER, user=UserTag(b"somebody"))


async def test_adapter_and_user_are_the_same_wherever_a_generation_is_tried_or_resumed(
    fleet: DispatchedFleet,
) -> None:
    unable = [await fleet.add("r0"), await fleet.add("r1", Adapter("sql", "f0"))]
    able = [await fleet.add(name, ADAPTER) for name in ("r2", "r3", "r4")]
    for replica in able:
        replica.script.step_seconds = 0.003
    able[0].script.refusal = RefusalCode.OVERLOADED

    async def die(run: GenerationRun) -> None:
        await fleet.replicas[run.replica_id].kill()

    assert_complete(await generate(fleet, ADAPTED, after_first=die), num_choices=1)
    submits = [submit for replica in able for submit in replica.submits]
    assert {(submit.adapter, submit.user) for submit in submits} == {("sql", b"somebody")}
    assert any(submit.num_output_tokens for submit in submits)
    assert [replica.submits for replica in unable] == [[], []]


async def test_an_adapter_that_no_replica_has_ready_is_named_in_the_refusal(fleet: DispatchedFleet) -> None:
    for name, adapter in (("r0", Adapter("sql", "f0")), ("r1", Adapter("other", "f1"))):
        await fleet.add(name, adapter)
    with pytest.raises(NoReplicaAvailable, match="sql"):
        await generate(fleet, ADAPTED)


@pytest.mark.parametrize(
    ("peer", "is_hinted"), [("r1", True), ("draining", True), ("gone", False), (None, False)]
)
async def test_a_submit_says_where_to_pull_from_if_that_peer_is_there(
    fleet: DispatchedFleet, peer: str | None, is_hinted: bool
) -> None:
    await fleet.add("r0")
    others = [await fleet.add(other) for other in ("r1", "draining")]
    for other in others:
        fleet.table.set_draining(other.replica_id)
    fleet.clients[ReplicaId("draining")].is_draining = True
    decide = fleet.table._policy

    def deciding(*arguments: Any) -> Decision:
        source = None if peer is None else ReplicaId(peer)
        return structs.replace(decide(*arguments), pull_from=source, overlap_tokens=96)

    fleet.table._policy = deciding
    await generate(fleet)
    (submit,) = fleet.replicas[ReplicaId("r0")].submits
    hints = {each.replica_id: PullHint(each.replica_id, Epoch("e0"), each.address, 96) for each in others}
    assert submit.pull == (hints[ReplicaId(str(peer))] if is_hinted else None)


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


PICTURE, LARGE = b"a picture", os.urandom(2 * MEDIA_PART_BYTES + 1)


def showing(*contents: bytes, **values: Any) -> Generation:
    """A generation whose prompt refers to these images."""
    media = [Media(media_hash(ROOT, content), content) for content in contents]
    spans = tuple(ImageTokens(each.content_hash, 10 * place, 5) for place, each in enumerate(media))
    generation = changed(GENERATION, **values)
    return replace(generation, media=media, submit=structs.replace(generation.submit, media=spans))


async def test_images_go_before_the_prompt_whole_and_once(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    assert_complete(await generate(fleet, showing(LARGE, PICTURE)), 1)
    assert_complete(await generate(fleet, showing(PICTURE)), 1)
    assert sorted(replica.media.values()) == sorted([LARGE, PICTURE])
    assert replica.num_uploads == 2
    first, second = replica.submits
    assert [span.content_hash for span in first.media] == [
        media_hash(ROOT, each) for each in (LARGE, PICTURE)
    ]
    assert len(second.media) == 1
    assert (fleet.traffic.images.num_sent, fleet.traffic.images.num_known) == (2, 1)
    assert fleet.traffic.images.num_bytes == len(LARGE) + len(PICTURE)
    uploads = fleet.traffic.images.uploads.of()
    assert sum(uploads.counts) == 2 and uploads.total > 0
    fleet.assert_nothing_reserved()


async def test_images_are_counted_for_as_long_as_the_router_lives(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    await generate(fleet, showing(PICTURE))
    await generate(fleet, showing(PICTURE, LARGE))
    assert (fleet.traffic.images.num_sent, fleet.traffic.images.num_known) == (2, 1)
    await fleet.clients[ReplicaId("r0")].close()
    fleet.connect(replica)
    assert_complete(await generate(fleet, showing(PICTURE)), 1)
    assert (fleet.traffic.images.num_sent, fleet.traffic.images.num_again) == (3, 0)
    metrics = RouterMetrics(CollectorRegistry())
    metrics.add(fleet.traffic.images.instruments())
    lines = [line for family in metrics.families() for line in family.text().splitlines()]
    assert 'router_images_total{way="sent"} 3.0' in lines and 'router_images_total{way="known"} 1.0' in lines
    assert "router_image_upload_seconds_count 3.0" in lines
    assert 'router_image_failures_total{reason="overloaded"} 0.0' in lines  # there before the first
    assert f"router_image_bytes_total {float(2 * len(PICTURE) + len(LARGE))}" in lines


async def test_prompts_that_wait_for_one_image_wait_for_one_upload(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.holds_uploads = True
    runs = [asyncio.create_task(generate(fleet, showing(PICTURE))) for _ in range(5)]
    await eventually(lambda: replica.num_uploads == 1)
    assert not replica.submits
    replica.script.holds_uploads = False
    for run in runs:
        assert_complete(await run, 1)
    assert (replica.num_uploads, len(replica.submits)) == (1, 5)
    assert (fleet.traffic.images.num_sent, fleet.traffic.images.num_shared) == (1, 4)


async def test_what_a_replica_has_forgotten_is_sent_again_to_the_same_one(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    await generate(fleet, showing(PICTURE, LARGE))
    replica.media.clear()
    assert_complete(await generate(fleet, showing(PICTURE, LARGE)), 1)
    assert replica.num_uploads == 4
    assert (fleet.traffic.images.num_sent, fleet.traffic.images.num_again) == (4, 2)
    assert [len(submit.media) for submit in replica.submits] == [2, 2, 2]
    fleet.assert_nothing_reserved()


async def test_a_replica_that_never_has_it_is_not_asked_for_ever(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.refusal = RefusalCode.MEDIA_MISSING
    with pytest.raises(Overloaded, match="fewer or smaller"):
        await generate(fleet, showing(PICTURE))
    assert replica.num_uploads == len(replica.submits) == 3
    fleet.assert_nothing_reserved()


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest, "no such picture"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded, "busy"),
        (grpc.StatusCode.INTERNAL, NoReplicaAvailable, "Try again"),
    ],
)
async def test_an_image_that_is_not_taken_ends_its_request_alone(
    fleet: DispatchedFleet, code: grpc.StatusCode, error: type[RouterError], message: str
) -> None:
    replica = await fleet.add("r0")
    replica.script.upload_error = code
    with pytest.raises(error, match=message):
        await generate(fleet, showing(PICTURE))
    assert not replica.submits
    failures = fleet.traffic.images.num_failed
    assert failures.total() == replica.num_uploads
    assert set(failures) == set(FAILURES) and sum(map(bool, failures.values())) == 1
    assert fleet.traffic.images.num_sent == 0
    assert_complete(await generate(fleet), 1)
    fleet.assert_nothing_reserved()


async def test_where_one_replica_takes_no_image_another_does(fleet: DispatchedFleet) -> None:
    for name in ("r0", "r1"):
        (await fleet.add(name)).script.upload_error = grpc.StatusCode.RESOURCE_EXHAUSTED
    fleet.replicas[ReplicaId("r1")].script.upload_error = None
    for place in range(8):
        picture = b"picture %d" % place
        generation = showing(picture, bucket=b"bucket %d" % place)
        assert_complete(await generate(fleet, generation), 1)
    refusing = fleet.replicas[ReplicaId("r0")]
    assert refusing.num_uploads and not refusing.submits
    fleet.assert_nothing_reserved()


async def test_a_client_that_goes_while_its_image_is_sent_leaves_nothing(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.holds_uploads = True
    run = asyncio.create_task(generate(fleet, showing(PICTURE)))
    await eventually(lambda: replica.num_uploads == 1)
    assert fleet.table.loads.num_reserved == 1
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    fleet.assert_nothing_reserved()
    replica.script.holds_uploads = False
    assert_complete(await generate(fleet, showing(PICTURE)), 1)
    assert replica.num_uploads == 1, "what had begun went on"


async def test_an_image_that_takes_too_long_is_too_late(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.holds_uploads = True
    with pytest.raises(TooLate):
        await generate(fleet, showing(PICTURE, timeout_seconds=0.2))
    assert not replica.submits
    fleet.assert_nothing_reserved()
    replica.script.holds_uploads = False


async def test_a_replica_that_dies_with_an_image_on_its_way_costs_only_time(fleet: DispatchedFleet) -> None:
    dying = await fleet.add("r0")
    dying.script.holds_uploads = True
    run = asyncio.create_task(generate(fleet, showing(PICTURE)))
    await eventually(lambda: dying.num_uploads == 1)
    other = await fleet.add("r1")
    dying.script.holds_uploads = False
    dying.script.upload_error = grpc.StatusCode.INTERNAL
    await dying.kill()
    assert_complete(await run, 1)
    assert len(other.submits) == other.num_uploads == 1
    fleet.assert_nothing_reserved()


async def test_an_answer_that_goes_on_elsewhere_takes_its_images_along(fleet: DispatchedFleet) -> None:
    dying = await fleet.add("r0")
    dying.script.step_seconds = 0.01
    dying.script.die_after_tokens = 7
    run = asyncio.create_task(generate(fleet, showing(PICTURE, LARGE)))
    await eventually(lambda: dying.num_tokens_sent > 0)
    other = await fleet.add("r1")
    assert_complete(await run, 1)
    assert sorted(other.media.values()) == sorted([LARGE, PICTURE])
    (submit,) = other.submits
    assert submit.num_output_tokens == 7 and len(submit.media) == 2
    fleet.assert_nothing_reserved()


async def test_a_tenant_is_charged_once_however_often_an_image_is_not_taken(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.upload_error = grpc.StatusCode.RESOURCE_EXHAUSTED
    charges: list[Charge] = []
    holding = fleet.dispatcher.holding
    charge = holding.charge

    def noted(*arguments: Any) -> Charge:
        charges.append(charge(*arguments))
        return charges[-1]

    holding.charge = noted  # type: ignore[method-assign, assignment]
    closed: list[Charge] = []
    with pytest.MonkeyPatch.context() as patch:
        close = Charge.close

        def counted(self: Charge, now: float | None = None) -> None:
            closed.append(self)
            close(self, now)

        patch.setattr(Charge, "close", counted)
        with pytest.raises(Overloaded):
            await generate(fleet, showing(PICTURE))
    assert len(charges) > 1 and {id(each) for each in charges} == {id(each) for each in closed}


async def test_a_burst_of_images_waits_its_turn_at_the_router(fleet: DispatchedFleet) -> None:
    """A replica takes so many calls at once, of all routers, and refuses more."""
    replica = await fleet.add("r0")
    replica.script.holds_uploads = True
    runs = [
        asyncio.create_task(generate(fleet, showing(f"picture {number}".encode(), bucket=b"b%d" % number)))
        for number in range(5 * MAX_UPLOADS)
    ]
    await eventually(lambda: replica.num_uploads == MAX_UPLOADS)
    await asyncio.sleep(0.05)
    assert replica.num_uploads == MAX_UPLOADS
    replica.script.holds_uploads = False
    for run in runs:
        assert_complete(await run, 1)
    assert replica.num_uploads == len(replica.media) == len(runs)
    fleet.assert_nothing_reserved()


async def test_what_waits_its_turn_goes_with_the_last_who_wants_it(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.holds_uploads = True
    first = [
        asyncio.create_task(generate(fleet, showing(b"first %d" % number))) for number in range(MAX_UPLOADS)
    ]
    await eventually(lambda: replica.num_uploads == MAX_UPLOADS)
    wanted = [asyncio.create_task(generate(fleet, showing(b"wanted"))) for _ in range(2)]
    unwanted = [asyncio.create_task(generate(fleet, showing(b"unwanted"))) for _ in range(2)]
    uploads = fleet.clients[ReplicaId("r0")].media
    await eventually(lambda: len(uploads._sending) == MAX_UPLOADS + 2)
    for run in (*unwanted, wanted[0]):
        run.cancel()
    await asyncio.gather(*unwanted, wanted[0], return_exceptions=True)
    await eventually(lambda: len(uploads._sending) == MAX_UPLOADS + 1)
    again = asyncio.create_task(generate(fleet, showing(b"unwanted")))
    await eventually(lambda: len(uploads._sending) == MAX_UPLOADS + 2)
    replica.script.holds_uploads = False
    for run in (*first, wanted[1], again):
        assert_complete(await run, 1)
    assert replica.num_uploads == MAX_UPLOADS + 2 and not uploads._sending
    fleet.assert_nothing_reserved()


async def test_a_picture_that_kills_replicas_condemns_no_other_of_its_size(fleet: DispatchedFleet) -> None:
    for name in ("r0", "r1"):
        replica = await fleet.add(name)
        replica.script.step_seconds, replica.script.die_after_tokens = 0.01, 1
    with pytest.raises(GenerationFailed):
        await generate(fleet, showing(b"poison"))
    healthy = await fleet.add("r2")
    assert_complete(await generate(fleet, showing(b"harmless")), 1)
    with pytest.raises(GenerationFailed, match="died computing this prompt"):
        await generate(fleet, showing(b"poison"))
    assert len(healthy.submits) == 1


async def test_a_suspect_is_tried_alone_though_its_image_is_on_its_way(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0", holding=True)
    suspect, state = showing(b"suspect"), fleet.dispatcher
    digest = state.suspects.digest(suspect.model, suspect.token_ids_with_images(), suspect.caller.owner)
    state.suspects.blame([(digest, True)], state.clock())
    replica.script.holds_uploads = True
    runs = [asyncio.create_task(generate(fleet, suspect)) for _ in range(3)]
    await eventually(lambda: replica.num_uploads == 1)
    await asyncio.sleep(0.05)
    replica.script.holds_uploads = False
    await eventually(lambda: len(replica.submits) == 1)
    await asyncio.sleep(0.1)
    assert len(replica.submits) == state.suspects.num_on_trial == 1
    replica.script.holding = False
    for run in runs:
        assert_complete(await run, 1)
    fleet.assert_nothing_reserved()


async def test_an_answer_that_has_begun_goes_on_where_its_image_is_taken(fleet: DispatchedFleet) -> None:
    dying = await fleet.add("r0")
    dying.script.step_seconds, dying.script.die_after_tokens = 0.01, 7
    run = asyncio.create_task(generate(fleet, showing(PICTURE)))
    await eventually(lambda: dying.num_tokens_sent > 0)
    refusing = await fleet.add("r1")
    refusing.script.upload_error = grpc.StatusCode.INVALID_ARGUMENT
    await eventually(lambda: refusing.num_uploads > 0)
    await fleet.add("r2")
    assert_complete(await run, 1)
    fleet.assert_nothing_reserved()
