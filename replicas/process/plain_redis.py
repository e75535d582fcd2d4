"""plain_redis(): a client of Redis that neither retries nor watches the time; its users do both.

A transaction that is sent twice would be two changes, and a reader must notice that it has reconnected. With
a timeout of its own the client waits in asyncio.wait_for, which before Python 3.12 may lose a cancellation.
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
