"""Affinity order: how every process ranks replicas for prompts that should meet.

Owns the rendezvous ranking. Knows no load, no index and no fleet state: processes that see the same replicas
rank them alike without communication.
"""

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from replicas.protocol.status import ReplicaId

if TYPE_CHECKING:
    import numpy.typing as npt


def tagged(tag: bytes, value: bytes) -> bytes:
    """For a digest of several values, so that no two lists of them look alike."""
    return len(tag).to_bytes(1, "little") + tag + len(value).to_bytes(4, "little") + value


class AffinityRanking:
    """A bucket's ranking of a set of replicas, home first: rendezvous hashing.

    A replica's score depends on the bucket and itself alone, and the lowest comes first. So removing a
    replica moves only what it was first for; adding one takes an equal share from each.

    All scores are computed at once, since one by one a fleet of 1,000 takes half a millisecond: both sides
    are hashed beforehand, and mixed by the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a
    bijection, so no two replicas have one score.
    """

    __slots__ = ("_positions", "_seeds", "replica_ids")

    def __init__(self, replica_ids: Iterable[ReplicaId]) -> None:
        self.replica_ids = tuple(replica_ids)
        self._positions = {replica_id: position for position, replica_id in enumerate(self.replica_ids)}
        self._seeds = np.array([_seed(replica_id) for replica_id in self.replica_ids], dtype=np.uint64)

    def __contains__(self, replica_id: object) -> bool:
        return replica_id in self._positions

    def of(self, bucket: bytes) -> "AffinityOrder":
        scores = self._seeds ^ np.uint64(int.from_bytes(bucket[-8:], "little"))
        scores ^= scores >> _SHIFTS[0]
        scores *= _FACTORS[0]
        scores ^= scores >> _SHIFTS[1]
        scores *= _FACTORS[1]
        scores ^= scores >> _SHIFTS[2]
        return AffinityOrder(self.replica_ids, self._positions, scores)


class AffinityOrder:
    """One bucket's order of the replicas."""

    __slots__ = ("_positions", "_replica_ids", "_scores")

    def __init__(
        self,
        replica_ids: Sequence[ReplicaId],
        positions: Mapping[ReplicaId, int],
        scores: "npt.NDArray[np.uint64]",
    ) -> None:
        self._replica_ids = replica_ids
        self._positions = positions
        self._scores = scores

    def whole(self) -> list[ReplicaId]:
        return [self._replica_ids[position] for position in self._scores.argsort().tolist()]

    def first(self, count: int) -> list[ReplicaId]:
        """Return the first `count`, or all if there are fewer."""
        scores = self._scores
        if count >= len(scores):
            return self.whole()
        few = scores.argpartition(count)[:count]
        return [self._replica_ids[position] for position in few[scores[few].argsort()].tolist()]

    def ranks(self, replica_ids: Iterable[ReplicaId]) -> list[int]:
        """Return the place of each of these."""
        own = self._scores[self._places(replica_ids)]
        ranks: list[int] = (self._scores < own[:, np.newaxis]).sum(axis=1).tolist()
        return ranks

    def scores(self, replica_ids: Iterable[ReplicaId]) -> list[int]:
        """In the same order as their ranks, and sooner found than these."""
        scores: list[int] = self._scores[self._places(replica_ids)].tolist()
        return scores

    def _places(self, replica_ids: Iterable[ReplicaId]) -> list[int]:
        return [self._positions[replica_id] for replica_id in replica_ids]


_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@functools.lru_cache(maxsize=4096)
def _seed(replica_id: ReplicaId) -> int:
    digest = hashlib.blake2b(digest_size=8, person=b"kvasir-affinity2")
    digest.update(tagged(b"replica", replica_id.encode()))
    return int.from_bytes(digest.digest(), "little")
