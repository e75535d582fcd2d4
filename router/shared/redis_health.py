"""RedisHealth: whether Redis answers one of its users, logged once when it stops and once when it is back.

Owns until when that user leaves Redis alone after a failure.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from redis.exceptions import RedisError

REDIS_FAILURES = (RedisError, OSError)
"""A TimeoutError is an OSError."""


class RedisHealth:
    """`away` and `back` are logged to `logger`. Operations fail and recover one by one: Redis is back when
    none is failing."""

    def __init__(
        self,
        logger: logging.Logger,
        away: str,
        back: str | None = None,
        *,
        rest_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger, self._away, self._back = logger, away, back
        self._rest_seconds, self._clock = rest_seconds, clock
        self._resting_until = -float("inf")
        self._failing: set[str] = set()

    @property
    def is_resting(self) -> bool:
        return self._clock() < self._resting_until

    def failed(self, error: Exception, operation: str = "") -> None:
        self._resting_until = self._clock() + self._rest_seconds
        if not self._failing:
            self._logger.warning("%s error=%r", self._away, error)
        self._failing.add(operation)

    def answered(self, operation: str = "") -> None:
        if operation in self._failing:
            self._failing.remove(operation)
            if not self._failing and self._back is not None:
                self._logger.info("%s", self._back)

    @asynccontextmanager
    async def deadline(self, seconds: float, operation: str = "") -> AsyncIterator[None]:
        """Notes how the block ends. Raises one of REDIS_FAILURES."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except REDIS_FAILURES as error:
            self.failed(error, operation)
            raise
        self.answered(operation)
