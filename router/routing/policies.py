"""The routing policies that a configuration can name, under one signature.

`kvasir` is the decision of `decision.py`; the others are for comparison: some weigh caches and load
differently, some ignore caches. All are stateless: their arguments have everything.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from replicas.protocol.status import ReplicaId
from router.routing.cost import CostParameters, fleet_rates
from router.routing.decision import (
    Candidate,
    Decision,
    DecisionReason,
    Replicas,
    RoutingRequest,
    decide,
    everybody,
    peer_of,
    weigh,
)
from router.routing.levels import Overlaps

if TYPE_CHECKING:
    import random

RADIX_MATCH_RATE = 0.3
RADIX_IMBALANCE_REQUESTS = 64
RADIX_IMBALANCE_RATIO = 1.5
"""The defaults of the gateway's command line: `cache_threshold`, `balance_abs_threshold` and
`balance_rel_threshold`."""

BOUNDED_LOAD_FACTOR = 1.25
BOUNDED_LOAD_SLACK = 2
"""Requests above the mean that are always allowed: a quarter of a mean of 1 is no room at all."""


class Policy(Protocol):
    def __call__(
        self,
        request: RoutingRequest,
        replicas: Replicas,
        overlaps: Overlaps,
        parameters: CostParameters,
        rng: "random.Random",
        /,
    ) -> Decision: ...


Candidates = tuple[Candidate, ...]

Choose = Callable[[RoutingRequest, Candidates, "random.Random"], Candidate]
"""A choice among all replicas, which come by affinity order with their overlaps, loads and costs."""

Pick = Callable[[RoutingRequest, Replicas, "random.Random"], ReplicaId]
"""A choice that ignores caches and costs."""


def radix(request: RoutingRequest, candidates: Candidates, rng: "random.Random") -> Candidate:
    """SGLang's cache-aware rule: the longest match while the fleet is in balance, else the shortest queue.

    Out of balance is a longest queue more than 64 requests and 1.5 times the shortest. In balance, the
    longest match serves if it is more than 0.3 of the prompt, and the shortest queue otherwise.

    Source: `sgl-model-gateway/src/policies/cache_aware.rs` at sgl-project/sglang 053b63f, which took the
    smallest tree instead of the shortest queue for short matches until sgl-project/sglang#14305. It
    matches characters in a tree of its own past requests; here the overlaps are the index's, so this
    is the rule at its best. Its queues are the requests in flight through one gateway; ours are the
    replicas' own. Ties go there to the first in the list, here to the shorter queue, then by chance.
    """
    loads = [candidate.load.num_requests for candidate in candidates]
    spread = max(loads) - min(loads)
    longest = max(candidate.overlap_tokens for candidate in candidates)
    is_imbalanced = spread > RADIX_IMBALANCE_REQUESTS and max(loads) > RADIX_IMBALANCE_RATIO * min(loads)
    if not is_imbalanced and longest > RADIX_MATCH_RATE * request.num_tokens:
        candidates = tuple(candidate for candidate in candidates if candidate.overlap_tokens == longest)
    return _least(candidates, lambda candidate: candidate.load.num_requests, rng)


def lmetric(request: RoutingRequest, candidates: Candidates, rng: "random.Random") -> Candidate:
    """LMetric: the least product of prefill tokens and batch size.

    score(r) = (tokens waiting for prefill at r + uncached tokens of the request at r) * (requests at r + 1)

    Source: "LMetric: Simple is Better - Multiplication May Be All You Need for LLM Request Scheduling"
    (arXiv:2603.15202); the one that is added is the request itself, as its authors' router counts it
    (sgl-project/sglang#29574). Ties go by chance.
    """

    def score(candidate: Candidate) -> float:
        num_uncached_tokens = request.num_tokens - candidate.overlap_tokens
        num_prefill_tokens = candidate.load.num_pending_tokens + num_uncached_tokens
        return num_prefill_tokens * (candidate.load.num_requests + 1)

    return _least(candidates, score, rng)


def minimum_ttft(request: RoutingRequest, candidates: Candidates, rng: "random.Random") -> Candidate:
    """Choose the least expected time to first token: like ours, without prices of copies and delays, without
    near-ties, and comparing all replicas. Ties go by affinity order."""

    def seconds(candidate: Candidate) -> float:
        cost = candidate.cost
        return cost.wait_seconds + cost.move_seconds + cost.prefill_seconds

    return min(candidates, key=seconds)


def sticky(request: RoutingRequest, candidates: Candidates, rng: "random.Random") -> Candidate:
    """A program stays where its last turn ran, whatever is cached or waits there. One without a home, or
    whose home is no candidate, goes where fewest requests are; ties go by chance."""
    home = None if request.claim is None else request.claim.home
    at_home = tuple(candidate for candidate in candidates if candidate.replica_id == home)
    return _least(at_home or candidates, lambda candidate: candidate.load.num_requests, rng)


def _least(candidates: Candidates, score: Callable[[Candidate], float], rng: "random.Random") -> Candidate:
    scores = [score(candidate) for candidate in candidates]
    least = min(scores)
    return rng.choice(
        [candidate for candidate, score in zip(candidates, scores, strict=True) if score == least]
    )


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


def _weighing(choose: Choose) -> Policy:
    """Make a policy of `choose`, which explains its decision with every replica."""
    return _policy(lambda request, replicas, weighed, rng: (choose(request, weighed, rng), weighed))


def _blind(pick: Pick) -> Policy:
    """Make a policy of `pick`, with its choice as the explanation."""

    def choose(
        request: RoutingRequest, replicas: Replicas, weighed: Candidates, rng: "random.Random"
    ) -> tuple[Candidate, Candidates]:
        picked = pick(request, replicas, rng)
        chosen = next(candidate for candidate in weighed if candidate.replica_id == picked)
        return chosen, (chosen,)

    return _policy(choose)


def _policy(
    choose: Callable[[RoutingRequest, Replicas, Candidates, "random.Random"], tuple[Candidate, Candidates]],
) -> Policy:
    def policy(
        request: RoutingRequest,
        replicas: Replicas,
        overlaps: Overlaps,
        parameters: CostParameters,
        rng: "random.Random",
    ) -> Decision:
        rates = fleet_rates(replicas.values(), parameters)
        weighed = weigh(request, replicas, everybody(request, replicas), overlaps, rates, parameters)
        chosen, shown = choose(request, replicas, weighed, rng)
        reason = DecisionReason.ONLY_REPLICA if len(replicas) == 1 else DecisionReason.POLICY
        peer = peer_of(chosen, replicas, overlaps, rng)
        return Decision(chosen.replica_id, chosen.overlap_tokens, reason, chosen.rank, shown, peer)

    return policy


POLICIES: Mapping[str, Policy] = {
    "kvasir": decide,
    "minimum_ttft": _weighing(minimum_ttft),
    "lmetric": _weighing(lmetric),
    "radix": _weighing(radix),
    "sticky": _weighing(sticky),
    "round_robin": _blind(round_robin),
    "random": _blind(random_choice),
    "least_loaded": _blind(least_loaded),
    "power_of_two": _blind(power_of_two),
    "consistent_hash": _blind(consistent_hash),
    "bounded_load": _blind(bounded_load),
}
