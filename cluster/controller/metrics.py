"""FleetMetrics: the fleet controller's Prometheus metrics.

Owns the names. Labels are pools and states, so there are few. Does not know Ray.
"""

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster.config import FleetSpec, base_name, pool_of_id
from replicas.protocol.status import ReplicaId, ReplicaState

START_BUCKETS = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0)

RECONCILE_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)


class FleetMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        pool = ["pool"]
        self._replicas = Gauge("fleet_replicas", "Replicas by state", ["pool", "state"], registry=registry)
        self._desired = Gauge("fleet_replicas_desired", "Replicas that should exist", pool, registry=registry)
        self.starts = Counter("fleet_replica_starts_total", "Starts of replicas", pool, registry=registry)
        self.restarts = Counter(
            "fleet_replica_restarts_total",
            "Starts of replicas that replace one that had ended",
            pool,
            registry=registry,
        )
        self.failures = Counter(
            "fleet_replica_failures_total",
            "Replicas that ended or failed to start unexpectedly",
            pool,
            registry=registry,
        )
        self.start_seconds = Histogram(
            "fleet_replica_start_seconds",
            "Time from the decision to start a replica until it is ready",
            pool,
            buckets=START_BUCKETS,
            registry=registry,
        )
        self.reconcile_seconds = Histogram(
            "fleet_reconcile_seconds",
            "Time of one reconciliation: observe, plan, act",
            buckets=RECONCILE_BUCKETS,
            registry=registry,
        )
        self.reconcile_errors = Counter(
            "fleet_reconcile_errors_total",
            "Replicas that Ray refused to create",
            registry=registry,
        )
        self.ray_nodes = Gauge("fleet_ray_nodes", "Machines that Ray considers alive", registry=registry)
        self._pools: set[str] = set()

    def see(self, spec: FleetSpec, members: Iterable[tuple[ReplicaId, ReplicaState]]) -> None:
        """Record the desired and the actual fleet."""
        tally = Tally((pool_of_id(replica_id), state) for replica_id, state in members)
        desired: Tally[str] = Tally()
        for pool in spec.pools:
            desired[base_name(pool.name)] += pool.num_replicas
        # A pool that was shown once is shown for good: nothing of it is a number too.
        self._pools |= desired.keys() | {pool for pool, _ in tally}
        for name in self._pools:
            self._desired.labels(name).set(desired[name])
            for metric in (self.starts, self.restarts, self.failures):
                metric.labels(name)  # from zero on, or the first one is no increase
            for state in ReplicaState:
                self._replicas.labels(name, state.value).set(tally[name, state])
