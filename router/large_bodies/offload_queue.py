"""OffloadQueue: which large bodies are prepared now and which wait, in order, no address beyond its share.

Owns the places and the line. An address that has its share of the places waits while others go before it,
and one that has its share of the line is refused.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from router.limits.address_shares import AddressShares


class QueueFull(Exception):
    """No room in the line, or no place in time."""


@dataclass(slots=True, eq=False)
class _Waiting:
    address: str | None
    called: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with a place that is already counted as this one's."""


class OffloadQueue:
    def __init__(
        self, *, num_places: int, most_waiting: int, wait_seconds: float, address_share: float
    ) -> None:
        self._working = AddressShares(num_places, address_share=address_share)
        self._in_line = AddressShares(most_waiting, address_share=address_share)
        self._line: list[_Waiting] = []
        self._wait_seconds = wait_seconds

    @property
    def num_working(self) -> int:
        return self._working.num

    @property
    def num_waiting(self) -> int:
        return self._in_line.num

    @asynccontextmanager
    async def place(self, address: str | None) -> AsyncIterator[None]:
        """Raises QueueFull."""
        await self._enter(address)
        try:
            yield
        finally:
            self._leave(address)

    async def _enter(self, address: str | None) -> None:
        if self._working.has_room(address):  # those in line are there for want of room for them
            self._working.add(address)
            return
        if not self._in_line.has_room(address):
            raise QueueFull
        waiting = _Waiting(address)
        self._line.append(waiting)
        self._in_line.add(address)
        try:
            async with asyncio.timeout(self._wait_seconds):
                await waiting.called.wait()
        except BaseException as error:
            if waiting.called.is_set():
                self._leave(address)
            else:
                self._step_out(waiting)
            if isinstance(error, TimeoutError):
                raise QueueFull from error
            raise

    def _leave(self, address: str | None) -> None:
        self._working.add(address, -1)
        following = next((other for other in self._line if self._working.has_room(other.address)), None)
        if following is not None:
            self._step_out(following)
            self._working.add(following.address)
            following.called.set()

    def _step_out(self, waiting: _Waiting) -> None:
        self._line.remove(waiting)
        self._in_line.add(waiting.address, -1)
