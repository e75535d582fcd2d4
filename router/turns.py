"""Turns: long work on the event loop, cut into pieces of some milliseconds between which others run.

All jobs of one `Turns` take turns: however many they are, a pass of the event loop does one piece of one of
them, beside what each does before it gives way for the first time.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TURN_SECONDS = 0.002
"""A piece takes about this long, and at least one step of its work."""


class Turns:
    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    def long_work(self) -> "LongWork":
        return LongWork(self)

    @asynccontextmanager
    async def piece(self) -> AsyncIterator[None]:
        """For one piece, or for starting a task whose first step is one."""
        async with self._lock:
            yield
            await asyncio.sleep(0)


class LongWork:
    """Work of many steps; `give_way` belongs after each of them."""

    __slots__ = ("_began", "_turns")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._began = time.monotonic()

    async def give_way(self) -> None:
        """Let others run, if this has run for long enough."""
        if time.monotonic() - self._began > TURN_SECONDS:
            async with self._turns.piece():
                pass
            self._began = time.monotonic()
