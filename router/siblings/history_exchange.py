"""HistoryExchange: shares answers with the other routers, and learns theirs.

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
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from router.history.canonical import ConversationKey
from router.history.retracing import Told
from router.shared.bounded_cache import BoundedCache
from router.shared.redis_health import REDIS_FAILURES, RedisHealth
from router.siblings.redis_history import RedisHistory, Telling

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
"""Before Redis is tried again: the first time, and at most."""
MOST_UNTOLD = 4096
MOST_UNTOLD_BYTES = 16 * 2**20
TELLINGS_PER_WRITE = 64
BYTES_PER_WRITE = 512 * 2**10
"""To seal and send that takes some milliseconds of the event loop."""
MISSING_SECONDS = 60.0
MOST_MISSING = 8192


class Look(enum.StrEnum):
    """How a look for answers of others has ended."""

    HEARD = "heard"
    """Some of what was asked for was there."""
    MISSING = "missing"
    LATE = "late"
    FAILED = "failed"
    RESTING = "resting"
    """Redis was not asked, since it has been late or has failed."""
    KNOWN_MISSING = "known_missing"
    """Nor here: all of it was missing a moment ago."""


@dataclass(frozen=True, slots=True)
class HistoryExchangeStatistics:
    """`num_told` by outcome: told, dropped (no room here), too_large, failed (Redis). `num_bytes` of all
    routers' records in Redis, as last seen. While `is_resting`, this router does not ask Redis."""

    num_looks: dict[str, int]
    num_told: dict[str, int]
    num_untold: int
    num_wrong: int
    num_let_go: int
    num_bytes: int
    is_resting: bool


class HistoryExchange:
    """For one event loop: have `run()` run, and `close()` when no request is left. `lost_at` is when
    something that was to be told was lost, so that what was told until then may not be there."""

    def __init__(
        self,
        redis: RedisHistory,
        look_seconds: float = 0.02,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self.look_seconds = look_seconds
        self._clock = clock
        self._untold: deque[Telling] = deque()
        self._num_untold_bytes = 0
        self._missing: BoundedCache[tuple[str, ConversationKey], float] = BoundedCache(MOST_MISSING)
        self._looking = asyncio.Semaphore(MOST_LOOKING)
        self._reads: set[asyncio.Task[Any]] = set()
        self._wake = asyncio.Event()
        self._is_resting = True
        self._health = RedisHealth(
            logger,
            "routers cannot tell each other of answers, which costs cached tokens where a conversation goes "
            "on at another one",
            "routers can tell each other of answers again",
        )
        self._refusals = RedisHealth(logger, "Redis refuses what routers tell each other of answers")
        self.lost_at = -float("inf")
        self.num_wrong = 0
        self._num_looks: dict[str, int] = dict.fromkeys(Look, 0)
        self._num_told = dict.fromkeys(("told", "dropped", "too_large", "failed"), 0)

    @property
    def seconds(self) -> float:
        """Minimum retention, in seconds, unless evicted."""
        return self._redis.bounds.seconds

    def statistics(self) -> HistoryExchangeStatistics:
        return HistoryExchangeStatistics(
            num_looks={str(name): count for name, count in self._num_looks.items()},
            num_told=dict(self._num_told),
            num_untold=len(self._untold),
            num_wrong=self.num_wrong + self._redis.num_not_ours,
            num_let_go=self._redis.num_let_go,
            num_bytes=self._redis.num_bytes,
            is_resting=self._is_resting,
        )

    def tell(self, telling: Telling) -> None:
        """Send in the background."""
        if telling.num_bytes > self._redis.bounds.bytes_per_record:
            self._num_told["too_large"] += 1
            return
        if len(self._untold) >= MOST_UNTOLD or self._num_untold_bytes + telling.num_bytes > MOST_UNTOLD_BYTES:
            self._num_told["dropped"] += 1
            self.lost_at = self._clock()
            return
        self._untold.append(telling)
        self._num_untold_bytes += telling.num_bytes
        self._wake.set()

    async def look(self, tenant: str, keys: Sequence[ConversationKey]) -> list[Told | None]:
        """Fetch other routers' records of a tenant's conversations; empty if that is not possible."""
        nothing: list[Told | None] = [None] * len(keys)
        now = self._clock()
        asked = [key for key in keys if (self._missing.peek((tenant, key)) or now) <= now]
        if not asked:
            self._num_looks[Look.KNOWN_MISSING] += 1
            return nothing
        if not self._may_look():
            return nothing
        try:
            async with self._looking:
                if not self._may_look():  # since this one waits
                    return nothing
                answers = await self._in_time(self._redis.read(tenant, asked))
        except TimeoutError as error:
            self._num_looks[Look.LATE] += 1
            self._rest(error)
            return nothing
        except ResponseError as error:  # Redis is there, and quick to refuse
            self._num_looks[Look.FAILED] += 1
            self._refusals.failed(error)
            return nothing
        except REDIS_FAILURES as error:
            self._num_looks[Look.FAILED] += 1
            self._rest(error)
            return nothing
        found = dict(zip(asked, answers, strict=True))
        self.pass_over(tenant, [key for key, told in found.items() if told is None])
        self._num_looks[Look.HEARD if any(answers) else Look.MISSING] += 1
        return [found.get(key) for key in keys]

    def pass_over(self, tenant: str, keys: Iterable[ConversationKey], *, is_wrong: bool = False) -> None:
        """Not to be asked for again for a while. `is_wrong` counts what was heard and does not fit."""
        until = self._clock() + MISSING_SECONDS
        for key in keys:
            self.num_wrong += is_wrong
            self._missing.put((tenant, key), until)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if self._is_resting:
                await self._recover()
            await self._wake.wait()
            self._wake.clear()
            while self._untold and not self._is_resting:
                await self._tell_some()

    async def close(self) -> None:
        """Close; what cannot be sent soon is lost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                while self._untold and not self._is_resting:
                    await self._tell_some()
        await self._redis.close()

    def _may_look(self) -> bool:
        self._num_looks[Look.RESTING] += self._is_resting
        return not self._is_resting

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
            reading.exception()  # who waited knows; or nobody waits any more

    async def _tell_some(self) -> None:
        """Nothing where it cannot be seen whether there is room."""
        tellings = self._next_tellings()
        try:
            if self._redis.is_survey_due:
                async with asyncio.timeout(SURVEY_SECONDS):
                    await self._redis.survey()
            async with asyncio.timeout(REDIS_SECONDS):
                is_intact = await self._redis.write(tellings)
            self._let_go(tellings, "told")
            self._refusals.answered()
            if not is_intact:
                self.lost_at = self._clock()
        except ResponseError as error:  # Redis is there and does not take it
            self._refusals.failed(error)
            self._let_go(tellings, "failed")
        except REDIS_FAILURES as error:  # what was not told stays
            self._rest(error)

    def _next_tellings(self) -> list[Telling]:
        tellings: list[Telling] = []
        num_bytes = 0
        for telling in self._untold:
            num_bytes += telling.num_bytes
            if tellings and (num_bytes > BYTES_PER_WRITE or len(tellings) == TELLINGS_PER_WRITE):
                break
            tellings.append(telling)
        return tellings

    def _let_go(self, tellings: Sequence[Telling], outcome: str) -> None:
        for telling in tellings:
            assert self._untold.popleft() is telling
            self._num_untold_bytes -= telling.num_bytes
        self._num_told[outcome] += len(tellings)
        if outcome == "failed":
            self.lost_at = self._clock()

    async def _recover(self) -> None:
        """Until Redis answers as soon as a request needs it to."""
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
            self._is_resting = False
            self._wake.set()
            return

    def _rest(self, error: Exception) -> None:
        """Stop asking: after more than a delay, Redis' content may be gone too."""
        if not isinstance(error, TimeoutError):
            self.lost_at = self._clock()
        self._is_resting = True
        self._wake.set()
