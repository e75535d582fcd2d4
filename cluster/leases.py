"""LeaseBook: which replicas have fallen silent, and how busy each pool is, from looks at the registry.

Owns what was seen of leases, look by look. Knows no Redis and no clock: the controller looks, and says when.
"""

from collections.abc import Iterable, Mapping

from cluster.autoscale import LoadSample
from cluster.config import pool_of_id
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState

SILENT_SECONDS = 2.0
"""How long a lease must be gone. It takes `lease_seconds` to expire; a Redis that has forgotten everything
hears from the living within a heartbeat, which is less."""


class LeaseBook:
    def __init__(self) -> None:
        self._last_seen: dict[tuple[ReplicaId, Epoch], float] = {}
        self._looked_at: float | None = None

    def look(
        self, records: Mapping[ReplicaId, ReplicaRecord], ready: Mapping[ReplicaId, Epoch], now: float
    ) -> list[ReplicaId]:
        """Which of `ready` have had a lease, have none, and have been without for too long."""
        if not records or self._looked_at is None or now - self._looked_at > SILENT_SECONDS:
            # A registry without any lease has lost them itself; and after a while without a look nobody
            # knows for how long one has been gone.
            self._last_seen = dict.fromkeys(self._last_seen, now)
        self._looked_at = now
        self._last_seen = {key: at for key, at in self._last_seen.items() if ready.get(key[0]) == key[1]}
        for replica_id, epoch in ready.items():
            record = records.get(replica_id)
            if record is not None and record.epoch == epoch:
                self._last_seen[replica_id, epoch] = now
        silent = [key[0] for key, at in self._last_seen.items() if now - at >= SILENT_SECONDS]
        return sorted(silent)


def load_of(pool_name: str, records: Iterable[ReplicaRecord], now: float) -> LoadSample:
    """All that the pool's replicas have to do. Those that drain finish their own; nobody else need."""
    loads = [
        record.load
        for record in records
        if pool_of_id(record.replica_id) == pool_name and record.state is ReplicaState.READY
    ]
    return LoadSample(
        now,
        sum(load.num_running + load.num_waiting for load in loads),
        sum(load.num_pending_tokens for load in loads),
    )
