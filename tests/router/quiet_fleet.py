"""A fleet for the live page that does nothing: replicas and holders are what a test says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import Epoch, ReplicaId
from router.features.live_page.feature import Mirror
from router.features.live_page.live_view import LiveReplica


def replica_view(name: str, load: LoadSnapshot | None = None, complaint: str | None = None) -> LiveReplica:
    return LiveReplica(
        replica_id=ReplicaId(name),
        model="tiny",
        engine="torch",
        block_size=16,
        epoch=Epoch(f"epoch-{name}"),
        address="127.0.0.1:1",
        state="ready",
        load=load or LoadSnapshot(),
        num_on_the_way=0,
        complaint=complaint,
    )


@dataclass(frozen=True)
class QuietMirror:
    num_entries: int = 7
    num_predictions: int = 0
    lag_seconds: float = 0.25
    is_connected: bool = True


@dataclass
class QuietFleet:
    """`held` has, for a replica, how many leading blocks it holds of whatever chain is asked for."""

    name: str = "router of a test"
    views: list[LiveReplica] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    num_lookups: int = 0

    def replicas(self) -> Sequence[LiveReplica]:
        return self.views

    def overlaps(self, model: str, block_hashes: Sequence[BlockHash], /) -> Mapping[ReplicaId, int]:
        self.num_lookups += 1
        return {ReplicaId(name): min(depth, len(block_hashes)) for name, depth in self.held.items()}

    def mirrors(self) -> Mapping[str, Mirror]:
        return {"tiny": QuietMirror()}
