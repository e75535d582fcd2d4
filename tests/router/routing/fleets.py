"""Fleets and requests for decisions by hand."""

from collections.abc import Mapping

from replicas.protocol.status import ReplicaId
from router.routing.decision import Replicas, RoutingRequest
from router.routing.levels import Overlaps, Slots
from router.routing.load import ReplicaLoad

BLOCK_SIZE = 16


def fleet(size: int, **loads: ReplicaLoad) -> dict[ReplicaId, ReplicaLoad]:
    return {ReplicaId(f"r{n}"): loads.get(f"r{n}", ReplicaLoad()) for n in range(size)}


def ready(loads: Mapping[ReplicaId, ReplicaLoad]) -> Replicas:
    return Replicas(loads, loads.__getitem__, dict.fromkeys(loads, "one layout"))


def overlapping(depths: Mapping[ReplicaId, int]) -> Overlaps:
    """As an index says it whose slots are in this order."""
    slots = Slots({replica_id: 1 << slot for slot, replica_id in enumerate(depths)})
    levels = sorted({depth for depth in depths.values() if depth}, reverse=True)
    return Overlaps(slots, [(it, slots.mask(each for each in depths if depths[each] == it)) for it in levels])


def request(number: int = 0, num_tokens: int = 8000) -> RoutingRequest:
    return RoutingRequest(number.to_bytes(16, "big"), num_tokens, BLOCK_SIZE, sequence=number)


def ranked(size: int, number: int = 0) -> list[ReplicaId]:
    """The affinity order of the request with this number in a fleet of so many."""
    return ready(fleet(size)).ranking.of(request(number).bucket).whole()
