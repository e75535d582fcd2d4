"""One generation through dispatch, over real gRPC and a real routing table: tokens, reservations, ends."""

import asyncio
import gc
import weakref
from typing import Any

import pytest
from msgspec import structs

from replicas.protocol.frames import RefusalCode, TokenDelta, UserTag
from replicas.protocol.pulls import PullHint
from replicas.protocol.status import Adapter, Epoch, ReplicaId
from router.dispatch.generation_run import GenerationRun
from router.dispatch.retries import RetryPolicy
from router.errors import (
    NoReplicaAvailable,
)
from router.routing.decision import Decision
from tests.router.dispatched_fleet import (
    GENERATION,
    PROMPT,
    DispatchedFleet,
    assert_complete,
    changed,
    expected_tokens,
    fleet,
    generate,
    long_generation,
    tokens_of,
)
from tests.router.scripted_replica import eventually

__all__ = ["fleet"]


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


async def test_the_reservation_is_given_back_with_the_last_token(fleet: DispatchedFleet) -> None:
    await fleet.add("r0")
    async with fleet.dispatcher.run(GENERATION) as run:
        async for _ in run:
            pass
        assert fleet.table.loads.num_reserved == 0


async def test_leaving_a_run_stops_it_on_the_replica(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.step_seconds = 0.005
    async with fleet.dispatcher.run(long_generation()) as run:
        await anext(run)
    fleet.assert_nothing_reserved()
    await eventually(lambda: replica.num_live == 0)
    assert replica.num_aborts == 1


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


async def test_a_run_cancelled_while_it_waits_for_a_place_to_resume_gives_everything_back(
    fleet: DispatchedFleet,
) -> None:
    replica = await fleet.add("r0")
    replica.script.step_seconds = 0.005
    fleet.dispatcher.retry = RetryPolicy(first_wait_seconds=60)
    task = asyncio.create_task(generate(fleet, long_generation()))
    await eventually(lambda: replica.num_tokens_sent > 2)
    await replica.kill()
    await eventually(lambda: fleet.dispatcher.num_lost == 1)
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


async def test_without_adapter_and_user_none_are_sent(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0", ADAPTER)
    await generate(fleet)
    assert [(submit.adapter, submit.user) for submit in replica.submits] == [(None, b"")]


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
