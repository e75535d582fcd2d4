"""RedisRoom: the memory of Redis that one model's index may use, and the reaction when it is exceeded.

Owns the bound of the stream in bytes, and whether the index may be written. Leases come before the index,
which stops well below Redis' `maxmemory`.

    bytes of the stream    measured by Redis when any writer's dice say so: on average whenever all
                           writers together have written a sixteenth of the bound
    used memory            read every few seconds by each writer at its own times. A writer that finds
                           Redis too full removes its own set, so that just enough do so: first those
                           that hold much of it, so that one that grows without bound costs the others nothing
"""

import logging
import random
import time
from collections.abc import Callable

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from replicas.observation.metrics import ReplicaMetrics

logger = logging.getLogger(__name__)

HOLD_RATIO = 0.85
"""Share of `maxmemory` above which the index is not written."""

LAST_RATIO = 0.92
"""Above, no index is written. Between the two those are not that hold much of the memory."""

MUCH = 0.5
"""The share of the memory that must be a writer's at `HOLD_RATIO`; none need be at `LAST_RATIO`."""

RESUME_RATIO = 0.7
"""Below, it is written again."""

LOOK_SECONDS = 3.0
LOOKS_PER_BOUND = 16
MOST_TRIMS = 16
TRIM_RATIO = 0.75
"""Target of a trim as a share of the bound, so that not every write is followed by one."""


class NoRoom(Exception):
    """The index must not be written just now."""


class RedisRoom:
    def __init__(
        self,
        redis: "Redis",
        events_key: str,
        *,
        stream_bytes: int,
        rng: random.Random,
        metrics: ReplicaMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._events_key = events_key
        self._stream_bytes = stream_bytes
        self._rng = rng
        self._metrics = metrics
        self._clock = clock
        self._look_due = clock()
        self._is_full = False
        self._is_blind = False
        """Redis does not tell us how full it is."""

    async def check(self, own_bytes: int) -> None:
        """Before a write of a set of this size. Raises NoRoom, RedisError or OSError."""
        if self._clock() >= self._look_due:
            await self._look(own_bytes)
        if self._is_full:
            raise NoRoom("Redis has no room for the index")

    async def make(self) -> None:
        """Make room after Redis refused a write: free what can be rebuilt, the stream first."""
        self._set_full(True)
        self._look_due = self._clock() + self._next_look_seconds()
        # Its last entry stays: readers go by its id.
        await self._redis.xtrim(self._events_key, maxlen=1, approximate=False)

    async def appended(self, num_bytes: int) -> None:
        """This many bytes were added to the stream."""
        if self._rng.random() * self._stream_bytes < num_bytes * LOOKS_PER_BOUND:
            await self.bound_stream()

    async def bound_stream(self) -> None:
        """Trim the stream until it is within its bound."""
        for _ in range(MOST_TRIMS):
            try:
                used = await self._redis.memory_usage(self._events_key, samples=0)
            except ResponseError as error:
                self._be_blind(error)
                return
            self._metrics.index_stream_bytes.set(used or 0)
            if used is None or used <= self._stream_bytes:
                return
            length = await self._redis.xlen(self._events_key)
            keep = max(1, int(length * TRIM_RATIO * self._stream_bytes / used))
            await self._redis.xtrim(self._events_key, maxlen=keep, approximate=False)
            if length <= 1:
                return

    async def _look(self, own_bytes: int) -> None:
        self._look_due = self._clock() + self._next_look_seconds()
        try:
            memory = await self._redis.info("memory")
        except ResponseError as error:
            self._be_blind(error)
            return
        used, limit = int(memory.get("used_memory", 0)), int(memory.get("maxmemory", 0))
        ratio = used / limit if limit else 0.0
        self._metrics.redis_memory_ratio.set(ratio)
        if self._is_full:
            self._set_full(ratio >= RESUME_RATIO)
            return
        much = MUCH * (LAST_RATIO - ratio) / (LAST_RATIO - HOLD_RATIO)
        self._set_full(ratio >= HOLD_RATIO and own_bytes >= much * used)

    def _next_look_seconds(self) -> float:
        return LOOK_SECONDS * self._rng.uniform(0.5, 1.5)

    def _set_full(self, is_full: bool) -> None:
        if is_full and not self._is_full:
            logger.error(
                "Redis is full: this replica removes its index, and writes it again when there is room"
            )
        elif self._is_full and not is_full:
            logger.info("Redis has room for the index again")
        self._is_full = is_full
        self._metrics.index_withheld.set(is_full)

    def _be_blind(self, error: ResponseError) -> None:
        if not self._is_blind:
            logger.warning("Redis does not report its memory; only its refusals count error=%r", error)
        self._is_blind = True
        self._set_full(False)
