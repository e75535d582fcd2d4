"""A replica's clients of Redis: connections, and the deadline of a last message.

Owns neither keys nor their writers.
"""

import asyncio
import logging
from collections.abc import Coroutine

from redis.asyncio import Redis
from redis.exceptions import RedisError

from replicas.errors import StartupError
from replicas.process.plain_redis import plain_redis
from replicas.process.settings import without_password

logger = logging.getLogger(__name__)

FAREWELL_SECONDS = 1.0
"""Seconds for Redis to take our farewell; otherwise everything there expires by itself."""


def connect(url: str) -> "Redis":
    """Raises StartupError if this is not a Redis address."""
    try:
        return plain_redis(url)
    except ValueError:  # which may quote the password
        raise StartupError(f"setting redis_url is not a Redis address: {without_password(url)}") from None


async def farewell(message: Coroutine[None, None, None]) -> None:
    """Tell Redis that we go, if it listens."""
    try:
        async with asyncio.timeout(FAREWELL_SECONDS):
            await message
    except (RedisError, OSError) as error:  # TimeoutError is an OSError
        logger.warning("Redis could not be told that this replica leaves error=%r", error)
