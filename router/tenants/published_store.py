"""PublishedStore: the published prefixes of a cluster, in Redis and in every router.

Owns the key: one sealed list, which only routers can read or make, and replicas may not even read. Requests
never wait for it: what a router knows is looked up again every other second, and while Redis is away it goes
on with that.
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec
from redis.exceptions import RedisError, WatchError

from replicas.process.plain_redis import plain_redis
from replicas.protocol.cluster_secret import ClusterSecret
from router.errors import CachesUnavailable
from router.shared.sealing import NotOurs, Seal
from router.tenants.published import PublishedPrefix, PublishedPrefixes

logger = logging.getLogger(__name__)

KEY = "kvasir-caches:published"
LOOK_SECONDS = 2.0
ANSWER_SECONDS = 2.0
MAX_TRIES = 16

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[PublishedPrefix])

Change = Callable[[list[PublishedPrefix]], list[PublishedPrefix]]


class PublishedStore:
    """Keeps `prefixes` as Redis has them, once it runs."""

    def __init__(self, redis_url: str, secret: ClusterSecret) -> None:
        self.prefixes = PublishedPrefixes()
        self._redis = plain_redis(redis_url)
        self._secret = secret
        self._sealing: Seal | None = None
        self._seen: bytes | None = None
        self._is_away = False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._look()
                self._is_away = False
            except (RedisError, OSError) as error:  # a timeout is an OSError
                if not self._is_away:
                    logger.warning("published prefixes cannot be looked up; the last known go on: %s", error)
                self._is_away = True
            await asyncio.sleep(LOOK_SECONDS)

    async def change(self, change: Change) -> None:
        """Of two changes at once one sees the other's; `change` may raise, and may be called again. Raises
        CachesUnavailable."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._change(change)
        except (RedisError, OSError) as error:
            raise CachesUnavailable("Published prefixes cannot be reached now. Try again shortly.") from error

    async def close(self) -> None:
        await self._redis.aclose()

    async def _change(self, change: Change) -> None:
        seal = await self._seal()
        for _ in range(MAX_TRIES):
            async with self._redis.pipeline(transaction=True) as pipeline:
                await pipeline.watch(KEY)
                value = await pipeline.get(KEY)
                assert not isinstance(value, str), "this client decodes nothing"
                changed = change(await self._opened(value))
                sealed = seal.seal(KEY, _encode(changed))
                pipeline.multi()  # type: ignore[no-untyped-call]
                pipeline.set(KEY, sealed)
                try:
                    await pipeline.execute()
                except WatchError:
                    continue
                await self._take(sealed)
                return
        raise RedisError("too many change the published prefixes at once")

    async def _look(self) -> None:
        value = await self._redis.get(KEY)
        assert not isinstance(value, str), "this client decodes nothing"
        await self._take(value)

    async def _take(self, value: bytes | None) -> None:
        if value != self._seen:
            self.prefixes.replace(await self._opened(value))
            self._seen = value

    async def _opened(self, value: bytes | None) -> list[PublishedPrefix]:
        """What is not ours is as good as nothing."""
        if value is None:
            return []
        try:
            return _decoder.decode((await self._seal()).open(KEY, value))
        except (NotOurs, msgspec.DecodeError, msgspec.ValidationError) as error:
            logger.error("the published prefixes in Redis are passed over: %s", error)
            return []

    async def _seal(self) -> Seal:
        if self._sealing is None:
            self._sealing = await asyncio.to_thread(Seal, self._secret)
        return self._sealing
