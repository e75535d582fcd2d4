"""Directory: which chunks of KV lie in host memory and on disk, and which is evicted when room is short.

Decides everything about both tiers, for real engines and the simulation. Pure: it moves no bytes, opens no
file, starts no thread and reads no clock. Its caller executes the decisions and reports the outcomes.

A chunk (`chunk.py`) may lie in a *slot* of host memory, in a file on disk, or in both::

    host    absent ──offer, fetch──> filling ──filled──> ready ──evicted──> absent
    disk    absent ──take_writes──> writing ──written──> ready ──evicted──> absent

**Host memory** has a hot and a cold part, each in LRU order; the oldest quarter is cold. Cold chunks are
written to disk within the write budget. Eviction takes the oldest chunk that is not being read, written or
filled, which by then is usually on disk. An idle disk may be given hot chunks. **The disk** evicts its
oldest. Children are evicted before their parents, and written after them: chunks behind a hole are useless.

A *leased* chunk (`leases.py`) has a copy somewhere until its lease ends. Without a file it is kept apart from
hot and cold, and evicted only as a last resort, which breaks the lease. Its file goes only if the disk itself
becomes too small. A lease of an hour or more is written first, as soon as the chunk is in host memory. When a
lease ends nothing is deleted: the chunk becomes the oldest.

A chunk being filled, read or written stays until the caller reports the end. A slot whose filling was
abandoned may still be written by a hanging thread: it is *quarantined*, without a chunk, until it is
returned.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from replicas.kvstore.chunk import Chunk, ChunkName, StoreTenant, chain_before
from replicas.kvstore.leasing.leases import LeaseRecord, Leases, Wish
from replicas.kvstore.tenant_shares import NOBODYS, Tenancy, TenantShares, TierShares
from replicas.kvstore.use_order import NewestChain, UseOrder
from replicas.kvstore.write_budget import WriteBudget
from replicas.kvstore.write_queues import WriteQueues
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, Removal, Tier
from replicas.protocol.prefix_leases import LeaseBreak, LeaseRefusal
from replicas.protocol.status import Epoch

COLD_SHARE = 0.25
"""Share of host memory that is written to disk and evicted from."""


class ChunkPlace(enum.Enum):
    """Location of a chunk, fastest first."""

    HOST = "host"
    COMING = "coming"
    """A slot is being filled with it."""
    DISK = "disk"


class Write(NamedTuple):
    """To write this slot's bytes to the file of this chunk."""

    name: ChunkName
    slot: int


class Directory:
    """Directory of `host_chunks` slots and at most `disk_chunks` files, each of `chunk_bytes`.

    Without `leases` none is ever granted.
    """

    def __init__(
        self,
        *,
        host_chunks: int,
        disk_chunks: int = 0,
        chunk_bytes: int = 1,
        write_budget: WriteBudget | None = None,
        leases: Leases | None = None,
    ) -> None:
        if host_chunks < 1 or disk_chunks < 0 or chunk_bytes < 1:
            raise ValueError(
                "a directory needs a slot of host memory and chunks of a byte or more, not"
                f" {host_chunks} slots, {disk_chunks} files and chunks of {chunk_bytes} bytes"
            )
        self.leases = leases or Leases()
        if self.leases.budget.host > host_chunks or self.leases.budget.disk > disk_chunks:
            raise ValueError(
                f"{host_chunks} slots and {disk_chunks} files are less than {self.leases.budget} to be leased"
            )
        self.num_host_slots = host_chunks
        self.max_disk_chunks = disk_chunks
        self._chunk_bytes = chunk_bytes
        self._write_budget = write_budget or WriteBudget()
        self._chunks: dict[BlockHash, Chunk] = {}
        self._shares = TenantShares()
        self._host_shares, self._disk_shares = TierShares(host_chunks, 3), TierShares(disk_chunks, 2)
        self._cold, self._hot, self._owed = self._host_shares.orders
        """Chunks in host memory that are leased and have no file."""
        self._newest_in_host = NewestChain(self._hot, self._owed)
        self._disk, self._disk_leased = self._disk_shares.orders
        """Written chunks and those being written; and the leased ones among them."""
        self._newest_on_disk = NewestChain(self._disk, self._disk_leased)
        self._to_write = WriteQueues()
        self.num_changes = 0
        """Grows whenever a slot was filled, or will not be."""
        self._free_slots = list(range(host_chunks - 1, -1, -1))
        self._quarantined: set[int] = set()
        self._generations = [0] * host_chunks
        self._removals: dict[BlockHash, None] = {}
        self._lease_changes: dict[BlockHash, None] = {}
        self._lease_ends: dict[BlockHash, None] = {}
        self._events: list[CacheEvent] = []

    # What is there.

    @property
    def num_in_host(self) -> int:
        """Chunks that have a slot, those that are being filled too."""
        return len(self._hot) + len(self._cold) + len(self._owed)

    @property
    def num_on_disk(self) -> int:
        """Chunks that have a file, those that are being written too."""
        return len(self._disk) + len(self._disk_leased)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def has_to_write(self) -> bool:
        """Whether anything waits to be written, now or to an idle disk."""
        has_room = self.num_on_disk < self.max_disk_chunks
        return bool(self.num_to_write or (self._to_write.has_early and has_room))

    @property
    def num_to_write(self) -> int:
        """Cold and leased chunks that wait for the write budget."""
        return self._to_write.num_waiting

    def on_disk(self) -> list[ChunkName]:
        """Return the written chunks, least recently used first and leased ones last, as `restore` takes
        them."""
        return [chunk.name for chunk in (*self._disk, *self._disk_leased) if chunk.is_on_disk]

    def place(self, key: BlockHash) -> ChunkPlace | None:
        chunk = self._chunks.get(key)
        if chunk is None:
            return None
        if chunk.slot is not None:
            return ChunkPlace.COMING if chunk.is_filling else ChunkPlace.HOST
        return ChunkPlace.DISK if chunk.is_on_disk else None

    def find(self, keys: Iterable[BlockHash]) -> list[ChunkPlace]:
        """Return the locations of a chain's leading chunks, up to the first missing one."""
        places: list[ChunkPlace] = []
        for key in keys:
            place = self.place(key)
            if place is None:
                break
            places.append(place)
        return places

    def slot(self, key: BlockHash) -> tuple[int, int] | None:
        """Return the slot that holds the chunk, and its generation, which grows whenever the slot gets
        another chunk: a reader that has not pinned it compares them before and after."""
        chunk = self._chunks.get(key)
        if chunk is None or chunk.slot is None or chunk.is_filling:
            return None
        return chunk.slot, self._generations[chunk.slot]

    def name(self, key: BlockHash) -> ChunkName:
        """Return the name of a present chunk."""
        return self._chunks[key].name

    def generation(self, slot: int) -> int:
        return self._generations[slot]

    # What is used.

    def use(self, keys: Sequence[BlockHash], tenancy: Tenancy = NOBODYS) -> None:
        """A request begins with these chunks, wherever its engine finds them. Unknown ones are ignored."""
        self._end_newest()
        tenant = self._sharing(tenancy)
        for key in reversed(keys):
            self.leases.use(key)
            chunk = self._chunks.get(key)
            if chunk is None:
                continue
            chunk.num_uses += 1
            chunk.has_failed = False
            if chunk.tenant is None and tenant is not None:
                self._charge(chunk, tenant)
            self._put_newest(chunk)
        self._cool()

    def pin(self, keys: Iterable[BlockHash]) -> None:
        """Protect these slots, which hold their chunks, until `unpin`."""
        for key in keys:
            chunk = self._chunks[key]
            assert chunk.slot is not None and not chunk.is_filling, "what is pinned is in host memory"
            chunk.num_readers += 1

    def unpin(self, keys: Iterable[BlockHash]) -> None:
        for key in keys:
            chunk = self._chunks[key]
            assert chunk.num_readers > 0, "what is unpinned was pinned"
            chunk.num_readers -= 1

    # What is leased.

    def grant(
        self, keys: Sequence[BlockHash], seconds: int, tenancy: Tenancy = NOBODYS, bucket: bytes = b""
    ) -> LeaseRefusal | None:
        """Lease all these chunks, a chain from its beginning, or none and say why. Absent ones are leased if
        they come soon. It counts as a use of them, by a request of this bucket."""
        chunks = [self._chunks.get(key) for key in keys]
        wishes = [
            Wish(key, chunk is not None and chunk.has_file) for key, chunk in zip(keys, chunks, strict=True)
        ]
        refusal = self.leases.grant(wishes, seconds, tenancy.tag, tenancy.lease_share, bucket)
        if refusal is None:
            self._keep_leased(chunks)
        return refusal

    def take_leases(self, records: Sequence[LeaseRecord], source: Epoch) -> list[LeaseRefusal | None]:
        """Lease another replica's leased chunks, each by itself; some are here, others are to come at once.
        Returns for each the refusal, or None."""
        chunks = [self._chunks.get(record.key) for record in records]
        refusals = [
            self.leases.take_over(record, has_file=chunk is not None and chunk.has_file, source=source)
            for record, chunk in zip(records, chunks, strict=True)
        ]
        taken = [None if refusal else chunk for chunk, refusal in zip(chunks, refusals, strict=True)]
        self._keep_leased(taken)
        return refusals

    def _keep_leased(self, chunks: Sequence[Chunk | None]) -> None:
        self._end_newest()
        for chunk in reversed(chunks):
            if chunk is None:
                continue
            if chunk.is_ready:
                self.leases.stored(chunk.name.key)
            self._put_newest(chunk)
        self._cool()

    def lease_end(self, key: BlockHash) -> tuple[float, int] | None:
        """Return the lease's end and last block of a present, leased chunk."""
        chunk, end = self._chunks.get(key), self.leases.end(key)
        return None if chunk is None or end is None or not chunk.is_ready else (end, chunk.name.last_block)

    def leased(self, key: BlockHash) -> tuple[LeaseRecord, Chunk, float] | None:
        """Return the lease of a chunk that is leased and there, and its tenant's share of the store."""
        chunk = self._chunks.get(key)
        records = self.leases.records([key]) if chunk is not None and chunk.is_ready else []
        if chunk is None or not records:
            return None
        return records[0], chunk, self._shares.share_of(records[0].tenant)

    def known(self, tenancy: Tenancy) -> Tenancy:
        """Return a recorded tenancy with the latest share that its requests have set here, if any."""
        return self._shares.known(tenancy)

    def broken(self, keys: Iterable[BlockHash]) -> tuple[int, LeaseBreak | None]:
        """How many of these chunks went before the end of their leases and are still missing, and why the
        first of them did.
        """
        causes = [cause for key in keys if key not in self._chunks and (cause := self.leases.broken_by(key))]
        return len(causes), causes[0] if causes else None

    def num_expired(self, keys: Iterable[BlockHash]) -> int:
        """How many of these chunks went after their leases had run out, and are still missing."""
        return sum(key not in self._chunks and self.leases.has_expired(key) for key in keys)

    def pass_time(self, now: float) -> None:
        """Set the time, by a clock that does not go back: leases go by the latest time."""
        self._end_leases(self.leases.pass_time(now))

    def withdraw(self, keys: Iterable[BlockHash], source: Epoch) -> None:
        """This replica has handed these leases over, and another keeps them instead."""
        ended = [key for key in keys if self.leases.withdraw(key, source)]
        self._lease_ends.update(dict.fromkeys(ended))
        self._end_leases(ended)

    def _end_leases(self, keys: Iterable[BlockHash]) -> None:
        """Drop the chunks' leases."""
        ended = [chunk for key in keys if (chunk := self._chunks.get(key)) is not None]
        for chunk in sorted(ended, key=lambda chunk: chunk.name.last_block):
            key = chunk.name.key
            if self._disk_leased.take(key):
                self._newest_on_disk.leave(key)
                self._disk.put_oldest(chunk)
            if self._owed.take(key):
                self._newest_in_host.leave(key)
                self._to_write.forget(key)
                self._cold.put_oldest(chunk)
                if not chunk.is_filling:
                    self._note_to_write(chunk)

    def take_lease_changes(self) -> list[LeaseRecord]:
        """Return the leases of files that were granted or used since the last call, and of files that are
        new."""
        changes, self._lease_changes = self._lease_changes, {}
        return self.leases.records(changes)

    def take_lease_ends(self) -> list[BlockHash]:
        """Files whose leases were withdrawn since the last call, and not granted again."""
        ends, self._lease_ends = self._lease_ends, {}
        return [
            key
            for key in ends
            if not self.leases.holds(key)
            and (chunk := self._chunks.get(key)) is not None
            and chunk.is_on_disk
        ]

    # Into host memory: from the device, from disk, from a peer.

    def offer(self, name: ChunkName, tenancy: Tenancy = NOBODYS) -> int | None:
        """Return the slot to copy a chunk into that the device or a peer has. Then `filled` or `given_up`.

        None if it has a slot already, or if no slot may be taken for it.
        """
        chunk = self._chunks.get(name.key)
        if chunk is not None and chunk.slot is not None:
            return None
        tenant = self._sharing(tenancy) if chunk is None or chunk.tenant is None else chunk.tenant
        slot = self._take_slot(tenant)
        if slot is None:
            return None
        if chunk is None:
            chunk = self._new_chunk(name, tenant)
        self._fill(chunk, slot)
        return slot

    def fetch(self, key: BlockHash) -> int | None:
        """Return a slot to read a chunk into that is on disk alone. End with `filled` or `given_up`.

        None if every slot is in use. The file may be evicted meanwhile; a reader that finds it gone gives up.
        """
        chunk = self._chunks[key]
        assert chunk.slot is None and chunk.is_on_disk, "what is fetched lies on disk alone"
        slot = self._take_slot(chunk.tenant)
        if slot is not None:
            self._fill(chunk, slot)
        return slot

    def filled(self, key: BlockHash) -> None:
        """The slot holds the chunk's KV, and that was verified."""
        chunk = self._chunks[key]
        assert chunk.is_filling, "what is filled was being filled"
        self.num_changes += 1
        chunk.is_filling = False
        self.leases.stored(key)
        self._events.append(BlockStored((key,), chunk.name.last_block, tier=Tier.HOST))
        if key in self._cold or self.leases.wants_file(key):
            self._note_to_write(chunk)
        elif self.max_disk_chunks and not chunk.has_file:
            self._to_write.add_early(key)

    def given_up(self, key: BlockHash, *, may_still_be_written: bool = False) -> None:
        """The slot was not filled. One that may still be written to is no chunk's until `give_back`."""
        chunk = self._chunks[key]
        assert chunk.is_filling and chunk.slot is not None, "what is given up was being filled"
        self.num_changes += 1
        if may_still_be_written:
            self._quarantined.add(chunk.slot)
        else:
            self._free_slots.append(chunk.slot)
        chunk.is_filling = False
        self._leave_host(chunk, LeaseBreak.LOST)

    def give_back(self, slot: int) -> None:
        """Return a quarantined slot that nothing writes to any more."""
        self._quarantined.remove(slot)
        self._free_slots.append(slot)

    # Onto disk.

    def take_writes(self, now: float, max_writes: int) -> list[Write]:
        """Return up to `max_writes` chunks to write; each ends with `written` or `not_written`.

        Leased chunks go first. While the budget is short, of the others only chunks that were used again are
        written.
        """
        writes: list[Write] = []
        while len(writes) < max_writes:
            key = self._to_write.next_urgent()
            if key is None and not self._write_budget.is_short(now):
                key = self._to_write.next_once()
            if key is None:
                break
            if not self._may_make_file() or not self._write_budget.take(now, self._chunk_bytes):
                break
            chunk = self._to_write.first_unwritten(self._chunks[key], self._chunks)
            while self.num_on_disk >= self.max_disk_chunks and self._make_room(chunk.tenant):
                pass
            if self.num_on_disk >= self.max_disk_chunks:
                self._to_write.forget(key)
                continue
            writes.append(self._begin_write(chunk))
        return writes

    def take_early_writes(self, now: float, max_writes: int) -> list[Write]:
        """Return hot chunks for an idle disk to write, oldest first, so that a killed replica loses only the
        newest. Each ends as in `take_writes`.

        None while the budget is short, and none that would replace another file.
        """
        writes: list[Write] = []
        while len(writes) < max_writes and self.num_on_disk < self.max_disk_chunks:
            key = self._to_write.next_early()
            if key is None:
                break
            chunk = self._chunks[key]
            if chunk.has_file or chunk.is_filling or chunk.has_failed:
                self._to_write.forget_early(key)
                continue
            if self._write_budget.is_short(now) or not self._write_budget.take(now, self._chunk_bytes):
                break
            writes.append(self._begin_write(self._to_write.first_unwritten(chunk, self._chunks)))
        return writes

    def _begin_write(self, chunk: Chunk) -> Write:
        self._to_write.forget(chunk.name.key)
        self._removals.pop(chunk.name.key, None)
        chunk.is_writing = True
        before = chain_before(chunk, self._chunks)
        self._newest_on_disk.put(chunk, before, self._take_for_disk_if_there)
        assert chunk.slot is not None
        return Write(chunk.name, chunk.slot)

    def written(self, key: BlockHash) -> None:
        chunk = self._chunks[key]
        assert chunk.is_writing, "what is written was being written"
        chunk.is_writing = False
        chunk.is_on_disk = True
        self.leases.has_file(key)
        self._note_lease(chunk)
        self._events.append(BlockStored((key,), chunk.name.last_block, tier=Tier.DISK))
        if key in self._owed:
            self._warm_chain(chunk)

    def not_written(self, key: BlockHash) -> None:
        """Writing failed. It is not tried again before the chunk has been used and become cold once more."""
        chunk = self._chunks[key]
        assert chunk.is_writing, "what is not written was being written"
        chunk.is_writing = False
        chunk.has_failed = True
        self._take_from_disk(chunk)
        if not self.leases.lost_file(key) and key in self._owed:
            self._warm_chain(chunk)

    def lost_file(self, key: BlockHash) -> None:
        """The chunk's file is gone or not to be believed. Unknown ones are ignored."""
        chunk = self._chunks.get(key)
        if chunk is not None and chunk.is_on_disk:
            self._leave_disk(chunk, LeaseBreak.LOST)

    def limit_files(self, most: int) -> None:
        """Shrink the disk to that many files; the excess goes with the next writes."""
        self.max_disk_chunks = most

    def take_removals(self) -> list[BlockHash]:
        """Return the chunks whose files must be removed, before any write that is taken later."""
        removals, self._removals = self._removals, {}
        return list(removals)

    def restore(self, names: Iterable[ChunkName], leases: Iterable[LeaseRecord] = ()) -> None:
        """Restore the files and leases of an earlier life, least recently used first. Chunks without room are
        removed."""
        assert not self._chunks, "a directory is restored before it is used"
        for name in names:
            if name.key in self._chunks:
                continue
            self._chunks[name.key] = Chunk(name, is_on_disk=True)
            self._events.append(BlockStored((name.key,), name.last_block, tier=Tier.DISK))
        self.leases.restore(record for record in leases if record.key in self._chunks)
        for chunk in self._chunks.values():
            self._take_for_disk(chunk).put_newest(chunk)
        while self.num_on_disk > self.max_disk_chunks:
            self._evict_file()

    def adopt(self, name: ChunkName) -> None:
        """Adopt a file of an earlier life that was found late: it is kept if there is room for one more, as
        the next to be evicted."""
        known = self._chunks.get(name.key)
        if known is not None and known.has_file:
            return
        if self.num_on_disk >= self.max_disk_chunks:
            self._removals[name.key] = None
            return
        chunk = known or self._new_chunk(name)
        chunk.is_on_disk = True
        self.leases.stored(name.key)
        self.leases.has_file(name.key)
        self._newest_on_disk.leave(name.key)
        files = self._take_for_disk(chunk)
        if files is self._disk:
            files.put_oldest(chunk)
        else:
            self._newest_on_disk.end()
            files.put_newest(chunk)
        if name.key in self._owed:
            self._warm_chain(chunk)
        self._to_write.forget(name.key)
        self._events.append(BlockStored((name.key,), name.last_block, tier=Tier.DISK))

    def write_all(self) -> None:
        """Queue every chunk without a file for writing, oldest first, since host memory is about to end."""
        self._newest_in_host.end()
        while self._hot:
            self._cool_oldest()
        for chunk in self._owed:
            if not chunk.is_filling:
                self._note_to_write(chunk)

    def clear(self) -> bool:
        """Forget everything and remove every file. Returns False and does nothing while anything moves."""
        if not all(chunk.may_leave_host for chunk in self._chunks.values()):
            return False
        self._end_newest()
        for chunk in (*self._hot, *self._cold, *self._owed):
            assert chunk.slot is not None
            self._free_slots.append(chunk.slot)
        self._removals.update((chunk.name.key, None) for chunk in (*self._disk, *self._disk_leased))
        self._chunks.clear()
        for part in (self._hot, self._cold, self._owed, self._disk, self._disk_leased):
            part.clear()
        self._to_write.clear()
        self.leases.clear()
        self._events += [AllBlocksCleared(Tier.HOST), AllBlocksCleared(Tier.DISK)]
        return True

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> list[CacheEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # One chunk.

    def _new_chunk(self, name: ChunkName, tenant: StoreTenant | None = None) -> Chunk:
        chunk = self._chunks[name.key] = Chunk(name, tenant=tenant)
        self._newest_in_host.has_come(name.key)
        self._newest_on_disk.has_come(name.key)
        return chunk

    def _end_newest(self) -> None:
        """Close the newest chain; later chunks are used and evicted by themselves."""
        self._newest_in_host.end()
        self._newest_on_disk.end()

    def _put_newest(self, chunk: Chunk) -> None:
        """By itself, wherever it is."""
        if chunk.has_file:
            self._take_for_disk(chunk).put_newest(chunk)
        if chunk.slot is not None:
            self._take_for_host(chunk).put_newest(chunk)

    def _sharing(self, tenancy: Tenancy) -> StoreTenant | None:
        tenant = self._shares.of(tenancy)
        if tenant is not None:
            self._host_shares.begin_shares()
            self._disk_shares.begin_shares()
        return tenant

    def _charge(self, chunk: Chunk, tenant: StoreTenant) -> None:
        """Charge an unowned chunk to a tenant. There must be no newest chain."""
        orders = [*self._host_shares.orders, *self._disk_shares.orders]
        held_by = [order for order in orders if order.take(chunk.name.key)]
        chunk.tenant = tenant
        for order in held_by:
            order.put_newest(chunk)

    # Slots.

    def _take_slot(self, tenant: StoreTenant | None) -> int | None:
        if not self._free_slots:
            victims = self._host_shares.victims(tenant, self._host_shares.orders)
            victim = next((each for each in victims if each.may_leave_host), None)
            if victim is None:
                return None
            assert victim.slot is not None
            self._free_slots.append(victim.slot)
            reason = self._leave_host(victim, LeaseBreak.HOST_FULL)
            self._events.append(BlockRemoved((victim.name.key,), Tier.HOST, reason))
        slot = self._free_slots.pop()
        self._generations[slot] += 1
        return slot

    def _fill(self, chunk: Chunk, slot: int) -> None:
        chunk.slot = slot
        chunk.is_filling = True
        self._warm_chain(chunk)

    def _leave_host(self, chunk: Chunk, cause: LeaseBreak) -> Removal:
        chunk.slot = None
        for part in (self._hot, self._cold, self._owed):
            part.take(chunk.name.key)
        self._to_write.forget(chunk.name.key)
        self._to_write.forget_early(chunk.name.key)
        return self._forget_if_nowhere(chunk, cause)

    def _warm_chain(self, chunk: Chunk) -> None:
        self._newest_in_host.put(chunk, chain_before(chunk, self._chunks), self._take_for_host_if_there)
        self._cool()

    def _take_for_host_if_there(self, chunk: Chunk) -> UseOrder | None:
        return None if chunk.slot is None else self._take_for_host(chunk)

    def _take_for_host(self, chunk: Chunk) -> UseOrder:
        """Out of where it is, for the part where it belongs while it is warm."""
        key = chunk.name.key
        was_hot = self._hot.take(key)
        if not self.leases.holds(key) or chunk.is_on_disk:
            if not was_hot and (self._cold.take(key) or self._owed.take(key)):
                self._to_write.forget(key)
            return self._hot
        if not was_hot and not self._owed.take(key) and self._cold.take(key):
            self._to_write.forget(key)
        if self.leases.wants_file(key) and not (chunk.is_filling or chunk.has_failed):
            self._note_to_write(chunk)
        return self._owed

    def _cool(self) -> None:
        num_others = self.num_host_slots - len(self._owed)
        max_hot = num_others - int(num_others * COLD_SHARE)
        while len(self._hot) > max_hot:
            self._cool_oldest()

    def _cool_oldest(self) -> None:
        chunk = self._hot.take_oldest()
        self._newest_in_host.leave(chunk.name.key)
        self._cold.put_newest(chunk)
        if not chunk.is_filling:
            self._note_to_write(chunk)

    # Files.

    def _note_to_write(self, chunk: Chunk) -> None:
        if self.max_disk_chunks and not chunk.has_file:
            self._to_write.add(chunk, is_leased=self.leases.wants_file(chunk.name.key))

    def _take_for_disk_if_there(self, chunk: Chunk) -> UseOrder | None:
        return self._take_for_disk(chunk) if chunk.has_file else None

    def _take_for_disk(self, chunk: Chunk) -> UseOrder:
        """Out of where its file is, for the part where it belongs."""
        self._take_from_disk(chunk)
        if not self.leases.holds(chunk.name.key):
            return self._disk
        self._note_lease(chunk)
        return self._disk_leased

    def _take_from_disk(self, chunk: Chunk) -> None:
        key = chunk.name.key
        if not self._disk.take(key):
            self._disk_leased.take(key)

    def _note_lease(self, chunk: Chunk) -> None:
        if chunk.is_on_disk and self.leases.holds(chunk.name.key):
            self._lease_changes[chunk.name.key] = None

    def _may_make_file(self) -> bool:
        """Whether there is room for one more file, or one can be evicted."""
        return self.num_on_disk < self.max_disk_chunks or any(each.is_on_disk for each in self._disk)

    def _make_room(self, tenant: StoreTenant | None) -> bool:
        """Whether a file has gone for one of this tenant."""
        files = self._disk_shares.victims(tenant, [self._disk])
        victim = next((each for each in files if each.is_on_disk), None)
        if victim is not None:
            self._leave_disk(victim, LeaseBreak.DISK_FULL)
        return victim is not None

    def _evict_file(self) -> None:
        files = (each for part in (self._disk, self._disk_leased) for each in part)
        self._leave_disk(next(each for each in files if each.is_on_disk), LeaseBreak.DISK_FULL)

    def _leave_disk(self, chunk: Chunk, cause: LeaseBreak) -> None:
        key = chunk.name.key
        chunk.is_on_disk = False
        self._take_from_disk(chunk)
        self._removals[key] = None
        if chunk.slot is not None and self.leases.lost_file(key):
            self._warm_chain(chunk)
        reason = self._forget_if_nowhere(chunk, cause)
        self._events.append(BlockRemoved((key,), Tier.DISK, reason))

    def _forget_if_nowhere(self, chunk: Chunk, cause: LeaseBreak) -> Removal:
        """Forget a chunk without copies, and return the reason for its removal."""
        if chunk.slot is not None or chunk.has_file:
            return Removal.EVICTED
        del self._chunks[chunk.name.key]
        self._newest_in_host.leave(chunk.name.key)
        self._newest_on_disk.leave(chunk.name.key)
        return self.leases.gone(chunk.name.key, cause)
