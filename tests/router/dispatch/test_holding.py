"""Requests whose replica has too much to do: who goes next, who is refused, and what is given back."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import ReplicaId
from router.caller import Caller, Tenant
from router.dispatch.retries import RetryPolicy
from router.dispatch.waiting_room import WaitingRoom
from router.errors import Overloaded, RouterError, TooLate
from router.generation import Generation
from router.queue.fair_queue import FairQueue
from router.queue.held import QueueRules
from router.queue.holding import Holding
from router.queue.room import NUM_NEXT
from router.queue.standing_delay import TARGET_SECONDS
from tests.router.dispatched_fleet import (
    GENERATION,
    PROMPT,
    DispatchedFleet,
    assert_complete,
    changed,
    fleet,
    generate,
)
from tests.router.scripted_replica import eventually

__all__ = ["fleet"]

RULES = QueueRules(longest_seconds=30.0)


def use(fleet: DispatchedFleet, rules: QueueRules = RULES, *, max_queued: int = 1000) -> Holding:
    """As in an overload."""
    holding = Holding(fleet.table, rules, lambda: FairQueue(max_waiting=max_queued))
    delay, now = holding._fleet("toy").delay, time.monotonic()
    for seconds_ago in (10.0, 6.0):
        delay.sees(0.0, TARGET_SECONDS + 1.0, 1, now - seconds_ago)
    delay.holds(now)
    fleet.dispatcher = fleet.new_dispatcher(
        WaitingRoom(max_waiting=1000, max_bytes=1 << 30), retry=RetryPolicy(wait_seconds=30), holding=holding
    )
    return holding


def of(tenant: str, number: int = 0, **more: object) -> Generation:
    """Its prompt's last token says whose it is, and that of nobody else begins so."""
    token_ids = [hash(tenant) % 40_000, *PROMPT, number]
    return changed(
        GENERATION,
        token_ids=token_ids,
        block_hashes=(),
        bucket=f"{tenant}/{number}".encode(),
        caller=Caller(tenant=Tenant(name=tenant)),
        **more,
    )


def num_held(fleet: DispatchedFleet) -> int:
    return fleet.dispatcher.holding.num_waiting


async def begin(fleet: DispatchedFleet, generations: Sequence[Generation]) -> list[asyncio.Task[None]]:
    async def one(generation: Generation) -> None:
        assert_complete(await generate(fleet, generation), 1)

    tasks = []
    for generation in generations:
        tasks.append(asyncio.create_task(one(generation)))
        await asyncio.sleep(0)
    return tasks


async def begin_held(fleet: DispatchedFleet, generations: Sequence[Generation]) -> list[asyncio.Task[None]]:
    before = num_held(fleet)
    tasks = await begin(fleet, generations)
    await eventually(lambda: num_held(fleet) == before + len(generations))
    return tasks


async def full(fleet: DispatchedFleet, replica_id: str = "full") -> list[asyncio.Task[None]]:
    """A replica that has as many as it may have, which make no progress."""
    replica = await fleet.add(replica_id, max_running=1, holding=True)
    tasks = await begin(fleet, [of("first", number) for number in range(1 + NUM_NEXT)])
    await eventually(lambda: replica.num_live == 1 + NUM_NEXT)
    return tasks


async def test_what_a_full_batch_has_no_place_for_is_held_also_without_an_overload(
    fleet: DispatchedFleet,
) -> None:
    tasks = await full(fleet)
    held = await begin_held(fleet, [of("red", number) for number in range(10)])
    replica = fleet.replicas[ReplicaId("full")]
    assert replica.num_live == 1 + NUM_NEXT
    replica.script.holding = False
    await asyncio.gather(*tasks, *held)
    assert len(replica.submits) == 11 + NUM_NEXT


@pytest.mark.parametrize("num_choices", [1, 8])
async def test_a_flood_of_one_key_leaves_places_for_the_next_tenant(
    fleet: DispatchedFleet, num_choices: int
) -> None:
    """Of 32 places it leaves two, though nobody else has asked, and its own wait."""
    replica = await fleet.add("only", max_running=32, holding=True)

    def asked(tenant: str, number: int, **more: object) -> asyncio.Task[object]:
        caller = Caller(tenant=Tenant(name=tenant), key_id=tenant)
        return asyncio.create_task(generate(fleet, replace(of(tenant, number, **more), caller=caller)))

    flood = [asked("red", number, num_choices=num_choices) for number in range(48 // num_choices)]
    num_gone = -(-30 // num_choices)
    await eventually(lambda: num_held(fleet) == 48 // num_choices - num_gone)
    await eventually(lambda: replica.num_live == num_gone * num_choices)
    shares = fleet.dispatcher.holding._fleet("toy").shares
    assert shares._num_places == num_gone * num_choices
    other = asked("green", 77)
    await eventually(lambda: replica.submits[-1].token_ids()[-1] == 77)
    assert num_held(fleet) == 48 // num_choices - num_gone
    replica.script.holding = False
    await asyncio.gather(*flood, other)
    assert shares._num_places == 0


async def test_a_tenant_with_one_request_goes_before_a_flood(fleet: DispatchedFleet) -> None:
    use(fleet)
    tasks = await full(fleet)
    tasks += await begin_held(fleet, [of("red", number) for number in range(20)])
    tasks += await begin_held(fleet, [of("green", 77)])
    replica = fleet.replicas[ReplicaId("full")]
    replica.script.holding = False
    await asyncio.gather(*tasks)
    order = [submit.token_ids()[-1] for submit in replica.submits[1 + NUM_NEXT :]]
    assert order.index(77) <= 1
    red = [number for number in order if number != 77]
    assert red[:6] == [19, 18, 17, 16, 15, 0], "of equal work the newest, and a fifth for the oldest"
    assert sorted(red) == list(range(20))


async def test_what_a_grammar_took_to_work_out_is_charged_to_its_tenant(fleet: DispatchedFleet) -> None:
    holding = use(fleet)
    replica = await fleet.add("only")
    replica.script.load = LoadSnapshot(prefill_seconds_per_token=0.001)
    await asyncio.gather(*await begin(fleet, [of("first")]))
    await asyncio.gather(*await begin(fleet, [of("red"), of("green", grammar_seconds=2.0)]))
    counters = holding._fleet("toy").queue.counters
    work = counters.counter("green") - counters.counter("red")
    assert work == pytest.approx(2000.0, abs=100)


async def test_whoever_leaves_while_held_leaves_nothing_behind(fleet: DispatchedFleet) -> None:
    holding = use(fleet)
    tasks = await full(fleet)
    held = await begin_held(fleet, [of("red", number) for number in range(10)])
    before = holding._fleet("toy").queue.counters.counter("red")
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    assert num_held(fleet) == 0
    assert holding._fleet("toy").queue.counters.counter("red") == before, "nothing of it was charged"
    fleet.replicas[ReplicaId("full")].script.holding = False
    await asyncio.gather(*tasks)


async def test_whoever_leaves_before_much_was_computed_gets_its_share_back(
    fleet: DispatchedFleet,
) -> None:
    holding = use(fleet)
    replica = await fleet.add("slow", holding=True)
    replica.script.load = LoadSnapshot(prefill_seconds_per_token=100.0)
    others = await begin(fleet, [of("first")])
    await eventually(lambda: fleet.table.load(replica.replica_id).prefill_seconds_per_token == 100.0)
    (task,) = await begin(fleet, [of("red")])
    await eventually(lambda: replica.num_live == 2)
    counters = holding._fleet("toy").queue.counters
    assert counters.counter_of_waiting("red") > 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert counters.counter_of_waiting("red") < 0.1
    replica.script.holding = False
    await asyncio.gather(*others)


async def test_what_was_decoded_is_charged(fleet: DispatchedFleet) -> None:
    holding = use(fleet)
    await fleet.add("quick")
    await asyncio.gather(*await begin(fleet, [of("red")]))
    assert holding._fleet("toy").queue.counters.counter_of_waiting("red") >= 2 * 20


async def test_those_that_wait_for_a_replica_that_dies_go_elsewhere(fleet: DispatchedFleet) -> None:
    use(fleet)
    tasks = await full(fleet)
    tasks += await begin_held(fleet, [of("red", number) for number in range(10)])
    other = await fleet.add("other", holding=True, max_running=1)
    await fleet.replicas[ReplicaId("full")].kill()
    await eventually(lambda: other.num_live > 0)
    other.script.holding = False
    await asyncio.gather(*tasks)


async def test_those_that_are_held_survive_that_all_are_away_for_a_while(fleet: DispatchedFleet) -> None:
    use(fleet)
    tasks = await full(fleet)
    held = await begin_held(fleet, [of("red", number) for number in range(10)])
    for task in tasks:
        task.cancel()
    await fleet.replicas[ReplicaId("full")].kill()
    await asyncio.gather(*tasks, return_exceptions=True)
    await fleet.add("back")
    await asyncio.gather(*held)


async def test_a_deadline_that_passes_while_held_is_told_and_nothing_is_computed(
    fleet: DispatchedFleet,
) -> None:
    use(fleet)
    tasks = await full(fleet)
    replica = fleet.replicas[ReplicaId("full")]
    num_submits = len(replica.submits)
    with pytest.raises(TooLate) as refused:
        await generate(fleet, of("red", timeout_seconds=0.2))
    assert refused.value.retry_after_seconds >= 1.0
    assert len(replica.submits) == num_submits
    replica.script.holding = False
    await asyncio.gather(*tasks)


async def test_a_tenants_slo_is_a_deadline_of_its_requests(fleet: DispatchedFleet) -> None:
    use(fleet)
    tasks = await full(fleet)
    hasty = replace(of("red"), caller=Caller(tenant=Tenant(name="red", slo_seconds=0.1)))
    with pytest.raises(TooLate):
        await generate(fleet, hasty)
    fleet.replicas[ReplicaId("full")].script.holding = False
    await asyncio.gather(*tasks)


async def test_who_cannot_make_it_is_told_at_once(fleet: DispatchedFleet) -> None:
    """The replica says that it has an hour of prompts to compute."""
    use(fleet)
    tasks = await full(fleet)
    replica = fleet.replicas[ReplicaId("full")]
    replica.script.load = LoadSnapshot(num_pending_tokens=36_000, prefill_seconds_per_token=0.1)
    await eventually(lambda: fleet.table.load(ReplicaId("full")).num_pending_tokens >= 36_000)
    with pytest.raises(TooLate) as refused:
        await generate(fleet, of("red", timeout_seconds=60.0))
    assert refused.value.retry_after_seconds == 60.0
    replica.script.load = LoadSnapshot()
    replica.script.holding = False
    await asyncio.gather(*tasks)


async def test_a_full_queue_refuses_the_flood_and_lets_another_tenant_in(fleet: DispatchedFleet) -> None:
    use(fleet, max_queued=4)
    tasks = await full(fleet)
    flood = await begin_held(fleet, [of("red", number) for number in range(4)])
    with pytest.raises(Overloaded):
        await generate(fleet, of("red", 9))
    green = await begin(fleet, [of("green", 77)])
    await eventually(lambda: any(task.done() for task in flood))
    lost = [task for task in flood if task.done()]
    assert len(lost) == 1 and isinstance(lost[0].exception(), Overloaded)
    assert lost[0] is flood[0], "the oldest"
    fleet.replicas[ReplicaId("full")].script.holding = False
    await asyncio.gather(*tasks, *green, *flood[1:])


async def test_nobody_is_held_for_longer_than_the_rules_say(fleet: DispatchedFleet) -> None:
    use(fleet, QueueRules(longest_seconds=0.2))
    tasks = await full(fleet)
    with pytest.raises(Overloaded):
        await generate(fleet, of("red"))
    fleet.replicas[ReplicaId("full")].script.holding = False
    await asyncio.gather(*tasks)


async def test_with_room_nothing_is_held(fleet: DispatchedFleet) -> None:
    holding = use(fleet)
    await fleet.add("quick")
    for number in range(20):
        await asyncio.gather(*await begin(fleet, [of("red", number)]))
    assert holding.counts.num_held == 0 and holding.counts.num_passed == 20


async def test_one_whose_time_is_over_at_its_replica_is_stopped_there_and_pays_for_what_that_did(
    fleet: DispatchedFleet,
) -> None:
    holding = use(fleet)
    replica = await fleet.add("slow", holding=True)
    counters = holding._fleet("toy").queue.counters
    asking = asyncio.create_task(generate(fleet, of("red", timeout_seconds=2.0)))
    await eventually(lambda: replica.num_live == 1)
    charged = counters.counter_of_waiting("red")
    assert charged > 0
    with pytest.raises(TooLate):
        await asking
    await eventually(lambda: replica.num_live == 0)
    assert replica.num_aborts == 1 and counters.counter_of_waiting("red") == charged
    statistics = fleet.dispatcher
    assert statistics.num_running == 0 and statistics.num_late == 1
    # The replica may have told its load just before.
    await eventually(lambda: fleet.table.load(ReplicaId("slow")).num_requests == 0)


async def test_a_prompt_whose_replica_is_lost_costs_its_tenant_nothing(fleet: DispatchedFleet) -> None:
    holding = use(fleet)
    replica = await fleet.add("slow", holding=True)
    counters = holding._fleet("toy").queue.counters
    asking = asyncio.create_task(generate(fleet, of("red")))
    await eventually(lambda: replica.num_live == 1)
    assert counters.counter_of_waiting("red") > 0
    await replica.kill()
    with pytest.raises(RouterError):
        await asking
    assert counters.counter_of_waiting("red") == 0


async def test_a_tenants_slo_is_a_deadline_too(fleet: DispatchedFleet) -> None:
    use(fleet)
    replica = await fleet.add("slow", holding=True)
    caller = Caller(tenant=Tenant(name="red", slo_seconds=2.0))  # to have reached the replica by then
    with pytest.raises(TooLate):
        await generate(fleet, replace(of("red"), caller=caller))
    await eventually(lambda: replica.num_aborts == 1)


async def test_what_nobody_waits_for_has_all_the_time(fleet: DispatchedFleet) -> None:
    use(fleet)
    replica = await fleet.add("slow", holding=True)
    caller = Caller(tenant=Tenant(name="red", slo_seconds=0.1))
    task = asyncio.create_task(generate(fleet, replace(of("red"), caller=caller, is_awaited=False)))
    await asyncio.sleep(0.3)
    replica.script.holding = False
    assert_complete(await task, 1)


async def test_an_answer_that_has_begun_in_time_may_take_longer(fleet: DispatchedFleet) -> None:
    use(fleet)
    replica = await fleet.add("slow")

    async def pause(run: object) -> None:
        replica.script.holding = True
        await asyncio.sleep(2.1)
        replica.script.holding = False

    replica.script.step_seconds = 0.01
    deltas = await generate(fleet, of("red", timeout_seconds=2.0), after_first=pause)
    assert_complete(deltas, 1)
    assert replica.num_aborts == 0
