"""RateExchange: exchanges the use of tenants and keys between routers over Redis, in the background.

Owns when a message is sent. No request waits for it. While Redis is away, each router counts its own use and
sends it afterwards.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator

from router.feature import Feature
from router.features.rate_limits.rate_account import SECONDS_PER_MINUTE
from router.features.rate_limits.rate_limits import RateLimits
from router.features.rate_limits.rate_news import MAX_ENTRIES, News, RateNews, decode_news
from router.shared.instruments import Instrument, counter, gauge
from router.shared.news import NewsStream

STREAM = "kvasir-limits:news"
WRITE_SECONDS = 0.2
"""Between two messages. With the time that Redis takes, this is how late the others know."""
WRITES_AT_ONCE = 8
MAX_NEWS = 2048
"""Length of the stream."""
KEPT_SECONDS = 120


class RateExchange(Feature):
    """For one event loop: have `run()` run. Raises ValueError if that is not a Redis address."""

    def __init__(
        self, redis_url: str, limits: RateLimits, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`clock` is that of `limits`."""
        self.news = RateNews(limits, secrets.token_urlsafe(9))
        self.stream = NewsStream(
            redis_url,
            STREAM,
            decode_news,
            max_messages=MAX_NEWS,
            kept_seconds=KEPT_SECONDS,
            while_away="other routers are not told what tenants use, each goes by its own count",
            once_back="routers tell each other again what tenants use",
        )
        self._clock = clock
        self.num_told = self.num_heard = 0

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(), name="limits told")
                tasks.create_task(self._read(), name="limits heard")
        finally:
            await self.stream.close()

    def instruments(self) -> Iterator[Instrument]:
        yield gauge(
            "router_rate_exchange_routers",
            "Other routers that have told lately what tenants and keys use",
            lambda: self.news.num_routers,
        )
        yield counter(
            "router_rate_news_total",
            "Messages between routers of what tenants and keys use: told, heard, failed or wrong",
            lambda: {
                "told": self.num_told,
                "heard": self.num_heard,
                "failed": self.stream.num_failed,
                "wrong": self.stream.num_wrong,
            },
            "outcome",
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
            is_told = await self.stream.send(news)
            self.num_told += is_told
        finally:  # cancelled, too
            if not is_told:
                self.news.untell(news)
        return is_told

    async def _read(self) -> None:
        """A router that has just started reads the use of the last minute."""
        async for news, seconds_ago in self.stream.messages(SECONDS_PER_MINUTE):
            self.news.hear(news, self._clock() - seconds_ago)
            self.num_heard += 1
