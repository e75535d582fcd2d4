"""Requests for a model whose replicas are all away: who waits, how long, in which order, and who does not."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from replicas.protocol.status import Adapter
from router.dispatch.generation_run import GenerationRun
from router.dispatch.retries import RetryPolicy
from router.dispatch.waiting_room import WaitingRoom
from router.errors import GenerationFailed, NoReplicaAvailable
from router.fleet.fleet_health import FleetHealth
from router.generation import Generation
from router.queue.room import NUM_NEXT
from router.shared.instruments import Reading
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

PATIENT = RetryPolicy(first_wait_seconds=0.01, wait_seconds=50)
AWAY_SECONDS = 12.5


@pytest.fixture
async def emptied(fleet: DispatchedFleet) -> AsyncIterator[DispatchedFleet]:
    """Its replica has gone, and others are said to come."""
    await (await fleet.add("gone")).kill()
    await eventually(lambda: fleet.clients["gone"].lost is not None)  # type: ignore[index]
    fleet.outlook = FleetHealth(is_coming=True, away_seconds=AWAY_SECONDS)
    use(fleet, wait_seconds=50)
    yield fleet


def use(
    fleet: DispatchedFleet, *, wait_seconds: float, max_waiting: int = 1000, max_bytes: int = 1 << 30
) -> None:
    room = WaitingRoom(max_waiting=max_waiting, max_bytes=max_bytes)
    fleet.dispatcher = fleet.new_dispatcher(room, retry=replace(PATIENT, wait_seconds=wait_seconds))


def numbered(number: int) -> Generation:
    return changed(GENERATION, token_ids=[*PROMPT, number], bucket=str(number).encode())


def num_waiting(fleet: DispatchedFleet) -> int:
    """For a replica to come, or for room at one."""
    statistics = fleet.dispatcher
    return statistics.room.num_waiting + statistics.holding.num_waiting


async def ask(fleet: DispatchedFleet, numbers: Sequence[int]) -> list[asyncio.Task[None]]:
    """Requests that wait, in this order."""

    async def one(number: int) -> None:
        assert_complete(await generate(fleet, numbered(number)), 1)

    tasks: list[asyncio.Task[None]] = []
    for number in numbers:
        before = num_waiting(fleet)
        tasks.append(asyncio.create_task(one(number)))
        await eventually(lambda before=before: num_waiting(fleet) == before + 1)  # type: ignore[misc]
    return tasks


async def test_who_asks_while_all_are_away_is_answered_when_one_is_back(emptied: DispatchedFleet) -> None:
    tasks = await ask(emptied, range(50))
    assert emptied.dispatcher.room.num_bytes > 50 * len(PROMPT)
    await emptied.add("back")
    await asyncio.gather(*tasks)


def unplaced(fleet: DispatchedFleet) -> dict[str, dict[str, float]]:
    found = {}
    for name in ("requests", "tokens"):
        (gauge,) = [each for each in fleet.dispatcher.instruments() if each.name == f"router_unplaced_{name}"]
        assert isinstance(gauge, Reading)
        found[name] = dict(gauge.read())  # type: ignore[call-overload]
    return found


async def test_autoscalers_are_told_how_much_waits_for_a_replica_or_for_room_at_one(
    emptied: DispatchedFleet,
) -> None:
    assert unplaced(emptied) == {"requests": {"toy": 0}, "tokens": {"toy": 0}}
    tasks = await ask(emptied, range(30))
    assert unplaced(emptied) == {"requests": {"toy": 30}, "tokens": {"toy": 30 * (len(PROMPT) + 1)}}
    first = await emptied.add("first", max_running=4, holding=True)
    await eventually(lambda: first.num_live == 4 + NUM_NEXT)
    left = num_waiting(emptied)
    assert left == 30 - 4 - NUM_NEXT
    assert unplaced(emptied) == {"requests": {"toy": left}, "tokens": {"toy": left * (len(PROMPT) + 1)}}
    first.script.holding = False
    await asyncio.gather(*tasks)


async def test_they_are_called_at_once_and_in_the_order_in_which_they_came(emptied: DispatchedFleet) -> None:
    tasks = await ask(emptied, range(20))
    back = await emptied.add("back")
    await asyncio.gather(*tasks)
    assert [submit.token_ids()[-1] for submit in back.submits] == list(range(20))
    assert emptied.dispatcher.num_retries == 0


async def test_the_first_that_comes_back_gets_no_more_than_it_can_begin_soon(
    emptied: DispatchedFleet,
) -> None:
    tasks = await ask(emptied, range(30))
    first = await emptied.add("first", max_running=4, holding=True)
    most = 4 + NUM_NEXT
    await eventually(lambda: first.num_live == most)
    for _ in range(5):
        await asyncio.sleep(0.05)
        assert first.num_live == most
    assert num_waiting(emptied) == 30 - most
    second = await emptied.add("second", max_running=4)
    await eventually(lambda: num_waiting(emptied) == 0)
    first.script.holding = False
    await asyncio.gather(*tasks)
    assert len(second.submits) > most


async def test_who_comes_later_does_not_pass_those_that_wait(emptied: DispatchedFleet) -> None:
    tasks = await ask(emptied, range(10))
    first = await emptied.add("first", max_running=2, holding=True)
    await eventually(lambda: first.num_live == 4)
    late = await ask(emptied, [99])
    first.script.holding = False
    await asyncio.gather(*tasks, *late)
    assert [submit.token_ids()[-1] for submit in first.submits] == [*range(10), 99]


async def test_after_the_wait_it_is_a_refusal_that_says_how_long_there_has_been_nobody(
    fleet: DispatchedFleet,
) -> None:
    await (await fleet.add("gone")).kill()
    await eventually(lambda: fleet.clients["gone"].lost is not None)  # type: ignore[index]
    fleet.outlook = FleetHealth(is_coming=True, away_seconds=AWAY_SECONDS)
    use(fleet, wait_seconds=0.3)
    began = time.monotonic()
    with pytest.raises(NoReplicaAvailable) as refused:
        await generate(fleet)
    assert refused.value.retry_after_seconds == AWAY_SECONDS
    assert time.monotonic() - began >= 0.3


@pytest.mark.parametrize("bound", [{"max_waiting": 3}, {"max_bytes": 3 * 40 * (len(PROMPT) + 1)}])
async def test_beyond_the_bounds_nobody_waits(emptied: DispatchedFleet, bound: dict[str, int]) -> None:
    use(emptied, wait_seconds=50, **bound)
    tasks = await ask(emptied, range(3))
    with pytest.raises(NoReplicaAvailable):
        await generate(emptied, numbered(3))
    assert emptied.dispatcher.room.num_refused == 1
    await emptied.add("back")
    await asyncio.gather(*tasks)


async def test_who_leaves_while_waiting_is_forgotten_and_holds_up_nobody(emptied: DispatchedFleet) -> None:
    tasks = await ask(emptied, range(5))
    for task in (tasks.pop(3), tasks.pop(0)):
        task.cancel()
    await eventually(lambda: num_waiting(emptied) == 3)
    back = await emptied.add("back")
    await asyncio.gather(*tasks)
    assert [submit.token_ids()[-1] for submit in back.submits] == [1, 2, 4]


async def test_an_answer_that_has_begun_waits_as_well_and_goes_on(fleet: DispatchedFleet) -> None:
    (await fleet.add("r0")).script.step_seconds = 0.01
    fleet.outlook = FleetHealth(is_coming=True)
    use(fleet, wait_seconds=50, max_waiting=0)

    async def kill(run: GenerationRun) -> None:
        await fleet.replicas[run.replica_id].kill()

    task = asyncio.create_task(generate(fleet, changed(GENERATION, num_choices=3), after_first=kill))
    await eventually(lambda: num_waiting(fleet) == 1)
    await fleet.add("r1")
    assert_complete(await task, 3)


async def test_an_answer_that_has_begun_and_waits_in_vain_has_failed(fleet: DispatchedFleet) -> None:
    (await fleet.add("r0")).script.step_seconds = 0.01
    fleet.outlook = FleetHealth(is_coming=True)
    use(fleet, wait_seconds=0.3)

    async def kill(run: GenerationRun) -> None:
        await fleet.replicas[run.replica_id].kill()

    with pytest.raises(GenerationFailed):
        await generate(fleet, after_first=kill)


async def test_those_in_line_for_an_adapter_do_not_hold_up_those_for_the_model(
    emptied: DispatchedFleet,
) -> None:
    adapted = asyncio.create_task(generate(emptied, changed(GENERATION, adapter=Adapter("sql", "f1"))))
    await eventually(lambda: num_waiting(emptied) == 1)
    tasks = await ask(emptied, range(3))
    await emptied.add("plain")
    await asyncio.gather(*tasks)
    await emptied.add("able", Adapter("sql", "f1"))
    assert_complete(await adapted, 1)


async def test_nobody_waits_where_nothing_is_coming(fleet: DispatchedFleet) -> None:
    use(fleet, wait_seconds=50)
    with pytest.raises(NoReplicaAvailable):
        await generate(fleet)
    room = fleet.dispatcher.room
    assert (room.num_waiting, room.num_bytes, room.num_refused) == (0, 0, 0)
