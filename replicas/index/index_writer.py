"""IndexWriter: one replica's share of the block index in Redis, kept equal to its cache.

Owns the blocks set of this incarnation and the numbering of its changes.

A write takes everything accumulated during the previous one: SADD, SREM and XADD in one transaction. Nothing
is queued: while Redis is away only counts change, bounded by the engine's blocks. A failed write may have
happened. The writer then abandons differences and rewrites the whole set, with a `cleared` change in the
stream, so that mirrors follow. It does the same if the set is lost or has the wrong size.

Redis may be full. Leases come first: then this set is removed, and rewritten when there is room.

Announcements ride along: an end is in the same change as the events before it, or in a later one. They are in
the stream only, so a change of announcements alone is one XADD.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from replicas.index.announcements import Announcements
from replicas.index.redis_room import NoRoom, RedisRoom
from replicas.index.residency import NetChange, Residency
from replicas.observation.metrics import ReplicaMetrics
from replicas.process.cancellation import raise_if_cancelled
from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.events import CacheEvent, Tier
from replicas.protocol.keys import (
    BLOCKS_MARKER,
    POINT_MARK,
    Announcement,
    IndexChange,
    blocks_key,
    blocks_member,
    encode_change,
    events_key,
)
from replicas.protocol.status import Epoch, ModelCard, ReplicaId

logger = logging.getLogger(__name__)

ENTRY_BYTES = 128
"""Approximate bytes of a stream entry, besides its hashes."""

MEMBER_BYTES = 100
"""Approximate bytes of a hash in a set."""

LAST_MILLISECONDS = b"18446744073709551615-"
"""After an entry with such an id a stream takes no other."""

HASHES_PER_CHANGE = 4096
"""Hashes per command or stream entry: 64 KiB, so that a big rewrite blocks neither Redis nor readers. (One
announcement is not cut: it is as long as its prompt.)"""

TIMEOUT_SECONDS = 5.0
"""For one command or transaction."""

MIN_BACKOFF_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 1.0

STREAM_BYTES = 64 << 20

REWRITE_SPREAD_SECONDS = 3.0
"""After a loss in Redis all replicas rewrite their sets, each at a random moment within this time."""


class IndexWriter:
    """`observe`, `announce` and `end` on the event loop, `run` as a task of the owner's.

    `redis` should have no timeout of its own: with one the client sends in asyncio.wait_for, which before
    Python 3.12 may lose a cancellation.
    """

    def __init__(
        self,
        redis: "Redis",
        card: ModelCard,
        replica_id: ReplicaId,
        epoch: Epoch,
        *,
        index_stride: int,
        stream_length: int,
        set_ttl_seconds: float,
        metrics: ReplicaMetrics,
        rng: random.Random,
        stream_bytes: int = STREAM_BYTES,
        rewrite_spread_seconds: float = REWRITE_SPREAD_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._rng = rng
        self._rewrite_spread_seconds = rewrite_spread_seconds
        self._room = RedisRoom(
            redis, events_key(card.name), stream_bytes=stream_bytes, rng=rng, metrics=metrics, clock=clock
        )
        self._replica_id = replica_id
        self._epoch = epoch
        self._blocks_key = blocks_key(card.name, replica_id, epoch)
        self._building_key = self._blocks_key + ":building"
        self._events_key = events_key(card.name)
        self._stream_length = stream_length
        self._set_ttl_ms = int(set_ttl_seconds * 1000)
        self._metrics = metrics
        self._clock = clock
        self._residency = Residency(card.block_size, index_stride)
        self._announcements = Announcements()
        self._number = 0  # of the newest change that was tried
        self._last_change = 0  # of the newest change that Redis has acknowledged
        self._must_rewrite = True  # the first write makes the set, empty or not
        self._is_writing = False
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._written = asyncio.Event()
        """Since a write began, all that was observed has been written."""
        self._unwritten_since: float | None = None

    @property
    def last_change(self) -> int:
        """Number of the newest change that is known to be written; 0 before the first."""
        return self._last_change

    @property
    def block_hashes(self) -> frozenset[BlockHash]:
        """Hashes that the index should hold for this replica now."""
        return frozenset(self._residency.kept)

    @property
    def is_settled(self) -> bool:
        """Whether Redis holds everything observed, to the writer's knowledge."""
        return not (self._must_rewrite or self._is_writing or self._has_change)

    async def wait_settled(self) -> None:
        """Return when Redis holds all that was observed."""
        while not self.is_settled:
            self._written.clear()
            await self._written.wait()

    @property
    def num_announcements(self) -> int:
        """Count the open announcements."""
        return len(self._announcements)

    @property
    def set_key(self) -> str:
        return self._blocks_key

    def observe(self, events: Sequence[CacheEvent]) -> None:
        """Take one frame's events, in order."""
        if not events:
            return
        num_unknown = self._residency.observe(events)
        if num_unknown:
            logger.warning("the engine removed blocks that it never stored count=%d", num_unknown)
        self._metrics.index_hashes.set(len(self._residency.kept))
        for tier in Tier:
            self._metrics.resident_hashes.labels(tier.value).set(self._residency.num_resident(tier))
        self._write_soon()

    def announce(
        self, announcement_id: int, block_hashes: tuple[BlockHash, ...], points: tuple[BlockHash, ...] = ()
    ) -> bool:
        """A request that will store these blocks and resume points has been taken. False if the id is in
        use."""
        if not self._announcements.begin(announcement_id, block_hashes, points):
            logger.warning("an announcement's id is in use id=%d", announcement_id)
            return False
        self._metrics.announcements.set(len(self._announcements))
        self._write_soon()
        return True

    def end(self, announcement_id: int) -> None:
        """End an announcement: its request has stored its blocks and `observe` was told, or never will."""
        self._announcements.end(announcement_id)
        self._metrics.announcements.set(len(self._announcements))
        self._write_soon()

    def check(self, number: int, num_members: int) -> None:
        """Hear from the heartbeat how many members the set had while `last_change` was `number`.

        A set that was lost or restored from an old snapshot has another size than it should.
        """
        is_comparable = self.is_settled and number == self._last_change and number > 0
        num_expected = len(self._residency.kept) + len(self._residency.points) + 1
        if is_comparable and num_members != num_expected:
            logger.warning(
                "the block index is not what this replica wrote; writing it again members=%d expected=%d",
                num_members,
                num_expected,
            )
            self.rewrite()

    def rewrite(self) -> None:
        """Write the whole set again, soon."""
        self._must_rewrite = True
        self._wanted.set()

    async def make_room(self) -> None:
        """A lease found none in Redis. Raises RedisError or OSError."""
        await self._room.make()
        await self._withhold()

    async def run(self) -> None:
        """Write until cancelled. Redis may go and come back as it likes."""
        backoff: float | None = None
        while True:
            raise_if_cancelled()
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._write_all()
            except NoRoom:
                with contextlib.suppress(RedisError, OSError):
                    await self._withhold()
                await asyncio.sleep(MAX_BACKOFF_SECONDS * self._rng.uniform(0.5, 1.5))
            except OutOfMemoryError:
                with contextlib.suppress(RedisError, OSError):
                    await self.make_room()
                self._wanted.set()
            except (RedisError, OSError) as error:
                if isinstance(error, ResponseError):
                    with contextlib.suppress(RedisError, OSError):
                        await self._clear_wrong_stream()
                self._wanted.set()
                if backoff is None:
                    logger.warning("cannot write the block index; trying again error=%r", error)
                backoff = min(MAX_BACKOFF_SECONDS, 2 * backoff) if backoff else MIN_BACKOFF_SECONDS
                await asyncio.sleep(backoff)
            else:
                self._written.set()
                if backoff is not None:
                    logger.info("the whole block index has been written hashes=%d", len(self._residency.kept))
                backoff = None

    async def remove(self) -> None:
        """Take this incarnation's set away, when it leaves. Raises RedisError or OSError."""
        await self._redis.unlink(self._blocks_key, self._building_key)

    async def _withhold(self) -> None:
        """Remove the set until there is room for it."""
        self.rewrite()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await self.remove()

    async def _clear_wrong_stream(self) -> None:
        """Delete a key under the stream's name that is no stream, or takes no more entries."""
        async with asyncio.timeout(TIMEOUT_SECONDS):
            kind = await self._redis.type(self._events_key)
            if kind == b"none":
                return
            if kind != b"stream" or (await self._redis.xinfo_stream(self._events_key))[
                "last-generated-id"
            ].startswith(LAST_MILLISECONDS):
                logger.error("the value under %s cannot take index changes; it is deleted", self._events_key)
                await self._redis.unlink(self._events_key)

    async def _write_all(self) -> None:
        self._is_writing = True
        try:
            while self._must_rewrite or self._has_change:
                if self._must_rewrite and self._last_change:
                    await asyncio.sleep(self._rng.uniform(0, self._rewrite_spread_seconds))
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    await self._room.check(MEMBER_BYTES * len(self._residency.kept))
                since, self._unwritten_since = self._unwritten_since, None
                try:
                    if self._must_rewrite:
                        await self._write_whole_set()
                    else:
                        await self._write_change(*self._take_change())
                except BaseException:  # whatever it was, the write may have got halfway
                    self._must_rewrite = True
                    self._unwritten_since = since
                    raise
                if since is not None:
                    self._metrics.index_lag_seconds.set(self._clock() - since)
        finally:
            self._is_writing = False

    @property
    def _has_change(self) -> bool:
        return self._residency.has_change or self._announcements.has_change

    def _write_soon(self) -> None:
        if self._has_change:
            if self._unwritten_since is None:
                self._unwritten_since = self._clock()
            self._wanted.set()

    def _take_change(self) -> tuple[list[IndexChange], Mapping[BlockHash, Tier]]:
        """Return the changes, and the present tier of named hashes that the set already has."""
        kept = self._residency.take_change()
        announced, ended = self._announcements.take_change()
        changes = self._change(
            added=kept.added,
            removed=kept.removed,
            reasons=kept.reasons,
            in_host=kept.in_host,
            on_disk=kept.on_disk,
            points=kept.points,
            points_removed=kept.points_removed,
            point_reasons=kept.point_reasons,
            announced=announced,
            ended=ended,
        )
        return changes, kept.before

    async def _write_change(self, changes: Sequence[IndexChange], before: Mapping[BlockHash, Tier]) -> None:
        if not any(map(_num_hashes, changes)):
            for change in changes:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    await self._append(self._redis, change)
            await self._acknowledge(changes)
            return
        async with asyncio.timeout(TIMEOUT_SECONDS), self._redis.pipeline(transaction=True) as pipeline:
            pipeline.sismember(self._blocks_key, BLOCKS_MARKER)  # type: ignore[arg-type]
            for change in changes:
                held = _held(change)
                moved = [(each, before[each]) for each in (*change.removed, *held) if each in before]
                if moved:
                    pipeline.srem(self._blocks_key, *(blocks_member(*each) for each in moved))
                if change.points_removed:
                    pipeline.srem(self._blocks_key, *map(_point_member, change.points_removed))
                if held:
                    pipeline.sadd(self._blocks_key, *(blocks_member(*each) for each in held.items()))
                if change.points:
                    pipeline.sadd(self._blocks_key, *map(_point_member, change.points))
                self._append(pipeline, change)
            # Were the set lost and we to die now, what this leaves would else stay for ever.
            pipeline.pexpire(self._blocks_key, self._set_ttl_ms)
            had_marker, *_ = await pipeline.execute()
        await self._acknowledge(changes)
        if not had_marker:
            self._must_rewrite = True  # the set was lost, and this made a torso of it

    async def _write_whole_set(self) -> None:
        """Build the set under another name, piece by piece, and put it in place at once."""
        whole = self._residency.take_all()
        announced = self._announcements.take_all()
        self._must_rewrite = False  # a wish to rewrite that comes during the writing counts again
        async with asyncio.timeout(TIMEOUT_SECONDS), self._redis.pipeline(transaction=True) as pipeline:
            pipeline.unlink(self._building_key)
            pipeline.sadd(self._building_key, BLOCKS_MARKER)
            pipeline.pexpire(self._building_key, self._set_ttl_ms)
            await pipeline.execute()
        members = [blocks_member(*each) for each in _held(whole).items()]
        members += map(_point_member, whole.points)
        for some in _chunks(tuple(members), HASHES_PER_CHANGE):
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await self._redis.sadd(self._building_key, *some)
        changes = self._change(
            added=whole.added,
            in_host=whole.in_host,
            on_disk=whole.on_disk,
            points=whole.points,
            announced=announced,
            cleared=True,
        )
        async with asyncio.timeout(TIMEOUT_SECONDS), self._redis.pipeline(transaction=True) as pipeline:
            pipeline.rename(self._building_key, self._blocks_key)
            pipeline.pexpire(self._blocks_key, self._set_ttl_ms)
            for change in changes:
                self._append(pipeline, change)
            await pipeline.execute()
        await self._acknowledge(changes)
        self._metrics.index_rewrites.inc()

    def _change(self, **parts: Any) -> list[IndexChange]:
        """Return stream entries for one write. A failed write uses up its numbers: readers may see a gap,
        never one number for two changes."""
        changes = _split(IndexChange(self._replica_id, self._epoch, self._number + 1, **parts))
        self._number += len(changes)
        return changes

    def _append(self, redis: "Redis", change: IndexChange) -> Awaitable[Any]:
        return redis.xadd(
            self._events_key,
            encode_change(change),  # type: ignore[arg-type]
            maxlen=self._stream_length,
            approximate=True,
        )

    async def _acknowledge(self, changes: Sequence[IndexChange]) -> None:
        self._last_change = changes[-1].number
        self._metrics.index_changes.inc(len(changes))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await self._room.appended(sum(map(_num_bytes, changes)))


def _held(change: IndexChange | NetChange) -> dict[BlockHash, Tier]:
    """Return the tier of each hash in the change that the set holds afterwards."""
    return {
        **dict.fromkeys(change.added, Tier.DEVICE),
        **dict.fromkeys(change.in_host, Tier.HOST),
        **dict.fromkeys(change.on_disk, Tier.DISK),
    }


def _point_member(point: BlockHash) -> bytes:
    return point + POINT_MARK


def _num_hashes(change: IndexChange) -> int:
    """Count the hashes that concern the set."""
    num_points = len(change.points) + len(change.points_removed)
    return len(change.added) + len(change.removed) + len(change.in_host) + len(change.on_disk) + num_points


def _num_announced(change: IndexChange) -> int:
    return sum(map(_num_hashes_of, change.announced))


def _num_hashes_of(announcement: Announcement) -> int:
    return len(announcement.block_hashes) + len(announcement.points)


def _num_bytes(change: IndexChange) -> int:
    num_reasons = len(change.reasons) + len(change.point_reasons)
    return ENTRY_BYTES + HASH_BYTES * (_num_hashes(change) + _num_announced(change)) + num_reasons


def _split(change: IndexChange) -> list[IndexChange]:
    """Return the same change in bites, in the order in which its parts apply, numbered from its number on."""
    if _num_hashes(change) + _num_announced(change) <= HASHES_PER_CHANGE:
        return [change]
    bare = IndexChange(change.replica_id, change.epoch, change.number)
    parts = [
        replace(bare, removed=some, reasons=reasons)
        for some, reasons in _chunks_with_reasons(change.removed, change.reasons)
    ]
    parts += [replace(bare, added=some) for some in _chunks(change.added, HASHES_PER_CHANGE)]
    parts += [replace(bare, in_host=some) for some in _chunks(change.in_host, HASHES_PER_CHANGE)]
    parts += [replace(bare, on_disk=some) for some in _chunks(change.on_disk, HASHES_PER_CHANGE)]
    parts += [
        replace(bare, points_removed=some, point_reasons=reasons)
        for some, reasons in _chunks_with_reasons(change.points_removed, change.point_reasons)
    ]
    parts += [replace(bare, points=some) for some in _chunks(change.points, HASHES_PER_CHANGE)]
    parts += [replace(bare, announced=group) for group in _groups(change.announced, HASHES_PER_CHANGE)]
    parts[0] = replace(parts[0], cleared=change.cleared)
    parts[-1] = replace(parts[-1], ended=change.ended)
    return [replace(part, number=number) for number, part in enumerate(parts, change.number)]


_T = TypeVar("_T")


def _chunks(items: tuple[_T, ...], size: int) -> Iterator[tuple[_T, ...]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]


def _chunks_with_reasons(
    removed: tuple[BlockHash, ...], reasons: bytes
) -> Iterator[tuple[tuple[BlockHash, ...], bytes]]:
    for number, some in enumerate(_chunks(removed, HASHES_PER_CHANGE)):
        yield some, reasons[number * HASHES_PER_CHANGE :][: len(some)]


def _groups(announced: tuple[Announcement, ...], size: int) -> Iterator[tuple[Announcement, ...]]:
    """Runs of announcements of at most `size` hashes together, or of a single larger one."""
    first = num_hashes = 0
    for position, announcement in enumerate(announced):
        num_hashes += _num_hashes_of(announcement)
        if num_hashes > size and position > first:
            yield announced[first:position]
            first, num_hashes = position, _num_hashes_of(announcement)
    if announced:
        yield announced[first:]
