"""Replica entries of the state file, from the fleet controller's view.

Owns what is written of replicas that outlive their raylet, and that their controller takes for dead, if it
lives. They serve on, with their leases and metrics, while their next incarnations start.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.config import pool_of_id
from cluster.controller.views import FleetView, ReplicaView
from cluster.local.run_directory import ReplicaEntry
from replicas.protocol.status import ReplicaState, Role


def replica_entries(
    view: FleetView, before: Sequence[ReplicaEntry], lives: Callable[[int], bool]
) -> tuple[ReplicaEntry, ...]:
    """Return the entries, in place of those of `before`. A controller that has just started has none."""
    serving = {
        entry.replica_id: replace(entry, state=ReplicaState.STARTING.value)
        for entry in before
        if entry.state != ReplicaState.DRAINING and entry.pid is not None and lives(entry.pid)
    }
    if not view.replicas:
        return tuple(serving.values())
    roles = {pool.name: pool.role for pool in view.pools}
    return tuple(
        replace(
            _entry(replica, serving.get(replica.replica_id)),
            role=roles.get(pool_of_id(replica.replica_id), Role.BOTH.value),
        )
        for replica in view.replicas
    )


def _entry(replica: ReplicaView, earlier: ReplicaEntry | None) -> ReplicaEntry:
    report = replica.report
    if earlier is not None and (report is None or replica.state is ReplicaState.STOPPED):
        return earlier
    if report is None:
        return ReplicaEntry(replica.replica_id, replica.state.value, None, None, None)
    return ReplicaEntry(
        replica.replica_id,
        replica.state.value,
        pid=report.pid,
        address=report.address,
        epoch=report.epoch,
        metrics_address=report.metrics_address,
    )
