"""IndexMirror: one model's prefix index, kept equal to its replicas' writes to Redis.

Owns the connection, the position in the stream, and which sets must be reread. Knows neither prompts nor
decisions. All data is in the PrefixIndex; it is bounded by the replicas' caches.

A replica's blocks set is read once, then the stream of changes is followed::

    stream   ── 41 ── 42 ── 43 ── 44 ── 45 ──▶
                       ▲ noted before the set is read: 42 is in the set for certain, 43 and 44 perhaps
                         and are applied once more, which changes nothing in the end

A set is reread when a change number is missing, and when the audit finds that mirror and Redis disagree
although the stream has been read to its end: a lost or rewritten set, a trimmed stream, an emptied Redis.
While Redis is away, or a live replica's set is lost, the mirror stays as it is: stale data is better than
none, and the replica will rewrite its set.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from replicas.process.cancellation import raise_if_cancelled
from replicas.process.complaints import Complaints
from replicas.process.plain_redis import plain_redis
from replicas.protocol.blocks import BlockHash
from replicas.protocol.bounds import parsed_number
from replicas.protocol.events import Tier
from replicas.protocol.keys import (
    BLOCKS_MARKER,
    ReplicaRecord,
    blocks_key,
    decode_blocks_member,
    decode_change,
    decode_point_member,
    events_key,
)
from replicas.protocol.status import Epoch, ReplicaId
from router.fleet.stream_reader import Entries, StreamReader
from router.routing.holders import StagedHashes
from router.routing.overlap import ChangeOutcome, PrefixIndex
from router.routing.resume_points import as_points
from router.shared.instruments import Instrument, counter, gauge

logger = logging.getLogger(__name__)

BLOCK_SECONDS = 0.1
"""Longest wait for a change; a replica that is new to the mirror waits no longer for its set."""

SECONDS_BETWEEN_READS = 0.02
"""Least time between reads, unless there is more than one read returns. A busy replica writes a change with
every step, and a read costs a router far more than one more change in it; the first change after a quiet
moment is read at once."""

AUDIT_SECONDS = 1.0
TIMEOUT_SECONDS = 5.0
MIN_BACKOFF_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 2.0

RESCAN_SPREAD_SECONDS = 2.0
"""After Redis returns, each router rereads its sets at a random moment within this time."""

ENTRIES_PER_READ = 256
HASHES_PER_SCAN = 2048
SLICES_PER_READ = 8
ENTRIES_TO_LOOK_BACK = 64

MAX_HASHES_PER_REPLICA = 1 << 22
"""No set is read further: at a stride of 128 tokens that is a cache of half a billion tokens."""


class StreamId(NamedTuple):
    """A place in a Redis stream. Compares as Redis does."""

    milliseconds: int
    sequence: int

    @classmethod
    def parse(cls, text: bytes) -> "StreamId":
        milliseconds, _, sequence = text.partition(b"-")
        return cls(int(milliseconds), int(sequence))

    def __str__(self) -> str:
        return f"{self.milliseconds}-{self.sequence}"


STREAM_START = StreamId(0, 0)


class Contained(NamedTuple):
    """A change that a set which has not been read yet is known to contain already."""

    epoch: Epoch
    number: int


class IndexMirror:
    """`run()` as a task of the owner's; `set_live()` whenever the registry has been read."""

    def __init__(
        self,
        redis_url: str,
        model: str,
        index: PrefixIndex,
        *,
        rng: random.Random | None = None,
        audit_seconds: float = AUDIT_SECONDS,
    ) -> None:
        """Without an rng, sets are read as soon as Redis is back."""
        self._rng = rng
        self._has_followed = False
        self._redis_url = redis_url
        self._model = model
        self._events_key = events_key(model)
        self._index = index
        self._audit_seconds = audit_seconds
        self._live: dict[ReplicaId, ReplicaRecord] = {}
        self._unread: dict[ReplicaId, Contained] = {}
        """Replicas whose set must be read."""
        self._position = STREAM_START
        self.num_changes = 0
        self.num_resyncs = 0
        self.num_malformed = 0
        self._complaints = Complaints(logger)
        self._num_foreign: dict[ReplicaId, int] = {}
        """Members of a set that were no hashes, or beyond the bound."""
        self.lag_seconds = 0.0
        self.is_connected = False
        self._backoff_seconds = MIN_BACKOFF_SECONDS
        self._next_read_at = 0.0
        self._told: str | None = None
        """Why the connection was lost, as long as no audit has succeeded since."""

    def set_live(self, records: Mapping[ReplicaId, ReplicaRecord]) -> None:
        """The replicas that the registry names now. The rest, and earlier incarnations, are forgotten."""
        for replica_id, record in self._live.items():
            following = records.get(replica_id)
            if following is None or following.epoch != record.epoch:
                self._index.forget(replica_id)
                self._unread.pop(replica_id, None)
                self._num_foreign.pop(replica_id, None)
        for replica_id, record in records.items():
            if self._index.epoch(replica_id) != record.epoch:
                self._unread.setdefault(replica_id, Contained(record.epoch, 0))
        self._live = dict(records)

    @property
    def num_entries(self) -> int:
        """Pairs of replica and hash."""
        return self._index.num_entries

    @property
    def num_predictions(self) -> int:
        """Requests whose blocks are expected: just sent by this router, or announced by their replica."""
        return self._index.num_predictions

    @property
    def num_departures(self) -> int:
        return self._index.departures.num_hashes

    async def run(self) -> None:
        """Follow Redis until cancelled. It may go and come back as it likes."""
        while True:
            raise_if_cancelled()
            try:
                await self._connect_and_follow()
            except (RedisError, OSError) as error:
                if self.is_connected and repr(error) != self._told:
                    self._told = repr(error)
                    logger.warning(
                        "the block index is unreachable; the router goes on with its copy model=%s error=%r",
                        self._model,
                        error,
                    )
                self.is_connected = False
                self._index.forget_announcements()
            await asyncio.sleep(self._backoff_seconds)
            self._backoff_seconds = min(MAX_BACKOFF_SECONDS, 2 * self._backoff_seconds)

    async def _connect_and_follow(self) -> None:
        """Connect and follow until an error. Nothing is retried below here: a reconnection must be
        noticed."""
        async with contextlib.AsyncExitStack() as stack:
            client = plain_redis(self._redis_url)
            stack.push_async_callback(client.aclose)
            if self._has_followed and self._rng is not None:
                await asyncio.sleep(self._rng.uniform(0, RESCAN_SPREAD_SECONDS))
            async with asyncio.timeout(TIMEOUT_SECONDS):
                reader = await stack.enter_async_context(StreamReader(client, self._events_key))
            await self._start_over(client)
            self._has_followed = True
            logger.info("following the block index model=%s", self._model)
            self.is_connected = True
            audit_due = time.monotonic() + self._audit_seconds
            while True:
                await self._read_sets(client)
                await self._follow(reader)
                self._sweep()
                if time.monotonic() >= audit_due:
                    await self._audit(client)
                    audit_due = time.monotonic() + self._audit_seconds

    async def _start_over(self, client: "Redis") -> None:
        """Take the stream from its end, and read every set."""
        self._position = await self._stream_end(client)
        for replica_id, record in self._live.items():
            self._unread.setdefault(replica_id, Contained(record.epoch, record.last_change))

    async def _stream_end(self, client: "Redis") -> StreamId:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return _last_id(await client.xinfo_stream(self._events_key))
        except ResponseError:  # there is no stream yet
            return STREAM_START

    async def _follow(self, reader: StreamReader) -> None:
        """Apply the stream's entries, or wait briefly for some."""
        too_early = self._next_read_at - time.monotonic()
        if too_early > 0:
            await asyncio.sleep(too_early)
        self._next_read_at = time.monotonic() + SECONDS_BETWEEN_READS
        async with asyncio.timeout(TIMEOUT_SECONDS):
            entries = await reader.read(
                str(self._position), count=ENTRIES_PER_READ, block_seconds=BLOCK_SECONDS
            )
        self._index.departures.now = time.time()
        for entry_id, fields in entries:
            self._apply(fields)
            self._position = StreamId.parse(entry_id)
        if len(entries) == ENTRIES_PER_READ:
            self._next_read_at = 0.0  # there are more

    def _sweep(self) -> None:
        """Clear some of what departed replicas left, even while nothing changes."""
        for _ in range(SLICES_PER_READ):
            if not self._index.sweep():
                return

    def _apply(self, fields: Mapping[bytes, bytes]) -> None:
        try:
            change = decode_change(fields)
        except ValueError as error:
            self._refuse("change", f"an index change is ignored: {error}")
            return
        outcome = self._index.apply(change)
        if outcome is ChangeOutcome.APPLIED:
            self.num_changes += 1
        elif outcome is ChangeOutcome.GAP:
            self._unread[change.replica_id] = Contained(change.epoch, change.number)

    def _refuse(self, subject: Hashable, message: str) -> None:
        self.num_malformed += 1
        self._complaints.say(subject, f"{message} model={self._model}")

    async def _read_sets(self, client: "Redis") -> None:
        """Read the sets of all that need it. A set that is lost is left to the next audit."""
        unread, self._unread = self._unread, {}
        try:
            while unread:
                replica_id = next(iter(unread))
                record = self._live.get(replica_id)
                if record is not None:
                    await self._read_set(client, record, unread[replica_id])
                del unread[replica_id]
        finally:
            for replica_id, contained in unread.items():
                self._unread.setdefault(replica_id, contained)

    async def _read_set(self, client: "Redis", record: ReplicaRecord, contained: Contained) -> None:
        replica_id, epoch = record.replica_id, record.epoch
        newest = max(record.last_change, await self._newest_change(client, replica_id, epoch))
        if contained.epoch == epoch:
            newest = max(newest, contained.number)
        with self._index.stage() as staged:
            try:
                is_there = await self._scan(client, record, staged)
            except ResponseError as error:  # it holds no set; its replica will write it again
                self._refuse(replica_id, f"the blocks of replica {replica_id} are unreadable: {error}")
                is_there = False
            current = self._live.get(replica_id)
            if current is None or current.epoch != epoch:
                return  # it went, or came back as another, while we read
            self.num_resyncs += 1
            if is_there:
                self._index.replace(replica_id, epoch, staged, last_change=newest)
            elif self._index.epoch(replica_id) != epoch:
                self._index.replace(replica_id, epoch, (), last_change=newest)

    async def _newest_change(self, client: "Redis", replica_id: ReplicaId, epoch: Epoch) -> int:
        """Return the replica's newest change near the stream's end; 0 if there is none.

        Set and stream change in one transaction, so a set that is read later contains it.
        """
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                entries = cast(
                    "Entries", await client.xrevrange(self._events_key, count=ENTRIES_TO_LOOK_BACK)
                )
        except ResponseError:  # it is no stream: `_follow` says so
            return 0
        for _, fields in entries:
            if fields.get(b"replica") == replica_id.encode() and fields.get(b"epoch") == epoch.encode():
                try:
                    return parsed_number(fields[b"number"])
                except (KeyError, ValueError):
                    continue
        return 0

    async def _scan(self, client: "Redis", record: ReplicaRecord, staged: StagedHashes) -> bool:
        """Read the set in pieces that block neither Redis nor our event loop. False if there is no such
        set."""
        key = blocks_key(self._model, record.replica_id, record.epoch)
        is_there = False
        num_foreign = num_read = cursor = 0
        while True:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                cursor, some = await client.sscan(key, cursor, count=HASHES_PER_SCAN)
            members = cast("list[bytes]", some)
            is_there = is_there or BLOCKS_MARKER in members
            num_hashes = _stage(members, staged)
            num_foreign += len(members) - num_hashes - members.count(BLOCKS_MARKER)
            num_read += num_hashes
            if num_read > MAX_HASHES_PER_REPLICA:
                raise ResponseError(f"more than {MAX_HASHES_PER_REPLICA} hashes")
            if cursor == 0:
                break
        if num_foreign:
            self._refuse(
                (record.replica_id, "members"),
                f"{num_foreign} members of the blocks of replica {record.replica_id} are no hashes",
            )
        self._num_foreign[record.replica_id] = num_foreign
        return is_there

    async def _audit(self, client: "Redis") -> None:
        """Compare positions, change numbers and sizes with Redis; schedule a reread of what differs."""
        replica_ids = [replica_id for replica_id in self._live if replica_id not in self._unread]
        records = [self._live[replica_id] for replica_id in replica_ids]
        async with asyncio.timeout(TIMEOUT_SECONDS), client.pipeline(transaction=True) as pipeline:
            pipeline.xinfo_stream(self._events_key)
            for record in records:
                pipeline.scard(blocks_key(self._model, record.replica_id, record.epoch))
            info, *sizes = await pipeline.execute(raise_on_error=False)
        _raise_unless_missing(info)
        self._backoff_seconds, self._told = MIN_BACKOFF_SECONDS, None
        end = STREAM_START if isinstance(info, ResponseError) else _last_id(info)
        if end < self._position:
            logger.warning("the stream of index changes began again model=%s", self._model)
            await self._start_over(client)
            return
        self.lag_seconds = (end.milliseconds - self._position.milliseconds) / 1000
        if end == self._position:
            for record, size in zip(records, sizes, strict=True):
                if isinstance(size, int):  # else it holds no set, and reading it would not help
                    foreign = self._num_foreign.get(record.replica_id, 0)
                    self._compare(record, size - 1 - foreign)

    def _compare(self, record: ReplicaRecord, num_hashes: int) -> None:
        """Compare once all of the stream is applied: any difference was missed."""
        if self._live.get(record.replica_id) is not record:
            return
        missed = record.last_change - self._index.last_change(record.replica_id)
        if missed > 0 or num_hashes != self._index.num_stored(record.replica_id):
            self._unread.setdefault(record.replica_id, Contained(record.epoch, record.last_change))


def _stage(members: Sequence[bytes], staged: StagedHashes) -> int:
    """How many of the members are blocks or resume points."""
    by_tier: dict[Tier, list[BlockHash]] = {tier: [] for tier in Tier}
    points: list[BlockHash] = []
    for member in members:
        decoded = decode_blocks_member(member)
        if decoded is not None:
            block_hash, tier = decoded
            by_tier[tier].append(block_hash)
        elif (point := decode_point_member(member)) is not None:
            points.append(point)
    for tier, hashes in by_tier.items():
        staged.add(hashes, tier)
    staged.add_points(as_points(points))
    return len(points) + sum(map(len, by_tier.values()))


def _last_id(info: Mapping[str, Any]) -> StreamId:
    last_id = info["last-generated-id"]
    return StreamId.parse(last_id if isinstance(last_id, bytes) else last_id.encode())


def _raise_unless_missing(info: object) -> None:
    """A stream that does not exist is an answer; any other error is one."""
    if isinstance(info, Exception) and "no such key" not in str(info):
        raise info


def mirror_instruments(
    mirrors: Mapping[str, IndexMirror], end_lingering: Callable[[], None]
) -> Iterator[Instrument]:
    """Instruments of all mirrors, by the model's name. More mirrors may be added later. `end_lingering` drops
    the predictions whose time is over, before they are counted."""
    yield from _content_instruments(mirrors, end_lingering)
    yield from _following_instruments(mirrors)


def _content_instruments(
    mirrors: Mapping[str, IndexMirror], end_lingering: Callable[[], None]
) -> Iterator[Instrument]:
    def predictions() -> Mapping[str, float]:
        end_lingering()
        return _of_each(mirrors, lambda mirror: mirror.num_predictions)()

    yield gauge(
        "router_index_entries",
        "Entries in the index: pairs of replica and block hash",
        _of_each(mirrors, lambda mirror: mirror.num_entries),
        "model",
    )
    yield gauge(
        "router_index_departures",
        "Block hashes of which it is known which replica they left",
        _of_each(mirrors, lambda mirror: mirror.num_departures),
        "model",
    )
    yield gauge(
        "router_index_predictions",
        "Requests whose blocks are expected at a replica before its events report them",
        predictions,
        "model",
    )


def _following_instruments(mirrors: Mapping[str, IndexMirror]) -> Iterator[Instrument]:
    yield counter(
        "router_index_changes_total",
        "Index changes applied",
        _of_each(mirrors, lambda mirror: mirror.num_changes),
        "model",
    )
    yield counter(
        "router_index_resyncs_total",
        "Times that a replica's whole block set was read again",
        _of_each(mirrors, lambda mirror: mirror.num_resyncs),
        "model",
    )
    yield counter(
        "router_index_malformed_total",
        "Index changes that could not be read",
        _of_each(mirrors, lambda mirror: mirror.num_malformed),
        "model",
    )
    yield gauge(
        "router_index_lag_seconds",
        "How far this router's copy of the index is behind Redis",
        _of_each(mirrors, lambda mirror: mirror.lag_seconds),
        "model",
    )
    yield gauge(
        "router_index_connected",
        "1 while this router's copy of the index follows Redis, else 0",
        _of_each(mirrors, lambda mirror: mirror.is_connected),
        "model",
    )


def _of_each(
    mirrors: Mapping[str, IndexMirror], read: Callable[[IndexMirror], float]
) -> Callable[[], Mapping[str, float]]:
    return lambda: {name: read(mirror) for name, mirror in mirrors.items()}
