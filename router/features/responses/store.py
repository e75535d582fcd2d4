"""ResponseStore: the stored responses of a cluster, as one router knows them.

Owns what waits to be written to Redis, and how long a request may wait for Redis. This router finds unwritten
responses in its own memory; others find them once they are written, soon after the answer. Another tenant's
response counts as missing. Without Redis, all responses are local.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager

from redis.exceptions import ResponseError

from router.errors import ResponseGone, ResponsesUnavailable
from router.feature import Feature
from router.features.responses.memory import Key, ResponseMemory
from router.features.responses.record import ResponseBounds, StoredResponse, is_response_id
from router.features.responses.redis_responses import RedisResponses
from router.shared.instruments import Instrument, counter, gauge
from router.shared.redis_health import REDIS_FAILURES, RedisHealth

logger = logging.getLogger(__name__)

REDIS_SECONDS = 1.0
FAREWELL_SECONDS = 1.0
"""At shutdown, for the writes that are left."""
REST_SECONDS = 2.0
"""How long Redis is not asked after a failure."""
LOOK_SECONDS = (0.0, 0.05, 0.1)
"""Pause before each lookup of a missing response: another router may just be writing it."""


class ResponseStore(Feature):
    """For one event loop. `close()` when no request is left."""

    def __init__(
        self,
        redis: RedisResponses | None,
        bounds: ResponseBounds | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bounds = bounds or ResponseBounds()
        self._redis = redis
        self._memory = ResponseMemory(self.bounds)
        self._wall_clock = wall_clock
        self._unwritten: deque[Key] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._health = RedisHealth(
            logger,
            "Redis cannot be reached for stored responses",
            "Redis has stored responses again",
            rest_seconds=REST_SECONDS,
            clock=clock,
        )
        self._refusals = RedisHealth(logger, "Redis takes no stored responses, which stay in memory")
        self.num_kept = self.num_missing = self.num_unavailable = self.num_failed = 0
        self.num_found = {"memory": 0, "redis": 0}

    async def close(self) -> None:
        """Close; what cannot be written soon is lost."""
        writer, self._writer = self._writer, None
        if writer is not None:
            await asyncio.wait([writer], timeout=FAREWELL_SECONDS)
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writer
        if self._redis is not None:
            await self._redis.close()

    def hold(self, num_bytes: int) -> AbstractContextManager[bool]:
        """Reserve room for a question until it is answered; False if there is none."""
        return self._memory.hold(num_bytes)

    def keep(self, record: StoredResponse) -> None:
        """Store a record in the background."""
        self.num_kept += 1
        self._memory.put(record)
        if self._redis is not None:
            self._unwritten.append((record.tenant, record.response_id))
            if self._writer is None or self._writer.done():
                self._writer = asyncio.create_task(self._write_all(self._redis))

    async def find(self, response_id: str, tenant: str) -> StoredResponse:
        """Raises ResponseGone, or ResponsesUnavailable for one that this router does not remember."""
        if not is_response_id(response_id):
            raise self._gone(response_id)
        record = self._memory.get((tenant, response_id), self._wall_clock())
        if record is not None:
            self.num_found["memory"] += 1
            return record
        if self._redis is not None:
            async with self._asking():
                for seconds in LOOK_SECONDS:
                    await asyncio.sleep(seconds)
                    record = await self._redis.get(tenant, response_id)
                    if record is not None:
                        self.num_found["redis"] += 1
                        return record
        raise self._gone(response_id)

    async def delete(self, response_id: str, tenant: str) -> None:
        """Raises ResponseGone or ResponsesUnavailable."""
        if not is_response_id(response_id):
            raise self._gone(response_id)
        was_there = self._memory.drop((tenant, response_id))
        if self._redis is not None:
            async with self._asking(), self._changing:
                was_there |= await self._redis.delete(tenant, response_id)
        if not was_there:
            raise self._gone(response_id)

    @property
    def num_not_ours(self) -> int:
        return 0 if self._redis is None else self._redis.num_not_ours

    @property
    def num_remembered(self) -> int:
        return len(self._memory)

    @property
    def num_bytes(self) -> int:
        """Memory of the responses that this router remembers."""
        return self._memory.num_bytes

    def instruments(self) -> Iterator[Instrument]:
        yield counter(
            "router_stored_responses_total",
            "Responses of this router that were to be stored",
            lambda: self.num_kept,
        )
        yield counter(
            "router_stored_response_uses_total",
            "Uses of stored responses by where this router found them: memory or redis",
            lambda: self.num_found,
            "source",
        )
        yield counter(
            "router_stored_response_refusals_total",
            "Requests about stored responses that were refused: not_found or unavailable",
            lambda: {"not_found": self.num_missing, "unavailable": self.num_unavailable},
            "reason",
        )
        yield counter(
            "router_stored_response_failures_total",
            "Attempts to write a response that Redis did not take; they are repeated",
            lambda: self.num_failed,
        )
        yield counter(
            "router_stored_responses_dropped_total",
            "Responses that were not stored, or forgotten, for want of memory in this router",
            lambda: self._memory.num_dropped,
        )
        yield counter(
            "router_stored_responses_not_ours_total",
            "Stored responses in Redis that were changed",
            lambda: self.num_not_ours,
        )
        yield gauge(
            "router_stored_responses_remembered",
            "Responses that only this router's memory has",
            lambda: self.num_remembered,
        )
        yield gauge(
            "router_stored_response_memory_bytes",
            "Memory of the responses that this router has yet to store, and of questions being answered",
            lambda: self.num_bytes,
        )

    async def _write_all(self, redis: RedisResponses) -> None:
        while self._unwritten:
            key = self._unwritten[0]
            record = self._memory.get(key, self._wall_clock())
            if record is None:  # deleted, dropped or too old by now
                self._unwritten.popleft()
                continue
            try:
                async with asyncio.timeout(REDIS_SECONDS), self._changing:
                    if self._memory.get(key, self._wall_clock()) is not None:
                        await redis.add(record, self._wall_clock())
            except ResponseError as error:  # Redis is there and does not take it: it stays in memory
                self.num_failed += 1
                self._refusals.failed(error)
                self._unwritten.popleft()
                continue
            except REDIS_FAILURES as error:
                self.num_failed += 1
                self._health.failed(error)
                await asyncio.sleep(REST_SECONDS)
                continue
            self._health.answered()
            self._refusals.answered()
            self._memory.drop(key)
            self._unwritten.popleft()

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        """Give Redis as long as a client can wait. Raises ResponsesUnavailable."""
        if self._health.is_resting:
            raise self._unavailable()
        try:
            async with self._health.deadline(REDIS_SECONDS):
                yield
        except REDIS_FAILURES as error:
            raise self._unavailable() from error

    def _unavailable(self) -> ResponsesUnavailable:
        self.num_unavailable += 1
        return ResponsesUnavailable("Stored responses cannot be reached at the moment. Try again shortly.")

    def _gone(self, response_id: str) -> ResponseGone:
        self.num_missing += 1
        return ResponseGone(f"Response with id '{response_id[:60]}' not found.")
