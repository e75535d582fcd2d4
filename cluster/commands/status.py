"""kvasir status: registry in Redis and state file joined, as a table or as JSON.

Asks only Redis, so it answers while replicas are busy and controllers are down.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from cluster.commands.tables import align, size
from cluster.local.processes import named_children
from cluster.local.run_directory import ClusterState, ReplicaEntry
from cluster.registry import Registry
from replicas.process.settings import without_password
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.status import ReplicaId, ReplicaState

SILENT = "silent"
"""State of a replica whose process lives, by the controller's account, while its lease has run out."""

HEADER = ("REPLICA", "STATE", "EPOCH", "PID", "ADDRESS", "REQUESTS", "BLOCKS", "CACHED TOKENS")
TIERS = ("HOST MEMORY", "DISK")
"""Columns for KV below the device, used and total; shown if any replica has such a tier."""


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One replica, from the state file and the registry."""

    replica_id: ReplicaId
    state: str
    epoch: str | None
    pid: int | None
    address: str | None
    load: LoadSnapshot | None


def replica_rows(state: ClusterState, registry: Registry) -> Iterator[ReplicaRow]:
    entries = {ReplicaId(entry.replica_id): entry for entry in state.replicas}
    for replica_id in sorted(entries.keys() | registry.records.keys()):
        entry, record = entries.get(replica_id), registry.records.get(replica_id)
        if entry is not None and record is not None and record.epoch != entry.epoch:
            serves_on = entry.state == ReplicaState.STARTING and entry.epoch is not None
            if not serves_on:  # else the next incarnation has registered, and is about to be known
                record = None  # the lease of an earlier incarnation, which has yet to expire
        yield ReplicaRow(
            replica_id,
            _state(entry, record, is_registry_read=registry.complaint is None),
            (record.epoch if record else None) or (entry.epoch if entry else None),
            entry.pid if entry else None,
            (record.address if record else None) or (entry.address if entry else None),
            record.load if record else None,
        )


def as_plain(state: ClusterState, registry: Registry) -> dict[str, Any]:
    """Return the cluster for JSON."""
    return {
        "ready": state.ready,
        "router_url": state.router_url,
        "router_pages": list(state.router_pages),
        "router_pid": state.router_pid,
        "redis_url": without_password(state.redis_url),
        "redis_pid": state.redis_pid,
        "redis_complaint": registry.complaint,
        "refused_records": list(registry.refused),
        "ray_address": state.ray_address,
        "controller_metrics": state.controller_metrics,
        "block_size": state.block_size,
        "replicas": msgspec.to_builtins(list(replica_rows(state, registry))),
    }


def render(state: ClusterState, registry: Registry) -> str:
    replicas = list(replica_rows(state, registry))
    rows = [HEADER, *(_cells(row, state.block_size) for row in replicas)]
    if any(row.load is not None and row.load.max_host_bytes for row in replicas):
        tiers = [TIERS, *(_tier_cells(row.load) for row in replicas)]
        rows = [(*cells, *more) for cells, more in zip(rows, tiers, strict=True)]
    redis_line = f"Redis   {without_password(state.redis_url)}"
    if state.redis_pid:
        redis_line += f"  pid {state.redis_pid}"
    if registry.refused:
        redis_line += f"  IGNORED: {'; '.join(registry.refused)}"
    if registry.complaint:
        redis_line += f"  NOT REACHABLE: {registry.complaint}"
    phase = "" if state.ready else "  (still starting)"
    router_lines = [f"router  {state.router_url}  pid {state.router_pid}{phase}"]
    if state.router_admins:
        pids = named_children(state.router_pid)
        names = [f"router-{number}" for number in range(len(state.router_admins))]
        router_lines += [
            f"  {name}  pid {pids.get(name, '-')}  page and metrics {page}/"
            for name, page in zip(names, state.router_pages, strict=True)
        ]
    return "\n".join([*align(rows), "", *router_lines, redis_line, f"Ray     {state.ray_address}"])


def _state(entry: ReplicaEntry | None, record: ReplicaRecord | None, *, is_registry_read: bool) -> str:
    """Merge the controller's view of the process with the replica's own record; the later state wins."""
    if entry is None:
        assert record is not None, "a row comes from the one or the other"
        return record.state.value
    if record is not None and entry.state != ReplicaState.STOPPED:
        return record.state.value  # perhaps of one that serves until its next incarnation is ready
    is_running = entry.state in (ReplicaState.READY, ReplicaState.DRAINING)
    return SILENT if is_running and is_registry_read else entry.state


def _cells(row: ReplicaRow, block_size: int) -> tuple[str, ...]:
    pid = str(row.pid) if row.pid else "-"
    load = _load_cells(row.load, block_size)
    return (row.replica_id, row.state, row.epoch or "-", pid, row.address or "-", *load)


def _tier_cells(load: LoadSnapshot | None) -> tuple[str, str]:
    if load is None:
        return ("-", "-")
    return (
        _fill(load.num_host_bytes, load.max_host_bytes),
        _fill(load.num_disk_bytes, load.max_disk_bytes),
    )


def _fill(num_bytes: int, max_bytes: int) -> str:
    return f"{size(num_bytes)}/{size(max_bytes)}" if max_bytes else "-"


def _load_cells(load: LoadSnapshot | None, block_size: int) -> tuple[str, str, str]:
    if load is None:
        return ("-", "-", "-")
    waiting = f" +{load.num_waiting} waiting" if load.num_waiting else ""
    return (
        f"{load.num_running}{waiting}",
        f"{load.num_used_blocks}/{load.num_total_blocks}",
        f"{load.num_cached_blocks * block_size}{' (predicted)' if load.is_predicted else ''}",
    )
