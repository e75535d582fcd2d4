"""FairPlaces: no owner takes all places or the whole line, and those that leave give back what they had."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from router.shared.fair_places import FairPlaces, NoPlace

FLOOD = "127.0.0.2"


def four_places(wait_seconds: float = 5.0) -> FairPlaces:
    return FairPlaces(num_places=4, most_waiting=8, wait_seconds=wait_seconds, owner_share=0.5)


class Worker:
    """Has a place until it is told to leave."""

    def __init__(self, places: FairPlaces, owner: str | None) -> None:
        self._leave = asyncio.Event()
        self.is_working = False
        self.task = asyncio.create_task(self._run(places, owner))

    async def _run(self, places: FairPlaces, owner: str | None) -> None:
        async with places.place(owner):
            self.is_working = True
            await self._leave.wait()

    async def leave(self) -> None:
        self._leave.set()
        await self.task
        await asyncio.sleep(0.01)


async def test_others_go_before_an_owner_that_has_its_share_and_it_goes_on_in_order() -> None:
    places = four_places()
    flood = [Worker(places, FLOOD) for _ in range(4)]
    await asyncio.sleep(0)
    others = [Worker(places, "127.0.0.3"), Worker(places, None)]
    await asyncio.sleep(0.01)
    assert [worker.is_working for worker in (*flood, *others)] == [True, True, False, False, True, True]
    late = Worker(places, "127.0.0.4")  # all places are taken
    await asyncio.sleep(0.01)
    assert (places.line.num_working, places.line.num_waiting) == (4, 3)
    await others[0].leave()
    assert late.is_working and not flood[2].is_working
    await flood[0].leave()
    assert flood[2].is_working and not flood[3].is_working
    for worker in (flood[1], flood[2], flood[3], others[1], late):
        await worker.leave()
    assert (places.line.num_working, places.line.num_waiting) == (0, 0)


async def test_those_that_leave_the_line_or_wait_in_vain_give_their_places_back() -> None:
    places = four_places(wait_seconds=0.05)
    working = [Worker(places, FLOOD) for _ in range(2)]
    await asyncio.sleep(0)
    gone = Worker(places, FLOOD)
    await asyncio.sleep(0.01)
    gone.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone.task
    assert places.line.num_waiting == 0
    with pytest.raises(NoPlace):
        await Worker(places, FLOOD).task
    called = Worker(places, FLOOD)
    await asyncio.sleep(0.01)
    leaving = asyncio.create_task(working[0].leave())
    while places.line.num_waiting:  # noqa: ASYNC110
        await asyncio.sleep(0)
    called.task.cancel()  # it has been called, and has not come yet
    with pytest.raises(asyncio.CancelledError):
        await called.task
    await leaving
    assert places.line.num_working == 1
    await working[1].leave()
    assert (places.line.num_working, places.line.num_waiting) == (0, 0)


async def test_a_full_line_takes_from_the_owner_with_most() -> None:
    places = FairPlaces(num_places=1, most_waiting=3)
    flood = [Worker(places, FLOOD) for _ in range(4)]
    await asyncio.sleep(0.01)
    other = Worker(places, "127.0.0.3")
    with pytest.raises(NoPlace):
        await flood[3].task
    for worker in (flood[0], other, flood[1], flood[2]):
        await worker.leave()
    assert (places.line.num_working, places.line.num_waiting) == (0, 0)


@given(
    owners=st.lists(st.sampled_from(["a", "b", "c", None]), max_size=30),
    leaving=st.sets(st.integers(0, 29)),
    wait=st.integers(0, 6),
    by_turns=st.booleans(),
)
async def test_the_bounds_hold_and_nothing_is_kept_of_those_that_leave(
    owners: Sequence[str | None], leaving: set[int], wait: int, by_turns: bool
) -> None:
    places = FairPlaces(num_places=2, most_waiting=8)
    working: Counter[str | None] = Counter()

    async def use(owner: str | None) -> None:
        if by_turns:
            await places.turn(owner, 1.0)
            return
        async with places.place(owner):
            working[owner] += 1
            assert working.total() <= 2 and all(working[name] <= 1 for name in "abc")
            try:
                for _ in range(3):
                    await asyncio.sleep(0)
            finally:
                working[owner] -= 1

    tasks = [asyncio.create_task(use(owner)) for owner in owners]
    for _ in range(wait):
        await asyncio.sleep(0)
        assert places.line.num_waiting <= 8
    for number in leaving:
        if number < len(tasks):
            tasks[number].cancel()
    ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    assert all(each is None or isinstance(each, NoPlace | asyncio.CancelledError) for each in ended)
    for _ in range(3):
        await asyncio.sleep(0)
    assert (places.line.num_working, places.line.num_waiting) == (0, 0)
    assert not places.line._owners and not places.line._idle
