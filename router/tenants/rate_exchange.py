"""RateExchange: routers' news of what tenants and keys have used, to and fro over Redis, in the background.

Owns the stream: news of all routers, the oldest let go, gone by itself when nobody writes. No request waits
for it. While Redis is away each router goes on by its own count and keeps what it has to tell, so that the
others know it afterwards; of what is only a hint between routers nothing is an error.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.exceptions import RedisError

from replicas.process.plain_redis import plain_redis
from router.tenants.rate_account import SECONDS_PER_MINUTE
from router.tenants.rate_limits import RateLimits
from router.tenants.rate_news import MAX_ENTRIES, News, RateNews, decode_news, encode_news

logger = logging.getLogger(__name__)

STREAM = "kvasir-limits:news"
FIELD = b"news"
WRITE_SECONDS = 0.2
"""Between two writes: with the time that Redis takes, how late the others know."""
WRITES_AT_ONCE = 8
READ_SECONDS = 1.0
"""A read waits so long for something new."""
REDIS_SECONDS = 2.0
MAX_NEWS = 2048
"""In the stream."""
NEWS_PER_READ = 64
KEPT_SECONDS = 120


@dataclass(frozen=True, slots=True)
class ExchangeStatistics:
    """Since the beginning, but for the other routers, which are those that were heard lately."""

    num_routers: int
    num_told: int
    num_heard: int
    num_failed: int
    num_wrong: int


class RateExchange:
    """For one event loop: have `run()` run. Raises ValueError if that is not a Redis address."""

    def __init__(
        self, redis_url: str, limits: RateLimits, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`clock` is the one by which the limits are asked."""
        self.news = RateNews(limits, secrets.token_urlsafe(9))
        self._redis: Any = plain_redis(redis_url)
        self._clock = clock
        self._position: bytes | None = None
        self._is_away = False
        self._num_told = self._num_heard = self._num_failed = self._num_wrong = 0

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(), name="limits told")
                tasks.create_task(self._read(), name="limits heard")
        finally:
            await self._redis.aclose()

    def statistics(self) -> ExchangeStatistics:
        return ExchangeStatistics(
            self.news.num_routers, self._num_told, self._num_heard, self._num_failed, self._num_wrong
        )

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            self.news.forget_quiet(self._clock())
            for _ in range(WRITES_AT_ONCE):
                news = self.news.tell(self._clock())
                if news is None or not await self._send(news) or len(news.entries) < MAX_ENTRIES:
                    break

    async def _send(self, news: News) -> bool:
        is_told = False
        try:
            async with asyncio.timeout(REDIS_SECONDS), self._redis.pipeline(transaction=False) as pipeline:
                pipeline.xadd(STREAM, {FIELD: encode_news(news)}, maxlen=MAX_NEWS, approximate=True)
                pipeline.expire(STREAM, KEPT_SECONDS)
                await pipeline.execute()
            is_told = True
            self._num_told += 1
            self._note_back()
        except (RedisError, OSError) as error:  # a TimeoutError is one
            self._note_away(error)
        finally:  # cancelled, too
            if not is_told:
                self.news.untell(news)
        return is_told

    async def _read(self) -> None:
        while True:
            try:
                if self._position is None:
                    async with asyncio.timeout(REDIS_SECONDS):
                        await self._catch_up()
                async with asyncio.timeout(READ_SECONDS + REDIS_SECONDS):
                    answer = await self._redis.xread(
                        {STREAM: self._position}, count=NEWS_PER_READ, block=int(READ_SECONDS * 1000)
                    )
                for _, told in answer or []:
                    self._take(told, self._clock())
                if not answer:
                    async with asyncio.timeout(REDIS_SECONDS):
                        await self._keep_up()
            except (RedisError, OSError) as error:
                self._note_away(error)
                await asyncio.sleep(READ_SECONDS)

    async def _catch_up(self) -> None:
        """A router that has just started takes in what was used within the last minute, as long ago as that
        is by Redis' own clock."""
        seconds, micros = await self._redis.time()
        redis_now, now = seconds + micros / 1e6, self._clock()
        first = int((redis_now - SECONDS_PER_MINUTE) * 1000)
        self._position = b"%d-0" % first
        for entry_id, fields in await self._redis.xrange(STREAM, min=self._position):
            self._take([(entry_id, fields)], now - max(0.0, redis_now - _seconds_of(entry_id)))

    async def _keep_up(self) -> None:
        """The stream counts by Redis' clock: one that went back would say nothing new for as long."""
        seconds, _ = await self._redis.time()
        assert self._position is not None
        if _seconds_of(self._position) > seconds + 2:
            self._position = b"%d-0" % (seconds * 1000)

    def _take(self, told: list[tuple[bytes, dict[bytes, bytes]]], now: float) -> None:
        for entry_id, fields in told:
            self._position = entry_id
            try:
                self.news.hear(decode_news(fields.get(FIELD, b"")), now)
                self._num_heard += 1
            except msgspec.MsgspecError:
                self._num_wrong += 1

    def _note_away(self, error: Exception) -> None:
        self._num_failed += 1
        if not self._is_away:
            self._is_away = True
            logger.warning(
                "other routers are not told what tenants use, each goes by its own count: %s",
                type(error).__name__,
            )

    def _note_back(self) -> None:
        if self._is_away:
            self._is_away = False
            logger.info("routers tell each other again what tenants use")


def _seconds_of(entry_id: bytes) -> float:
    return int(entry_id.partition(b"-")[0]) / 1000
