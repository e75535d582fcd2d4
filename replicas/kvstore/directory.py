"""Directory: which chunks of KV lie in host memory and on disk, and which one goes when room is short.

Owns every decision about both tiers, for real engines and for the simulation alike. Pure: it moves no
bytes, opens no file, starts no thread and asks no clock. Its caller does what it says and tells it how
that ended.

A *chunk* is `blocks_per_chunk` consecutive blocks of one chain, named by the hash of its last block, which
stands for everything before it. It may lie in a *slot* of host memory, in a file on disk, or in both::

    host    absent ──offer, fetch──> filling ──filled──> ready ──evicted──> absent
    disk    absent ──take_writes──> writing ──written──> ready ──evicted──> absent

**Host memory** has a hot and a cold part, each in the order of last use; the oldest quarter is cold. What
becomes cold is written to disk, as far as the write budget goes, so that eviction, which takes the oldest
that is not being read, written or filled, finds it there already. **The disk** evicts the oldest. Whatever
happens to a chunk happens to those before it in its chain a moment later, so the end of a chain goes before
its beginning; and a chunk is written after those before it. What lies behind a hole is of no use.

What is filled, read or written stays where it is until its caller says that this has ended. A slot whose
filling was given up may still be written to by a thread that hangs: it is *quarantined*, and no chunk's,
until it is given back.
"""

import enum
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from replicas.kvstore.write_budget import WriteBudget
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, Tier

COLD_SHARE = 0.25
"""Of host memory: the part that is written to disk and evicted from."""


class Place(enum.Enum):
    """Where a chunk is, fastest first."""

    HOST = "host"
    COMING = "coming"
    """A slot is being filled with it."""
    DISK = "disk"


class ChunkName(NamedTuple):
    """`key` is the hash of the chunk's last block, `last_block` that block's position in its chain; `parent`
    is the key of the chunk before it, None for a chain's first.
    """

    key: BlockHash
    parent: BlockHash | None
    last_block: int


class Write(NamedTuple):
    """To write this slot's bytes to the file of this chunk."""

    name: ChunkName
    slot: int


@dataclass(slots=True, eq=False)
class _Chunk:
    name: ChunkName
    slot: int | None = None
    is_filling: bool = False
    num_readers: int = 0
    is_writing: bool = False
    is_on_disk: bool = False
    has_failed: bool = False
    """It could not be written when it was tried last, and was not used since."""
    num_uses: int = 1

    @property
    def may_leave_host(self) -> bool:
        return not (self.is_filling or self.num_readers or self.is_writing)


class Directory:
    """Of `host_chunks` slots and at most `disk_chunks` files, each of `chunk_bytes`."""

    def __init__(
        self,
        *,
        host_chunks: int,
        disk_chunks: int = 0,
        chunk_bytes: int = 1,
        write_budget: WriteBudget | None = None,
    ) -> None:
        if host_chunks < 1 or disk_chunks < 0 or chunk_bytes < 1:
            raise ValueError(
                "a directory needs a slot of host memory and chunks of a byte or more, not"
                f" {host_chunks} slots, {disk_chunks} files and chunks of {chunk_bytes} bytes"
            )
        self.num_host_slots = host_chunks
        self.max_disk_chunks = disk_chunks
        self._chunk_bytes = chunk_bytes
        self._write_budget = write_budget or WriteBudget()
        self._max_hot = host_chunks - int(host_chunks * COLD_SHARE)
        self._chunks: dict[BlockHash, _Chunk] = {}
        self._hot: OrderedDict[BlockHash, _Chunk] = OrderedDict()
        self._cold: OrderedDict[BlockHash, _Chunk] = OrderedDict()
        self._disk: OrderedDict[BlockHash, _Chunk] = OrderedDict()
        """Those that are written, and those that are being written."""
        self._to_write_once: OrderedDict[BlockHash, None] = OrderedDict()
        self._to_write_reused: OrderedDict[BlockHash, None] = OrderedDict()
        """Cold chunks without a file, by whether they were used again since they were made."""
        self._free_slots = list(range(host_chunks - 1, -1, -1))
        self._quarantined: set[int] = set()
        self._generations = [0] * host_chunks
        self._removals: dict[BlockHash, None] = {}
        self._events: list[CacheEvent] = []

    # What is there.

    @property
    def num_in_host(self) -> int:
        """Chunks that have a slot, those that are being filled too."""
        return len(self._hot) + len(self._cold)

    @property
    def num_on_disk(self) -> int:
        """Chunks that have a file, those that are being written too."""
        return len(self._disk)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def num_to_write(self) -> int:
        """Cold chunks that wait for the write budget."""
        return len(self._to_write_once) + len(self._to_write_reused)

    def on_disk(self) -> list[ChunkName]:
        """What has been written, oldest use first: what `restore` takes."""
        return [chunk.name for chunk in self._disk.values() if chunk.is_on_disk]

    def place(self, key: BlockHash) -> Place | None:
        chunk = self._chunks.get(key)
        if chunk is None:
            return None
        if chunk.slot is not None:
            return Place.COMING if chunk.is_filling else Place.HOST
        return Place.DISK if chunk.is_on_disk else None

    def find(self, keys: Iterable[BlockHash]) -> list[Place]:
        """Where the leading chunks of a chain are, up to the first that is nowhere."""
        places: list[Place] = []
        for key in keys:
            place = self.place(key)
            if place is None:
                break
            places.append(place)
        return places

    def slot(self, key: BlockHash) -> tuple[int, int] | None:
        """The slot that holds the chunk, and its generation, which grows whenever the slot gets another
        chunk: a reader that has not pinned it compares them before and after.
        """
        chunk = self._chunks.get(key)
        if chunk is None or chunk.slot is None or chunk.is_filling:
            return None
        return chunk.slot, self._generations[chunk.slot]

    def generation(self, slot: int) -> int:
        return self._generations[slot]

    # What is used.

    def use(self, keys: Sequence[BlockHash]) -> None:
        """A request begins with these chunks, wherever its engine finds them. Unknown ones are ignored."""
        for key in reversed(keys):
            chunk = self._chunks.get(key)
            if chunk is None:
                continue
            chunk.num_uses += 1
            chunk.has_failed = False
            if chunk.is_on_disk or chunk.is_writing:
                self._disk.move_to_end(key)
            if chunk.slot is not None:
                self._warm(chunk)
        self._cool()

    def pin(self, keys: Iterable[BlockHash]) -> None:
        """Somebody reads these slots, which hold their chunks, until `unpin`."""
        for key in keys:
            chunk = self._chunks[key]
            assert chunk.slot is not None and not chunk.is_filling, "what is pinned is in host memory"
            chunk.num_readers += 1

    def unpin(self, keys: Iterable[BlockHash]) -> None:
        for key in keys:
            chunk = self._chunks[key]
            assert chunk.num_readers > 0, "what is unpinned was pinned"
            chunk.num_readers -= 1

    # Into host memory: from the device, from disk, from a peer.

    def offer(self, name: ChunkName) -> int | None:
        """The slot to copy a chunk into that the device or a peer has. Then `filled` or `given_up`.

        None if it has a slot already, or if every slot is in use.
        """
        chunk = self._chunks.get(name.key)
        if chunk is not None and chunk.slot is not None:
            return None
        slot = self._take_slot()
        if slot is None:
            return None
        if chunk is None:
            chunk = self._chunks[name.key] = _Chunk(name)
        self._fill(chunk, slot)
        return slot

    def fetch(self, key: BlockHash) -> int | None:
        """The slot to read a chunk into that is on disk alone. Then `filled` or `given_up`.

        None if every slot is in use. The file may be evicted meanwhile: who reads a file that is gone
        gives up.
        """
        chunk = self._chunks[key]
        assert chunk.slot is None and chunk.is_on_disk, "what is fetched lies on disk alone"
        slot = self._take_slot()
        if slot is not None:
            self._fill(chunk, slot)
        return slot

    def filled(self, key: BlockHash) -> None:
        """The slot holds the chunk's KV, and that was verified."""
        chunk = self._chunks[key]
        assert chunk.is_filling, "what is filled was being filled"
        chunk.is_filling = False
        self._events.append(BlockStored((key,), chunk.name.last_block, tier=Tier.HOST))
        if key in self._cold:
            self._note_to_write(chunk)

    def given_up(self, key: BlockHash, *, may_still_be_written: bool = False) -> None:
        """The slot was not filled. One that may still be written to is no chunk's until `give_back`."""
        chunk = self._chunks[key]
        assert chunk.is_filling and chunk.slot is not None, "what is given up was being filled"
        if may_still_be_written:
            self._quarantined.add(chunk.slot)
        else:
            self._free_slots.append(chunk.slot)
        chunk.is_filling = False
        self._leave_host(chunk)

    def give_back(self, slot: int) -> None:
        """Nothing writes to this quarantined slot any more."""
        self._quarantined.remove(slot)
        self._free_slots.append(slot)

    # Onto disk.

    def take_writes(self, now: float, max_writes: int) -> list[Write]:
        """What to write next, at most `max_writes`; each ends with `written` or `not_written`.

        While the budget is short, only chunks that were used again after they were made.
        """
        writes: list[Write] = []
        while len(writes) < max_writes:
            key = next(iter(self._to_write_reused), None)
            if key is None and not self._write_budget.is_short(now):
                key = next(iter(self._to_write_once), None)
            if key is None:
                break
            if not self._may_make_file() or not self._write_budget.take(now, self._chunk_bytes):
                break
            chunk = self._first_unwritten(self._chunks[key])
            if len(self._disk) == self.max_disk_chunks:
                self._evict_file()
            self._forget_to_write(chunk)
            self._removals.pop(chunk.name.key, None)
            chunk.is_writing = True
            self._disk[chunk.name.key] = chunk
            for before in self._chain_before(chunk):
                if before.is_on_disk or before.is_writing:
                    self._disk.move_to_end(before.name.key)
            assert chunk.slot is not None
            writes.append(Write(chunk.name, chunk.slot))
        return writes

    def written(self, key: BlockHash) -> None:
        chunk = self._chunks[key]
        assert chunk.is_writing, "what is written was being written"
        chunk.is_writing = False
        chunk.is_on_disk = True
        self._events.append(BlockStored((key,), chunk.name.last_block, tier=Tier.DISK))

    def not_written(self, key: BlockHash) -> None:
        """Writing failed. It is not tried again before the chunk has been used and become cold once more."""
        chunk = self._chunks[key]
        assert chunk.is_writing, "what is not written was being written"
        chunk.is_writing = False
        chunk.has_failed = True
        del self._disk[key]
        self._forget_if_nowhere(chunk)

    def lost_file(self, key: BlockHash) -> None:
        """The chunk's file is gone or not to be believed. Unknown ones are ignored."""
        chunk = self._chunks.get(key)
        if chunk is not None and chunk.is_on_disk:
            self._leave_disk(chunk)

    def take_removals(self) -> list[BlockHash]:
        """Chunks whose files are to be removed, since the last call; before any write that is taken later."""
        removals, self._removals = self._removals, {}
        return list(removals)

    def restore(self, names: Iterable[ChunkName]) -> None:
        """What an earlier life has left on disk, oldest use first. What does not fit is to be removed."""
        assert not self._chunks, "a directory is restored before it is used"
        for name in names:
            if name.key in self._chunks:
                continue
            chunk = self._chunks[name.key] = _Chunk(name, is_on_disk=True)
            self._disk[name.key] = chunk
            self._events.append(BlockStored((name.key,), name.last_block, tier=Tier.DISK))
        while len(self._disk) > self.max_disk_chunks:
            self._evict_file()

    def adopt(self, name: ChunkName) -> None:
        """A file that an earlier life has left was found late: it is kept while there is room for one more,
        as the one that goes next.
        """
        if name.key in self._chunks and (
            self._chunks[name.key].is_on_disk or self._chunks[name.key].is_writing
        ):
            return
        if len(self._disk) >= self.max_disk_chunks:
            self._removals[name.key] = None
            return
        chunk = self._chunks.setdefault(name.key, _Chunk(name))
        chunk.is_on_disk = True
        self._disk[name.key] = chunk
        self._disk.move_to_end(name.key, last=False)
        self._forget_to_write(chunk)
        self._events.append(BlockStored((name.key,), name.last_block, tier=Tier.DISK))

    def write_all(self) -> None:
        """Host memory is about to end: whatever has no file is to be written, the oldest first."""
        while self._hot:
            key, chunk = self._hot.popitem(last=False)
            self._cold[key] = chunk
            if not chunk.is_filling:
                self._note_to_write(chunk)

    def clear(self) -> bool:
        """Forget everything and remove every file. False, and nothing happens, while anything moves."""
        if not all(chunk.may_leave_host for chunk in self._chunks.values()):
            return False
        for chunk in [*self._hot.values(), *self._cold.values()]:
            assert chunk.slot is not None
            self._free_slots.append(chunk.slot)
        self._removals.update(dict.fromkeys(self._disk))
        for table in (self._chunks, self._hot, self._cold, self._disk):
            table.clear()
        self._to_write_once.clear()
        self._to_write_reused.clear()
        self._events += [AllBlocksCleared(Tier.HOST), AllBlocksCleared(Tier.DISK)]
        return True

    def take_events(self) -> list[CacheEvent]:
        """What became ready or went since the last call, in order."""
        events, self._events = self._events, []
        return events

    # Slots.

    def _take_slot(self) -> int | None:
        if not self._free_slots:
            victim = next(
                (each for part in (self._cold, self._hot) for each in part.values() if each.may_leave_host),
                None,
            )
            if victim is None:
                return None
            assert victim.slot is not None
            self._free_slots.append(victim.slot)
            self._events.append(BlockRemoved((victim.name.key,), Tier.HOST))
            self._leave_host(victim)
        slot = self._free_slots.pop()
        self._generations[slot] += 1
        return slot

    def _fill(self, chunk: _Chunk, slot: int) -> None:
        chunk.slot = slot
        chunk.is_filling = True
        self._hot[chunk.name.key] = chunk
        for before in self._chain_before(chunk):
            if before.slot is not None:
                self._warm(before)
        self._cool()

    def _leave_host(self, chunk: _Chunk) -> None:
        key = chunk.name.key
        chunk.slot = None
        if self._hot.pop(key, None) is None:
            del self._cold[key]
            self._forget_to_write(chunk)
        self._forget_if_nowhere(chunk)

    def _warm(self, chunk: _Chunk) -> None:
        key = chunk.name.key
        if self._cold.pop(key, None) is not None:
            self._forget_to_write(chunk)
            self._hot[key] = chunk
        else:
            self._hot.move_to_end(key)

    def _cool(self) -> None:
        while len(self._hot) > self._max_hot:
            key, chunk = self._hot.popitem(last=False)
            self._cold[key] = chunk
            if not chunk.is_filling:
                self._note_to_write(chunk)

    # Files.

    def _first_unwritten(self, chunk: _Chunk) -> _Chunk:
        """The first chunk of its chain that has no file and can be written now, at latest itself."""
        first = chunk
        for before in self._chain_before(chunk):
            if before.is_on_disk or before.is_writing or before.slot is None:
                break
            if before.is_filling or before.has_failed:
                break
            first = before
        return first

    def _chain_before(self, chunk: _Chunk) -> Iterator[_Chunk]:
        """The chunks before it in its chain, nearest first, up to one that is nowhere."""
        parent = chunk.name.parent
        while parent is not None and (before := self._chunks.get(parent)) is not None:
            yield before
            parent = before.name.parent

    def _note_to_write(self, chunk: _Chunk) -> None:
        if self.max_disk_chunks and not (chunk.is_on_disk or chunk.is_writing):
            waiting = self._to_write_reused if chunk.num_uses > 1 else self._to_write_once
            waiting[chunk.name.key] = None

    def _forget_to_write(self, chunk: _Chunk) -> None:
        self._to_write_once.pop(chunk.name.key, None)
        self._to_write_reused.pop(chunk.name.key, None)

    def _may_make_file(self) -> bool:
        """Whether there is room for one more file, or a file that may go."""
        return len(self._disk) < self.max_disk_chunks or any(each.is_on_disk for each in self._disk.values())

    def _evict_file(self) -> None:
        self._leave_disk(next(each for each in self._disk.values() if each.is_on_disk))

    def _leave_disk(self, chunk: _Chunk) -> None:
        key = chunk.name.key
        chunk.is_on_disk = False
        del self._disk[key]
        self._removals[key] = None
        self._events.append(BlockRemoved((key,), Tier.DISK))
        self._forget_if_nowhere(chunk)

    def _forget_if_nowhere(self, chunk: _Chunk) -> None:
        if chunk.slot is None and not chunk.is_on_disk and not chunk.is_writing:
            del self._chunks[chunk.name.key]
