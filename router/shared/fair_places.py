"""FairPlaces: a few places for work, and the fair line of those who wait for one.

Owns the places and the waiting tasks of one event loop; the order and the bounds of an owner are a
`FairLine`'s. An owner is what shares the places with its like: a tenant, a client's address.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import NamedTuple

from replicas.process.fair_line import FairLine


class NoPlace(Exception):
    """The line has no room, or no place became free in time."""


class _PlaceWaiter(NamedTuple):
    future: "asyncio.Future[None]"
    """Done once it has a place; NoPlace if another took its place in the line."""
    work: float | None
    """The work of a turn, which gives its place back by itself."""


class FairPlaces:
    """`owner_share` of the places and of the line may be one owner's, but at least one; by default all but
    one place, and the whole line. Only the whole bounds an owner of None. Waits `wait_seconds` at most.

    `line` is to be read only.
    """

    def __init__(
        self,
        *,
        num_places: int,
        most_waiting: int,
        wait_seconds: float | None = None,
        owner_share: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.line: FairLine[_PlaceWaiter] = FairLine(
            num_places=num_places,
            most_waiting=most_waiting,
            most_of_owner=None if owner_share is None else max(1, int(num_places * owner_share)),
            most_waiting_of_owner=None if owner_share is None else max(1, int(most_waiting * owner_share)),
        )
        self._wait_seconds = wait_seconds
        self._clock = clock

    @asynccontextmanager
    async def place(self, owner: Hashable) -> AsyncIterator[None]:
        """Wait for a place and hold it. Raises NoPlace."""
        if owner is None:
            owner = object()
        await self._take(owner, None)
        began = self._clock()
        try:
            yield
        finally:
            self._give_back(owner, self._clock() - began)

    async def turn(self, owner: Hashable, work: float) -> None:
        """Wait for a place that is given back in the next pass of the event loop. Begin the work at once,
        without awaiting. Raises NoPlace."""
        await self._take(owner, work)

    async def _take(self, owner: Hashable, work: float | None) -> None:
        waiting = _PlaceWaiter(asyncio.get_running_loop().create_future(), work)
        lost = self.line.enter(owner, waiting)
        if lost is not None and not lost.future.done():
            lost.future.set_exception(NoPlace)
        self._call_next()
        try:
            if self._wait_seconds is None:
                await waiting.future
            else:
                async with asyncio.timeout(self._wait_seconds):
                    await waiting.future
        except BaseException as error:
            if waiting.future.cancelled():
                self.line.leave(owner, waiting)
            elif waiting.future.exception() is None and work is None:  # called, and cancelled before it ran
                self._give_back(owner, 0.0)
            if isinstance(error, TimeoutError):
                raise NoPlace from error
            raise

    def _give_back(self, owner: Hashable, work: float) -> None:
        self.line.ends(owner, work)
        self._call_next()

    def _call_next(self) -> None:
        while (found := self.line.next()) is not None:
            owner, waiting = found
            if waiting.future.done():  # cancelled, and its task has yet to run
                self.line.ends(owner, 0.0)
                continue
            waiting.future.set_result(None)
            if waiting.work is not None:
                asyncio.get_running_loop().call_soon(self._give_back, owner, waiting.work)
