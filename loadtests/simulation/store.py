"""VirtualStore: a replica's host memory and disk, in virtual time.

Owns the directory, which is the real one, and the links that bytes would take. Does not know requests: it is
told which chunks a prompt has, and says when they will be there.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from msgspec.structs import replace

from loadtests.simulation.links import Link
from loadtests.simulation.shape import TierShape
from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.directory import ChunkPlace, Directory
from replicas.kvstore.leasing.leases import Leases
from replicas.kvstore.plan import chunk_names, num_ready_blocks, plan_arrival
from replicas.kvstore.pulling.take_overs import TakeOvers
from replicas.kvstore.tenant_shares import Tenancy
from replicas.kvstore.write_budget import WriteBudget
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import BlockRemoved, CacheEvent
from replicas.protocol.frames import LoadSnapshot, UserTag
from replicas.protocol.hand_overs import (
    HandOverOutcome,
    KeepChunks,
    LeasedChunk,
    ListLeases,
    StoreAnswer,
    TakeOver,
)
from replicas.protocol.pulls import PullHint
from replicas.protocol.status import Epoch
from replicas.protocol.ways import (
    DISK_MOVE_SECONDS,
    HOST_MOVE_SECONDS,
    PULL_MOVE_SECONDS,
    MoveSpeeds,
    Way,
)

MAX_WRITES = 4
"""Chunks that are written to the disk together. Reads wait for no more than these."""

PATIENCE = 4.0
"""A move is given up when it has taken this many times as long as was expected."""

MAX_COPY_SECONDS = 1.0
"""Nothing more is copied to host memory while what is being copied takes longer."""


Writers = tuple[UserTag, ...]
"""User whose request computed each block of a chunk."""

OnDisk = tuple[ChunkName, Writers]
"""A file's own description."""


class VirtualStore:
    """`restored` is what an earlier life has left on disk, oldest use first."""

    def __init__(self, shape: TierShape, block_size: int, restored: Iterable[OnDisk] = ()) -> None:
        self.blocks_per_chunk = max(1, shape.chunk_tokens // block_size)
        self._block_tokens = block_size
        self._token_bytes = shape.bytes_per_token
        self.chunk_bytes = self.blocks_per_chunk * block_size * shape.bytes_per_token
        self._shape = shape
        self.directory = Directory(
            host_chunks=max(1, int(shape.host_bytes // self.chunk_bytes)),
            disk_chunks=int(shape.disk_bytes // self.chunk_bytes),
            chunk_bytes=self.chunk_bytes,
            write_budget=WriteBudget(shape.write_bytes_per_second),
            leases=self._leases(),
        )
        self._now = 0.0
        self._source: VirtualStore | None = None
        """Source of the current take-overs."""
        self._take_overs = TakeOvers(self.directory, self, self)
        self._sources: list[Epoch] = []
        """Sources that have asked: a take-over's number is its place."""
        self._writers: dict[BlockHash, Writers] = {name.key: writers for name, writers in restored}
        self.directory.restore([name for name, _ in restored])
        self._to_device = Link(shape.host_bytes_per_second, HOST_MOVE_SECONDS)
        self._to_host = Link(shape.host_bytes_per_second, HOST_MOVE_SECONDS)
        self._disk = Link(shape.disk_bytes_per_second, DISK_MOVE_SECONDS)
        rate = shape.pull_bytes_per_second
        self._in = None if rate is None else Link(rate, PULL_MOVE_SECONDS)
        self._out = None if rate is None else Link(rate)
        self._due: dict[BlockHash, float] = {}
        """Arrival times of the chunks on their way."""
        self._answered: list[StoreAnswer] = []
        self._num_moves = 0
        self._moves: list[tuple[float, int, Callable[[], None]]] = []
        self._num_writing = 0

    def _leases(self) -> Leases | None:
        shape = self._shape
        if shape.lease_seconds is None:
            return None
        return Leases(
            host_chunks=int(shape.host_bytes // self.chunk_bytes * shape.lease_share),
            disk_chunks=int(shape.disk_bytes // self.chunk_bytes * shape.lease_share),
        )

    @property
    def ends_at(self) -> float | None:
        """Return the end of the next move."""
        return self._moves[0][0] if self._moves else None

    def advance(self, now: float) -> None:
        """End the moves that have ended by now."""
        while self._moves and self._moves[0][0] <= now:
            heappop(self._moves)[2]()
        self._now = now
        self._take_overs.poll()
        self._write(now)

    def take_events(self) -> list[CacheEvent]:
        self.directory.take_removals()
        events = self.directory.take_events()
        for event in events:
            if isinstance(event, BlockRemoved):
                self._forget_if_nowhere(event.block_hashes)
        return events

    def on_disk(self) -> list[OnDisk]:
        """Return the files for the next life, least recently used first."""
        return [(name, self._writers[name.key]) for name in self.directory.on_disk()]

    def speeds(self, now: float) -> MoveSpeeds:
        shape = self._shape
        return MoveSpeeds(
            host=self._token_bytes / shape.host_bytes_per_second,
            disk=self._token_bytes / shape.disk_bytes_per_second if shape.disk_bytes else None,
            pull=self._token_bytes / shape.pull_bytes_per_second if shape.pull_bytes_per_second else None,
            backlog_seconds=max(self._to_device.backlog_seconds(now), self._disk.backlog_seconds(now)),
        )

    def fill(self, load: LoadSnapshot, now: float) -> LoadSnapshot:
        """Return the load, with what moving KV takes."""
        speeds = self.speeds(now)
        return replace(
            load,
            host_seconds_per_token=speeds.host or 0.0,
            disk_seconds_per_token=speeds.disk or 0.0,
            pull_seconds_per_token=speeds.pull or 0.0,
            move_backlog_seconds=speeds.backlog_seconds,
        )

    def names(self, block_hashes: Sequence[BlockHash], first_chunk: int = 0) -> list[ChunkName]:
        """Return the full chunks of a chain, from this one on."""
        return chunk_names(block_hashes, self.blocks_per_chunk, first_chunk)

    # From the device.

    def copy_out(self, chunks: Sequence[OnDisk], now: float) -> None:
        """The device has completed these chunks."""
        for name, writers in chunks:
            if self._to_host.backlog_seconds(now) > MAX_COPY_SECONDS:
                break
            if self._offer(name, writers):
                self._plan_fill([name.key], self._to_host.take(now, self.chunk_bytes))
            elif self.directory.place(name.key) is not ChunkPlace.HOST:
                break  # every slot is in use
        self._write(now)

    # Towards the device.

    def bring(
        self,
        names: Sequence[ChunkName],
        now: float,
        *,
        num_device_blocks: int,
        num_findable_blocks: int,
        wait_seconds: float,
        token_seconds: float,
        peer: "VirtualStore | None",
        encode_seconds: Callable[[int], float] | None = None,
    ) -> Way:
        """Start to bring a new request's chunks into host memory before its turn.

        Returns how many tokens it will not have to compute, by present knowledge.
        """
        chunk_tokens = self.blocks_per_chunk * self._block_tokens
        num_at_peer = 0
        if peer is not None and self._shape.pull_bytes_per_second:
            first = num_device_blocks // self.blocks_per_chunk
            num_at_peer = first + self._num_at(peer, names[first:])
        if self._shape.lease_seconds is not None:
            self.directory.pass_time(now)
            self.directory.grant([name.key for name in names], self._shape.lease_seconds)
        due = max((self._due[name.key] for name in names if name.key in self._due), default=now)
        speeds = self.speeds(now)
        plan = plan_arrival(
            self.directory,
            names,
            chunk_tokens=chunk_tokens,
            num_device_tokens=num_device_blocks * self._block_tokens,
            num_findable_tokens=num_findable_blocks * self._block_tokens,
            speeds=speeds._replace(backlog_seconds=max(speeds.backlog_seconds, due - now)),
            wait_seconds=wait_seconds,
            token_seconds=token_seconds,
            encode_seconds=encode_seconds,
            num_at_peer=num_at_peer,
        )
        self._read(plan.to_read, now)
        if peer is not None and plan.to_pull:
            self._pull(plan.to_pull, peer, now)
        return plan.way

    def has(self, name: ChunkName) -> bool:
        """Whether it is here, or on its way."""
        return self.directory.place(name.key) is not None

    def pull_next(self, names: Sequence[ChunkName], peer: "VirtualStore", now: float) -> int:
        """Pull the leading ones of these that the peer has by now; returns how many need nothing more."""
        num_done, wanted = 0, []
        for name in names:
            if not self.has(name):
                if peer.directory.place(name.key) in (None, ChunkPlace.COMING):
                    break
                wanted.append(name)
            num_done += 1
        if wanted:
            self._pull(wanted, peer, now)
        return num_done

    def _num_at(self, peer: "VirtualStore", names: Sequence[ChunkName]) -> int:
        """How many of these chunks are here, or follow what is here and are at the peer."""
        here = len(self.directory.find(name.key for name in names))
        return here + len(peer.directory.find(name.key for name in names[here:]))

    def num_ready_blocks(
        self, names: Sequence[ChunkName], num_device_blocks: int, num_findable_blocks: int
    ) -> tuple[int, bool]:
        """Return the leading blocks on the device or in host memory, and whether more of them are coming."""
        return num_ready_blocks(
            self.directory,
            names,
            blocks_per_chunk=self.blocks_per_chunk,
            num_device_blocks=num_device_blocks,
            num_findable_blocks=num_findable_blocks,
        )

    def writers(self, names: Sequence[ChunkName], first_block: int, end_block: int) -> list[UserTag]:
        """Return the users whose requests computed blocks `[first_block, end_block)` of these chunks of a
        chain."""
        size = self.blocks_per_chunk
        first_chunk = first_block // size
        chunks = names[first_chunk : -(-end_block // size)]
        tags = [tag for name in chunks for tag in self._writers[name.key]]
        return tags[first_block - first_chunk * size : end_block - first_chunk * size]

    def load_seconds(self, num_blocks: int, now: float) -> float:
        """Expected seconds to load `num_blocks` from host memory."""
        num_bytes = num_blocks * self._block_tokens * self._token_bytes
        link = self._to_device
        return link.backlog_seconds(now) + num_bytes / link.bytes_per_second + link.fixed_seconds

    def load(
        self,
        names: Sequence[ChunkName],
        num_device_blocks: int,
        num_ready_blocks: int,
        now: float,
        done: Callable[[], None],
    ) -> None:
        """Copy these blocks to the device, and call `done` then."""
        size = self.blocks_per_chunk
        keys = [name.key for name in names[num_device_blocks // size : -(-num_ready_blocks // size)]]
        self.directory.pin(keys)

        def end() -> None:
            self.directory.unpin(keys)
            done()

        num_bytes = (num_ready_blocks - num_device_blocks) * self._block_tokens * self._token_bytes
        self._plan(self._to_device.take(now, num_bytes), end)

    # What another had leased.

    def leased(self) -> list[LeasedChunk]:
        """Return the leases here, for a leaving replica."""
        self._take_overs.ask(ListLeases(0))
        while True:
            for answer in self._take_overs.take_answers():
                if not answer.number:
                    return [*answer.leased]
                self._answered.append(answer)
            self._take_overs.poll()

    def take_over(self, take_over: TakeOver, source: "VirtualStore", now: float) -> None:
        """Lease and pull what another has leased that leaves."""
        self._now, self._source = now, source
        self._sources.append(take_over.source.epoch)
        self._take_overs.ask(KeepChunks(len(self._sources), take_over))
        self._answered += self._take_overs.take_answers()

    def take_outcomes(self, epoch: Epoch) -> tuple[HandOverOutcome, ...] | None:
        """Return the outcomes of that source's last request, once it is over."""
        self._answered += self._take_overs.take_answers()
        for answer in self._answered:
            if self._sources[answer.number - 1] == epoch:
                self._answered.remove(answer)
                return answer.outcomes
        return None

    def look(self) -> None:
        """For the take-overs: what time it is."""
        self.directory.pass_time(self._now)

    def may_pull(self, peer: PullHint) -> bool:
        return self._in is not None

    def begin(self, peer: PullHint, wanted: Sequence[tuple[ChunkName, Tenancy]]) -> None:
        assert self._source is not None, "what is taken over is pulled from somebody"
        self._pull([name for name, _ in wanted], self._source, self._now)

    # Between the tiers.

    def _offer(self, name: ChunkName, writers: Writers) -> bool:
        """Whether it has a slot now. What lies on disk keeps the writers that it had."""
        is_on_disk = self.directory.place(name.key) is not None
        if self.directory.offer(name) is None:
            return False
        if not is_on_disk:
            self._writers[name.key] = writers
        return True

    def _read(self, keys: Iterable[BlockHash], now: float) -> None:
        """Read the chunks that are on disk alone, together."""
        fetched = []
        for key in keys:
            if self.directory.place(key) is ChunkPlace.DISK:
                if self.directory.fetch(key) is None:
                    break
                fetched.append(key)
        if fetched:
            self._plan_fill(fetched, self._disk.take(now, len(fetched) * self.chunk_bytes))

    def _pull(self, names: Sequence[ChunkName], peer: "VirtualStore", now: float) -> None:
        """From a peer's host memory or disk, together; given up if that takes much longer than expected."""
        offered, num_on_disk = [], 0
        for name in names:
            place = peer.directory.place(name.key)
            if place is None or place is ChunkPlace.COMING or not self._offer(name, peer._writers[name.key]):
                break
            num_on_disk += place is ChunkPlace.DISK
            offered.append(name.key)
        if not offered:
            return
        assert self._in is not None and peer._out is not None, "who cannot pull plans no pull"
        num_bytes = len(offered) * self.chunk_bytes
        expected = num_bytes / self._in.bytes_per_second + self._in.fixed_seconds
        ready_at = peer._disk.take(now, num_on_disk * self.chunk_bytes) if num_on_disk else now
        ends_at = max(self._in.take(now, num_bytes), peer._out.take(ready_at, num_bytes))
        deadline = now + PATIENCE * (expected + self._in.backlog_seconds(now))
        if ends_at <= deadline:
            self._plan_fill(offered, ends_at)
        else:
            self._plan_fill(offered, deadline, is_given_up=True)

    def _plan_fill(self, keys: Sequence[BlockHash], ends_at: float, *, is_given_up: bool = False) -> None:
        self._due.update(dict.fromkeys(keys, ends_at))

        def end() -> None:
            for key in keys:
                del self._due[key]
                (self.directory.given_up if is_given_up else self.directory.filled)(key)
            self._forget_if_nowhere(keys)

        self._plan(ends_at, end)

    def _forget_if_nowhere(self, keys: Iterable[BlockHash]) -> None:
        for key in keys:
            if self.directory.place(key) is None:
                self._writers.pop(key, None)

    def _write(self, now: float) -> None:
        if self._num_writing or self._disk.backlog_seconds(now):
            return
        writes = self.directory.take_writes(now, MAX_WRITES)
        if writes:
            self._num_writing = len(writes)
            keys = [write.name.key for write in writes]
            self._plan(self._disk.take(now, len(keys) * self.chunk_bytes), lambda: self._end_writes(keys))

    def _end_writes(self, keys: Iterable[BlockHash]) -> None:
        self._num_writing = 0
        for key in keys:
            self.directory.written(key)

    def _plan(self, ends_at: float, end: Callable[[], None]) -> None:
        self._num_moves += 1
        heappush(self._moves, (ends_at, self._num_moves, end))
