"""LeaseList: a store's leased chunks, gathered a few at a time, so that no step waits for all.

Owns its progress. Pure. Of more than `MAX_LISTED_CHUNKS` it finds those with the longest leases, and of these
the beginnings of prompts first. Chunks that go or end meanwhile are left out; new ones are for the next list.
"""

import heapq

from replicas.kvstore.directory import Directory
from replicas.protocol.blocks import BlockHash
from replicas.protocol.hand_overs import MAX_LISTED_CHUNKS, LeasedChunk
from replicas.protocol.prefix_leases import MAX_LEASE_SECONDS

SEEN_PER_STEP = 4096
TOLD_PER_STEP = 1024


class LeaseList:
    """The answer to the question with this number."""

    def __init__(self, directory: Directory, number: int) -> None:
        self.number = number
        self._directory = directory
        self._keys = directory.leases.keys()
        self._num_seen = 0
        self._longest: list[tuple[float, int, BlockHash]] = []
        """A heap of those that are there, by the ends of their leases."""
        self._found: list[LeasedChunk] = []
        """The shortest leases first."""

    def go_on(self) -> tuple[LeasedChunk, ...] | None:
        """Look at a few more. All of them once that is done, else None."""
        if self._num_seen < len(self._keys):
            self._look_on()
            if self._num_seen < len(self._keys):
                return None
        for _ in range(min(TOLD_PER_STEP, len(self._longest))):
            leased = self._leased(heapq.heappop(self._longest)[2])
            if leased is not None:
                self._found.append(leased)
        return None if self._longest else tuple(reversed(self._found))

    def _look_on(self) -> None:
        keys = self._keys[self._num_seen : self._num_seen + SEEN_PER_STEP]
        for key in keys:
            place = self._directory.lease_end(key)
            if place is None:
                continue
            entry = (place[0], -place[1], key)
            if len(self._longest) < MAX_LISTED_CHUNKS:
                heapq.heappush(self._longest, entry)
            else:
                heapq.heappushpop(self._longest, entry)
        self._num_seen += len(keys)

    def _leased(self, key: BlockHash) -> LeasedChunk | None:
        lease = self._directory.leased(key)
        if lease is None or lease[0].seconds_left <= 0:
            return None
        record, chunk, store_share = lease
        return LeasedChunk(
            *chunk.name,
            record.seconds,
            min(record.seconds_left, float(MAX_LEASE_SECONDS)),
            record.tenant,
            record.tenant_share,
            store_share,
            record.bucket,
            chunk.is_on_disk,
        )
