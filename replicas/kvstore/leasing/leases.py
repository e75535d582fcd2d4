"""Leases: which chunks of KV are promised to be kept, for how long, and the outcome of each promise.

Owns the promises and their budget. Pure: it moves nothing, knows neither slots nor files, and gets the time
from its caller. `directory.py` keeps the promises.

A lease belongs to a chunk and lasts for some seconds after its last use. The longest of several wins, and
belongs to its requester. It is charged to the tier that keeps it: to disk if the chunk has a file or the
lease is an hour or more, else to host memory. A lease on disk also takes host memory until its file is
written. So neither tier ever owes more than its budget, in any order of writes::

    granted ──stored──> held ──its seconds are over──────> kept
       │                  └─────its last copy went───────> broken, a tombstone
       └────never stored, STORE_SECONDS are over─────────> broken, a tombstone

A *kept* chunk may be evicted. The last `MAX_KEPT` are remembered as expired until they are stored or leased
again.

A *tombstone* stays until the lease's end or until the chunk is stored again, so that a request that misses
the chunk is told why it went before its time. At most `MAX_TOMBSTONES`; more forget the oldest.

**Time** never goes back: an earlier time counts as the latest seen. It is a monotonic clock's; outside the
process only remaining seconds are used.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NewType

from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import Removal
from replicas.protocol.prefix_leases import (
    HOUR_SECONDS,
    MAX_LEASE_SECONDS,
    LeaseBreak,
    LeaseRefusal,
)
from replicas.protocol.status import Epoch

STORE_SECONDS = 600.0
"""A leased chunk is stored this long after it was leased, or its lease is broken."""

MAX_TOMBSTONES = 1 << 15
MAX_KEPT = 1 << 15

MAX_SOURCES = 4
"""Replicas that hand one lease over and of which each may take that back. With more it stays."""

_SPARE_ENTRIES = 64

TenantTag = NewType("TenantTag", bytes)
"""Tenant whose budget a lease is charged to."""

EVERYBODY = TenantTag(b"")


class Wish(NamedTuple):
    """A chunk to be leased. `has_file`: it lies on disk, or is being written."""

    key: BlockHash
    has_file: bool = False


class LeaseRecord(NamedTuple):
    """A lease as it outlives a process: `seconds_left` of `seconds`, for the bytes of `tenant`, whose share
    may be its own, and in whose `bucket` it was asked for.
    """

    key: BlockHash
    seconds: int
    seconds_left: float
    tenant: TenantTag = EVERYBODY
    tenant_share: float = 0.0
    bucket: bytes = b""


class Charge(NamedTuple):
    """Chunks of each tier, charged to a lease, to a tenant or in all."""

    host: int = 0
    disk: int = 0

    def plus(self, other: "Charge") -> "Charge":
        return Charge(self.host + other.host, self.disk + other.disk)

    def less(self, other: "Charge") -> "Charge":
        return Charge(self.host - other.host, self.disk - other.disk)

    def is_within(self, most: "Charge") -> bool:
        return self.host <= most.host and self.disk <= most.disk


@dataclass(slots=True)
class LeaseCounts:
    """Counts since the start. `granted` and `refused` count requested leases, the rest chunks: each leased
    chunk is held, was kept, or had its lease broken."""

    granted: int = 0
    refused: Counter[LeaseRefusal] = field(default_factory=Counter)
    leased: int = 0
    kept: int = 0
    broken: Counter[LeaseBreak] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class _Lease:
    key: BlockHash
    seconds: int
    end: float
    tenant: TenantTag
    is_on_disks_bill: bool
    has_file: bool
    store_by: float | None
    """Until it is stored."""
    broken_by: LeaseBreak | None = None
    bucket: bytes = b""
    sources: tuple[Epoch, ...] | None = None
    """The replica that handed it over; None for a request here."""

    @property
    def charge(self) -> Charge:
        return _charge(self.is_on_disks_bill, self.has_file)

    @property
    def due(self) -> float:
        """Return the time of the next change without input."""
        return self.end if self.store_by is None or self.broken_by else min(self.end, self.store_by)


class Leases:
    """At most `host_chunks` and `disk_chunks` are leased, of one tenant at most its share of each."""

    def __init__(self, *, host_chunks: int = 0, disk_chunks: int = 0, tenant_share: float = 1.0) -> None:
        if host_chunks < 0 or disk_chunks < 0 or not 0 < tenant_share <= 1:
            raise ValueError(
                "leases need budgets of 0 chunks or more and a tenant's share above 0 and up to 1, not"
                f" {host_chunks}, {disk_chunks} and {tenant_share:g}"
            )
        self.budget = Charge(host_chunks, disk_chunks)
        self.tenant_budget = Charge(int(host_chunks * tenant_share), int(disk_chunks * tenant_share))
        self.counts = LeaseCounts()
        self.charged = Charge()
        """In all."""
        self.is_disk_off = False
        """Nothing is written any more, so no lease that needs the disk is granted."""
        self.now = 0.0
        self._leases: dict[BlockHash, _Lease] = {}
        self._tombstones: OrderedDict[BlockHash, _Lease] = OrderedDict()
        self._kept: OrderedDict[BlockHash, bool] = OrderedDict()
        """Chunks whose leases ran out while they were there, and whether they have gone since."""
        self._due: list[tuple[float, int, _Lease]] = []
        """A heap with one entry for each lease and tombstone, whose time may be too early."""
        self._num_entries = 0
        self._charged: dict[TenantTag, Charge] = {}
        self._budgets: dict[TenantTag, Charge] = {}
        self._shares: dict[TenantTag, float] = {}
        """Tenants with a share of their own, while charged with a lease."""

    @property
    def num_leased(self) -> int:
        return len(self._leases)

    @property
    def num_tombstones(self) -> int:
        return len(self._tombstones)

    def charged_to(self, tenant: TenantTag) -> Charge:
        return self._charged.get(tenant, Charge())

    def holds(self, key: BlockHash) -> bool:
        """Whether the chunk is leased now, whether it is stored yet or not."""
        return key in self._leases

    def wants_file(self, key: BlockHash) -> bool:
        """Whether the chunk's lease is so long that it must be written at once."""
        lease = self._leases.get(key)
        return lease is not None and lease.is_on_disks_bill and not lease.has_file

    def broken_by(self, key: BlockHash) -> LeaseBreak | None:
        """Why a chunk went before its time that is still within it."""
        lease = self._tombstones.get(key)
        return None if lease is None else lease.broken_by

    def has_expired(self, key: BlockHash) -> bool:
        """Whether a chunk went after its lease had run out."""
        return self._kept.get(key, False)

    def end(self, key: BlockHash) -> float | None:
        """Return the end of the chunk's lease, if it has one."""
        lease = self._leases.get(key)
        return None if lease is None else lease.end

    def keys(self) -> list[BlockHash]:
        """Keys of all leased chunks, stored or not."""
        return [*self._leases]

    def records(self, keys: Iterable[BlockHash]) -> list[LeaseRecord]:
        """Return the leases among these chunks."""
        return [self._record(lease) for key in keys if (lease := self._leases.get(key)) is not None]

    def all_records(self) -> list[LeaseRecord]:
        """Records of all leased chunks, stored or not."""
        return [*map(self._record, self._leases.values())]

    def _record(self, lease: _Lease) -> LeaseRecord:
        share = self._shares.get(lease.tenant, 0.0)
        return LeaseRecord(lease.key, lease.seconds, lease.end - self.now, lease.tenant, share, lease.bucket)

    # What time does.

    def pass_time(self, now: float) -> list[BlockHash]:
        """Set the time. Returns the chunks whose lease ended."""
        self.now = max(self.now, now)
        ended: list[BlockHash] = []
        while self._due and self._due[0][0] <= self.now:
            _, _, lease = heapq.heappop(self._due)
            key = lease.key
            if lease.broken_by is not None:
                if self._tombstones.get(key) is lease:
                    self._bury_or_wait(lease)
            elif self._leases.get(key) is not lease:
                continue
            elif lease.due > self.now:
                self._note_due(lease)
            elif lease.store_by is not None:
                ended.append(key)
                self._broke(lease, LeaseBreak.NOT_STORED)
                self._note_due(lease)
            else:
                ended.append(key)
                self._end(lease)
                self.counts.kept += 1
                self._kept[key] = False
                self._kept.move_to_end(key)
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        return ended

    def _bury_or_wait(self, lease: _Lease) -> None:
        if lease.due > self.now:
            self._note_due(lease)
        else:
            del self._tombstones[lease.key]

    # What is asked for.

    def grant(
        self,
        wishes: Sequence[Wish],
        seconds: int,
        tenant: TenantTag = EVERYBODY,
        tenant_share: float = 0.0,
        bucket: bytes = b"",
    ) -> LeaseRefusal | None:
        """Lease all of these chunks, or none and say why. Existing leases restart. `tenant_share` bounds a
        tenant with a share of its own; 0 is none."""
        refusal = self._refusal_within(tenant_share, wishes, seconds, tenant)
        if refusal is not None:
            self.counts.refused[refusal] += 1
            return refusal
        self.counts.granted += 1
        for wish in wishes:
            self._lease(wish, seconds, tenant, seconds, bucket)
            self._leases[wish.key].sources = None
            self.use(wish.key)
        return None

    def take_over(self, record: LeaseRecord, *, has_file: bool, source: Epoch) -> LeaseRefusal | None:
        """Lease as another replica had, for the time that is left. None if it is leased now."""
        wish, seconds = Wish(record.key, has_file), min(record.seconds, MAX_LEASE_SECONDS)
        left = min(record.seconds_left, float(seconds))
        if not left > 0:
            return LeaseRefusal.NO_TIME
        # What its own requests have said here is newer than what it was when the record was made.
        share = self._shares.get(record.tenant, record.tenant_share)
        refusal = self._refusal_within(share, [wish], seconds, record.tenant)
        if refusal is None:
            is_new = record.key not in self._leases
            self._lease(wish, seconds, record.tenant, left, record.bucket)
            lease = self._leases[record.key]
            lease.end = max(lease.end, self.now + left)
            if is_new:
                lease.sources = (source,)
            elif lease.sources is not None and source not in lease.sources:
                has_room = len(lease.sources) < MAX_SOURCES
                lease.sources = (*lease.sources, source) if has_room else None
        return refusal

    def withdraw(self, key: BlockHash, source: Epoch) -> bool:
        """Undo this replica's hand-over of the chunk's lease. The lease ends, and True is returned, unless
        another replica has handed it over too, or a request has asked for it here."""
        lease = self._leases.get(key)
        if lease is None or lease.sources is None or source not in lease.sources:
            return False
        lease.sources = tuple(other for other in lease.sources if other != source)
        if lease.sources:
            return False
        self._end(lease)
        self.counts.leased -= 1
        return True

    def lost_elsewhere(self, record: LeaseRecord, *, is_broken: bool) -> None:
        """Remember a tombstone for a chunk that a leaving replica leased and no replica keeps, unless it is
        leased here. It does not count as broken if its copy may return with that replica."""
        left = min(record.seconds_left, float(MAX_LEASE_SECONDS))
        if record.key in self._leases or record.key in self._tombstones or not left > 0:
            return
        end = self.now + left
        lease = _Lease(record.key, record.seconds, end, record.tenant, False, False, None, LeaseBreak.LEFT)
        if is_broken:
            self.counts.leased += 1
            self.counts.broken[LeaseBreak.LEFT] += 1
        self._kept.pop(record.key, None)
        self._bury(lease)
        self._note_due(lease)

    def restore(self, records: Iterable[LeaseRecord]) -> None:
        """Restore an earlier process's leases on chunks that are on disk. Leases without time or budget are
        skipped, and remaining time is bounded by the original."""
        for record in records:
            seconds = min(record.seconds, MAX_LEASE_SECONDS)
            left = min(record.seconds_left, float(seconds))
            wish = Wish(record.key, has_file=True)
            if record.key in self._leases or not left > 0:
                continue
            if self._refusal([wish], seconds, record.tenant) is None:
                self._lease(wish, seconds, record.tenant, left)
                self.stored(record.key)

    def use(self, key: BlockHash) -> None:
        """The chunk is used: its lease, if it has one, begins anew."""
        lease = self._leases.get(key)
        if lease is not None:
            lease.end = self.now + lease.seconds

    # What becomes of the chunks.

    def stored(self, key: BlockHash) -> None:
        """Record a copy of the chunk, which removes its tombstone."""
        lease = self._leases.get(key)
        if lease is not None:
            lease.store_by = None
            return
        self._tombstones.pop(key, None)
        if self._kept.get(key):
            del self._kept[key]

    def has_file(self, key: BlockHash) -> None:
        lease = self._leases.get(key)
        if lease is not None:
            self._set_file(lease, has_file=True)

    def lost_file(self, key: BlockHash) -> bool:
        """Record the loss of a file whose copy in host memory remains. Returns whether it is still leased:
        not if host memory's budget has no room, which breaks the lease."""
        lease = self._leases.get(key)
        if lease is None:
            return False
        more = _charge(lease.is_on_disks_bill, False).less(lease.charge)
        if self._refusal_of({lease.tenant: more}) is not None:
            self._broke(lease, LeaseBreak.LOST)
            return False
        self._set_file(lease, has_file=False)
        return True

    def gone(self, key: BlockHash, cause: LeaseBreak) -> Removal:
        """Record the loss of the last copy, and return the reason. A chunk that was not stored yet may still
        be."""
        lease = self._leases.get(key)
        if lease is not None and lease.store_by is None:
            self._broke(lease, cause)
        elif key in self._kept:
            self._kept[key] = True
        if key in self._tombstones:
            return Removal.BROKEN
        if cause is LeaseBreak.LOST:
            return Removal.LOST
        return Removal.EXPIRED if key in self._kept else Removal.EVICTED

    def clear(self) -> None:
        """All copies went at once."""
        for lease in [*self._leases.values()]:
            self._broke(lease, LeaseBreak.CLEARED)
        self._kept = OrderedDict.fromkeys(self._kept, True)

    # Promises.

    def _lease(self, wish: Wish, seconds: int, tenant: TenantTag, left: float, bucket: bytes = b"") -> None:
        lease = self._leases.get(wish.key)
        if lease is None:
            lease = _Lease(
                wish.key,
                seconds,
                self.now + left,
                tenant,
                is_on_disks_bill=self._is_on_disks_bill(wish, seconds),
                has_file=wish.has_file,
                store_by=self.now + STORE_SECONDS,
                bucket=bucket,
            )
            self._tombstones.pop(wish.key, None)
            self._kept.pop(wish.key, None)
            self._leases[wish.key] = lease
            self._charge(tenant, lease.charge)
            self.counts.leased += 1
            self._note_due(lease)
            return
        if lease.store_by is not None:
            lease.store_by = self.now + STORE_SECONDS
        if seconds > lease.seconds:
            self._charge(lease.tenant, Charge().less(lease.charge))
            lease.seconds, lease.tenant, lease.bucket = seconds, tenant, bucket
            lease.is_on_disks_bill |= self._is_on_disks_bill(wish, seconds)
            self._charge(tenant, lease.charge)

    def _end(self, lease: _Lease) -> None:
        del self._leases[lease.key]
        self._charge(lease.tenant, Charge().less(lease.charge))

    def _broke(self, lease: _Lease, cause: LeaseBreak) -> None:
        self._end(lease)
        lease.broken_by = cause
        self.counts.broken[cause] += 1
        self._bury(lease)

    def _bury(self, lease: _Lease) -> None:
        self._tombstones[lease.key] = lease
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def _note_due(self, lease: _Lease) -> None:
        self._num_entries += 1
        heapq.heappush(self._due, (lease.due, self._num_entries, lease))
        if len(self._due) > 2 * (len(self._leases) + len(self._tombstones)) + _SPARE_ENTRIES:
            living = {id(each) for table in (self._leases, self._tombstones) for each in table.values()}
            self._due = [entry for entry in self._due if id(entry[2]) in living]
            heapq.heapify(self._due)

    # The budget.

    def _set_share(self, tenant: TenantTag, share: float) -> None:
        if share > 0 and tenant != EVERYBODY:
            self._budgets[tenant] = Charge(int(self.budget.host * share), int(self.budget.disk * share))
            self._shares[tenant] = share
        else:
            self._forget_share(tenant)

    def _forget_share(self, tenant: TenantTag) -> None:
        self._budgets.pop(tenant, None)
        self._shares.pop(tenant, None)

    def _is_on_disks_bill(self, wish: Wish, seconds: int) -> bool:
        return self.budget.disk > 0 and (wish.has_file or seconds >= HOUR_SECONDS)

    def _refusal_within(
        self, share: float, wishes: Sequence[Wish], seconds: int, tenant: TenantTag
    ) -> LeaseRefusal | None:
        self._set_share(tenant, share)
        refusal = self._refusal(wishes, seconds, tenant)
        if tenant not in self._charged and refusal is not None:
            self._forget_share(tenant)
        return refusal

    def _refusal(self, wishes: Sequence[Wish], seconds: int, tenant: TenantTag) -> LeaseRefusal | None:
        if seconds < 1:
            return LeaseRefusal.NO_TIME
        if seconds > MAX_LEASE_SECONDS:
            return LeaseRefusal.TOO_LONG
        has_disk = self.budget.disk and not self.is_disk_off
        if not (has_disk or (self.budget.host and seconds <= HOUR_SECONDS)):
            return LeaseRefusal.NO_TIER
        if not wishes:
            return LeaseRefusal.NO_WHOLE_CHUNK
        more: dict[TenantTag, Charge] = {}
        for wish in wishes:
            lease = self._leases.get(wish.key)
            if lease is None:
                owed = _charge(self._is_on_disks_bill(wish, seconds), wish.has_file)
            elif seconds > lease.seconds:
                more[lease.tenant] = more.get(lease.tenant, Charge()).less(lease.charge)
                bill = lease.is_on_disks_bill or self._is_on_disks_bill(wish, seconds)
                owed = _charge(bill, lease.has_file)
            else:
                continue
            more[tenant] = more.get(tenant, Charge()).plus(owed)
        return self._refusal_of(more)

    def _refusal_of(self, more: Mapping[TenantTag, Charge]) -> LeaseRefusal | None:
        total = self.charged
        for tenant, charge in more.items():
            total = total.plus(charge)
            budget = self._budgets.get(tenant, self.tenant_budget)
            if not self.charged_to(tenant).plus(charge).is_within(budget):
                return LeaseRefusal.BUDGET if budget == self.budget else LeaseRefusal.TENANT_SHARE
        return None if total.is_within(self.budget) else LeaseRefusal.BUDGET

    def _set_file(self, lease: _Lease, *, has_file: bool) -> None:
        before = lease.charge
        lease.has_file = has_file
        self._charge(lease.tenant, lease.charge.less(before))

    def _charge(self, tenant: TenantTag, more: Charge) -> None:
        self.charged = self.charged.plus(more)
        self._charged[tenant] = self.charged_to(tenant).plus(more)
        if self._charged[tenant] == Charge():
            del self._charged[tenant]
            self._forget_share(tenant)


def _charge(is_on_disks_bill: bool, has_file: bool) -> Charge:
    return Charge(0 if has_file else 1, 1) if is_on_disks_bill else Charge(1, 0)
