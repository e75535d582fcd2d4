"""Turns of programs in dispatch: each one is ended once, whatever its end, and its home is where it ran."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from msgspec import structs

from replicas.protocol.frames import RefusalCode
from replicas.protocol.status import ReplicaId
from router.dispatch.pick import Pick
from router.dispatch.retries import RetryPolicy
from router.dispatch.waiting_room import WaitingRoom
from router.errors import NoReplicaAvailable, Overloaded, TooLate
from router.observation.trace_points import NO_TRACE
from router.programs.book import ProgramBook, Turn
from router.programs.name import ProgramName
from router.queue import gate
from router.queue.held import QueueRules
from router.queue.holding import Holding
from tests.router.dispatched_fleet import (
    GENERATION,
    DispatchedFleet,
    assert_complete,
    changed,
    fleet,
    generate,
    long_generation,
)
from tests.router.scripted_replica import CARD, eventually

__all__ = ["fleet"]

NAME = ProgramName("client", "x-session", "s1")
TURN = replace(GENERATION, program=NAME)


class CountedBook(ProgramBook):
    """Knows each turn that was begun, and how often it was ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[Turn, int] = {}
        self.routes: list[ReplicaId] = []

    def begin(self, *args: object) -> Turn:  # type: ignore[override]
        turn = super().begin(*args)  # type: ignore[arg-type]
        self.ends[turn] = 0
        return turn

    def routed(self, turn: Turn, replica_id: ReplicaId, now: float) -> None:
        super().routed(turn, replica_id, now)
        self.routes.append(replica_id)

    def end(self, turn: Turn, now: float) -> None:
        super().end(turn, now)
        self.ends[turn] += 1


def use(fleet: DispatchedFleet, *, wait_seconds: float = 0.2) -> CountedBook:
    book = CountedBook()
    fleet.dispatcher = fleet.new_dispatcher(
        WaitingRoom(max_waiting=10, max_bytes=1 << 30),
        retry=RetryPolicy(max_waits=3, first_wait_seconds=0.01, wait_seconds=wait_seconds),
        holding=Holding(fleet.table, QueueRules(), programs=book),
    )
    return book


def assert_over(book: CountedBook, num_turns: int = 1) -> None:
    assert list(book.ends.values()) == [1] * num_turns
    assert all(not each.num_open and each.paused_at is not None for each in book.programs())


async def succeeds(fleet: DispatchedFleet) -> None:
    await fleet.add("r0")
    assert_complete(await generate(fleet, TURN), 1)


async def is_refused(fleet: DispatchedFleet) -> None:
    (await fleet.add("r0")).script.refusal = RefusalCode.OVERLOADED
    with pytest.raises(Overloaded):
        await generate(fleet, TURN)


async def finds_no_replica(fleet: DispatchedFleet) -> None:
    fleet.table.add_replica(ReplicaId("away"), CARD, CARD.block_size)
    fleet.table.set_stalled(ReplicaId("away"), is_stalled=True)
    with pytest.raises(NoReplicaAvailable):
        await generate(fleet, TURN)


async def is_left_in_mid_answer(fleet: DispatchedFleet) -> None:
    (await fleet.add("r0")).script.step_seconds = 0.01
    async with fleet.dispatcher.run(replace(long_generation(), program=NAME)) as run:
        async for _ in run:
            break


async def is_cancelled_while_it_waits(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.holding = True
    task = asyncio.create_task(generate(fleet, TURN))
    await eventually(lambda: replica.num_live == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def is_too_late(fleet: DispatchedFleet) -> None:
    (await fleet.add("r0")).script.holding = True
    with pytest.raises(TooLate):
        await generate(fleet, replace(TURN, timeout_seconds=0.1))


ENDS = [
    *(succeeds, is_refused, finds_no_replica, is_left_in_mid_answer, is_cancelled_while_it_waits),
    is_too_late,
]


@pytest.mark.parametrize("happens", ENDS)
async def test_a_turn_is_ended_once(
    fleet: DispatchedFleet, happens: Callable[[DispatchedFleet], Awaitable[None]]
) -> None:
    book = use(fleet)
    await happens(fleet)
    assert_over(book)
    (program,) = book.programs()
    assert (program.home is None) == (happens is finds_no_replica)


async def test_one_of_a_program_that_waits_at_the_gate_leaves_it_when_it_is_cancelled_and_goes_in_its_turn(
    fleet: DispatchedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "CHEAP_SECONDS", 0.0)
    book, replica = use(fleet), await fleet.add("r0")
    full = book.begin("toy", "red", structs.replace(NAME, session="full"), 10**9, (), 0.0)
    book.admit(full.program, 10**9, 0.0)
    tasks = [
        asyncio.create_task(generate(fleet, replace(TURN, program=structs.replace(NAME, session=session))))
        for session in ("s1", "s2")
    ]
    holding = fleet.dispatcher.holding
    await eventually(lambda: len(list(holding.at_gate())) == 2)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    assert len(list(holding.at_gate())) == 1 and not replica.submits
    book.dismiss(full.program)
    assert_complete(await tasks[1], 1)
    holding.end_turn(full, 0.0)
    assert_over(book, 3)
    assert list(holding.at_gate()) == []


async def test_a_retried_turn_takes_its_home_along(fleet: DispatchedFleet) -> None:
    book = use(fleet)
    for name in ("r0", "r1"):
        (await fleet.add(name)).script.holding = True
    task = asyncio.create_task(generate(fleet, TURN))
    await eventually(lambda: any(replica.num_live for replica in fleet.replicas.values()))
    dying = fleet.serving_replica()
    other = next(replica for replica in fleet.replicas.values() if replica is not dying)
    other.script.holding = False
    await dying.kill()
    assert_complete(await task, 1)
    assert_over(book)
    (program,) = book.programs()
    assert book.routes == [dying.replica_id, other.replica_id]
    assert program.home == other.replica_id and set(book._homes) == {other.replica_id}


async def test_side_calls_and_requests_without_a_program_are_no_turns(fleet: DispatchedFleet) -> None:
    book = use(fleet)
    await fleet.add("r0")
    for generation in (GENERATION, replace(TURN, program=structs.replace(NAME, is_side=True))):
        assert_complete(await generate(fleet, generation), 1)
    assert len(book) == 0 and book.ends == {}
    fleet.dispatcher = fleet.new_dispatcher()
    assert_complete(await generate(fleet, TURN), 1)


async def test_a_program_is_one_through_all_its_turns_and_goes_home(fleet: DispatchedFleet) -> None:
    book = use(fleet)
    for name in ("r0", "r1", "r2"):
        await fleet.add(name)
    for number in range(5):
        longer = [*TURN.token_ids, *range(number)]
        assert_complete(await generate(fleet, changed(TURN, token_ids=longer)), 1)
    assert_over(book, 5)
    (program,) = book.programs()
    assert (program.num_turns, program.num_tokens) == (5, len(longer))
    assert len(set(book.routes)) == 1 and program.home == book.routes[0]


@pytest.mark.parametrize("end", ["answered", "failed", "none may go", "cancelled"])
async def test_a_pick_is_a_turn_and_is_ended_once(fleet: DispatchedFleet, end: str) -> None:
    book = use(fleet)
    await fleet.add("r0")
    admits = end != "none may go"
    pick = Pick(fleet.dispatcher, TURN, NO_TRACE, lambda card: admits)
    if end == "none may go":
        with pytest.raises(NoReplicaAvailable), pick:
            await pick.place()
        assert book.ends == {}
        return
    if end == "cancelled":
        fleet.table.set_stalled(ReplicaId("r0"), is_stalled=True)
        with pytest.raises(TimeoutError), pick:
            async with asyncio.timeout(0.05):
                await pick.place()
        assert_over(book)
        return
    with pick:
        await pick.place()
        (program,) = book.programs()
        assert (program.state, program.home) == ("active", "r0")
        if end == "answered":
            pick.first_token()
            pick.used(0, 5)
        else:
            pick.failed("503")
    assert_over(book)
