"""NewsExchange: what one part of a router tells the same part of the others, in the background.

Owns when messages are written, and their counts. What was not sent is taken back. No request waits for it.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from router.shared.news import NewsStream

WRITE_SECONDS = 0.2
"""Between two messages. With the time that Redis takes, this is how late the others know."""
WRITES_AT_ONCE = 8

M = TypeVar("M")


class Teller(Protocol[M]):
    """Times are of the exchange's clock; `hear` is told when a message was sent."""

    def tell(self, now: float, /) -> M | None: ...
    def untell(self, news: M, /) -> None: ...
    def hear(self, news: M, now: float, /) -> None: ...
    def forget_quiet(self, now: float, /) -> None: ...


class NewsExchange(Generic[M]):
    """For one event loop: have `run()` run. `may_follow` says whether another message may follow one at once.

    A router that has just started reads what was told in the last `since_seconds`.
    """

    def __init__(
        self,
        teller: Teller[M],
        stream: NewsStream[M],
        clock: Callable[[], float],
        *,
        since_seconds: float,
        may_follow: Callable[[M], bool] = lambda _: True,
    ) -> None:
        self._teller, self._stream, self._clock = teller, stream, clock
        self._since_seconds = since_seconds
        self._may_follow = may_follow
        self.num_told = self.num_heard = 0

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(), name="news told")
                tasks.create_task(self._read(), name="news heard")
        finally:
            await self._stream.close()

    def outcomes(self) -> dict[str, float]:
        """Count messages by what became of them."""
        return {
            "told": self.num_told,
            "heard": self.num_heard,
            "failed": self._stream.num_failed,
            "wrong": self._stream.num_wrong,
        }

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            self._teller.forget_quiet(self._clock())
            for _ in range(WRITES_AT_ONCE):
                news = self._teller.tell(self._clock())
                if news is None or not await self._send(news) or not self._may_follow(news):
                    break

    async def _send(self, news: M) -> bool:
        is_told = False
        try:
            is_told = await self._stream.send(news)
            self.num_told += is_told
        finally:  # cancelled, too
            if not is_told:
                self._teller.untell(news)
        return is_told

    async def _read(self) -> None:
        async for news, seconds_ago in self._stream.messages(self._since_seconds):
            self._teller.hear(news, self._clock() - seconds_ago)
            self.num_heard += 1
