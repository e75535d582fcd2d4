"""RedisHistory: answers that routers share, sealed in Redis; replicas may not read them.

Owns the keys and their bound in bytes. A tenant's routers write one log, counted in bytes; a sorted set holds
the byte at which each record begins, oldest first::

    kvasir-history:{TAG}:record:KEY   sealed HistoryRecord, until it was not used for some time
    kvasir-history:{TAG}:log          KEY → the byte at which its record begins
    kvasir-history:{TAG}:end          how many bytes have been written
    kvasir-history:tenants            tags of those that have a log

TAG is from `tenant_tags.py`, under the current secret: under another one no conversation has the same KEY. A
tenant holds the bytes between its oldest record and the end of its log. From time to time a router adds up
all tenants. If the sum exceeds the bound, it deletes the oldest records of those that hold most, down to one
level. Deleting twice is harmless, so routers need not agree on who does it. Between two surveys the bound may
be exceeded by 1/64 for each router. A value that does not open counts as missing.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from replicas.protocol.cluster_secret import ClusterSecret, Purpose
from router.history.canonical import ConversationKey
from router.history.retracing import HistoryRecord
from router.shared.sealed_store import SealedStore

PREFIX = "kvasir-history:"
TENANTS_KEY = PREFIX + "tenants"

RECORD_BYTES = 400
"""Redis' memory for a record beside its content."""
SHARE_OF_ONE = 64
"""One record may take 1/64 of the bytes of all."""
SHARE_BEFORE_SURVEY = 64
"""A survey is due after 1/64 of the bytes of all was written."""
TENANTS_PER_READ = 100
RECORDS_PER_DELETION = 256

_decoder = msgspec.msgpack.Decoder(HistoryRecord)


@dataclass(frozen=True, slots=True)
class HistoryBounds:
    """`num_bytes` bounds all tenants and routers. A record is kept for at least `seconds` after its last use,
    and at most half as long again."""

    num_bytes: int = 64 * 2**20
    seconds: float = 3600.0

    @property
    def bytes_per_record(self) -> int:
        return self.num_bytes // SHARE_OF_ONE

    @property
    def kept_ms(self) -> int:
        return math.ceil(1500 * self.seconds)


class OutgoingRecord(NamedTuple):
    """A record on its way to Redis."""

    tenant: str
    key: ConversationKey
    record: HistoryRecord

    @property
    def num_bytes(self) -> int:
        return len(self.record.said) + RECORD_BYTES


class RedisHistory(SealedStore):
    def __init__(self, redis_url: str, secret: ClusterSecret, bounds: HistoryBounds) -> None:
        super().__init__(redis_url, secret, Purpose.HISTORY)
        self.bounds = bounds
        self._num_unseen: int | None = None
        self._ends: dict[str, int] = {}
        self.num_let_go = 0
        self.num_bytes = 0
        """All tenants' bytes at the last survey, plus those written here since."""

    async def ping(self) -> None:
        """Once this returns, a read takes no longer than Redis does: the seal is made."""
        await self._sealing.get()
        await self._redis.ping()

    async def read(self, tenant: str, keys: Sequence[ConversationKey]) -> list[HistoryRecord | None]:
        tag = self._tags.of(tenant)
        return await self._read_all([record_key(tag, key) for key in keys], _decode)

    async def write(self, records: Sequence[OutgoingRecord]) -> bool:
        """Write records; False if Redis has lost earlier ones."""
        kept_ms = self.bounds.kept_ms
        tags = [self._tags.of(each.tenant) for each in records]
        names = [record_key(tag, each.key) for tag, each in zip(tags, records, strict=True)]
        sealed = [await self._seal(name, each.record) for name, each in zip(names, records, strict=True)]
        sizes = [len(value) + RECORD_BYTES for value in sealed]
        totals: dict[str, int] = {}
        for tag, size in zip(tags, sizes, strict=True):
            totals[tag] = totals.get(tag, 0) + size
        async with self._redis.pipeline(transaction=False) as pipeline:
            for tag, total in totals.items():
                pipeline.incrby(end_key(tag), total)
            ends = await pipeline.execute()
        is_intact = all(
            end - totals[tag] >= self._ends.get(tag, 0) for tag, end in zip(totals, ends, strict=True)
        )
        self._ends |= zip(totals, ends, strict=True)
        begins = {tag: end - totals[tag] for tag, end in zip(totals, ends, strict=True)}
        async with self._redis.pipeline(transaction=True) as pipeline:
            for tag, name, each, value, size in zip(tags, names, records, sealed, sizes, strict=True):
                pipeline.set(name, value, px=kept_ms)
                pipeline.zadd(log_key(tag), {each.key.hex(): begins[tag]})
                begins[tag] += size
            pipeline.sadd(TENANTS_KEY, *totals)
            for key in (TENANTS_KEY, *map(log_key, totals), *map(end_key, totals)):
                pipeline.pexpire(key, 2 * kept_ms)  # they outlive every record
            await pipeline.execute()
        self._num_unseen = sum(sizes) + (self._num_unseen or 0)
        self.num_bytes += sum(sizes)
        return is_intact

    @property
    def is_survey_due(self) -> bool:
        unseen = self._num_unseen
        return unseen is None or unseen * SHARE_BEFORE_SURVEY >= self.bounds.num_bytes

    async def survey(self) -> None:
        """Add up all tenants, and delete what exceeds the bound."""
        tags = [tag.decode("utf-8", "replace") for tag in await self._redis.smembers(TENANTS_KEY)]
        held: dict[str, tuple[int, int]] = {}
        for first in range(0, len(tags), TENANTS_PER_READ):
            held |= await self._held(tags[first : first + TENANTS_PER_READ])
        level = level_of((size for size, _ in held.values()), self.bounds.num_bytes)
        for tag, (size, end) in held.items():
            if size > level:
                await self._let_go(tag, end - level)
        self.num_bytes = sum(min(level, size) for size, _ in held.values())
        self._num_unseen = 0

    async def _held(self, tags: Sequence[str]) -> dict[str, tuple[int, int]]:
        """By tenant tag: the bytes it holds, and where its log ends."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for tag in tags:
                pipeline.get(end_key(tag))
                pipeline.zrange(log_key(tag), 0, 0, withscores=True)
            answers: list[Any] = await pipeline.execute()
        held: dict[str, tuple[int, int]] = {}
        for tag, end, oldest in zip(tags, answers[::2], answers[1::2], strict=True):
            if end is not None and end.isdigit() and oldest and math.isfinite(oldest[0][1]):
                held[tag] = (max(0, int(end) - int(oldest[0][1])), int(end))
        gone = [tag for tag in tags if tag not in held]
        if gone:
            await self._redis.srem(TENANTS_KEY, *gone)
        return held

    async def _let_go(self, tag: str, before: int) -> None:
        """Delete all records that begin before that byte."""
        while True:
            found = await self._redis.zrangebyscore(
                log_key(tag), "-inf", f"({before}", start=0, num=RECORDS_PER_DELETION
            )
            if not found:
                return
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.delete(*[f"{PREFIX}{{{tag}}}:record:{_text(member)}" for member in found])
                pipeline.zrem(log_key(tag), *found)
                await pipeline.execute()
            self.num_let_go += len(found)


def _decode(plain: bytes) -> HistoryRecord:
    record = _decoder.decode(plain)
    if not record.is_well_formed:
        raise ValueError("it is no record of an answer")
    return record


def level_of(sizes: Iterable[int], room: int) -> int:
    """Return the largest size that all can be cut to so that they fit into `room`."""
    ordered = sorted(sizes)
    for place, size in enumerate(ordered):
        share = room // (len(ordered) - place)
        if size > share:
            return share
        room -= size
    return ordered[-1] if ordered else room


def record_key(tag: str, key: ConversationKey) -> str:
    return f"{PREFIX}{{{tag}}}:record:{key.hex()}"


def log_key(tag: str) -> str:
    return f"{PREFIX}{{{tag}}}:log"


def end_key(tag: str) -> str:
    return f"{PREFIX}{{{tag}}}:end"


def _text(member: bytes) -> str:
    return member.decode("ascii", "replace")
