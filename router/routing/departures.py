"""Departures: which block hashes left which replica, when and why, or whether the replica itself went.

Owns this bounded memory. It has the latest departure of each hash, in a table with a place for each: a newer
hash replaces an older one in the same place, so old ones are forgotten gradually.

Noting a change costs as much as appending to a list; notes enter the table by the thousand, or at a lookup.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.events import Removal
from replicas.protocol.status import Epoch, ReplicaId

MAX_HASHES = 1 << 19
"""Places in the table, of 20 bytes each. A power of two."""

MAX_INCARNATIONS = 1 << 12
MAX_NOTED = 1 << 12

_REASONS = 8
"""A mark is the incarnation's number times this, and a reason: a `Removal`, or the last one."""
_REPLICA_GONE = _REASONS - 1


class Departure(NamedTuple):
    """`at` is in seconds of `pass_time`'s clock. For a departed replica `reason` means nothing."""

    replica_id: ReplicaId
    epoch: Epoch
    is_replica_gone: bool
    at: float
    reason: Removal = Removal.EVICTED


class Departures:
    def __init__(self, max_hashes: int = MAX_HASHES) -> None:
        assert max_hashes > 0 and max_hashes & (max_hashes - 1) == 0, "a power of two"
        self.now = 0.0
        """Time of later notes."""
        self._max_hashes = max_hashes
        self._noted: list[BlockHash] = []
        self._notes: tuple[list[int], list[int], list[float]] = ([], [], [])
        """Per call: number noted, mark and time. Flat, so that the garbage collector skips it."""
        self._incarnations: OrderedDict[int, tuple[ReplicaId, Epoch]] = OrderedDict()
        self._numbers: dict[tuple[ReplicaId, Epoch], int] = {}
        self._last_number = 0
        self._rests: npt.NDArray[np.uint64] | None = None
        """The second half of each placed hash; the first half gives its place."""
        self._marks = np.zeros(0, np.uint32)
        self._times = np.zeros(0, np.float64)

    @property
    def num_hashes(self) -> int:
        """Places that are taken. Looks at all."""
        self._write()
        return 0 if self._rests is None else int(np.count_nonzero(self._marks))

    @property
    def num_bytes(self) -> int:
        return 0 if self._rests is None else self._rests.nbytes + self._marks.nbytes + self._times.nbytes

    def left(
        self,
        replica_id: ReplicaId,
        epoch: Epoch,
        block_hashes: Sequence[BlockHash],
        *,
        reason: Removal = Removal.EVICTED,
        is_replica_gone: bool = False,
        at: float | None = None,
    ) -> None:
        """These are gone from there, since now or since `at`."""
        number = self._numbers.get((replica_id, epoch)) or self._add(replica_id, epoch)
        counts, marks, times = self._notes
        counts.append(len(block_hashes))
        marks.append(_REASONS * number + (_REPLICA_GONE if is_replica_gone else reason))
        times.append(self.now if at is None else at)
        self._noted.extend(block_hashes)
        if len(self._noted) >= MAX_NOTED or len(counts) >= MAX_NOTED:
            self._write()

    def of(self, block_hashes: Sequence[BlockHash]) -> list[Departure | None]:
        """Return the latest departure of each."""
        self._write()
        if self._rests is None or not block_hashes:
            return [None] * len(block_hashes)
        places, rests = self._places(block_hashes)
        is_known = self._rests[places] == rests
        if not is_known.any():
            return [None] * len(block_hashes)
        marks = np.where(is_known, self._marks[places], 0)
        return [
            self._departure(mark, float(self._times[place])) if mark else None
            for mark, place in zip(marks.tolist(), places.tolist(), strict=True)
        ]

    def _departure(self, mark: int, at: float) -> Departure | None:
        number, reason = divmod(mark, _REASONS)
        incarnation = self._incarnations.get(number)
        if incarnation is None:
            return None
        if reason == _REPLICA_GONE:
            return Departure(*incarnation, True, at)
        return Departure(*incarnation, False, at, Removal(reason))

    def _add(self, replica_id: ReplicaId, epoch: Epoch) -> int:
        self._last_number += 1
        self._incarnations[self._last_number] = (replica_id, epoch)
        self._numbers[replica_id, epoch] = self._last_number
        if len(self._incarnations) > MAX_INCARNATIONS:
            _, oldest = self._incarnations.popitem(last=False)
            del self._numbers[oldest]
        return self._last_number

    def _places(
        self, block_hashes: Sequence[BlockHash]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        halves = np.frombuffer(b"".join(block_hashes), np.uint64).reshape(-1, HASH_BYTES // 8)
        return halves[:, 0] & np.uint64(self._max_hashes - 1), halves[:, 1]

    def _write(self) -> None:
        """Write the notes; the last one in a place stays."""
        if not self._noted:
            return
        hashes, self._noted = self._noted, []
        (counts, marks, times), self._notes = self._notes, ([], [], [])
        if self._rests is None:
            self._rests = np.zeros(self._max_hashes, np.uint64)
            self._marks = np.zeros(self._max_hashes, np.uint32)
            self._times = np.zeros(self._max_hashes, np.float64)
        places, rests = self._places(hashes)
        self._rests[places] = rests
        self._marks[places] = np.repeat(np.array(marks, np.uint32), counts)
        self._times[places] = np.repeat(np.array(times), counts)
