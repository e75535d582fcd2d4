"""Member: one incarnation of a replica as the controller knows it; and the fleet as others see it.

Owns what is remembered of a replica between its start and its end. Decides nothing.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.actors import ReplicaHandle, ReplicaReport
from cluster.changes import FleetState
from cluster.config import PoolSpec, pool_of_id
from cluster.fleet_file import model_name
from cluster.plan import ObservedReplica
from replicas.protocol.status import ReplicaId, ReplicaState, advance


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as shown to people. `report` is there once it has started; `cause` once it has ended."""

    replica_id: ReplicaId
    state: ReplicaState
    report: ReplicaReport | None
    cause: str | None
    num_early_deaths: int
    refused_to_start: bool
    revision: str | None


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool as shown to people. `is_settled`: its replicas are what its spec says, and no others exist.
    `failure` says why the latest rollout was given up."""

    name: str
    model: str
    revision: str
    num_replicas: int
    num_ready: int
    is_settled: bool
    failure: str | None


@dataclass(frozen=True, slots=True)
class FleetView:
    """The fleet at one moment. `version` grows with every change; `notes` are those since the last look."""

    version: int
    replicas: tuple[ReplicaView, ...]
    notes: tuple[str, ...]
    metrics_address: str | None
    pools: tuple[PoolView, ...]
    redis_url: str | None


@dataclass(slots=True)
class Member:
    """One incarnation of a replica. `dismissed`: its end is wanted. `lost` is set, to the reason, for one
    that is given up although Ray has not said that it ended."""

    replica_id: ReplicaId
    num_early_deaths: int = 0
    actor: ReplicaHandle | None = None
    state: ReplicaState = ReplicaState.STARTING
    since: float = field(default_factory=time.monotonic)
    report: ReplicaReport | None = None
    cause: str | None = None
    dismissed: bool = False
    refused_to_start: bool = False
    revision: str | None = None
    lost: "asyncio.Future[str]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def observed(self) -> ObservedReplica:
        return ObservedReplica(
            self.replica_id, self.state, self.since, self.num_early_deaths, self.cause, self.revision
        )

    def view(self) -> ReplicaView:
        return ReplicaView(
            *(self.replica_id, self.state, self.report, self.cause),
            *(self.num_early_deaths, self.refused_to_start, self.revision),
        )

    def move(self, state: ReplicaState) -> None:
        self.state, self.since = advance(self.state, state), time.monotonic()


def pool_views(state: FleetState, members: Iterable[Member]) -> tuple[PoolView, ...]:
    members = list(members)
    return tuple(_pool_view(state, pool, members) for pool in state.spec.pools)


def _pool_view(state: FleetState, pool: PoolSpec, members: Iterable[Member]) -> PoolView:
    own = [member for member in members if pool_of_id(member.replica_id) == pool.name]
    ready = [member for member in own if member.state is ReplicaState.READY]
    fresh = [member for member in ready if member.revision == pool.revision]
    return PoolView(
        pool.name,
        model_name(pool.replica),
        pool.revision,
        pool.num_replicas,
        len(ready),
        len(fresh) == len(own) == pool.num_replicas,
        state.failures.get(pool.name),
    )
