"""The directory under a storm, beside real bytes: what it says is there is there, and is the right chunk.

Beside its leases stands a plain list of promises: each is held, was kept or is broken, and none is broken
while anything else could go.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replicas.kvstore.directory import ChunkPlace, Directory, Write
from replicas.kvstore.leasing.leases import STORE_SECONDS, LeaseRecord, Leases, TenantTag
from replicas.kvstore.tenant_shares import Tenancy
from replicas.kvstore.write_budget import BURST_SECONDS, WriteBudget
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, Removal, Tier
from replicas.protocol.prefix_leases import HOUR_SECONDS, MAX_LEASE_SECONDS, LeaseBreak, LeaseRefusal
from replicas.protocol.status import Epoch
from tests.replicas.kvstore.chunk_names import chain, key, name

PATHS = [
    first + second + third
    for first in "ab"
    for second in ["", *"ab"]
    for third in ["", *"ab"]
    if second or not third
]
RATE = 2.0
TENANTS = (TenantTag(b""), TenantTag(b"t"))
SOURCES = (Epoch("e"), Epoch("f"))


@dataclass
class Promise:
    seconds: int
    end: float
    store_by: float
    tenant: TenantTag
    is_stored: bool = False
    sources: set[Epoch] | None = None
    """Who has handed it over; None if it was asked for here."""


class Tiers(RuleBasedStateMachine):
    """`arena` and `files` are the bytes: what a slot and a file really hold, the key of a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_written = 0
        self.filling: dict[BlockHash, int] = {}
        self.writing: dict[BlockHash, Write] = {}
        self.pinned: Counter[BlockHash] = Counter()
        self.stuck: list[int] = []
        self.files: dict[BlockHash, BlockHash] = {}
        self.told: dict[Tier, set[BlockHash]] = {Tier.HOST: set(), Tier.DISK: set()}
        self.promises: dict[BlockHash, Promise] = {}
        self.num_promised = self.num_kept = 0
        self.num_broken: Counter[LeaseBreak] = Counter()

    @initialize(
        host=st.integers(1, 6),
        disk=st.integers(0, 5),
        restored=st.lists(st.sampled_from(PATHS), unique=True),
        lease_share=st.sampled_from([0.0, 0.5, 1.0]),
        tenant_share=st.sampled_from([0.5, 1.0]),
        store_shares=st.sampled_from([(0.0, 0.0), (0.5, 0.0), (0.25, 0.5), (1.0, 1.0)]),
    )
    def begin(
        self,
        host: int,
        disk: int,
        restored: list[str],
        lease_share: float,
        tenant_share: float,
        store_shares: tuple[float, float],
    ) -> None:
        self.tenancies = {
            first: Tenancy(TenantTag(first.encode()), 0.0, share)
            for first, share in zip("ab", store_shares, strict=True)
        }
        self.has_shares = any(store_shares)
        self.directory = Directory(
            host_chunks=host,
            disk_chunks=disk,
            chunk_bytes=1,
            write_budget=WriteBudget(bytes_per_second=RATE),
            leases=Leases(
                host_chunks=int(host * lease_share),
                disk_chunks=int(disk * lease_share),
                tenant_share=tenant_share,
            ),
        )
        self.arena: list[BlockHash | None] = [None] * host
        if disk:
            self.files = {key(path): key(path) for path in restored}
            self.directory.restore(map(name, restored))
            self.remove_files()

    @rule(path=st.sampled_from(PATHS))
    def offer(self, path: str) -> None:
        with self.only_the_last_leased_one_goes():
            slot = self.directory.offer(name(path), self.tenancies[path[0]])
        if slot is not None:
            self.begin_filling(key(path), slot)

    @rule(path=st.sampled_from(PATHS))
    def put(self, path: str) -> None:
        """The whole chain, as when a prompt has been computed."""
        for length in range(1, len(path) + 1):
            self.offer(path[:length])
            slot = self.filling.pop(key(path[:length]), None)
            if slot is not None:
                self.arena[slot] = key(path[:length])
                self.directory.filled(key(path[:length]))
            self.tell()
            self.note_stored()

    @rule(path=st.sampled_from(PATHS))
    def fetch(self, path: str) -> None:
        if self.directory.place(key(path)) is ChunkPlace.DISK:
            with self.only_the_last_leased_one_goes():
                slot = self.directory.fetch(key(path))
            if slot is not None:
                self.begin_filling(key(path), slot)

    @contextmanager
    def only_the_last_leased_one_goes(self) -> Iterator[None]:
        """Out of host memory a promise goes that has no file, and only if there is nothing else to take."""
        directory = self.directory
        in_host = {key(path) for path in PATHS if directory.place(key(path)) is ChunkPlace.HOST}
        has_free = directory.num_in_host + directory.num_quarantined < directory.num_host_slots
        could_go = in_host - self.pinned.keys() - self.writing.keys()
        on_disk = self.told[Tier.DISK]
        may_not_go = {chunk for chunk in could_go - on_disk if chunk in self.promises}
        yield
        gone = [chunk for chunk in may_not_go if directory.place(chunk) is None]
        assert not gone or (len(gone) == 1 and not has_free)
        assert not gone or could_go == may_not_go or self.has_shares
        for chunk in gone:
            self.break_promise(chunk, LeaseBreak.HOST_FULL)

    def break_promise(self, chunk: BlockHash, cause: LeaseBreak) -> None:
        del self.promises[chunk]
        self.num_broken[cause] += 1
        if not self.directory.place(chunk):
            assert self.directory.broken([chunk]) == (1, cause)

    @rule(
        path=st.sampled_from(PATHS),
        seconds=st.sampled_from([20, HOUR_SECONDS, MAX_LEASE_SECONDS, 3, 0, MAX_LEASE_SECONDS + 1]),
        tenant=st.sampled_from(TENANTS),
    )
    def lease(self, path: str, seconds: int, tenant: TenantTag) -> None:
        directory = self.directory
        refusal = directory.grant(chain(path), seconds, Tenancy(tenant))
        new = [chunk for chunk in chain(path) if chunk not in self.promises]
        if not 0 < seconds <= MAX_LEASE_SECONDS:
            assert refusal is (LeaseRefusal.TOO_LONG if seconds else LeaseRefusal.NO_TIME)
        if refusal is not None:
            return
        for chunk in new:
            self.num_promised += 1
            self.promises[chunk] = Promise(
                seconds, self.now + seconds, self.now + STORE_SECONDS, tenant, self.has_copy(chunk)
            )
        for chunk in chain(path):
            promise = self.promises[chunk]
            if seconds > promise.seconds:
                promise.seconds, promise.tenant = seconds, tenant
            promise.end = self.now + promise.seconds
            promise.store_by = self.now + STORE_SECONDS
            promise.sources = None

    @rule(
        path=st.sampled_from(PATHS),
        seconds=st.sampled_from([20, HOUR_SECONDS, MAX_LEASE_SECONDS]),
        left=st.sampled_from([2.0, 20.0, 3000.0]),
        tenant=st.sampled_from(TENANTS),
        source=st.sampled_from(SOURCES),
    )
    def take_over(self, path: str, seconds: int, left: float, tenant: TenantTag, source: Epoch) -> None:
        records = [LeaseRecord(chunk, seconds, left, tenant) for chunk in chain(path)]
        for chunk, refusal in zip(chain(path), self.directory.take_leases(records, source), strict=True):
            if refusal is not None:
                continue
            end = self.now + min(left, seconds)
            promise = self.promises.get(chunk)
            if promise is None:
                self.num_promised += 1
                self.promises[chunk] = Promise(
                    seconds, end, self.now + STORE_SECONDS, tenant, self.has_copy(chunk), {source}
                )
                continue
            if seconds > promise.seconds:
                promise.seconds, promise.tenant = seconds, tenant
            promise.end = max(promise.end, end)
            promise.store_by = self.now + STORE_SECONDS
            if promise.sources is not None:
                promise.sources.add(source)

    @rule(path=st.sampled_from(PATHS), source=st.sampled_from(SOURCES))
    def withdraw(self, path: str, source: Epoch) -> None:
        self.directory.withdraw(chain(path), source)
        for chunk in chain(path):
            promise = self.promises.get(chunk)
            if promise is not None and promise.sources is not None:
                promise.sources.discard(source)
                if not promise.sources:
                    del self.promises[chunk]
                    self.num_promised -= 1
        assert set(self.directory.take_lease_ends()) <= self.files.keys() - self.promises.keys()

    def has_copy(self, chunk: BlockHash) -> bool:
        return (
            self.directory.place(chunk) in (ChunkPlace.HOST, ChunkPlace.DISK) or chunk in self.told[Tier.DISK]
        )

    def begin_filling(self, chunk: BlockHash, slot: int) -> None:
        assert slot not in self.filling.values() and slot not in self.stuck
        assert all(write.slot != slot for write in self.writing.values())
        for pinned in self.pinned:
            at = self.directory.slot(pinned)
            assert at is not None and at[0] != slot
        self.arena[slot] = None
        self.filling[chunk] = slot

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), ends_well=st.booleans(), hangs=st.booleans())
    def end_filling(self, data: st.DataObject, ends_well: bool, hangs: bool) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.filling)))
        slot = self.filling.pop(chunk)
        if ends_well:
            self.arena[slot] = chunk
            self.directory.filled(chunk)
            return
        self.directory.given_up(chunk, may_still_be_written=hangs)
        if chunk in self.promises and self.promises[chunk].is_stored and not self.has_copy(chunk):
            self.break_promise(chunk, LeaseBreak.LOST)
        if hangs:
            self.stuck.append(slot)

    @precondition(lambda self: self.stuck)
    @rule(data=st.data())
    def a_stuck_thread_returns(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.stuck))
        self.arena[slot] = key("?")
        self.stuck.remove(slot)
        self.directory.give_back(slot)

    @rule(path=st.sampled_from(PATHS))
    def use(self, path: str) -> None:
        self.directory.use(chain(path), self.tenancies[path[0]])
        for chunk in chain(path):
            if chunk in self.promises:
                self.promises[chunk].end = self.now + self.promises[chunk].seconds

    @rule(path=st.sampled_from(PATHS))
    def pin(self, path: str) -> None:
        if self.directory.place(key(path)) is ChunkPlace.HOST:
            self.directory.pin([key(path)])
            self.pinned[key(path)] += 1

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.pinned)))
        self.directory.unpin([chunk])
        self.pinned -= Counter([chunk])

    @rule(seconds=st.sampled_from([0, 1, 2, 3, 0, 1, 2, 3, 15, 650, HOUR_SECONDS, MAX_LEASE_SECONDS]))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.directory.pass_time(self.now)
        self.directory.pass_time(self.now - 1)
        for chunk, promise in [*self.promises.items()]:
            if not promise.is_stored and promise.store_by <= self.now:
                del self.promises[chunk]
                self.num_broken[LeaseBreak.NOT_STORED] += 1
            elif promise.end <= self.now:
                del self.promises[chunk]
                if promise.is_stored:
                    self.num_kept += 1
                else:
                    self.num_broken[LeaseBreak.NOT_STORED] += 1

    @rule(max_writes=st.integers(1, 3))
    def begin_writes(self, max_writes: int) -> None:
        self.remove_files()
        leased_files = self.files.keys() & self.promises.keys()
        for write in self.directory.take_writes(self.now, max_writes):
            assert write.name.key not in self.writing
            self.writing[write.name.key] = write
            self.num_written += 1
        self.remove_files()
        assert leased_files <= self.files.keys()

    @rule(max_writes=st.integers(1, 3))
    def begin_early_writes(self, max_writes: int) -> None:
        self.remove_files()
        files = set(self.files)
        for write in self.directory.take_early_writes(self.now, max_writes):
            assert write.name.key not in self.writing
            self.writing[write.name.key] = write
            self.num_written += 1
        self.remove_files()
        assert set(self.files) == files, "a file has gone for one that could wait"

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), ends_well=st.booleans())
    def end_write(self, data: st.DataObject, ends_well: bool) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.writing)))
        write = self.writing.pop(chunk)
        held = self.arena[write.slot]
        assert held == chunk, "the slot had another chunk while it was written"
        if ends_well:
            self.files[chunk] = held
            self.directory.written(chunk)
        else:
            self.directory.not_written(chunk)
            self.may_have_lost(chunk)

    @rule(path=st.sampled_from(PATHS))
    def lose_a_file(self, path: str) -> None:
        chunk = key(path)
        was_on_disk = chunk in self.told[Tier.DISK]
        self.directory.lost_file(chunk)
        self.tell(lost=chunk)
        if was_on_disk:
            self.may_have_lost(chunk)

    def may_have_lost(self, chunk: BlockHash) -> None:
        """A promise is broken if there is no copy left, or no budget for keeping the one in host memory."""
        if chunk not in self.promises or self.directory.leases.holds(chunk):
            return
        leases = self.directory.leases
        tenant = self.promises[chunk].tenant
        assert (
            self.directory.place(chunk) is None
            or leases.charged.host == leases.budget.host
            or leases.charged_to(tenant).host == leases.tenant_budget.host
        )
        self.break_promise(chunk, LeaseBreak.LOST)

    @rule()
    def clear(self) -> None:
        cleared = self.directory.clear()
        assert cleared == (not self.filling and not self.writing and not self.pinned)
        if cleared:
            self.remove_files()
            assert not self.files
            self.num_broken[LeaseBreak.CLEARED] += len(self.promises)
            self.promises.clear()

    def what_it_is_called(self, chunk: BlockHash, lost: BlockHash | None) -> Removal:
        """Why a copy went, as the owner of a miss is told. A copy on its way into host memory is one."""
        if self.has_copy(chunk) or chunk in self.filling:
            return Removal.EVICTED
        if self.directory.broken([chunk])[0]:
            return Removal.BROKEN
        if chunk == lost:
            return Removal.LOST
        return Removal.EXPIRED if self.directory.num_expired([chunk]) else Removal.EVICTED

    def remove_files(self) -> None:
        for chunk in self.directory.take_removals():
            self.files.pop(chunk, None)

    def tell(self, lost: BlockHash | None = None) -> None:
        for event in self.directory.take_events():
            match event:
                case BlockStored([chunk], tier=tier):
                    assert chunk not in self.told[tier]
                    self.told[tier].add(chunk)
                case BlockRemoved([chunk], tier, reason):
                    self.told[tier].remove(chunk)
                    assert reason is self.what_it_is_called(chunk, lost)
                case AllBlocksCleared(tier):
                    self.told[tier].clear()
        self.remove_files()

    @invariant()
    def what_is_there_is_there(self) -> None:
        self.tell()
        in_host = {key(path) for path in PATHS if self.directory.place(key(path)) is ChunkPlace.HOST}
        assert self.told[Tier.HOST] == in_host
        for chunk in in_host:
            at = self.directory.slot(chunk)
            assert at is not None and self.arena[at[0]] == chunk
            assert at[0] not in self.stuck
        assert self.told[Tier.DISK] == self.files.keys()
        assert all(self.files[chunk] == chunk for chunk in self.files)

    @invariant()
    def what_tenants_hold_is_counted(self) -> None:
        directory = self.directory
        for shares in (directory._host_shares, directory._disk_shares):
            for order in shares.orders:
                whose: dict[object, list[BlockHash]] = {}
                for chunk in order:
                    whose.setdefault(chunk.tenant, []).append(chunk.name.key)
                if self.has_shares and order._parts is not None:
                    parts = {tenant: [*order.of(tenant)] for tenant in order._parts}
                    assert {
                        tenant: [chunk.name.key for chunk in part] for tenant, part in parts.items() if part
                    } == whose
            held = Counter(chunk.tenant for order in shares.orders for chunk in order if chunk.tenant)
            assert shares._held == held
            assert set(shares._over) == {each for each in held if held[each] > shares.room_of(each)}

    @invariant()
    def promises_are_held_and_counted(self) -> None:
        self.note_stored()
        leases = self.directory.leases
        chunks = {key(path) for path in PATHS}
        assert {chunk for chunk in chunks if leases.holds(chunk)} == self.promises.keys()
        assert leases.num_leased == len(self.promises)
        counts = leases.counts
        assert (counts.leased, counts.kept, counts.broken) == (
            self.num_promised,
            self.num_kept,
            self.num_broken,
        )
        assert counts.leased == leases.num_leased + counts.kept + counts.broken.total()
        assert leases.num_tombstones <= counts.broken.total()

    def note_stored(self) -> None:
        for chunk, promise in self.promises.items():
            promise.is_stored = promise.is_stored or self.has_copy(chunk)
            assert not promise.is_stored or self.directory.place(chunk) is not None

    @invariant()
    def no_more_is_promised_than_the_budget(self) -> None:
        leases, directory = self.directory.leases, self.directory
        has_file = self.files.keys() | self.writing.keys()
        assert leases.charged.is_within(leases.budget)
        for tenant in TENANTS:
            own = {chunk: each for chunk, each in self.promises.items() if each.tenant == tenant}
            assert len(own.keys() - has_file) <= leases.charged_to(tenant).host
            long = [each for each in own.values() if each.seconds >= HOUR_SECONDS and leases.budget.disk]
            assert len(long) <= leases.charged_to(tenant).disk
            assert leases.charged_to(tenant).is_within(leases.tenant_budget)
        for record in directory.take_lease_changes():
            promise = self.promises[record.key]
            assert (record.seconds, record.tenant) == (promise.seconds, promise.tenant)
            assert record.seconds_left == promise.end - self.now

    @invariant()
    def every_bound_holds(self) -> None:
        self.remove_files()
        directory = self.directory
        assert directory.num_in_host + directory.num_quarantined <= directory.num_host_slots
        assert directory.num_quarantined == len(self.stuck)
        assert directory.num_on_disk == len(self.files) + len(self.writing) <= directory.max_disk_chunks
        assert self.num_written <= RATE * (self.now + BURST_SECONDS) + 1
        for chunk in self.pinned:
            assert directory.place(chunk) is ChunkPlace.HOST


TestTiers = Tiers.TestCase
