"""ChunkStore: a replica's KV below its device, as its engine sees it.

Owns the directory, its memory, and the jobs for the disk and for peers. The engine owns requests, and the way
of KV between device and slot. One thread calls it, the engine's, and only `close` and `wait` block.

    device ──offer, filled──▶ host memory ──▶ device      the engine copies; `pin` while it reads
                                 ▲  │
                       arrived   │  │ poll                the threads of both read and write
                         peers, disk
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from replicas.engine import SharedKv
from replicas.kvstore.arena import Arena
from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.directory import ChunkPlace, Directory
from replicas.kvstore.layout import ChunkHeader, LayoutId
from replicas.kvstore.leasing.lease_service import LeaseService, leases_within, restored_leases
from replicas.kvstore.on_disk.disk import Disk, Finished, Kind
from replicas.kvstore.plan import ArrivalPlan, num_ready_blocks, plan_arrival
from replicas.kvstore.pulling.store_pulls import StorePulls
from replicas.kvstore.pulling.take_overs import TakeOvers
from replicas.kvstore.rate import Rate
from replicas.kvstore.slot_books import SlotBooks, Writers
from replicas.kvstore.tally import Tally, failure
from replicas.kvstore.tenant_shares import NOBODYS, Tenancy
from replicas.kvstore.write_budget import WriteBudget
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import AllBlocksCleared, CacheEvent, Tier
from replicas.protocol.pulls import PullHint
from replicas.protocol.tier_figures import MoveFailure, TierFigures, TierFill
from replicas.protocol.ways import HOST_MOVE_SECONDS, MoveSpeeds

if TYPE_CHECKING:
    from replicas.kvstore.pulling.pull import Puller

logger = logging.getLogger(__name__)

MAX_WRITES = 32
MAX_HOST_SHARE_OF_WRITES = 0.125
"""Chunks in the disk's queue for writing at once, as a share of host memory: enough to last while the engine
computes a step. Reads go before unstarted writes."""

MIN_WRITES = 4
"""Minimum of these for a small host memory, and maximum for writes to an idle disk."""

ERASE_SECONDS = 10.0
"""Seconds without progress that the end waits for files being erased."""

LEARNING_SECONDS = 0.1
MAX_LEARNING_SECONDS = 10.0
"""How often, and for how long after the start, to look whether the disk's speed has been measured."""

SPILL_PAUSE_SECONDS = 0.05

MOVING_SECONDS = 0.002
WRITING_SECONDS = 0.02
WAITING_SECONDS = 1.0
"""Seconds until the next look while a read or write runs, the write budget is spent, or the disk takes no
writes."""


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """Blocks of `block_size` tokens, `blocks_per_chunk` of them in a chunk."""

    block_size: int
    blocks_per_chunk: int

    @property
    def tokens(self) -> int:
        return self.block_size * self.blocks_per_chunk


@dataclass(frozen=True, slots=True)
class DiskShare:
    """A disk that is open, how many chunks it may hold, and how fast they may be written."""

    disk: Disk
    layout: LayoutId
    max_chunks: int
    write_budget: WriteBudget


class ChunkStore:
    """`clock` is monotonic. The disk's content of an earlier life is there from the start."""

    def __init__(
        self,
        arena: Arena,
        shape: ChunkShape,
        *,
        clock: Callable[[], float],
        share: DiskShare | None = None,
        lease_share: float = 0.0,
        puller: "Puller | None" = None,
    ) -> None:
        """`lease_share` of the bytes of each tier may be leased. With a `puller`, whose chunks are as here,
        the arena has a table.
        """
        self.arena = arena
        self.shape = shape
        self._clock = clock
        self._share = share
        self._disk = None if share is None else share.disk
        max_files = 0 if share is None else share.max_chunks
        self.directory = Directory(
            host_chunks=arena.num_slots,
            disk_chunks=max_files,
            chunk_bytes=arena.slot_bytes,
            write_budget=None if share is None else share.write_budget,
            leases=leases_within(lease_share, arena.num_slots, max_files),
        )
        self._has_begun = False
        self._learns_until = 0.0
        self._tally = Tally()
        self._told: TierFigures | None = None
        self._events: list[CacheEvent] = []
        self.leases = LeaseService(
            self.directory,
            self._disk,
            blocks_per_chunk=shape.blocks_per_chunk,
            chunk_tokens=shape.tokens,
            clock=clock,
        )
        self._host_rate = Rate()
        """Rate of loading: seconds per token from host memory to the device."""
        self._reads: dict[int, tuple[BlockHash, int]] = {}
        """By job: the chunk, and its slot."""
        self._overdue: dict[int, int] = {}
        """By job: the slot that a read may still write to."""
        self._writes: dict[int, BlockHash] = {}
        share_of_host = int(arena.num_slots * MAX_HOST_SHARE_OF_WRITES)
        self._max_writes = max(MIN_WRITES, min(MAX_WRITES, share_of_host))
        self._erasures: set[int] = set()
        self._books = SlotBooks(arena, shape.tokens, None if puller is None else puller.kind.layout)
        self._pulls = (
            None if puller is None else StorePulls(self.directory, arena, self._books, puller, clock=clock)
        )
        self.take_overs = TakeOvers(self.directory, self.leases, self._pulls)

    @property
    def shared(self) -> SharedKv | None:
        """Return the host memory that others may read; None if they may not."""
        return self._books.shared

    def begin(self) -> None:
        """Let the disk's earlier content count from now on; earlier activity here was a trial."""
        self._has_begun = True
        self._learns_until = self._clock() + MAX_LEARNING_SECONDS
        self._tally, self._told = Tally(), None
        if self._disk is not None:
            self.directory.clear()
            self._books.cleared()
            self.directory.take_removals()
            self.directory.take_events()
            self._events.append(AllBlocksCleared(Tier.DISK))  # said even where nothing is left
            self.directory.pass_time(self._clock())
            self.directory.restore(self._disk.restored, restored_leases(self._disk, time.time))

    # From the device.

    def offer(self, name: ChunkName, writers: Writers, tenancy: Tenancy = NOBODYS) -> int | None:
        """Return the slot to copy a chunk into that the device has. Then `filled` or `given_up`.

        None if it has a slot already (`is_kept`), or if no slot may be taken for it.
        """
        slot = self.directory.offer(name, tenancy)
        if slot is not None:
            self._books.taken(slot, name, writers)
        return slot

    def is_kept(self, key: BlockHash) -> bool:
        """Whether host memory has the chunk, or is about to."""
        return self.directory.place(key) in (ChunkPlace.HOST, ChunkPlace.COMING)

    def filled(self, key: BlockHash) -> None:
        self.directory.filled(key)
        place = self.directory.slot(key)
        assert place is not None
        self._books.filled(place[0])

    def given_up(self, key: BlockHash, *, may_still_be_written: bool = False) -> None:
        """The device's copy went before it was copied, or copying failed.

        A slot that a copy may still be made to is no chunk's until `give_back`.
        """
        self.directory.given_up(key, may_still_be_written=may_still_be_written)

    def give_back(self, slot: int) -> None:
        """Return a slot that nothing copies to any more."""
        self.directory.give_back(slot)

    # Towards the device.

    def arrived(
        self,
        names: Sequence[ChunkName],
        *,
        num_device_tokens: int,
        num_findable_tokens: int,
        wait_seconds: float,
        token_seconds: float,
        encode_seconds: Callable[[int], float] | None = None,
        peer: PullHint | None = None,
        tenancy: Tenancy = NOBODYS,
    ) -> ArrivalPlan:
        """Register a new request with these chunks. They count as used, and chunks that should be in host
        memory when its turn comes are read from now on, or pulled from the peer."""
        pulls = self._pulls if peer is not None and self._has_begun else None
        num_at_peer = 0 if pulls is None or peer is None else pulls.num_at(peer)
        binds = peer is not None and peer.binds and num_at_peer > 0
        plan = plan_arrival(
            self.directory,
            names,
            chunk_tokens=self.shape.tokens,
            num_device_tokens=num_device_tokens,
            num_findable_tokens=num_findable_tokens,
            speeds=self.speeds(),
            wait_seconds=wait_seconds,
            token_seconds=token_seconds,
            encode_seconds=encode_seconds,
            num_at_peer=num_at_peer,
            binding_seconds=peer.wait_seconds if binds and peer is not None else 0.0,
            tenancy=tenancy,
        )
        if pulls is not None and peer is not None and plan.to_pull:
            pull = pulls.bind if binds else pulls.begin
            plan = plan._replace(transfer=pull(peer, [(name, tenancy) for name in plan.to_pull]))
        if self._disk is not None:
            self._disk.note_use([name.key for name in reversed(names)])
            for key in plan.to_read:
                if not self._read(self._disk, key):
                    break
        return plan

    def awaits_room(self, transfer: int | None) -> bool:
        """Whether chunks that a binding hint has the transfer bring have no slots yet, and will."""
        return self._pulls is not None and self._pulls.awaits_room(transfer)

    def unbind(self, transfer: int | None) -> None:
        """End what a binding hint has begun: its request does not wait for it any more."""
        if self._pulls is not None and transfer is not None:
            self._pulls.unbind(transfer)

    def num_ready_blocks(
        self, names: Sequence[ChunkName], num_device_blocks: int, num_findable_blocks: int
    ) -> tuple[int, bool]:
        """Return the leading blocks on the device or in host memory, and whether more of them are coming
        there."""
        return num_ready_blocks(
            self.directory,
            names,
            blocks_per_chunk=self.shape.blocks_per_chunk,
            num_device_blocks=num_device_blocks,
            num_findable_blocks=num_findable_blocks,
        )

    def load_seconds(self, num_tokens: int) -> float:
        """Expected seconds to load that many tokens from host memory, once their turn has come."""
        return HOST_MOVE_SECONDS + num_tokens * (self._host_rate.seconds_per_unit or 0.0)

    def pin(self, keys: Sequence[BlockHash]) -> list[int]:
        """Return the slots of chunks that are in host memory. They stay until `unpin`."""
        self.directory.pin(keys)
        slots: list[int] = []
        for key in keys:
            place = self.directory.slot(key)
            assert place is not None
            slots.append(place[0])
        return slots

    def unpin(self, keys: Sequence[BlockHash]) -> None:
        self.directory.unpin(keys)

    def writers(self, slot: int) -> Writers:
        return self._books.writers(slot)

    def transfer(self, slot: int) -> int | None:
        """Return the number of the transfer from a peer that brought the chunk; None if it came otherwise."""
        return self._books.transfer(slot)

    def loaded(self, num_tokens: int, seconds: float) -> None:
        """Record a load's duration, from which the reported speed follows."""
        self._host_rate.observe(num_tokens, seconds)
        self._tally.loads.moved(num_tokens, seconds)

    # Beside requests.

    def poll(self) -> None:
        """Process the disk's finished jobs, and give it more."""
        self.leases.poll()
        if self._pulls is not None:
            self._pulls.poll(self._tally.pulls)
        self.take_overs.poll()
        if self._disk is None or not self._has_begun:
            return
        for finished in self._disk.take_finished():
            self._end(finished)
        for name in self._disk.take_found():
            self.directory.adopt(name)
        self._disk.remove(self.directory.take_removals())
        if self._share is not None:
            self.directory.limit_files(max(1, self._share.max_chunks - self._disk.num_unremoved))
            self._write(self._share)

    @property
    def num_changes(self) -> int:
        """Grows whenever something has come to host memory, or will not come."""
        return self.directory.num_changes + (0 if self._pulls is None else self._pulls.num_changes)

    @property
    def has_news(self) -> bool:
        """Whether there are events or answers to take, or the tiers have not been reported yet."""
        is_unknown = self._has_begun and self._told is None
        has_events = bool(self._events) or self.directory.has_events
        return is_unknown or has_events or self.take_overs.has_answers

    @property
    def look_again_seconds(self) -> float | None:
        """Return the seconds until the next `poll`; None if nothing ends by itself."""
        if self._reads or self.take_overs.is_listing or (self._pulls is not None and self._pulls.is_busy):
            return MOVING_SECONDS
        if self._writes or self._erasures or self.take_overs.is_busy:
            return WRITING_SECONDS
        if self._is_learning:
            return LEARNING_SECONDS
        return WAITING_SECONDS if self.directory.has_to_write else None

    @property
    def _is_learning(self) -> bool:
        """Whether the speed of the disk, of which routers are to hear soon, has yet to be measured."""
        is_early = self._disk is not None and self._clock() < self._learns_until
        return is_early and self.speeds().disk is None

    def wait(self, seconds: float) -> None:
        """Wait until the disk or a peer has finished something, at most `seconds`."""
        if self._pulls is not None and self._pulls.is_busy:
            self._pulls.wait(seconds)
        elif self._disk is None:
            time.sleep(seconds)
        else:
            self._disk.wait(seconds)

    def speeds(self) -> MoveSpeeds:
        """Speeds of the moves; None for one that does not exist or was never measured."""
        host = self._host_rate.seconds_per_unit
        pull, pull_backlog = None, 0.0
        if self._pulls is not None:
            pull, pull_backlog = self._pulls.seconds_per_token, self._pulls.backlog_seconds
        if self._disk is None or self._disk.is_off:
            return MoveSpeeds(host=host, disk=None, pull=pull, backlog_seconds=pull_backlog)
        disk = self._disk.speeds()
        # Until something has been read, it counts as no faster than writing.
        per_byte = disk.read_seconds_per_byte or disk.write_seconds_per_byte
        return MoveSpeeds(
            host=host,
            disk=None if per_byte is None else per_byte * self.arena.slot_bytes / self.shape.tokens,
            pull=pull,
            backlog_seconds=pull_backlog + (disk.backlog_seconds if self._reads else 0.0),
        )

    def figures(self) -> TierFigures:
        """Return how full the tiers are, and the moves since `begin`."""
        now, directory, slot_bytes = self._clock(), self.directory, self.arena.slot_bytes
        figures = TierFigures(
            TierFill(
                directory.num_in_host,
                directory.num_in_host * slot_bytes,
                directory.num_host_slots * slot_bytes,
            ),
            loads=self._tally.loads.figures(),
            num_quarantined_slots=directory.num_quarantined,
            pulls=None if self._pulls is None else self._tally.pulls.figures(),
        )
        if self._share is None:
            return figures
        disk, budget = self._share.disk, self._share.write_budget
        return replace(
            figures,
            disk=TierFill(directory.num_on_disk, disk.bytes_used, disk.max_bytes),
            reads=self._tally.reads.figures(),
            writes=self._tally.writes.figures(),
            num_waiting_writes=directory.num_to_write,
            write_budget_ratio=round(budget.left_ratio(now), 2),
            is_write_budget_short=budget.is_short(now),
            write_stop=disk.write_stop,
            num_other_bytes=disk.other_bytes,
        )

    def is_news(self, figures: TierFigures) -> bool:
        """Whether the last ones that this was asked of were others."""
        was_told, self._told = self._told, figures
        return figures != was_told

    def take_events(self) -> list[CacheEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events + self.directory.take_events()

    def clear(self) -> bool:
        """Forget every chunk. Returns False and does nothing while any of them moves."""
        self.poll()
        if not self.directory.clear():
            return False
        self._books.cleared()
        if self._disk is not None and self._has_begun:
            self.directory.take_removals()
            job = self._disk.erase()
            if job is not None:
                self._erasures.add(job)
        return True

    def close(self, seconds: float = 0.0) -> None:
        """Write what only host memory has to the disk, within `seconds`, and free the memory."""
        is_free = self._pulls is None or self._pulls.close()
        if self._disk is not None:
            self._spill(self._disk, seconds)
            self.leases.poll()
            if not self._disk.close(max(1.0, seconds)):
                return  # a thread hangs in a slot, and the memory has to outlast it
        if is_free:
            self.arena.close()

    def _spill(self, disk: Disk, seconds: float) -> None:
        while self._erasures and disk.wait(ERASE_SECONDS):
            self.poll()
        ends_at = self._clock() + seconds
        self.directory.write_all()
        while (left := ends_at - self._clock()) > 0:
            self.poll()
            if self._writes:
                disk.wait(left)
            elif self.directory.num_to_write and disk.write_stop is None:
                time.sleep(min(left, SPILL_PAUSE_SECONDS))  # until the budget allows more
            else:
                break
        num_left = self.directory.num_to_write + len(self._writes)
        if seconds and num_left:
            logger.warning("chunks of KV that were not written to the disk before the end: %d", num_left)

    # The disk.

    def _read(self, disk: Disk, key: BlockHash) -> bool:
        slot = self.directory.fetch(key)
        if slot is None:
            return False
        self._books.taken(slot)
        job = disk.read(key, self.arena.slot(slot))
        if job is None:
            self._tally.reads.failed(MoveFailure.REFUSED)
            self.directory.given_up(key)
            return False
        self._reads[job] = (key, slot)
        return True

    def _write(self, share: DiskShare) -> None:
        disk, most = share.disk, self._max_writes - len(self._writes)
        if most <= 0 or not disk.can_write:
            return
        now = self._clock()
        writes = self.directory.take_writes(now, most)
        if not self._reads and not self._writes and not writes:
            writes = self.directory.take_early_writes(now, MIN_WRITES)
        disk.remove(self.directory.take_removals())  # what goes makes the room for what comes
        for write in writes:
            sync = self.leases.is_to_be_synced(write.name.key)
            header = self._books.header(write.slot, share.layout, created_seconds=int(time.time()))
            job = disk.write(header, self.arena.slot(write.slot), sync=sync)
            if job is None:
                self._tally.writes.failed(MoveFailure.REFUSED)
                self.directory.not_written(write.name.key)
            else:
                self._writes[job] = write.name.key

    def _is_wanted(self, key: BlockHash, header: ChunkHeader) -> bool:
        """Whether a file is what the directory expects."""
        return header.is_of(
            self.directory.name(key),
            num_tokens=self.shape.tokens,
            num_blocks=self.shape.blocks_per_chunk,
            payload_bytes=self.arena.payload_bytes,
        )

    def _end(self, finished: Finished) -> None:
        if finished.kind is Kind.ERASE:
            self._erasures.discard(finished.job)
        elif finished.kind is Kind.WRITE:
            key = self._writes.pop(finished.job)
            if finished.ok:
                self._tally.writes.moved(self.shape.tokens, finished.seconds)
                self.directory.written(key)
            else:
                self._tally.writes.failed(failure(finished.reason))
                self.directory.not_written(key)
        elif finished.kind is Kind.READ:
            key, slot = self._reads.pop(finished.job)
            if finished.ok and finished.header is not None and self._is_wanted(key, finished.header):
                self._tally.reads.moved(self.shape.tokens, finished.seconds)
                self._books.came(slot, finished.header)
                self.filled(key)
            else:
                self._tally.reads.failed(failure(finished.reason))
                self.directory.given_up(key)
                if finished.is_gone or finished.ok:
                    self.directory.lost_file(key)
        elif finished.kind is Kind.OVERDUE:
            self._tally.reads.failed(MoveFailure.LATE)
            key, self._overdue[finished.job] = self._reads.pop(finished.job)
            self.directory.given_up(key, may_still_be_written=True)
        elif finished.kind is Kind.RETURNED:
            self.directory.give_back(self._overdue.pop(finished.job))
        elif finished.kind is Kind.LOST and finished.key is not None:
            self.directory.lost_file(finished.key)
