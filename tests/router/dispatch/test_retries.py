"""What is tried again: the budget of a router, the patience of a generation, and what both do to a fleet."""

import asyncio

import pytest

from replicas.protocol.frames import LoadSnapshot, RefusalCode
from replicas.protocol.status import ReplicaId
from router.dispatch.retries import Patience, RetryBudget, RetryPolicy
from router.errors import Overloaded
from tests.router.dispatched_fleet import GENERATION, DispatchedFleet, changed, fleet, generate
from tests.router.scripted_replica import eventually

__all__ = ["fleet"]


def test_a_budget_is_a_share_of_the_traffic_and_a_little_each_second() -> None:
    budget = RetryBudget(share=0.2, per_second=2.0, max_retries=3.0)
    assert [budget.take(0.0) for _ in range(4)] == [True, True, True, False]
    for _ in range(5):
        budget.add_request()
    assert [budget.take(0.0) for _ in range(2)] == [True, False]
    assert [budget.take(1.0) for _ in range(3)] == [True, True, False]
    assert budget.num_refused == 3


def test_an_idle_budget_is_full_and_not_more() -> None:
    budget = RetryBudget(max_retries=3.0)
    budget.left(0.0)
    for _ in range(100):
        budget.add_request()
    assert budget.left(1000.0) == 3.0


def test_pauses_grow_with_failures_and_none_are_alike() -> None:
    patience = Patience(RetryPolicy(first_wait_seconds=1.0))
    pauses = []
    for chance in (0.5, 1.0, 0.25):
        patience.failed(ReplicaId("r0"), RefusalCode.INTERNAL, 10.0, chance)
        pauses.append(patience.not_before)
    assert pauses == [10.5, 12.0, 12.0]
    assert patience.excluded == {"r0"}


def test_who_waits_in_line_has_so_many_seconds_until_it_is_placed() -> None:
    patience = Patience(RetryPolicy())
    assert [patience.wait_in_line(now, 5.0) for now in (1.0, 4.0, 6.0, 7.0)] == [5.0, 2.0, 0.0, 0.0]
    patience.placed()
    assert patience.wait_in_line(8.0, 5.0) == 5.0


async def test_retries_at_living_replicas_are_bounded_by_the_budget(fleet: DispatchedFleet) -> None:
    for number in range(4):
        (await fleet.add(f"r{number}")).script.refusal = RefusalCode.OVERLOADED
    fleet.dispatcher.budget = RetryBudget(share=0.1, per_second=0.0, max_retries=20.0)
    tasks = [
        asyncio.create_task(generate(fleet, changed(GENERATION, bucket=str(number).encode())))
        for number in range(200)
    ]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {Overloaded}
    assert 200 < sum(len(replica.submits) for replica in fleet.replicas.values()) <= 200 + 20 + 200 // 10
    assert fleet.dispatcher.budget.num_refused > 0


async def test_what_a_death_has_interrupted_is_tried_again_with_an_empty_budget(
    fleet: DispatchedFleet,
) -> None:
    dying = await fleet.add("r0")
    dying.script.holding = True
    fleet.dispatcher.budget = RetryBudget(share=0.0, per_second=0.0, max_retries=0.0)
    tasks = [
        asyncio.create_task(generate(fleet, changed(GENERATION, token_ids=[*GENERATION.token_ids, number])))
        for number in range(20)
    ]
    await eventually(lambda: dying.num_live == 20)
    await fleet.add("r1")
    await dying.kill()
    assert all(await asyncio.gather(*tasks))


async def test_a_refusal_says_how_long_the_idlest_replica_has_to_compute(fleet: DispatchedFleet) -> None:
    for number, pending in enumerate((300_000, 200_000)):
        replica = await fleet.add(f"r{number}")
        replica.script.refusal = RefusalCode.OVERLOADED
        replica.script.load = LoadSnapshot(num_pending_tokens=pending)
    await eventually(lambda: fleet.table.backlog_seconds("toy") == pytest.approx(20.0))
    with pytest.raises(Overloaded) as refused:
        await generate(fleet)
    assert refused.value.retry_after_seconds == pytest.approx(20.0)
