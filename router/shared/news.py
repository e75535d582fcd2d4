"""NewsStream: short messages from each router to all others, over a stream in Redis.

Owns the stream, which is capped by MAXLEN; its key expires when nothing is sent. Messages may be lost, and
none pass while Redis is away. No client's request may depend on it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import msgspec

from replicas.process.plain_redis import plain_redis
from router.shared.redis_health import REDIS_FAILURES, RedisHealth
from router.shared.sealing import LazySeal, NotOurs

logger = logging.getLogger(__name__)

FIELD = b"news"
READ_SECONDS = 1.0
"""How long a read waits for something new."""
REDIS_SECONDS = 2.0
MESSAGES_PER_READ = 64

M = TypeVar("M")
_encode = msgspec.msgpack.Encoder().encode


class NewsStream(Generic[M]):
    """For one event loop. Raises ValueError if that is not a Redis address.

    `while_away` is logged once when Redis goes away, `once_back` when it is back. With `seal`, only routers
    can read or write messages. `num_failed` counts reads and writes, `num_wrong` messages that are not ours.
    """

    def __init__(
        self,
        redis_url: str,
        key: str,
        decode: Callable[[bytes], M],
        *,
        max_messages: int,
        kept_seconds: int,
        while_away: str,
        once_back: str,
        seal: LazySeal | None = None,
    ) -> None:
        self._redis: Any = plain_redis(redis_url)
        self._key, self._decode, self._seal = key, decode, seal
        self._max_messages, self._kept_seconds = max_messages, kept_seconds
        self._health = RedisHealth(logger, while_away, once_back)
        self._position: bytes | None = None
        self.num_failed = self.num_wrong = 0

    async def send(self, message: M) -> bool:
        """Whether Redis has it."""
        data = _encode(message)
        if self._seal is not None:
            data = (await self._seal.get()).seal(self._key, data)
        try:
            async with (
                self._health.deadline(REDIS_SECONDS, "writing"),
                self._redis.pipeline(transaction=False) as pipeline,
            ):
                pipeline.xadd(self._key, {FIELD: data}, maxlen=self._max_messages, approximate=True)
                pipeline.expire(self._key, self._kept_seconds)
                await pipeline.execute()
        except REDIS_FAILURES:
            self.num_failed += 1
            return False
        return True

    async def messages(self, since_seconds: float) -> AsyncIterator[tuple[M, float]]:
        """Yield each with its age in seconds by Redis' clock, first those of the last `since_seconds`. Never
        ends. Our own messages are among them."""
        while True:
            try:
                async with self._health.deadline(READ_SECONDS + REDIS_SECONDS, "reading"):
                    entries = await self._next(since_seconds)
            except REDIS_FAILURES:
                self.num_failed += 1
                await asyncio.sleep(READ_SECONDS)
                continue
            for data, age in entries:
                try:
                    if self._seal is not None:
                        data = (await self._seal.get()).open(self._key, data)
                    message = self._decode(data)
                except (NotOurs, msgspec.MsgspecError):
                    self.num_wrong += 1
                else:
                    yield message, age

    async def close(self) -> None:
        await self._redis.aclose()

    async def _next(self, since_seconds: float) -> list[tuple[bytes, float]]:
        """Messages that have not been read yet, with their ages; none if none comes in READ_SECONDS."""
        if self._position is None:
            now = await self._now()
            self._position = b"%d-0" % int((now - since_seconds) * 1000)
            entries = await self._redis.xrange(self._key, min=self._position) if since_seconds else []
            ages = [max(0.0, now - _seconds_of(entry_id)) for entry_id, _ in entries]
        else:
            answer = await self._redis.xread(
                {self._key: self._position}, count=MESSAGES_PER_READ, block=int(READ_SECONDS * 1000)
            )
            if not answer:
                await self._follow_clock(self._position)
            entries = [entry for _, entries in answer or () for entry in entries]
            ages = [0.0] * len(entries)
        if entries:
            self._position = entries[-1][0]
        return [(fields.get(FIELD, b""), age) for (_, fields), age in zip(entries, ages, strict=True)]

    async def _follow_clock(self, position: bytes) -> None:
        """Entries are numbered by Redis' clock: after it went back, nothing would be new for as long."""
        now = await self._now()
        if _seconds_of(position) > now + 2:
            self._position = b"%d-0" % int(now * 1000)

    async def _now(self) -> float:
        seconds, micros = await self._redis.time()
        return float(seconds + micros / 1e6)


def _seconds_of(entry_id: bytes) -> float:
    return int(entry_id.partition(b"-")[0]) / 1000
