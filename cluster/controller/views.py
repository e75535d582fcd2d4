"""FleetView, PoolView, ReplicaView: the fleet at one moment, as the controller shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.config import FleetSpec, PoolSpec, base_name, member_of_id, pool_of_id
from cluster.controller.actors import ReplicaReport
from cluster.controller.changes import FleetState
from cluster.controller.replica_life import ReplicaLife
from cluster.fleet_file import model_name
from replicas.protocol.status import ReplicaId, ReplicaState, Role


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica for display. `report` exists once it has started, `cause` once it has ended."""

    replica_id: ReplicaId
    state: ReplicaState
    report: ReplicaReport | None
    cause: str | None
    num_early_deaths: int
    refused_to_start: bool
    revision: str | None
    is_waiting_for_room: bool


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool for display. `is_settled`: it has exactly the replicas of its spec. `failure` says why the
    latest rollout was given up."""

    name: str
    model: str
    revision: str
    num_replicas: int
    num_ready: int
    is_settled: bool
    failure: str | None
    role: str = Role.BOTH.value


@dataclass(frozen=True, slots=True)
class FleetView:
    """The fleet for display. `version` grows with every change; `notes` are those since the last look.
    `applied_revision` is the last applied spec's; None before the first."""

    version: int
    replicas: tuple[ReplicaView, ...]
    notes: tuple[str, ...]
    metrics_address: str | None
    pools: tuple[PoolView, ...]
    redis_url: str | None
    applied_revision: str | None = None
    complaints: tuple[str, ...] = ()
    """Current problems of the controller itself."""


def pool_views(state: FleetState, wanted: FleetSpec, lives: Sequence[ReplicaLife]) -> tuple[PoolView, ...]:
    """`wanted` is that of `state`."""
    revisions = {member.name: member.revision for member in wanted.pools if member.num_replicas}
    return tuple(_pool_view(state, pool, revisions, lives) for pool in state.spec.pools)


def _pool_view(
    state: FleetState, pool: PoolSpec, revisions: Mapping[str, str], lives: Sequence[ReplicaLife]
) -> PoolView:
    own = [life for life in lives if pool_of_id(life.replica_id) == pool.name]
    ready = [life for life in own if life.state is ReplicaState.READY]
    fresh = [life for life in ready if life.revision == revisions.get(member_of_id(life.replica_id))]
    num_replicas = pool.num_replicas
    if pool.engines is not None:
        num_replicas = sum(base_name(name) == pool.name for name in revisions)
    is_known = pool.engines is None or pool.name in state.found
    return PoolView(
        name=pool.name,
        model=model_name(pool.replica),
        revision=pool.revision,
        num_replicas=num_replicas,
        num_ready=len(ready),
        is_settled=is_known and len(fresh) == len(own) == num_replicas,
        failure=state.failures.get(pool.name),
        role=pool.replica.role,
    )
