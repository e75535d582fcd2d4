"""Incarnation: one incarnation of a replica as the controller knows it; and the fleet as others see it.

Owns what is remembered of a replica between its start and its end. Decides nothing.
"""

import asyncio
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from cluster.config import PoolSpec, pool_of_id
from cluster.controller.actors import ReplicaHandle, ReplicaReport
from cluster.controller.changes import FleetState
from cluster.controller.plan import ObservedReplica
from cluster.fleet_file import model_name
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
    is_waiting_for_room: bool


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
    """The fleet at one moment. `version` grows with every change; `notes` are those since the last look.
    `applied_revision` is that of the spec that was applied last; None if none was."""

    version: int
    replicas: tuple[ReplicaView, ...]
    notes: tuple[str, ...]
    metrics_address: str | None
    pools: tuple[PoolView, ...]
    redis_url: str | None
    applied_revision: str | None = None
    complaints: tuple[str, ...] = ()
    """What is wrong with the controller itself, just now."""


@dataclass(slots=True)
class Incarnation:
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
    is_waiting_for_room: bool = False
    lost: "asyncio.Future[str]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def observed(self) -> ObservedReplica:
        return ObservedReplica(
            *(self.replica_id, self.state, self.since, self.num_early_deaths, self.cause, self.revision),
            machine=None if self.report is None else self.report.machine,
        )

    def view(self) -> ReplicaView:
        return ReplicaView(
            *(self.replica_id, self.state, self.report, self.cause),
            *(self.num_early_deaths, self.refused_to_start, self.revision),
            is_waiting_for_room=self.is_waiting_for_room and self.state is ReplicaState.STARTING,
        )

    def move(self, state: ReplicaState) -> None:
        self.state, self.since = advance(self.state, state), time.monotonic()


def pool_views(state: FleetState, members: Iterable[Incarnation]) -> tuple[PoolView, ...]:
    members = list(members)
    return tuple(_pool_view(state, pool, members) for pool in state.spec.pools)


def _pool_view(state: FleetState, pool: PoolSpec, members: Iterable[Incarnation]) -> PoolView:
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


def mark_waiting(
    members: Iterable[Incarnation], pending: Collection[ReplicaId], patience_seconds: float
) -> list[Incarnation]:
    """Remember who waits for room, and for longer than it takes to be given some; those who begin to."""
    begun = []
    for member in members:
        is_starting = member.state is ReplicaState.STARTING
        is_late = is_starting and time.monotonic() - member.since >= patience_seconds
        was_waiting, member.is_waiting_for_room = (
            member.is_waiting_for_room,
            is_late and member.replica_id in pending,
        )
        if member.is_waiting_for_room and not was_waiting:
            begun.append(member)
    return begun


async def first_end(sentinel: "asyncio.Future[str]", lost: "asyncio.Future[str]") -> str:
    """What the replica says at its end, or why it is given up, whichever comes first."""
    call = asyncio.ensure_future(sentinel)
    done, _ = await asyncio.wait((call, lost), return_when=asyncio.FIRST_COMPLETED)
    if call not in done:
        call.cancel()
        await asyncio.wait((call,))
    return (call if call in done else lost).result()
