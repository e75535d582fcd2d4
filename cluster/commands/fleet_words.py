"""Formats a fleet for people: a table, JSON, or one sentence."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from msgspec import structs

from cluster.commands.tables import align
from cluster.config import pool_of_id
from cluster.registry import Registry
from replicas.process.settings import without_password
from replicas.protocol.status import Role

if TYPE_CHECKING:
    from cluster.controller.views import FleetView, ReplicaView  # it loads Ray


def as_plain(view: "FleetView", registry: Registry) -> dict[str, Any]:
    """Return the fleet for JSON."""
    return {
        "redis_url": None if view.redis_url is None else without_password(view.redis_url),
        "redis_complaint": registry.complaint,
        "controller_metrics": view.metrics_address,
        "complaints": list(view.complaints),
        "pools": [asdict(pool) for pool in view.pools],
        "replicas": [
            {
                "replica_id": replica.replica_id,
                "pool": pool_of_id(replica.replica_id),
                "state": replica.state.value,
                "revision": replica.revision,
                "cause": replica.cause,
                "is_waiting_for_room": replica.is_waiting_for_room,
                **(asdict(replica.report) if replica.report else {}),
                "load": structs.asdict(registry.records[replica.replica_id].load)
                if replica.replica_id in registry.records
                else None,
            }
            for replica in view.replicas
        ],
    }


def render(view: "FleetView", registry: Registry) -> str:
    pools: list[tuple[str, ...]] = [("POOL", "MODEL", "READY", "WANTED", "REVISION", "")]
    for pool in view.pools:
        remark = "" if pool.is_settled else "on its way"
        if pool.failure is not None:
            remark = f"rollout given up: {pool.failure}"
        pools.append(
            (pool.name, pool.model, str(pool.num_ready), str(pool.num_replicas), pool.revision, remark)
        )
    if any(pool.role != Role.BOTH for pool in view.pools):
        roles = ["ROLE", *(pool.role for pool in view.pools)]
        pools = [(*cells[:2], role, *cells[2:]) for cells, role in zip(pools, roles, strict=True)]
    replicas = [("REPLICA", "STATE", "REVISION", "ADDRESS", "REQUESTS", "PENDING TOKENS")]
    for replica in view.replicas:
        record = registry.records.get(replica.replica_id)
        load = None if record is None else record.load
        replicas.append(
            (
                replica.replica_id,
                _state(replica),
                replica.revision or "-",
                replica.report.address if replica.report else "-",
                "-" if load is None else str(load.num_running + load.num_waiting),
                "-" if load is None else str(load.num_pending_tokens),
            )
        )
    redis_line = f"Redis    {'-' if view.redis_url is None else without_password(view.redis_url)}"
    if registry.complaint is not None:
        redis_line += f"  NOT REACHABLE: {registry.complaint}"
    lines = [*align(pools), "", *align(replicas), "", redis_line]
    if view.metrics_address is not None:
        lines.append(f"metrics  http://{view.metrics_address}/metrics (the controller's)")
    return "\n".join([*lines, *(f"WRONG    {complaint}" for complaint in view.complaints)])


def _state(replica: "ReplicaView") -> str:
    if replica.is_waiting_for_room:
        return f"{replica.state.value} (waits for room)"
    return replica.state.value + (f" ({replica.cause})" if replica.cause else "")


def trouble(view: "FleetView", pool_name: str | None) -> str | None:
    """Say in one sentence why waiting will not help one pool, or any; None if it may."""
    for pool in view.pools:
        if pool_name not in (None, pool.name):
            continue
        if pool.failure is not None:
            return f"the rollout of pool {pool.name} was given up, the old replicas serve on: {pool.failure}"
        if pool.num_ready == 0:
            for replica in view.replicas:
                if replica.cause and replica.refused_to_start and pool_of_id(replica.replica_id) == pool.name:
                    return f"pool {pool.name} does not start: {replica.replica_id}: {replica.cause}"
    return None


def missing(view: "FleetView") -> str:
    """Return the clause that counts ready replicas and lists those that wait for room."""
    there = ", ".join(f"{pool.name} {pool.num_ready} of {pool.num_replicas}" for pool in view.pools)
    waiting = [replica.replica_id for replica in view.replicas if replica.is_waiting_for_room]
    if not waiting:
        return f" (ready: {there})"
    return f" (ready: {there}; waiting for room in the Ray cluster: {', '.join(waiting)})"


def is_settled(view: "FleetView") -> bool:
    return all(pool.is_settled for pool in view.pools) and not _orphans(view)


def ready(view: "FleetView") -> str:
    return "ready: " + ", ".join(f"{pool.name} {pool.num_ready}" for pool in view.pools)


def _orphans(view: "FleetView") -> list[str]:
    names = {pool.name for pool in view.pools}
    return [replica.replica_id for replica in view.replicas if pool_of_id(replica.replica_id) not in names]
