"""HistorySync: shares answers with the other routers, and learns theirs.

Owns what waits to be sent, and how long a request may wait for a read. Sending is in the background; without
room, records are dropped. A read of Redis may take some milliseconds; after a late or failed one no request
asks again until Redis has answered in time in the background, so a hanging Redis costs only the requests that
were asking. A missing record is not asked for again for a while: it was answered elsewhere, or never.
"""

import asyncio
import contextlib
import enum
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from router.feature import Feature
from router.features.history.redis_history import OutgoingRecord, RedisHistory
from router.history.canonical import ConversationKey
from router.history.retracing import HistoryRecord
from router.shared.bounded_cache import BoundedCache
from router.shared.instruments import Instrument, counter, gauge
from router.shared.redis_health import REDIS_FAILURES, RedisHealth

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_LOOKING = 16
"""Reads at a time."""
PASSES = 50
"""Passes of the event loop that a read may always take: if the loop is late, Redis is not."""
REDIS_SECONDS = 1.0
"""For one write."""
SURVEY_SECONDS = 10.0
FAREWELL_SECONDS = 1.0
REST_SECONDS = (0.1, 2.0)
"""Pause before Redis is tried again: the first, and the longest."""
MOST_UNSENT = 4096
MOST_UNSENT_BYTES = 16 * 2**20
RECORDS_PER_WRITE = 64
BYTES_PER_WRITE = 512 * 2**10
"""Sealing and sending this much takes some milliseconds of the event loop."""
MISSING_SECONDS = 60.0
MOST_MISSING = 8192


class Fetch(enum.StrEnum):
    """The outcome of a lookup."""

    HEARD = "heard"
    """Some of the records were there."""
    MISSING = "missing"
    LATE = "late"
    FAILED = "failed"
    RESTING = "resting"
    """Redis was not asked: it was late or has failed."""
    KNOWN_MISSING = "known_missing"
    """Redis was not asked: all records were missing a moment ago."""


class HistorySync(Feature):
    """For one event loop: run `run()`, and `close()` when no request is left. `lost_at` is when Redis last
    lost a record; those written before may be gone."""

    def __init__(
        self,
        redis: RedisHistory,
        look_seconds: float = 0.02,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self.look_seconds = look_seconds
        self._clock = clock
        self._unsent: deque[OutgoingRecord] = deque()
        self._num_unsent_bytes = 0
        self._missing: BoundedCache[tuple[str, ConversationKey], float] = BoundedCache(MOST_MISSING)
        self._looking = asyncio.Semaphore(MOST_LOOKING)
        self._reads: set[asyncio.Task[Any]] = set()
        self._wake = asyncio.Event()
        self.is_resting = True
        self._health = RedisHealth(
            logger,
            "routers cannot tell each other of answers, which costs cached tokens where a conversation goes "
            "on at another one",
            "routers can tell each other of answers again",
        )
        self._refusals = RedisHealth(logger, "Redis refuses what routers tell each other of answers")
        self.lost_at = -float("inf")
        self._num_wrong = 0
        self.num_looks: dict[str, int] = dict.fromkeys(Fetch, 0)
        self.num_sent = dict.fromkeys(("told", "dropped", "too_large", "failed"), 0)

    @property
    def seconds(self) -> float:
        """Minimum retention, in seconds, unless evicted."""
        return self._redis.bounds.seconds

    @property
    def num_unsent(self) -> int:
        return len(self._unsent)

    @property
    def num_wrong(self) -> int:
        return self._num_wrong + self._redis.num_not_ours

    def instruments(self) -> Iterator[Instrument]:
        yield counter(
            "router_history_lookups_total",
            "Looks in Redis for answers of a conversation that this router does not know: heard, missing, "
            "late (the request went on without), failed; resting (not asked, since Redis was late or has "
            "failed), known_missing (not asked, since it was missing a moment ago)",
            lambda: self.num_looks,
            "outcome",
        )
        yield counter(
            "router_history_told_total",
            "Answers of which Redis was to have the tokens, for other routers: told, dropped (too many were "
            "waiting), too_large, failed (Redis did not take them)",
            lambda: self.num_sent,
            "outcome",
        )
        yield gauge(
            "router_history_untold",
            "Answers whose tokens have yet to be written to Redis",
            lambda: self.num_unsent,
        )
        yield gauge(
            "router_history_resting",
            "1 while no request asks Redis for answers of other routers, since it has not answered in time",
            lambda: self.is_resting,
        )
        yield counter(
            "router_history_wrong_total",
            "Answers in Redis that were not believed: not sealed by this cluster's routers, or not those of "
            "the conversation that they were found for",
            lambda: self.num_wrong,
        )
        yield counter(
            "router_history_let_go_total",
            "Answers whose tokens this router has removed from Redis, where they had too little room",
            lambda: self._redis.num_let_go,
        )
        yield gauge(
            "router_history_redis_bytes",
            "Room that the answers of all routers take in Redis, as this router has seen it last, and what "
            "it has written since",
            lambda: self._redis.num_bytes,
        )

    def send(self, record: OutgoingRecord) -> None:
        """Send in the background."""
        if record.num_bytes > self._redis.bounds.bytes_per_record:
            self.num_sent["too_large"] += 1
            return
        if len(self._unsent) >= MOST_UNSENT or self._num_unsent_bytes + record.num_bytes > MOST_UNSENT_BYTES:
            self.num_sent["dropped"] += 1
            self.lost_at = self._clock()
            return
        self._unsent.append(record)
        self._num_unsent_bytes += record.num_bytes
        self._wake.set()

    async def fetch(self, tenant: str, keys: Sequence[ConversationKey]) -> list[HistoryRecord | None]:
        """Fetch other routers' records of a tenant's conversations; empty if that is not possible."""
        nothing: list[HistoryRecord | None] = [None] * len(keys)
        now = self._clock()
        asked = [key for key in keys if (self._missing.peek((tenant, key)) or now) <= now]
        if not asked:
            self.num_looks[Fetch.KNOWN_MISSING] += 1
            return nothing
        if not self._may_look():
            return nothing
        try:
            async with self._looking:
                if not self._may_look():  # since this one waits
                    return nothing
                answers = await self._in_time(self._redis.read(tenant, asked))
        except TimeoutError as error:
            self.num_looks[Fetch.LATE] += 1
            self._rest(error)
            return nothing
        except ResponseError as error:  # Redis is there, and quick to refuse
            self.num_looks[Fetch.FAILED] += 1
            self._refusals.failed(error)
            return nothing
        except REDIS_FAILURES as error:
            self.num_looks[Fetch.FAILED] += 1
            self._rest(error)
            return nothing
        found = dict(zip(asked, answers, strict=True))
        self.pass_over(tenant, [key for key, record in found.items() if record is None])
        self.num_looks[Fetch.HEARD if any(answers) else Fetch.MISSING] += 1
        return [found.get(key) for key in keys]

    def pass_over(self, tenant: str, keys: Iterable[ConversationKey], *, is_wrong: bool = False) -> None:
        """Do not ask for these again for a while. `is_wrong` counts records that did not fit."""
        until = self._clock() + MISSING_SECONDS
        for key in keys:
            self._num_wrong += is_wrong
            self._missing.put((tenant, key), until)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if self.is_resting:
                await self._recover()
            await self._wake.wait()
            self._wake.clear()
            while self._unsent and not self.is_resting:
                await self._send_some()

    async def close(self) -> None:
        """Close; what cannot be sent soon is lost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                while self._unsent and not self.is_resting:
                    await self._send_some()
        await self._redis.close()

    def _may_look(self) -> bool:
        self.num_looks[Fetch.RESTING] += self.is_resting
        return not self.is_resting

    async def _in_time(self, read: Coroutine[Any, Any, T]) -> T:
        """Raises TimeoutError."""
        reading = asyncio.create_task(read)
        self._reads.add(reading)
        reading.add_done_callback(self._has_read)
        try:
            await asyncio.wait([reading], timeout=self.look_seconds)
            for _ in range(PASSES):
                if reading.done():
                    return reading.result()
                await asyncio.sleep(0)
            raise TimeoutError
        finally:
            reading.cancel()

    def _has_read(self, reading: asyncio.Task[Any]) -> None:
        self._reads.discard(reading)
        if not reading.cancelled():
            reading.exception()  # the caller has it, or is gone

    async def _send_some(self) -> None:
        """Write one batch, after a survey of the room if one is due."""
        records = self._next_records()
        try:
            if self._redis.is_survey_due:
                async with asyncio.timeout(SURVEY_SECONDS):
                    await self._redis.survey()
            async with asyncio.timeout(REDIS_SECONDS):
                is_intact = await self._redis.write(records)
            self._let_go(records, "told")
            self._refusals.answered()
            if not is_intact:
                self.lost_at = self._clock()
        except ResponseError as error:  # Redis is there and does not take it
            self._refusals.failed(error)
            self._let_go(records, "failed")
        except REDIS_FAILURES as error:  # what was not sent stays
            self._rest(error)

    def _next_records(self) -> list[OutgoingRecord]:
        records: list[OutgoingRecord] = []
        num_bytes = 0
        for record in self._unsent:
            num_bytes += record.num_bytes
            if records and (num_bytes > BYTES_PER_WRITE or len(records) == RECORDS_PER_WRITE):
                break
            records.append(record)
        return records

    def _let_go(self, records: Sequence[OutgoingRecord], outcome: str) -> None:
        for record in records:
            assert self._unsent.popleft() is record
            self._num_unsent_bytes -= record.num_bytes
        self.num_sent[outcome] += len(records)
        if outcome == "failed":
            self.lost_at = self._clock()

    async def _recover(self) -> None:
        """Wait until Redis answers as fast as a request needs it to."""
        pause, most = REST_SECONDS
        while True:
            try:
                async with asyncio.timeout(REDIS_SECONDS):
                    await self._redis.ping()
                await self._in_time(self._redis.ping())
            except REDIS_FAILURES as error:
                self._health.failed(error)
                await asyncio.sleep(pause)
                pause = min(most, 2 * pause)
                continue
            self._health.answered()
            self.is_resting = False
            self._wake.set()
            return

    def _rest(self, error: Exception) -> None:
        """Stop asking: after more than a delay, Redis' content may be gone too."""
        if not isinstance(error, TimeoutError):
            self.lost_at = self._clock()
        self.is_resting = True
        self._wake.set()
