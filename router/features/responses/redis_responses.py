"""RedisResponses: stored responses in Redis, sealed, under keys that replicas may not even read.

Owns the keys. Each response is one text with a TTL; a sorted set for each tenant counts them, oldest first::

    kvasir-responses:{TAG}:record:ID   sealed StoredResponse, until it is too old
    kvasir-responses:{TAG}:index       ID:{bytes} → created in ms, until the newest is too old

TAG is from `tenant_tags.py`. Each router enforces the bounds after every few of its writes, so they are
exceeded by those few at most. A value that does not open counts as missing.
"""

import math
from collections import Counter

import msgspec

from replicas.protocol.cluster_secret import ClusterSecret
from router.features.responses.record import ResponseBounds, StoredResponse, is_response_id
from router.shared.sealed_store import SealedStore

PREFIX = "kvasir-responses:"
SHARE_BEFORE_TRIM = 32
"""A tenant is trimmed after 1/32 of its bound was written, in bytes or in number."""

_decode = msgspec.msgpack.Decoder(StoredResponse).decode


class RedisResponses(SealedStore):
    def __init__(self, redis_url: str, secret: ClusterSecret, bounds: ResponseBounds) -> None:
        super().__init__(redis_url, secret)
        self._bounds = bounds
        self._written_bytes: Counter[str] = Counter()
        self._written: Counter[str] = Counter()

    async def add(self, record: StoredResponse, now: float) -> None:
        tenant, bounds = record.tenant, self._bounds
        left = record.created + bounds.seconds - now
        if left <= 0:
            return
        tag = self._tags.of(tenant)
        key, index = record_key(tag, record.response_id), index_key(tag)
        sealed = await self._seal(key, record)
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.set(key, sealed, px=math.ceil(left * 1000))
            pipeline.zadd(index, {_member(record): int(record.created * 1000)})
            pipeline.pexpire(index, math.ceil(bounds.seconds * 1000))
            await pipeline.execute()
        self._written[tenant] += 1
        self._written_bytes[tenant] += record.num_bytes
        if (
            self._written[tenant] * SHARE_BEFORE_TRIM >= bounds.num_responses
            or self._written_bytes[tenant] * SHARE_BEFORE_TRIM >= bounds.num_bytes
        ):
            await self._trim(tenant, now)

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        found = await self._read_all(self._record_keys(tenant, response_id), _decode)
        return next((record for record in found if record is not None), None)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Whether it was there. Its entry in the index stays until it is the oldest."""
        return bool(await self._redis.delete(*self._record_keys(tenant, response_id)))

    async def _trim(self, tenant: str, now: float) -> None:
        """Delete what is too old, then the oldest until the bounds are kept."""
        bounds, tag = self._bounds, self._tags.of(tenant)
        index = index_key(tag)
        oldest = int((now - bounds.seconds) * 1000)
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.zremrangebyscore(index, "-inf", oldest)
            pipeline.zrevrangebyscore(index, "+inf", "-inf")
            _, members = await pipeline.execute()
        num_bytes, kept = 0, 0
        for member in members:
            num_bytes += _bytes_of(member)
            if kept == bounds.num_responses or num_bytes > bounds.num_bytes:
                break
            kept += 1
        gone = members[kept:]
        if gone:
            async with self._redis.pipeline(transaction=True) as pipeline:
                for member in gone:
                    response_id = member.decode("ascii", "replace").partition(":")[0]
                    if is_response_id(response_id):
                        pipeline.delete(record_key(tag, response_id))
                pipeline.zrem(index, *gone)
                await pipeline.execute()
        self._written[tenant] = self._written_bytes[tenant] = 0

    def _record_keys(self, tenant: str, response_id: str) -> list[str]:
        return [record_key(tag, response_id) for tag in self._tags.all_of(tenant)]


def record_key(tag: str, response_id: str) -> str:
    return f"{PREFIX}{{{tag}}}:record:{response_id}"


def index_key(tag: str) -> str:
    return f"{PREFIX}{{{tag}}}:index"


def _member(record: StoredResponse) -> str:
    return f"{record.response_id}:{record.num_bytes}"


def _bytes_of(member: bytes) -> int:
    size = member.rpartition(b":")[2]
    return int(size) if size.isdigit() and len(size) < 16 else 0
