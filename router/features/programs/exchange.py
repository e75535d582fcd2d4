"""ProgramExchange: tells other routers over Redis of the programs that this one knows, in the background.

Owns when a message is sent. Messages are sealed under the cluster secret: clients name sessions. No request
waits for it. While Redis is away, each router knows its own programs, and tells of them afterwards.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator

from replicas.protocol.cluster_secret import ClusterSecret, Purpose
from router.feature import Feature
from router.programs.book import ProgramBook
from router.programs.news import REFRESH_SECONDS, News, ProgramNews, decode_news
from router.shared.instruments import Instrument, counter, gauge
from router.shared.news import NewsStream
from router.shared.sealing import LazySeal

STREAM = "kvasir-programs:news"
WRITE_SECONDS = 0.2
"""Between two messages. With the time that Redis takes, this is how late the others know."""
WRITES_AT_ONCE = 8
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
        self._clock = clock
        self.num_told = self.num_heard = 0

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(), name="programs told")
                tasks.create_task(self._read(), name="programs heard")
        finally:
            await self.stream.close()

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
            lambda: {
                "told": self.num_told,
                "heard": self.num_heard,
                "failed": self.stream.num_failed,
                "wrong": self.stream.num_wrong,
                "passed_over": self.news.num_passed_over,
            },
            "outcome",
        )

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            self.news.forget_quiet(self._clock())
            for _ in range(WRITES_AT_ONCE):
                news = self.news.tell(self._clock())
                if news is None or not await self._send(news):
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
        """A router that has just started reads what was told since all was told again."""
        async for news, seconds_ago in self.stream.messages(REFRESH_SECONDS):
            self.news.hear(news, self._clock() - seconds_ago)
            self.num_heard += 1
