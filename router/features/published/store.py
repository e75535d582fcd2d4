"""PublishedStore: the published prefixes of a cluster, in Redis and in every router.

Owns the key: one sealed list, which replicas may not even read. Each router reads it every two seconds, and
keeps the last one while Redis is away. No request waits for it.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from replicas.protocol.cluster_secret import ClusterSecret
from router.errors import CachesUnavailable
from router.feature import Feature
from router.features.published.prefixes import PublishedPrefix, PublishedPrefixes
from router.shared.redis_health import REDIS_FAILURES, RedisHealth
from router.shared.sealed_store import SealedStore
from router.shared.sealing import NotOurs

logger = logging.getLogger(__name__)

KEY = "kvasir-caches:published"
LOOK_SECONDS = 2.0
ANSWER_SECONDS = 2.0

_decode = msgspec.msgpack.Decoder(list[PublishedPrefix]).decode

Change = Callable[[list[PublishedPrefix]], list[PublishedPrefix]]


class PublishedStore(SealedStore, Feature):
    """Keeps `prefixes` as Redis has them, once it runs."""

    def __init__(self, redis_url: str, secret: ClusterSecret) -> None:
        super().__init__(redis_url, secret)
        self.prefixes = PublishedPrefixes()
        self._seen: bytes | None = None
        self._health = RedisHealth(logger, "published prefixes cannot be looked up; the last known go on")

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with suppress(*REDIS_FAILURES):
                async with self._health.deadline(ANSWER_SECONDS):
                    await self._look()
            await asyncio.sleep(LOOK_SECONDS)

    async def change(self, change: Change) -> None:
        """Apply a change; of two concurrent ones the second sees the first. `change` may raise, and may run
        again. Raises CachesUnavailable."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._change(change)
        except REDIS_FAILURES as error:
            raise CachesUnavailable("Published prefixes cannot be reached now. Try again shortly.") from error

    async def _change(self, change: Change) -> None:
        async def put(pipeline: Any) -> bytes:
            sealed = await self._seal(KEY, change(await self._prefixes_of(await pipeline.get(KEY))))
            pipeline.multi()
            pipeline.set(KEY, sealed)
            return sealed

        await self._take(await self._update(KEY, put))

    async def _look(self) -> None:
        await self._take(await self._redis.get(KEY))

    async def _take(self, value: bytes | None) -> None:
        if value != self._seen:
            self.prefixes.replace(await self._prefixes_of(value))
            self._seen = value

    async def _prefixes_of(self, value: bytes | None) -> list[PublishedPrefix]:
        """Empty if the value is not ours."""
        try:
            return [] if value is None else await self._open(KEY, value, _decode)
        except NotOurs as error:
            logger.error("the published prefixes in Redis are passed over: %s", error)
            return []
