"""RateExchange: exchanges the use of tenants and keys between routers over Redis, in the background.

Owns the stream and its bounds. While Redis is away, each router counts its own use and
sends it afterwards.
"""

import secrets
import time
from collections.abc import Callable, Iterator

from router.feature import Feature
from router.features.rate_limits.rate_account import SECONDS_PER_MINUTE
from router.features.rate_limits.rate_limits import RateLimits
from router.features.rate_limits.rate_news import MAX_ENTRIES, RateNews, decode_news
from router.shared.instruments import Instrument, counter, gauge
from router.shared.news import NewsStream
from router.shared.news_exchange import NewsExchange

STREAM = "kvasir-limits:news"
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
        self.exchange = NewsExchange(
            self.news,
            self.stream,
            clock,
            since_seconds=SECONDS_PER_MINUTE,
            may_follow=lambda news: len(news.entries) == MAX_ENTRIES,
        )

    async def run(self) -> None:
        """Until cancelled."""
        await self.exchange.run()

    def instruments(self) -> Iterator[Instrument]:
        yield gauge(
            "router_rate_exchange_routers",
            "Other routers that have told lately what tenants and keys use",
            lambda: self.news.num_routers,
        )
        yield counter(
            "router_rate_news_total",
            "Messages between routers of what tenants and keys use: told, heard, failed or wrong",
            self.exchange.outcomes,
            "outcome",
        )
