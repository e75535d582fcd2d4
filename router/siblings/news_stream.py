"""NewsStream: short messages from each router to all others, over a stream in Redis.

Owns the stream: the oldest messages let go, gone by itself when nobody writes. It is lossy, and while Redis
is away nothing passes; what that means is its users' to say. No request of a client's may depend on it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from redis.exceptions import RedisError

from replicas.process.plain_redis import plain_redis

logger = logging.getLogger(__name__)

FIELD = b"news"
READ_SECONDS = 1.0
"""A read waits so long for something new."""
REDIS_SECONDS = 2.0
MESSAGES_PER_READ = 64


class NewsStream:
    """For one event loop. Raises ValueError if that is not a Redis address. `while_away` is logged once when
    Redis is no longer there, and `once_back` when it is again."""

    def __init__(
        self,
        redis_url: str,
        key: str,
        *,
        max_messages: int,
        kept_seconds: int,
        while_away: str,
        once_back: str,
    ) -> None:
        self._redis: Any = plain_redis(redis_url)
        self._key = key
        self._max_messages = max_messages
        self._kept_seconds = kept_seconds
        self._while_away, self._once_back = while_away, once_back
        self._position: bytes | None = None
        self._failing: set[str] = set()
        """Of reading and writing."""
        self.num_failed = 0
        """Reads and writes."""

    async def send(self, message: bytes) -> bool:
        """Whether Redis has it."""
        try:
            async with asyncio.timeout(REDIS_SECONDS), self._redis.pipeline(transaction=False) as pipeline:
                pipeline.xadd(self._key, {FIELD: message}, maxlen=self._max_messages, approximate=True)
                pipeline.expire(self._key, self._kept_seconds)
                await pipeline.execute()
        except (RedisError, OSError) as error:  # a TimeoutError is one
            self._note_failed("writing", error)
            return False
        self._note_done("writing")
        return True

    async def messages(self, since_seconds: float) -> AsyncIterator[tuple[bytes, float]]:
        """Each with the seconds since it was sent, by Redis' own clock; first those of the last
        `since_seconds`. Without end, and with one's own. What has no message is told as an empty one."""
        while True:
            try:
                if self._position is None:
                    async with asyncio.timeout(REDIS_SECONDS):
                        earlier = await self._catch_up(since_seconds)
                    for message, age in earlier:
                        yield message, age
                async with asyncio.timeout(READ_SECONDS + REDIS_SECONDS):
                    answer = await self._redis.xread(
                        {self._key: self._position}, count=MESSAGES_PER_READ, block=int(READ_SECONDS * 1000)
                    )
                if not answer:
                    async with asyncio.timeout(REDIS_SECONDS):
                        await self._keep_up()
            except (RedisError, OSError) as error:
                self._note_failed("reading", error)
                await asyncio.sleep(READ_SECONDS)
                continue
            self._note_done("reading")
            for _, entries in answer or []:
                for entry_id, fields in entries:
                    self._position = entry_id
                    yield fields.get(FIELD, b""), 0.0

    async def close(self) -> None:
        await self._redis.aclose()

    async def _catch_up(self, since_seconds: float) -> list[tuple[bytes, float]]:
        seconds, micros = await self._redis.time()
        now = seconds + micros / 1e6
        self._position = b"%d-0" % int((now - since_seconds) * 1000)
        if not since_seconds:
            return []
        found = []
        for entry_id, fields in await self._redis.xrange(self._key, min=self._position):
            self._position = entry_id
            found.append((fields.get(FIELD, b""), max(0.0, now - _seconds_of(entry_id))))
        return found

    async def _keep_up(self) -> None:
        """The stream counts by Redis' clock: one that went back would say nothing new for as long."""
        seconds, _ = await self._redis.time()
        assert self._position is not None
        if _seconds_of(self._position) > seconds + 2:
            self._position = b"%d-0" % (seconds * 1000)

    def _note_failed(self, what: str, error: Exception) -> None:
        self.num_failed += 1
        if not self._failing:
            logger.warning("%s: %s", self._while_away, type(error).__name__)
        self._failing.add(what)

    def _note_done(self, what: str) -> None:
        if what in self._failing:
            self._failing.remove(what)
            if not self._failing:
                logger.info("%s", self._once_back)


def _seconds_of(entry_id: bytes) -> float:
    return int(entry_id.partition(b"-")[0]) / 1000
