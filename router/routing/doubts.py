"""Doubts: replicas that were wrong several times in a row, each for a while.

Pure. Owns the counts. One right answer clears a replica. Without one it is believed again when the time is
over, and doubted anew after the next wrong answer.
"""

from collections.abc import Collection

from replicas.protocol.status import ReplicaId


class Doubts:
    """`most` wrong answers in a row are enough, for `seconds`. Times are arguments. `counts` are of replicas
    that were wrong and have not been right since."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self.counts: dict[ReplicaId, int] = {}
        self._until: dict[ReplicaId, float] = {}
        self.num_wrong = 0

    def wrong(self, replica_id: ReplicaId, now: float) -> bool:
        """Return whether it is doubted from now on, and was not before."""
        self.num_wrong += 1
        number = self.counts[replica_id] = self.counts.get(replica_id, 0) + 1
        if number < self._most or replica_id in self.at(now):
            return False
        self._until[replica_id] = now + self._seconds
        return True

    def right(self, replica_id: ReplicaId) -> bool:
        """Return whether it was doubted. Also for one that is gone."""
        self.counts.pop(replica_id, None)
        return self._until.pop(replica_id, None) is not None

    def at(self, now: float) -> Collection[ReplicaId]:
        """Return the replicas that are doubted now."""
        return [replica_id for replica_id, until in self._until.items() if now < until]
