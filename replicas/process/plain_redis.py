"""plain_redis(): a client of Redis without retries and timeouts; its users have their own.

A transaction sent twice would be two changes, and a reader must notice a reconnection. With its own timeout
the client uses asyncio.wait_for, which before Python 3.12 may lose a cancellation.
"""

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff


def plain_redis(url: str) -> "Redis":
    """Raises ValueError, which may quote the password, if this is not a Redis address."""
    return Redis.from_url(
        url,
        protocol=2,
        decode_responses=False,
        socket_timeout=None,
        socket_connect_timeout=None,
        retry=Retry(NoBackoff(), 0),
        driver_info=None,  # else each connection reads the package metadata from disk
    )
