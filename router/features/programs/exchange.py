"""ProgramExchange: tells other routers over Redis of the programs that this one knows, in the background.

Owns the stream and its bounds. Messages are sealed under the cluster secret: clients name sessions. While
Redis is away, each router knows its own programs, and tells of them afterwards.
"""

import secrets
from collections.abc import Callable, Iterator

from replicas.protocol.cluster_secret import ClusterSecret, Purpose
from router.feature import Feature
from router.programs.book import ProgramBook
from router.programs.news import REFRESH_SECONDS, ProgramNews, decode_news
from router.shared.instruments import Instrument, counter, gauge
from router.shared.news import NewsStream
from router.shared.news_exchange import NewsExchange
from router.shared.sealing import LazySeal

STREAM = "kvasir-programs:news"
MAX_NEWS = 512
"""Length of the stream."""
KEPT_SECONDS = 120


class ProgramExchange(Feature):
    """For one event loop: have `run()` run. Raises ValueError if that is not a Redis address.

    Routers without a common secret ignore each other.
    """

    def __init__(
        self, redis_url: str, book: ProgramBook, clock: Callable[[], float], secret: ClusterSecret
    ) -> None:
        """`clock` is that of `book`."""
        self.news = ProgramNews(book, secrets.token_urlsafe(9))
        self.stream = NewsStream(
            redis_url,
            STREAM,
            decode_news,
            seal=LazySeal(secret, Purpose.PROGRAMS),
            max_messages=MAX_NEWS,
            kept_seconds=KEPT_SECONDS,
            while_away="other routers are not told where programs run, each knows its own",
            once_back="routers tell each other again where programs run",
        )
        self.exchange = NewsExchange(self.news, self.stream, clock, since_seconds=REFRESH_SECONDS)

    async def run(self) -> None:
        """Until cancelled."""
        await self.exchange.run()

    def instruments(self) -> Iterator[Instrument]:
        yield gauge(
            "router_program_exchange_routers",
            "Other routers that have told lately of programs",
            lambda: self.news.num_routers,
        )
        yield counter(
            "router_program_news_total",
            "Messages between routers of programs: told, heard, failed or wrong; and programs that were "
            "passed_over, as the book is full or their names are too long",
            lambda: {**self.exchange.outcomes(), "passed_over": self.news.num_passed_over},
            "outcome",
        )
