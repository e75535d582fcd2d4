"""The routing policies that a configuration can name, all under one signature.

`kvasir` is the decision of `decision.py`; the others are the baselines that it is compared with. None
keeps any state: what a policy needs to know stands in its arguments.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from replicas.protocol.status import ReplicaId
from router.routing.bucket import affinity_order
from router.routing.cost import CostParameters, cost_of, fleet_rates
from router.routing.decision import (
    Candidate,
    Decision,
    DecisionReason,
    RoutingRequest,
    decide,
    overlap_tokens,
)
from router.routing.load import ReplicaLoad

if TYPE_CHECKING:
    import random

BOUNDED_LOAD_FACTOR = 1.25
BOUNDED_LOAD_SLACK = 2
"""Requests above the mean that are always allowed: a quarter of a mean of 1 is no room at all."""


class Policy(Protocol):
    def __call__(
        self,
        request: RoutingRequest,
        replicas: Mapping[ReplicaId, ReplicaLoad],
        overlaps: Mapping[ReplicaId, int],
        parameters: CostParameters,
        rng: "random.Random",
        /,
    ) -> Decision: ...


def round_robin(
    request: RoutingRequest,
    replicas: Mapping[ReplicaId, ReplicaLoad],
    overlaps: Mapping[ReplicaId, int],
    parameters: CostParameters,
    rng: "random.Random",
) -> Decision:
    ordered = sorted(replicas)
    return _explained(ordered[request.sequence % len(ordered)], request, replicas, overlaps, parameters)


def random_choice(
    request: RoutingRequest,
    replicas: Mapping[ReplicaId, ReplicaLoad],
    overlaps: Mapping[ReplicaId, int],
    parameters: CostParameters,
    rng: "random.Random",
) -> Decision:
    return _explained(rng.choice(list(replicas)), request, replicas, overlaps, parameters)


def least_loaded(
    request: RoutingRequest,
    replicas: Mapping[ReplicaId, ReplicaLoad],
    overlaps: Mapping[ReplicaId, int],
    parameters: CostParameters,
    rng: "random.Random",
) -> Decision:
    fewest = min(load.num_requests for load in replicas.values())
    idlest = [replica_id for replica_id, load in replicas.items() if load.num_requests == fewest]
    return _explained(rng.choice(idlest), request, replicas, overlaps, parameters)


def power_of_two(
    request: RoutingRequest,
    replicas: Mapping[ReplicaId, ReplicaLoad],
    overlaps: Mapping[ReplicaId, int],
    parameters: CostParameters,
    rng: "random.Random",
) -> Decision:
    drawn = rng.sample(list(replicas), min(2, len(replicas)))
    chosen = min(drawn, key=lambda replica_id: replicas[replica_id].num_requests)
    return _explained(chosen, request, replicas, overlaps, parameters)


def consistent_hash(
    request: RoutingRequest,
    replicas: Mapping[ReplicaId, ReplicaLoad],
    overlaps: Mapping[ReplicaId, int],
    parameters: CostParameters,
    rng: "random.Random",
) -> Decision:
    home = affinity_order(request.bucket, replicas)[0]
    return _explained(home, request, replicas, overlaps, parameters)


def bounded_load(
    request: RoutingRequest,
    replicas: Mapping[ReplicaId, ReplicaLoad],
    overlaps: Mapping[ReplicaId, int],
    parameters: CostParameters,
    rng: "random.Random",
) -> Decision:
    """Consistent hashing that passes on what would put a replica too far above the mean."""
    mean = (sum(load.num_requests for load in replicas.values()) + 1) / len(replicas)
    most = max(math.ceil(BOUNDED_LOAD_FACTOR * mean), math.ceil(mean) + BOUNDED_LOAD_SLACK)
    order = affinity_order(request.bucket, replicas)
    chosen = next(replica_id for replica_id in order if replicas[replica_id].num_requests < most)
    return _explained(chosen, request, replicas, overlaps, parameters)


POLICIES: Mapping[str, Policy] = {
    "kvasir": decide,
    "round_robin": round_robin,
    "random": random_choice,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "consistent_hash": consistent_hash,
    "bounded_load": bounded_load,
}


def _explained(
    chosen: ReplicaId,
    request: RoutingRequest,
    replicas: Mapping[ReplicaId, ReplicaLoad],
    overlaps: Mapping[ReplicaId, int],
    parameters: CostParameters,
) -> Decision:
    """A baseline's choice with the same explanation as ours, for the chosen replica alone."""
    tokens = overlap_tokens(request, overlaps.get(chosen, 0))
    deepest = max(
        (overlap_tokens(request, overlaps.get(replica_id, 0)) for replica_id in replicas), default=0
    )
    rank = affinity_order(request.bucket, replicas).index(chosen)
    cost = cost_of(
        replicas[chosen],
        num_uncached_tokens=request.num_tokens - tokens,
        num_copied_tokens=deepest - tokens,
        rates=fleet_rates(replicas.values(), parameters),
        copy_price=parameters.copy_price,
    )
    candidate = Candidate(chosen, rank, tokens, replicas[chosen], cost)
    reason = DecisionReason.ONLY_REPLICA if len(replicas) == 1 else DecisionReason.POLICY
    return Decision(chosen, tokens, reason, rank, (candidate,))
