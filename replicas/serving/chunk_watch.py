"""ChunkWatch: waits for chunks that the engine is computing to come to host memory.

Owns one look for all that wait. The engine is not asked; while nothing waits, it does not look.
"""

import asyncio
import logging
import time
from concurrent.futures import Executor
from dataclasses import dataclass

from replicas.kvstore.pulling.chunk_reader import ChunkReader
from replicas.protocol.blocks import BlockHash
from replicas.serving.open_splits import OpenSplits

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.003
MAX_LOOK_SECONDS = 0.05
"""Pause between two looks, and its maximum."""

PAUSE_PER_LOOK = 4.0
"""A pause takes at least this many times as long as the look: a large host memory has a large table."""


@dataclass(slots=True, eq=False)
class _Waiter:
    key: BlockHash
    split_id: int
    since: float
    is_there: asyncio.Future[bool]


class ChunkWatch:
    """Lives on an event loop; `threads` do the looking."""

    def __init__(self, reader: ChunkReader, splits: OpenSplits, threads: Executor) -> None:
        self._reader = reader
        self._splits = splits
        self._threads = threads
        self._waiters: set[_Waiter] = set()
        self._looking: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    async def wait(self, key: BlockHash, split_id: int) -> bool:
        """Whether the chunk has come; False if it no longer will. Takes at least one pause."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(key, split_id, time.monotonic(), loop.create_future())
        self._waiters.add(waiter)
        if self._looking is None or self._looking.done():
            self._looking = loop.create_task(self._look())
        try:
            return await waiter.is_there
        finally:
            self._waiters.discard(waiter)

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        pause = LOOK_SECONDS
        while self._waiters:
            await asyncio.sleep(pause)
            waiters, began = [*self._waiters], time.monotonic()
            keys = {waiter.key for waiter in waiters}
            try:
                there = await loop.run_in_executor(self._threads, self._reader.found, keys)
            except Exception:  # whoever waits looks again, and fails by itself
                logger.exception("the engine's memory for KV cannot be read")
                there = keys
            for waiter in waiters:
                if not waiter.is_there.done():
                    self._tell(waiter, waiter.key in there)
            pause = min(MAX_LOOK_SECONDS, max(LOOK_SECONDS, PAUSE_PER_LOOK * (time.monotonic() - began)))

    def _tell(self, waiter: _Waiter, is_there: bool) -> None:
        if not self._splits.may_come(waiter.split_id, waiter.since):
            waiter.is_there.set_result(False)
        elif is_there:
            waiter.is_there.set_result(True)
