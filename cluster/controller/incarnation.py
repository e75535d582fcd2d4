"""Incarnation: one incarnation of a replica as the controller holds it: its life, and its actor in Ray.

Owns what Ray and the replica have said of themselves. Decides nothing: `replica_life.py` does.
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
    """`pool` is what it was made for, as that was then; None for one that was found. `report` is there once
    it has started. `lost` is set, to the reason, for one that is given up although Ray has not said that it
    ended."""

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
    """What the replica says at its end, or why it is given up, whichever comes first."""
    call = asyncio.ensure_future(sentinel)
    done, _ = await asyncio.wait((call, lost), return_when=asyncio.FIRST_COMPLETED)
    if call not in done:
        call.cancel()
        await asyncio.wait((call,))
    return (call if call in done else lost).result()
