"""NamedCaches: the named caches of a cluster, as one router knows them.

Owns how long a request may wait for Redis, and what is trusted without it: a cache that this router used
lately is good until it expires, and is looked up again after RECHECK_SECONDS while Redis answers. Another
tenant's cache counts as missing. Counts the outcome of each use.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec

from replicas.protocol.cluster_secret import ClusterSecret
from router.errors import CacheGone, CachesFull, CachesUnavailable
from router.feature import Feature
from router.features.named_caches.bounds import CacheBounds
from router.features.named_caches.record import (
    CacheContent,
    CacheKind,
    CacheLease,
    CacheRecord,
    Gone,
    gone_words,
    is_cache_id,
)
from router.features.named_caches.store import CacheStore, StoreFull
from router.shared.bounded_cache import BoundedCache
from router.shared.instruments import Instrument, counter, gauge
from router.shared.redis_health import REDIS_FAILURES, RedisHealth

logger = logging.getLogger(__name__)

REDIS_SECONDS = 1.0
RECHECK_SECONDS = 2.0
REST_SECONDS = 2.0
"""How long requests do not ask Redis after a failure."""
NUM_LOCKS = 64
ENTRY_BYTES = 2048
"""Bytes of an entry in memory, besides its content."""


class Remembered(NamedTuple):
    """`checked_at` is when it was last read from Redis."""

    record: CacheRecord
    content: CacheContent
    checked_at: float


class Page(NamedTuple):
    records: list[CacheRecord]
    has_more: bool


class NamedCaches(Feature):
    """For one event loop. `close()` when no request is left."""

    def __init__(
        self,
        redis_url: str,
        secret: ClusterSecret,
        bounds: CacheBounds | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bounds = bounds or CacheBounds()
        self._store = CacheStore(redis_url, secret, self.bounds)
        self._memory: BoundedCache[str, Remembered] = BoundedCache(
            self.bounds.memory_bytes, lambda _, known: ENTRY_BYTES + known.content.num_bytes
        )
        self._wall_clock, self._clock = wall_clock, clock
        self._locks = [asyncio.Lock() for _ in range(NUM_LOCKS)]
        self._health = RedisHealth(
            logger,
            "Redis refuses named caches, or cannot be reached",
            "Redis has named caches again",
            rest_seconds=REST_SECONDS,
            clock=clock,
        )
        self.num_created = 0
        self.num_uses = {"memory": 0, "redis": 0}
        self.num_refused = Counter({each.value: 0 for each in Gone} | {"full": 0, "unavailable": 0})

    async def close(self) -> None:
        await self._store.close()

    async def create(self, record: CacheRecord, content: CacheContent, share: float = 1.0) -> None:
        """`share` is the tenant's part of the bounds. Raises CachesFull or CachesUnavailable."""
        try:
            async with self._asking():
                await self._store.add(record, content, self._wall_clock(), share)
        except StoreFull as error:
            self.num_refused["full"] += 1
            raise CachesFull(f"{error} Delete some, or wait until some expire.") from error
        self.num_created += 1
        self._remember(record, content)

    async def use(self, cache_id: str, tenant: str) -> tuple[CacheRecord, CacheContent]:
        """Raises CacheGone, or CachesUnavailable for one that this router does not know."""
        known = self._memory.get(cache_id)
        if known is None or not self._is_fresh(known):
            source, known = "redis", await self._look_again(cache_id, tenant)
        else:
            source = "memory"
        if known.record.tenant != tenant:
            raise self._gone(cache_id, None)
        if known.record.is_gone(self._wall_clock()):
            raise self._gone(cache_id, known.record)
        self.num_uses[source] += 1
        return known.record, known.content

    async def look(self, cache_id: str, tenant: str) -> CacheRecord:
        """Read a cache's record in Redis. Raises CacheGone or CachesUnavailable."""
        async with self._asking():
            return self._there(cache_id, tenant, await self._record(cache_id))

    async def extend(
        self, cache_id: str, tenant: str, *, ttl: int | None = None, name: str | None = None
    ) -> CacheRecord:
        """Let it live `ttl` seconds from now, rename it, or both. Raises CacheGone or CachesUnavailable."""
        now = self._wall_clock()

        def changed(record: CacheRecord) -> CacheRecord:
            if ttl is not None:
                record = msgspec.structs.replace(record, ttl=ttl, expires=now + ttl)
            return record if name is None else msgspec.structs.replace(record, name=name)

        return await self._change(cache_id, tenant, changed)

    async def note_lease(self, cache_id: str, tenant: str, lease: CacheLease) -> CacheRecord:
        """Raises CacheGone or CachesUnavailable."""
        return await self._change(
            cache_id, tenant, lambda record: msgspec.structs.replace(record, lease=lease)
        )

    async def delete(self, cache_id: str, tenant: str) -> CacheRecord:
        """Raises CacheGone or CachesUnavailable."""
        now = self._wall_clock()
        return await self._change(
            cache_id, tenant, lambda record: msgspec.structs.replace(record, deleted=now)
        )

    async def page(self, tenant: str, limit: int, after: str | None, kind: CacheKind | None = None) -> Page:
        """Return the tenant's caches, or those of a kind, newest first, from the one behind `after`. Raises
        CacheGone if `after` is unknown, and CachesUnavailable."""
        now = self._wall_clock()
        async with self._asking():
            entries = await self._store.entries(now)
            if after is not None:
                last = await self._record(after)
                if last is None or last.tenant != tenant:
                    raise self._gone(after, None)
                place = (int(last.created * 1000), last.cache_id)
                entries = [entry for entry in entries if entry[:2] < place]
            found: list[CacheRecord] = []
            for start in range(0, len(entries), limit + 1):
                ids = [entry.cache_id for entry in entries[start : start + limit + 1]]
                records = await self._store.records(ids)
                found += [
                    each
                    for each in records
                    if each.tenant == tenant and not each.is_gone(now) and kind in (None, each.kind)
                ]
                if len(found) > limit:
                    break
        return Page(found[:limit], len(found) > limit)

    @property
    def num_not_ours(self) -> int:
        return self._store.num_not_ours

    @property
    def num_remembered(self) -> int:
        return len(self._memory)

    @property
    def num_bytes(self) -> int:
        """Memory of the caches that this router remembers."""
        return self._memory.size

    def instruments(self) -> Iterator[Instrument]:
        yield counter(
            "router_named_caches_created_total",
            "Named caches that were created through this router",
            lambda: self.num_created,
        )
        yield counter(
            "router_named_cache_uses_total",
            "Uses of named caches by where this router found them: memory or redis",
            lambda: self.num_uses,
            "source",
        )
        yield counter(
            "router_named_cache_refusals_total",
            "Requests about named caches that were refused: not_found, expired, deleted, lost, full "
            "or unavailable",
            lambda: self.num_refused,
            "reason",
        )
        yield counter(
            "router_named_caches_not_ours_total",
            "Values of named caches in Redis that were changed or sealed under another secret",
            lambda: self.num_not_ours,
        )
        yield gauge(
            "router_named_caches_remembered",
            "Named caches in this router's memory",
            lambda: self.num_remembered,
        )
        yield gauge(
            "router_named_cache_memory_bytes",
            "Memory of the named caches that this router has used lately",
            lambda: self.num_bytes,
        )

    def _is_fresh(self, known: Remembered) -> bool:
        """Whether Redis need not, or must not, be asked."""
        return self._clock() - known.checked_at < RECHECK_SECONDS or self._health.is_resting

    async def _look_again(self, cache_id: str, tenant: str) -> Remembered:
        """Read it from Redis, one caller at a time per cache; the others share the result."""
        if self._health.is_resting:
            raise self._unavailable()
        is_known = self._memory.get(cache_id) is not None
        try:
            async with self._asking(is_needed=not is_known), self._locks[hash(cache_id) % NUM_LOCKS]:
                known = self._memory.get(cache_id)
                if known is not None and self._is_fresh(known):
                    return known
                record = self._there(cache_id, tenant, await self._record(cache_id))
                content = known.content if known is not None else await self._store.content(cache_id)
                if content is None:
                    raise self._gone(cache_id, record)
        except CachesUnavailable:
            known = self._memory.get(cache_id)
            if known is None:
                raise
            return known
        return self._remember(record, content)

    def _remember(self, record: CacheRecord, content: CacheContent) -> Remembered:
        known = Remembered(record, content, self._clock())
        self._memory.put(record.cache_id, known)
        return known

    async def _change(
        self, cache_id: str, tenant: str, changed: Callable[[CacheRecord], CacheRecord]
    ) -> CacheRecord:
        def change(record: CacheRecord) -> CacheRecord:
            return changed(self._there(cache_id, tenant, record))

        async with self._asking():
            record = None
            if is_cache_id(cache_id):
                record = await self._store.change(cache_id, change, self._wall_clock())
            if record is None:
                raise self._gone(cache_id, None)
        known = self._memory.get(cache_id)
        if known is not None:
            content = CacheContent(b"") if record.is_gone(self._wall_clock()) else known.content
            self._remember(record, content)
        return record

    async def _record(self, cache_id: str) -> CacheRecord | None:
        return await self._store.record(cache_id) if is_cache_id(cache_id) else None

    def _there(self, cache_id: str, tenant: str, record: CacheRecord | None) -> CacheRecord:
        if record is None or record.tenant != tenant:
            self._memory.pop(cache_id)
            raise self._gone(cache_id, None)
        if record.is_gone(self._wall_clock()):
            self._memory.pop(cache_id)
            raise self._gone(cache_id, record)
        return record

    def _gone(self, cache_id: str, record: CacheRecord | None) -> CacheGone:
        why, words = gone_words(cache_id, record, self._wall_clock())
        self.num_refused[why.value] += 1
        return CacheGone(words, f"cache_{why.value}")

    def _unavailable(self, *, is_refusal: bool = True) -> CachesUnavailable:
        self.num_refused["unavailable"] += is_refusal
        return CachesUnavailable("Named caches cannot be reached at the moment. Try again shortly.")

    @asynccontextmanager
    async def _asking(self, *, is_needed: bool = True) -> AsyncIterator[None]:
        """Give Redis as long as a client can wait. Raises CachesUnavailable."""
        try:
            async with self._health.deadline(REDIS_SECONDS):
                yield
        except REDIS_FAILURES as error:
            raise self._unavailable(is_refusal=is_needed) from error
