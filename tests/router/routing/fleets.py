"""Fleets and requests for decisions by hand."""

from collections.abc import Mapping

from replicas.protocol.status import ReplicaId
from router.routing.decision import Replicas, RoutingRequest
from router.routing.load import ReplicaLoad

BLOCK_SIZE = 16


def fleet(size: int, **loads: ReplicaLoad) -> dict[ReplicaId, ReplicaLoad]:
    return {ReplicaId(f"r{n}"): loads.get(f"r{n}", ReplicaLoad()) for n in range(size)}


def ready(loads: Mapping[ReplicaId, ReplicaLoad]) -> Replicas:
    return Replicas(loads, loads.__getitem__)


def request(number: int = 0, num_tokens: int = 8000) -> RoutingRequest:
    return RoutingRequest(number.to_bytes(16, "big"), num_tokens, BLOCK_SIZE, sequence=number)


def ranked(size: int, number: int = 0) -> list[ReplicaId]:
    """The affinity order of the request with this number in a fleet of so many."""
    return ready(fleet(size)).ranking.of(request(number).bucket).whole()
