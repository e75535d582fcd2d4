"""Baselines that ignore caches, for comparison.

Owns each one's choice of a replica. Knows no cache, no cost and no decision. All are stateless.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from replicas.protocol.status import ReplicaId
from router.routing.decision import Replicas, RoutingRequest

if TYPE_CHECKING:
    import random

BOUNDED_LOAD_FACTOR = 1.25
BOUNDED_LOAD_SLACK = 2
"""Requests above the mean that are always allowed: a quarter of a mean of 1 is no room at all."""

Pick = Callable[[RoutingRequest, Replicas, "random.Random"], ReplicaId]


def round_robin(request: RoutingRequest, replicas: Replicas, rng: "random.Random") -> ReplicaId:
    ordered = sorted(replicas)
    return ordered[request.sequence % len(ordered)]


def random_choice(request: RoutingRequest, replicas: Replicas, rng: "random.Random") -> ReplicaId:
    return rng.choice(list(replicas))


def least_loaded(request: RoutingRequest, replicas: Replicas, rng: "random.Random") -> ReplicaId:
    fewest = min(load.num_requests for load in replicas.values())
    return rng.choice([replica_id for replica_id, load in replicas.items() if load.num_requests == fewest])


def power_of_two(request: RoutingRequest, replicas: Replicas, rng: "random.Random") -> ReplicaId:
    drawn = rng.sample(list(replicas), min(2, len(replicas)))
    return min(drawn, key=lambda replica_id: replicas[replica_id].num_requests)


def consistent_hash(request: RoutingRequest, replicas: Replicas, rng: "random.Random") -> ReplicaId:
    return replicas.ranking.of(request.bucket).first(1)[0]


def bounded_load(request: RoutingRequest, replicas: Replicas, rng: "random.Random") -> ReplicaId:
    """Hash consistently, but pass on requests that would put a replica too far above the mean."""
    mean = (sum(load.num_requests for load in replicas.values()) + 1) / len(replicas)
    most = max(math.ceil(BOUNDED_LOAD_FACTOR * mean), math.ceil(mean) + BOUNDED_LOAD_SLACK)
    order = replicas.ranking.of(request.bucket).whole()
    return next(replica_id for replica_id in order if replicas[replica_id].num_requests < most)
