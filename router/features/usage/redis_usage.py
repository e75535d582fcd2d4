"""RedisUsage: the usage that all routers have counted, in Redis, where replicas may neither read nor write.

Owns the keys::

    kvasir-usage:HOUR:TAG         hash, WRITER:PART:KEY:MODEL → one router's total of that hour
    kvasir-usage:HOUR             set of the tenants of that hour
    kvasir-usage:writer:WRITER    how many times that router has written

TAG is from `tenant_tags.py`. All keys have a TTL. A router writes its own totals, not increments, so writing
twice is harmless. Each write watches its router's number of writes: one that Redis gets late, over a
connection that was given up, fails. All methods raise RedisError or OSError; the caller sets the deadline.
"""

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from replicas.process.plain_redis import plain_redis
from replicas.protocol.cluster_secret import ClusterSecret
from router.features.usage.ledger import Row
from router.features.usage.sums import StoredEntry, stored_entry, stored_field, stored_value
from router.shared.tenant_tags import TenantTags

PREFIX = "kvasir-usage:"


class Written(NamedTuple):
    """`refused` are rows that Redis has not taken. `is_intact` is false if Redis has lost some of this
    router's earlier writes."""

    refused: list[Row]
    is_intact: bool


class RedisUsage:
    """`writer` names this router, and never any other."""

    def __init__(
        self, redis_url: str, writer: str, keep_seconds: int, secret: ClusterSecret | None = None
    ) -> None:
        self._redis = plain_redis(redis_url)
        self._tags = TenantTags(secret)
        self.writer = writer
        self._keep_seconds = keep_seconds
        self._num_tried = self._last_taken = 0
        self.num_not_ours = 0

    async def close(self) -> None:
        await self._redis.aclose()

    async def write(self, rows: Sequence[Row]) -> Written:
        fields: dict[tuple[int, str], dict[str, bytes]] = {}
        for row in rows:
            name = stored_field(self.writer, row.part, row.use)
            fields.setdefault((row.hour, row.tenant), {})[name] = stored_value(row.amounts)
        hours: dict[int, list[str]] = {}
        for hour, tenant in fields:
            hours.setdefault(hour, []).append(tenant)
        own, keep = PREFIX + "writer:" + self.writer, self._keep_seconds
        self._num_tried += 1
        async with self._redis.pipeline(transaction=True) as pipeline:
            await pipeline.watch(own)
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.set(own, self._num_tried, ex=keep, get=True)
            for (hour, tenant), mapping in fields.items():
                key = amounts_key(hour, self._tags.of(tenant))
                pipeline.hset(key, mapping=mapping)  # type: ignore[arg-type]
                pipeline.expire(key, keep)
            for hour, tenants in hours.items():
                pipeline.sadd(tenants_key(hour), *tenants)
                pipeline.expire(tenants_key(hour), keep)
            before, *results = await pipeline.execute(raise_on_error=False)
        if isinstance(before, Exception):
            raise before
        is_intact = self._last_taken == 0 or (before is not None and int(before) >= self._last_taken)
        self._last_taken = self._num_tried
        has_failed = [isinstance(result, RedisError) for result in results]
        of_places, of_hours = has_failed[: 2 * len(fields)], has_failed[2 * len(fields) :]
        bad = {place for number, place in enumerate(fields) if any(of_places[2 * number : 2 * number + 2])}
        bad_hours = {hour for number, hour in enumerate(hours) if any(of_hours[2 * number : 2 * number + 2])}
        refused = [row for row in rows if (row.hour, row.tenant) in bad or row.hour in bad_hours]
        return Written(refused, is_intact)

    async def tenants(self, hours: Sequence[int]) -> list[tuple[int, str]]:
        """Each hour with each of its tenants."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for hour in hours:
                pipeline.smembers(tenants_key(hour))
            answers = await pipeline.execute()
        return [
            (hour, name.decode("utf-8", "replace"))
            for hour, names in zip(hours, answers, strict=True)
            for name in names
        ]

    async def hashes(self, places: Sequence[tuple[int, str]]) -> list[dict[bytes, bytes]]:
        """Return the raw hashes of these hours and tenants."""
        keys = [[amounts_key(hour, tag) for tag in self._tags.all_of(tenant)] for hour, tenant in places]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for key in itertools.chain.from_iterable(keys):
                pipeline.hgetall(key)
            answers: Iterator[Any] = iter(await pipeline.execute())
        return [functools.reduce(operator.or_, itertools.islice(answers, len(each))) for each in keys]

    def entries(self, stored: dict[bytes, bytes]) -> list[StoredEntry]:
        """Decode a hash; entries that cannot be decoded are skipped and counted."""
        found = [stored_entry(name, value) for name, value in stored.items()]
        entries = [entry for entry in found if entry is not None]
        self.num_not_ours += len(found) - len(entries)
        return entries


def amounts_key(hour: int, tag: str) -> str:
    return f"{PREFIX}{hour}:{tag}"


def tenants_key(hour: int) -> str:
    return f"{PREFIX}{hour}"
