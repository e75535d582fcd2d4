"""SealedStore: msgpack values in Redis that only routers can read or write; each store of them extends it.

Owns the client, the seal and the count of values that were not ours. Keys, bounds and expiry are the store's.
All methods raise RedisError or OSError; the caller sets the deadline.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import WatchError

from replicas.process.plain_redis import plain_redis
from replicas.protocol.cluster_secret import ClusterSecret, Purpose
from router.shared.sealing import LazySeal, NotOurs
from router.shared.tenant_tags import TenantTags

MAX_TRIES = 16
"""Per update, while other routers change the same key."""

T = TypeVar("T")
Decode = Callable[[bytes], T]
"""Raises ValueError or MsgspecError."""

_encode = msgspec.msgpack.Encoder().encode


class SealedStore:
    """For one event loop. Raises ValueError if that is not a Redis address."""

    def __init__(self, redis_url: str, secret: ClusterSecret, purpose: Purpose = Purpose.CACHES) -> None:
        self._redis: Any = plain_redis(redis_url)
        self._tags = TenantTags(secret)
        self._sealing = LazySeal(secret, purpose)
        self.num_not_ours = 0

    async def close(self) -> None:
        await self._redis.aclose()

    async def _seal(self, key: str, value: object) -> bytes:
        return (await self._sealing.get()).seal(key, _encode(value))

    async def _open(self, key: str, sealed: object, decode: Decode[T]) -> T:
        """Raises NotOurs."""
        seal = await self._sealing.get()
        try:
            if not isinstance(sealed, bytes):
                raise NotOurs("it is no text")
            return decode(seal.open(key, sealed))
        except (ValueError, msgspec.MsgspecError) as error:
            raise NotOurs(str(error)) from error

    async def _opened(self, key: str, sealed: object, decode: Decode[T]) -> T | None:
        """None for a value that is missing or not ours; the latter is counted."""
        try:
            return None if sealed is None else await self._open(key, sealed, decode)
        except NotOurs:
            self.num_not_ours += 1
            return None

    async def _read(self, key: str, decode: Decode[T]) -> T | None:
        return await self._opened(key, await self._redis.get(key), decode)

    async def _read_all(self, keys: Sequence[str], decode: Decode[T]) -> list[T | None]:
        values = await self._redis.mget(keys) if keys else []
        return [await self._opened(key, value, decode) for key, value in zip(keys, values, strict=True)]

    async def _update(self, key: str, change: Callable[[Any], Awaitable[T]]) -> T:
        """Run `change` with a pipeline that watches `key`, again if another router changed it meanwhile.

        `change` reads, calls `pipeline.multi()` and queues writes; it may raise.
        """
        for _ in range(MAX_TRIES):
            async with self._redis.pipeline(transaction=True) as pipeline:
                await pipeline.watch(key)
                result = await change(pipeline)
                if not pipeline.command_stack:
                    return result
                with suppress(WatchError):
                    await pipeline.execute()
                    return result
        raise RedisConnectionError("too many routers change the same key at once")
