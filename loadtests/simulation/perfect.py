"""PerfectIndex: a yardstick for routers, which asks the replicas' own caches at each decision.

Owns what a prompt would find at each replica: what is cached there, and what the prompts before it will
leave. Delays, thinning and predictions of the router's own index do not count. The decision is the router's.
"""

from collections.abc import Callable, Mapping, Sequence

from loadtests.simulation.host import VirtualHost
from replicas.protocol.blocks import BlockHash
from replicas.protocol.status import ReplicaId
from router.routing.levels import Depth, Overlaps, Slots
from router.routing.overlap import PrefixIndex

PERFECT = "perfect"
"""The name of the policy of `kvasir simulate`: Kvasir's decision with this index."""


class PerfectIndex(PrefixIndex):
    def __init__(
        self,
        hosts: Mapping[ReplicaId, VirtualHost],
        block_size: int,
        index_stride: int,
        *,
        is_sparse: bool = False,
    ) -> None:
        super().__init__(block_size, index_stride, is_sparse=is_sparse)
        self._hosts = hosts

    def overlaps(self, block_hashes: Sequence[BlockHash]) -> Overlaps:
        alive = [host for host in self._hosts.values() if host.replica is not None]
        slots = Slots({host.replica_id: 1 << number for number, host in enumerate(alive)})
        hits: dict[int, int] = {}
        reach: dict[int, int] = {}
        for host in alive:
            assert host.replica is not None
            found = host.replica.foresee(block_hashes)
            bit = slots.bit(host.replica_id)
            hits[found.num_hit_blocks] = hits.get(found.num_hit_blocks, 0) | bit
            reach[found.num_reached_blocks] = reach.get(found.num_reached_blocks, 0) | bit
        return Overlaps(slots, _levels(hits), reach=_levels(reach) if self._is_sparse else ())


def perfect_index(hosts: Mapping[ReplicaId, VirtualHost]) -> Callable[..., PrefixIndex]:
    def new_index(block_size: int, index_stride: int, *, is_sparse: bool = False) -> PrefixIndex:
        return PerfectIndex(hosts, block_size, index_stride, is_sparse=is_sparse)

    return new_index


def _levels(masks: Mapping[int, int]) -> list[Depth]:
    return sorted(((depth, mask) for depth, mask in masks.items() if depth), reverse=True)
