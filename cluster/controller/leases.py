"""LeaseBook and LoadHistory: which replicas have fallen silent, and how busy each pool is.

Owns the history of the registry. The controller decides when to look.
"""

from collections.abc import Iterable, Mapping

from cluster.config import PoolSpec, pool_of_id
from cluster.controller.autoscale import LoadSample, decide, kept
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState

SILENT_SECONDS = 2.0
"""Seconds that a lease must be gone. It takes `lease_seconds` to expire; after Redis lost everything, the
living write within a heartbeat, which is shorter."""


class LeaseBook:
    def __init__(self) -> None:
        self._last_seen: dict[tuple[ReplicaId, Epoch], float] = {}
        self._looked_at: float | None = None

    def look(
        self, records: Mapping[ReplicaId, ReplicaRecord], ready: Mapping[ReplicaId, Epoch], now: float
    ) -> list[ReplicaId]:
        """Return the replicas in `ready` that once had a lease and have had none for too long."""
        if not records or self._looked_at is None or now - self._looked_at > SILENT_SECONDS:
            # A registry without any lease has lost them itself; and after a while without a look, a lease
            # may have been gone for any time.
            self._last_seen = dict.fromkeys(self._last_seen, now)
        self._looked_at = now
        self._last_seen = {key: at for key, at in self._last_seen.items() if ready.get(key[0]) == key[1]}
        for replica_id, epoch in ready.items():
            record = records.get(replica_id)
            if record is not None and record.epoch == epoch:
                self._last_seen[replica_id, epoch] = now
        silent = [key[0] for key, at in self._last_seen.items() if now - at >= SILENT_SECONDS]
        return sorted(silent)


class LoadHistory:
    """The load of each pool since its size last changed."""

    def __init__(self) -> None:
        self._samples: dict[str, list[LoadSample]] = {}

    def forget(self, pool_name: str) -> None:
        self._samples.pop(pool_name, None)

    def forget_all(self) -> None:
        self._samples.clear()

    def look(self, pool: PoolSpec, records: Iterable[ReplicaRecord], now: float) -> tuple[int, str]:
        """Return the size that the pool should have, and why."""
        assert pool.autoscaling is not None, "only pools that scale themselves are looked at"
        samples = self._samples.setdefault(pool.name, [])
        samples.append(load_of(pool.name, records, now))
        samples[:] = kept(pool.autoscaling, samples, now)
        wanted, sample = decide(pool.autoscaling, pool.num_replicas, samples, now), samples[-1]
        return wanted, (
            f"pool {pool.name}: {sample.num_in_flight} requests and {sample.num_pending_tokens} pending "
            f"tokens ask for {wanted} replicas"
        )


def load_of(pool_name: str, records: Iterable[ReplicaRecord], now: float) -> LoadSample:
    """Sum the pool's load. Draining replicas do not count."""
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
