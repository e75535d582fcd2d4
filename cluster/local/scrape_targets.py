"""Prometheus' file-based service discovery for a local cluster.

Owns the shape of that file and the labels of targets.
"""

from typing import TypedDict

from cluster.local.run_directory import ClusterState


class TargetGroup(TypedDict):
    targets: list[str]
    labels: dict[str, str]


def scrape_targets(state: ClusterState) -> list[TargetGroup]:
    """Return every process that serves /metrics; the path is the same for all."""
    routers = [page.removeprefix("http://") for page in state.router_pages]
    groups = [_group(router, job="kvasir-router", router=router) for router in routers]
    if state.controller_metrics is not None:
        groups.append(_group(state.controller_metrics, job="kvasir-controller"))
    for entry in state.replicas:
        if entry.metrics_address is not None and entry.state != "stopped":
            pool = entry.replica_id.rpartition("-")[0]
            replica = entry.replica_id
            groups.append(_group(entry.metrics_address, job="kvasir-replica", replica=replica, pool=pool))
    return groups


def _group(target: str, **labels: str) -> TargetGroup:
    return TargetGroup(targets=[target], labels=labels)
