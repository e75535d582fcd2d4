"""LeaseService: takes requests for leases to the directory, and records them in the disk's journal.

Owns the time for leases. Inside a process it is a monotonic clock, so that jumps of the wall clock change
nothing. The journal has the wall-clock time of each lease's end. A later process continues with the rest:
after a jump forward less, perhaps nothing; after one back never more than the lease began with.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from replicas.kvstore.chunk import ChunkName, NotedLease
from replicas.kvstore.directory import Directory
from replicas.kvstore.leasing.lease_outcome import LeaseOutcome, ask_for_leases, lease_totals
from replicas.kvstore.leasing.leases import LeaseRecord, Leases, TenantTag
from replicas.kvstore.tenant_shares import NOBODYS, Tenancy
from replicas.protocol.blocks import BlockHash
from replicas.protocol.prefix_leases import LeaseTotals, PrefixLease
from replicas.protocol.tier_figures import WriteStop


class LeaseJournal(Protocol):
    """Storage for leases on a disk. Ends are in seconds since 1970."""

    restored_leases: Mapping[BlockHash, NotedLease]

    @property
    def is_off(self) -> bool: ...

    @property
    def write_stop(self) -> WriteStop | None: ...

    def note_lease(self, key: BlockHash, until: float, seconds: int, tenant: bytes = b"") -> None: ...


def leases_within(lease_share: float, num_slots: int, max_files: int) -> Leases:
    """Make leases with this share of each tier as budget."""
    return Leases(host_chunks=int(num_slots * lease_share), disk_chunks=int(max_files * lease_share))


def restored_leases(journal: LeaseJournal, wall_clock: Callable[[], float]) -> Iterable[LeaseRecord]:
    """Read the unexpired leases of an earlier process."""
    now = wall_clock()
    for key, (until, seconds, tenant) in journal.restored_leases.items():
        if until > now:
            left = until - now
            yield LeaseRecord(key, seconds or math.ceil(min(left, 1e9)), left, TenantTag(tenant))


class LeaseService:
    """`blocks_per_chunk` blocks are a chunk, which is `chunk_tokens` tokens. `clock` never goes back."""

    def __init__(
        self,
        directory: Directory,
        journal: LeaseJournal | None,
        *,
        blocks_per_chunk: int,
        chunk_tokens: int,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._journal = journal
        self._blocks_per_chunk = blocks_per_chunk
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._wall_clock = wall_clock
        self._told = LeaseTotals()

    def ask(
        self,
        names: Sequence[ChunkName],
        leases: Sequence[PrefixLease],
        num_device_blocks: int,
        tenancy: Tenancy = NOBODYS,
        bucket: bytes = b"",
    ) -> LeaseOutcome:
        """Request leases for a prompt with these chunks, of which that many blocks are on the device."""
        self.look()
        return ask_for_leases(
            self._directory,
            names,
            leases,
            blocks_per_chunk=self._blocks_per_chunk,
            chunk_tokens=self._chunk_tokens,
            num_device_blocks=num_device_blocks,
            tenancy=tenancy,
            bucket=bucket,
        )

    def look(self) -> None:
        """Update the time, and whether the disk accepts writes."""
        journal = self._journal
        takes_nothing = journal is not None and (journal.is_off or journal.write_stop is not None)
        self._directory.leases.is_disk_off = takes_nothing
        self._directory.pass_time(self._clock())

    def poll(self) -> None:
        """Let time pass, and record changes in the journal."""
        self._directory.pass_time(self._clock())
        changes, ends = self._directory.take_lease_changes(), self._directory.take_lease_ends()
        if self._journal is not None and changes:
            now = self._wall_clock()
            for record in changes:
                until = now + record.seconds_left
                self._journal.note_lease(record.key, until, record.seconds, record.tenant)
        if self._journal is not None:
            for key in ends:
                self._journal.note_lease(key, 0.0, 0)

    def is_to_be_synced(self, key: BlockHash) -> bool:
        """Whether a write of the chunk is to survive a power cut once it has ended."""
        return self._directory.leases.wants_file(key)

    def take_totals(self) -> LeaseTotals | None:
        """Return the totals; None if unchanged since the last call."""
        totals = lease_totals(self._directory, self._chunk_tokens)
        if totals == self._told:
            return None
        self._told = totals
        return totals
