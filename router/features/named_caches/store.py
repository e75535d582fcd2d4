"""CacheStore: named caches in Redis, sealed, under keys that replicas may not even read.

Owns the keys. Each cache has a record and its content, both with a TTL; sorted sets by expiry count them::

    kvasir-caches:record:ID     sealed CacheRecord; known for a day after the cache is gone
    kvasir-caches:content:ID    sealed CacheContent, until the cache expires
    kvasir-caches:index         {created in ms}:ID:{bytes} → expiry in ms
    kvasir-caches:of:TAG        the same of one tenant's, for a day after the last was made or extended

TAG is from `tenant_tags.py`. A value that does not open counts as missing. Changes are transactions under
WATCH: of two at once, the second sees the first, so no cache is both deleted and extended.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from replicas.protocol.cluster_secret import ClusterSecret
from router.features.named_caches.bounds import MAX_TTL_SECONDS, CacheBounds
from router.features.named_caches.record import CacheContent, CacheRecord, is_cache_id
from router.shared.sealed_store import SealedStore

PREFIX = "kvasir-caches:"
INDEX_KEY = PREFIX + "index"

_decode_record = msgspec.msgpack.Decoder(CacheRecord).decode
_decode_content = msgspec.msgpack.Decoder(CacheContent).decode


class StoreFull(Exception):
    """The message names the bound that was reached. It gives no number, which would tell of other tenants."""


class Entry(NamedTuple):
    """One cache in the index. Sorts by creation."""

    created_ms: int
    cache_id: str
    num_bytes: int


class CacheStore(SealedStore):
    def __init__(self, redis_url: str, secret: ClusterSecret, bounds: CacheBounds) -> None:
        super().__init__(redis_url, secret)
        self._bounds = bounds

    async def add(self, record: CacheRecord, content: CacheContent, now: float, share: float) -> None:
        """`share` is the tenant's part of the bounds. Raises StoreFull."""
        own_indexes = self._own_indexes(record.tenant)
        records, contents = record_key(record.cache_id), content_key(record.cache_id)
        sealed = await self._seal(records, record), await self._seal(contents, content)

        async def put(pipeline: Any) -> None:
            for keys, bounds, whose in (
                (own_indexes, self._bounds.of_share(share), "this tenant"),
                ([INDEX_KEY], self._bounds, "all tenants together"),
            ):
                members: set[bytes] = set()
                for key in keys:
                    members |= {*await pipeline.zrangebyscore(key, int(now * 1000), "+inf")}
                _check_room(record, members, bounds, whose)
            pipeline.multi()
            for key in (INDEX_KEY, *own_indexes):
                pipeline.zremrangebyscore(key, "-inf", int(now * 1000))
            pipeline.set(records, sealed[0], px=_ms(record.known_seconds(now)))
            pipeline.set(contents, sealed[1], px=_ms(record.seconds_left(now)))
            _list(pipeline, record, own_indexes[0])

        await self._update(INDEX_KEY, put)

    async def record(self, cache_id: str) -> CacheRecord | None:
        return await self._read(record_key(cache_id), _decode_record)

    async def content(self, cache_id: str) -> CacheContent | None:
        return await self._read(content_key(cache_id), _decode_content)

    async def records(self, cache_ids: list[str]) -> list[CacheRecord]:
        """Return the records that exist."""
        opened = await self._read_all([record_key(cache_id) for cache_id in cache_ids], _decode_record)
        return [record for record in opened if record is not None]

    async def entries(self, now: float) -> list[Entry]:
        """All caches that have not expired, newest first."""
        members = await self._redis.zrangebyscore(INDEX_KEY, int(now * 1000), "+inf")
        return sorted(_entries(members), reverse=True)

    async def change(
        self, cache_id: str, change: Callable[[CacheRecord], CacheRecord], now: float
    ) -> CacheRecord | None:
        """Change a record; None if there is none. `change` may raise, and may run again."""
        records, contents = record_key(cache_id), content_key(cache_id)

        async def put(pipeline: Any) -> CacheRecord | None:
            known = await self._opened(records, await pipeline.get(records), _decode_record)
            if known is None:
                return None
            changed = change(known)
            sealed = await self._seal(records, changed)
            own_indexes = self._own_indexes(changed.tenant)
            pipeline.multi()
            pipeline.set(records, sealed, px=_ms(changed.known_seconds(now)))
            if changed.is_gone(now):
                pipeline.delete(contents)
                for key in (INDEX_KEY, *own_indexes):
                    pipeline.zrem(key, _member(changed))
            else:
                pipeline.pexpire(contents, _ms(changed.seconds_left(now)))
                _list(pipeline, changed, own_indexes[0])
            return changed

        return await self._update(records, put)

    def _own_indexes(self, tenant: str) -> list[str]:
        """The index that is written comes first; the others are read while the secret changes."""
        return [tenant_index_key(tag) for tag in self._tags.all_of(tenant)]


def _check_room(record: CacheRecord, members: Iterable[bytes], bounds: CacheBounds, whose: str) -> None:
    entries = _entries(members)
    if len(entries) >= bounds.num_caches:
        raise StoreFull(f"There are as many named caches as {whose} may have.")
    num_bytes = sum(entry.num_bytes for entry in entries)
    if num_bytes + record.num_bytes > bounds.num_bytes:
        raise StoreFull(f"The named caches of {whose} have as many bytes as they may have.")


def _list(pipeline: Any, record: CacheRecord, own_index: str) -> None:
    for key in (INDEX_KEY, own_index):
        pipeline.zadd(key, {_member(record): int(record.expires * 1000)})
    pipeline.pexpire(own_index, _ms(MAX_TTL_SECONDS))  # no cache in it lives longer


def record_key(cache_id: str) -> str:
    return f"{PREFIX}record:{cache_id}"


def content_key(cache_id: str) -> str:
    return f"{PREFIX}content:{cache_id}"


def tenant_index_key(tag: str) -> str:
    return f"{PREFIX}of:{tag}"


def _member(record: CacheRecord) -> str:
    return f"{int(record.created * 1000)}:{record.cache_id}:{record.num_bytes}"


def _entries(members: Iterable[bytes]) -> list[Entry]:
    """Skips members that we have not written."""
    entries: list[Entry] = []
    for member in members:
        created, _, rest = member.decode("ascii", "replace").partition(":")
        cache_id, _, num_bytes = rest.partition(":")
        if is_cache_id(cache_id) and _is_number(created) and _is_number(num_bytes):
            entries.append(Entry(int(created), cache_id, int(num_bytes)))
    return entries


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16


def _ms(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))
