"""The routing policies that a configuration can name, all under one signature.

`kvasir` is the decision of `decision.py`; the others are the baselines that it is compared with. None
keeps any state: what a policy needs to know stands in its arguments.
"""

import math
from collections.abc import Callable, Mapping
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


Pick = Callable[[RoutingRequest, Mapping[ReplicaId, ReplicaLoad], "random.Random"], ReplicaId]
"""All that a baseline decides on: none of them looks at what is cached."""


def round_robin(
    request: RoutingRequest, replicas: Mapping[ReplicaId, ReplicaLoad], rng: "random.Random"
) -> ReplicaId:
    ordered = sorted(replicas)
    return ordered[request.sequence % len(ordered)]


def random_choice(
    request: RoutingRequest, replicas: Mapping[ReplicaId, ReplicaLoad], rng: "random.Random"
) -> ReplicaId:
    return rng.choice(list(replicas))


def least_loaded(
    request: RoutingRequest, replicas: Mapping[ReplicaId, ReplicaLoad], rng: "random.Random"
) -> ReplicaId:
    fewest = min(load.num_requests for load in replicas.values())
    return rng.choice([replica_id for replica_id, load in replicas.items() if load.num_requests == fewest])


def power_of_two(
    request: RoutingRequest, replicas: Mapping[ReplicaId, ReplicaLoad], rng: "random.Random"
) -> ReplicaId:
    drawn = rng.sample(list(replicas), min(2, len(replicas)))
    return min(drawn, key=lambda replica_id: replicas[replica_id].num_requests)


def consistent_hash(
    request: RoutingRequest, replicas: Mapping[ReplicaId, ReplicaLoad], rng: "random.Random"
) -> ReplicaId:
    return affinity_order(request.bucket, replicas)[0]


def bounded_load(
    request: RoutingRequest, replicas: Mapping[ReplicaId, ReplicaLoad], rng: "random.Random"
) -> ReplicaId:
    """Consistent hashing that passes on what would put a replica too far above the mean."""
    mean = (sum(load.num_requests for load in replicas.values()) + 1) / len(replicas)
    most = max(math.ceil(BOUNDED_LOAD_FACTOR * mean), math.ceil(mean) + BOUNDED_LOAD_SLACK)
    order = affinity_order(request.bucket, replicas)
    return next(replica_id for replica_id in order if replicas[replica_id].num_requests < most)


def _baseline(pick: Pick) -> Policy:
    """`pick` as a policy, whose decisions are explained like ours."""

    def policy(
        request: RoutingRequest,
        replicas: Mapping[ReplicaId, ReplicaLoad],
        overlaps: Mapping[ReplicaId, int],
        parameters: CostParameters,
        rng: "random.Random",
    ) -> Decision:
        return _explained(pick(request, replicas, rng), request, replicas, overlaps, parameters)

    return policy


POLICIES: Mapping[str, Policy] = {
    "kvasir": decide,
    "round_robin": _baseline(round_robin),
    "random": _baseline(random_choice),
    "least_loaded": _baseline(least_loaded),
    "power_of_two": _baseline(power_of_two),
    "consistent_hash": _baseline(consistent_hash),
    "bounded_load": _baseline(bounded_load),
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
