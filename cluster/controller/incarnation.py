"""Incarnation: one incarnation of a replica: its life, and its actor in Ray.

Owns what Ray and the replica have reported. `replica_life.py` decides.
"""

import asyncio
from dataclasses import dataclass, field

from cluster.config import PoolSpec
from cluster.controller.actors import ReplicaHandle, ReplicaReport
from cluster.controller.replica_life import ReplicaLife
from cluster.controller.views import ReplicaView
from replicas.protocol.status import ReplicaId


@dataclass(slots=True, eq=False)
class Incarnation:
    """`pool` is the spec it was made from; None for one that was found. `report` exists once it has started.
    `lost` is the reason for giving it up before Ray says that it ended."""

    life: ReplicaLife
    pool: PoolSpec | None = None
    actor: ReplicaHandle = None
    """None until Ray has made it."""
    report: ReplicaReport | None = None
    lost: "asyncio.Future[str]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def replica_id(self) -> ReplicaId:
        return self.life.replica_id

    def view(self) -> ReplicaView:
        life = self.life
        return ReplicaView(
            replica_id=life.replica_id,
            state=life.state,
            report=self.report,
            cause=life.cause,
            num_early_deaths=life.num_early_deaths,
            refused_to_start=life.has_refused,
            revision=life.revision,
            is_waiting_for_room=life.is_waiting_for_room,
        )


async def first_end(sentinel: "asyncio.Future[str]", lost: "asyncio.Future[str]") -> str:
    """Return the replica's last words or the reason for giving it up, whichever comes first."""
    call = asyncio.ensure_future(sentinel)
    done, _ = await asyncio.wait((call, lost), return_when=asyncio.FIRST_COMPLETED)
    if call not in done:
        call.cancel()
        await asyncio.wait((call,))
    return (call if call in done else lost).result()
