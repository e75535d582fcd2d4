"""PreparingTurns: whose request the event loop prepares next.

Owns the turns of tenants at a busy router: a request beside a hundred of another tenant's waits for one of
them, not for all. `router/queue/` shares the replicas; this shares the router's own work, most of it with the
prompt's text.
"""

import asyncio
import heapq
from collections import deque

from router.caller import Tenant

REQUEST_BYTES = 4 * 2**10
"""Fixed cost of a request in bytes, besides its body."""

MIXED_SECONDS = 1.0
"""Seconds without a request of another tenant after which a tenant counts as alone, and is not held back."""


class PreparingTurns:
    """For one event loop. While several tenants ask, a pass of the loop prepares one request besides its
    other work. Turns go by the bytes that a tenant was given over its weight, counted from where the waiting
    tenants stood when it came; idle times are not remembered."""

    def __init__(self) -> None:
        self._tenant = ""
        """The last tenant that asked."""
        self._mixed_until = 0.0
        self._is_taken = False
        self._lines: dict[str, deque[_Waiter]] = {}
        """Waiting tenants' lines; none is empty."""
        self._order: list[tuple[float, int, str]] = []
        """A heap with an entry per waiting tenant: its received work, its order of arrival, and its name."""
        self._given: dict[str, float] = {}
        self._floor = 0.0
        self._number = 0

    @property
    def num_waiting(self) -> int:
        return sum(len(line) for line in self._lines.values())

    async def turn(self, tenant: Tenant, num_bytes: int) -> None:
        """Wait for a turn to prepare `num_bytes`. Start right away, without awaiting. Safe to cancel."""
        loop = asyncio.get_running_loop()
        if tenant.name != self._tenant:
            if self._tenant:
                self._mixed_until = loop.time() + MIXED_SECONDS
            self._tenant = tenant.name
        if not self._lines and (not self._is_taken or loop.time() >= self._mixed_until):
            self._take(loop)
            return
        waiter = _Waiter((num_bytes + REQUEST_BYTES) / tenant.weight, loop.create_future())
        line = self._lines.get(tenant.name)
        if line is None:
            line = self._lines[tenant.name] = deque()
            self._number += 1
            given = max(self._floor, self._given.get(tenant.name, 0.0))
            heapq.heappush(self._order, (given, self._number, tenant.name))
        line.append(waiter)
        await waiter.future

    def _take(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._pass, loop)

    def _pass(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin each pass of the loop that follows one with a preparation. A waiter that gets the turn runs
        in the next pass, for which this is scheduled again."""
        self._is_taken = False
        while self._lines and not self._is_taken:
            given, number, name = heapq.heappop(self._order)
            line = self._lines[name]
            while line and line[0].future.done():  # cancelled
                line.popleft()
            if line:
                waiter = line.popleft()
                self._take(loop)
                waiter.future.set_result(None)
                self._floor = given
                given = self._given[name] = given + waiter.work
            if line:
                heapq.heappush(self._order, (given, number, name))
            else:
                del self._lines[name]
        if not self._lines:
            self._given.clear()
            self._floor = 0.0


class _Waiter:
    __slots__ = ("future", "work")

    def __init__(self, work: float, future: asyncio.Future[None]) -> None:
        self.work = work
        self.future = future
