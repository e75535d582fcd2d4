"""IndexWriter: one replica's share of the block index in Redis, kept equal to what its cache holds.

Owns the blocks set of this incarnation and the numbering of its changes. Knows nothing of engines,
routers or leases.

A write takes whatever accumulated while the previous one was in flight: SADD, SREM and XADD in one
transaction. Nothing is queued: while Redis is away only the counts go on, and they are bounded by the
engine's blocks. When a write fails, nobody knows whether it happened. The writer then gives up on
differences and writes the whole set anew, with a change in the stream that says `cleared`, so that
mirrors follow. The same when the set turns out to be lost or to have the wrong size.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError

from replicas.metrics import ReplicaMetrics
from replicas.protocol.blocks import BlockHash
from replicas.protocol.cancellation import raise_if_cancelled
from replicas.protocol.events import CacheEvent, Tier
from replicas.protocol.keys import BLOCKS_MARKER, IndexChange, blocks_key, encode_change, events_key
from replicas.protocol.status import Epoch, ModelCard, ReplicaId
from replicas.residency import NetChange, Residency

logger = logging.getLogger(__name__)

HASHES_PER_CHANGE = 4096
"""64 KiB: what one stream entry holds at most, so that a reader takes a big rewrite in small bites."""

HASHES_PER_SADD = 4096

MIN_BACKOFF_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 1.0


class IndexWriter:
    """`observe` on the event loop, `run` as a task of the owner's."""

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
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
        self._number = 0  # of the newest change that was tried
        self._last_change = 0  # of the newest change that Redis has acknowledged
        self._must_rewrite = True  # the first write makes the set, empty or not
        self._is_writing = False
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._unwritten_since: float | None = None

    @property
    def last_change(self) -> int:
        """Number of the newest change that is known to be written; 0 before the first."""
        return self._last_change

    @property
    def block_hashes(self) -> frozenset[BlockHash]:
        """What the index should hold for this replica now."""
        return frozenset(self._residency.kept)

    @property
    def is_settled(self) -> bool:
        """Whether Redis holds all that was observed, as far as the writer knows."""
        return not (self._must_rewrite or self._is_writing or self._residency.has_change)

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
        if self._residency.has_change:
            if self._unwritten_since is None:
                self._unwritten_since = self._clock()
            self._wanted.set()

    def check(self, number: int, num_members: int) -> None:
        """Hear from the heartbeat how many members the set had while `last_change` was `number`.

        A set that was lost or restored from an old snapshot has another size than it should.
        """
        is_comparable = self.is_settled and number == self._last_change and number > 0
        if is_comparable and num_members != len(self._residency.kept) + 1:
            logger.warning(
                "the block index is not as it was written; writing it again members=%d expected=%d",
                num_members,
                len(self._residency.kept) + 1,
            )
            self.rewrite()

    def rewrite(self) -> None:
        """Write the whole set again, soon."""
        self._must_rewrite = True
        self._wanted.set()

    async def run(self) -> None:
        """Write until cancelled. Redis may go and come back as it likes."""
        backoff: float | None = None
        while True:
            raise_if_cancelled()
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._write_all()
            except (RedisError, OSError) as error:
                self._wanted.set()
                if backoff is None:
                    logger.warning("cannot write the block index; trying on error=%r", error)
                backoff = min(MAX_BACKOFF_SECONDS, 2 * backoff) if backoff else MIN_BACKOFF_SECONDS
                await asyncio.sleep(backoff)
            else:
                if backoff is not None:
                    logger.info("the block index is written again hashes=%d", len(self._residency.kept))
                backoff = None

    async def remove(self) -> None:
        """Take this incarnation's set away, when it leaves. Raises RedisError or OSError."""
        await self._redis.unlink(self._blocks_key, self._building_key)

    async def _write_all(self) -> None:
        since = self._unwritten_since
        self._unwritten_since = None
        self._is_writing = True
        try:
            while self._must_rewrite or self._residency.has_change:
                raise_if_cancelled()
                if self._must_rewrite:
                    await self._write_whole_set()
                else:
                    await self._write_change(self._residency.take_change())
        except BaseException:  # whatever it was, nobody knows how far it got
            self._must_rewrite = True
            self._unwritten_since = since
            raise
        finally:
            self._is_writing = False
        if since is not None:
            self._metrics.index_lag_seconds.set(self._clock() - since)

    async def _write_change(self, change: NetChange) -> None:
        changes = self._number_changes(change.added, change.removed, cleared=False)
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.sismember(self._blocks_key, BLOCKS_MARKER)  # type: ignore[arg-type]
            for removed in _chunks(change.removed, HASHES_PER_SADD):
                pipeline.srem(self._blocks_key, *removed)
            for added in _chunks(change.added, HASHES_PER_SADD):
                pipeline.sadd(self._blocks_key, *added)
            # Were the set lost and we to die now, what this leaves would else stay for ever.
            pipeline.pexpire(self._blocks_key, self._set_ttl_ms)
            self._append(pipeline, changes)
            had_marker, *_ = await pipeline.execute()
        self._acknowledge(changes)
        if not had_marker:
            self._must_rewrite = True  # the set was lost, and this made a torso of it

    async def _write_whole_set(self) -> None:
        """Build the set under another name, piece by piece, and put it in place at once."""
        self._residency.take_change()
        hashes = tuple(self._residency.kept)
        self._must_rewrite = False  # a wish to rewrite that comes during the writing counts again
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.unlink(self._building_key)
            pipeline.sadd(self._building_key, BLOCKS_MARKER)
            pipeline.pexpire(self._building_key, self._set_ttl_ms)
            await pipeline.execute()
        for chunk in _chunks(hashes, HASHES_PER_SADD):
            await self._redis.sadd(self._building_key, *chunk)
        changes = self._number_changes(hashes, (), cleared=True)
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.rename(self._building_key, self._blocks_key)
            pipeline.pexpire(self._blocks_key, self._set_ttl_ms)
            self._append(pipeline, changes)
            await pipeline.execute()
        self._acknowledge(changes)
        self._metrics.index_rewrites.inc()

    def _number_changes(
        self, added: Sequence[BlockHash], removed: Sequence[BlockHash], *, cleared: bool
    ) -> list[IndexChange]:
        """Stream entries for one write. Numbers are used up by trying: a reader may see a gap, never a
        number that stands for two different changes."""
        parts: list[tuple[Sequence[BlockHash], Sequence[BlockHash]]] = [(added, removed)]
        if len(added) + len(removed) > HASHES_PER_CHANGE:
            parts = [((), chunk) for chunk in _chunks(removed, HASHES_PER_CHANGE)]
            parts += [(chunk, ()) for chunk in _chunks(added, HASHES_PER_CHANGE)]
        changes = []
        for position, (part_added, part_removed) in enumerate(parts):
            self._number += 1
            changes.append(
                IndexChange(
                    self._replica_id,
                    self._epoch,
                    self._number,
                    added=tuple(part_added),
                    removed=tuple(part_removed),
                    cleared=cleared and position == 0,
                )
            )
        return changes

    def _append(self, pipeline: "Pipeline", changes: Sequence[IndexChange]) -> None:
        for change in changes:
            pipeline.xadd(
                self._events_key,
                encode_change(change),  # type: ignore[arg-type]
                maxlen=self._stream_length,
                approximate=True,
            )

    def _acknowledge(self, changes: Sequence[IndexChange]) -> None:
        self._last_change = changes[-1].number
        self._metrics.index_changes.inc(len(changes))


def _chunks(hashes: Sequence[BlockHash], size: int) -> Iterator[Sequence[BlockHash]]:
    for at in range(0, len(hashes), size):
        yield hashes[at : at + size]
