"""One routing decision: which replica, and why.

Owns candidates, near-ties and the decision's explanation. Knows no clock, no index and no reservations:
plain data in, plain data out.
"""

import enum
import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from replicas.protocol.status import ReplicaId
from router.routing.bucket import affinity_order
from router.routing.cost import Cost, CostParameters, FleetRates, cost_of, fleet_rates
from router.routing.load import ReplicaLoad

if TYPE_CHECKING:
    import random


class DecisionReason(enum.StrEnum):
    ONLY_REPLICA = "only_replica"
    """There was no choice."""
    OVERLAP = "overlap"
    """Nobody holds more of the prompt."""
    HOME = "home"
    """The bucket's first replica."""
    SPILL = "spill"
    """Away from home and from the cache, because both were too busy."""
    POLICY = "policy"
    """A baseline policy said so."""


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """All that a decision needs of a request. `sequence` counts a router's requests (round robin)."""

    bucket: bytes
    num_tokens: int
    block_size: int
    sequence: int = 0


class Candidate(NamedTuple):
    """A replica that was considered. `rank` is its place in the affinity order, 0 for home."""

    replica_id: ReplicaId
    rank: int
    overlap_tokens: int
    load: ReplicaLoad
    cost: Cost


@dataclass(frozen=True, slots=True)
class Decision:
    replica_id: ReplicaId
    overlap_tokens: int
    reason: DecisionReason
    rank: int
    candidates: tuple[Candidate, ...]


def decide(
    request: RoutingRequest,
    replicas: Mapping[ReplicaId, ReplicaLoad],
    overlaps: Mapping[ReplicaId, int],
    parameters: CostParameters,
    rng: "random.Random",
) -> Decision:
    """The cheapest replica; among near-ties the deepest overlap, then the affinity order.

    `replicas` are those that may serve (at least one); `overlaps` are leading blocks, and may speak of
    others, whose caches then count for nothing.
    """
    assert replicas, "a decision needs a replica"
    order = affinity_order(request.bucket, replicas)
    considered = _considered(order, replicas, overlaps, parameters, rng)
    rates = fleet_rates([replicas[replica_id] for _, replica_id in considered], parameters)
    candidates = _weigh(request, considered, replicas, overlaps, rates, parameters.copy_price)
    chosen = _choose(candidates, rates, parameters)
    return Decision(
        replica_id=chosen.replica_id,
        overlap_tokens=chosen.overlap_tokens,
        reason=_reason(chosen, candidates),
        rank=chosen.rank,
        candidates=candidates,
    )


def overlap_tokens(request: RoutingRequest, num_blocks: int) -> int:
    """Tokens that need no computing. The last one of a prompt always does: its logits are wanted."""
    return max(0, min(num_blocks * request.block_size, request.num_tokens - 1))


def _considered(
    order: list[ReplicaId],
    replicas: Mapping[ReplicaId, ReplicaLoad],
    overlaps: Mapping[ReplicaId, int],
    parameters: CostParameters,
    rng: "random.Random",
) -> list[tuple[int, ReplicaId]]:
    """Who is compared, with their ranks: everybody, or in a large fleet a bounded few."""
    ranked = list(enumerate(order))
    if len(ranked) <= parameters.num_compared_candidates:
        return ranked
    few = ranked[: parameters.num_affinity_candidates]
    rest = ranked[parameters.num_affinity_candidates :]
    holders = [entry for entry in rest if entry[1] in overlaps]
    few += heapq.nlargest(
        parameters.num_holder_candidates,
        holders,
        key=lambda entry: (overlaps[entry[1]], -replicas[entry[1]].num_pending_tokens, -entry[0]),
    )
    chosen = set(few)
    drawn = [
        entry
        for entry in rng.sample(rest, min(len(rest), 3 * parameters.num_idle_candidates))
        if entry not in chosen
    ]
    few += heapq.nsmallest(
        parameters.num_idle_candidates,
        drawn,
        key=lambda entry: (replicas[entry[1]].num_pending_tokens, replicas[entry[1]].num_requests, entry[0]),
    )
    return few


def _weigh(
    request: RoutingRequest,
    considered: list[tuple[int, ReplicaId]],
    replicas: Mapping[ReplicaId, ReplicaLoad],
    overlaps: Mapping[ReplicaId, int],
    rates: FleetRates,
    copy_price: float,
) -> tuple[Candidate, ...]:
    """The deepest holder is always among those considered, so the deepest overlap is theirs."""
    tokens = {
        replica_id: overlap_tokens(request, overlaps.get(replica_id, 0)) for _, replica_id in considered
    }
    deepest = max(tokens.values())
    return tuple(
        Candidate(
            replica_id,
            rank,
            tokens[replica_id],
            replicas[replica_id],
            cost_of(
                replicas[replica_id],
                num_uncached_tokens=request.num_tokens - tokens[replica_id],
                num_copied_tokens=deepest - tokens[replica_id],
                rates=rates,
                copy_price=copy_price,
            ),
        )
        for rank, replica_id in considered
    )


def _choose(candidates: tuple[Candidate, ...], rates: FleetRates, parameters: CostParameters) -> Candidate:
    """The cheapest, unless a near-tie has more of the prompt or comes earlier in the affinity order.

    Overlap comes before affinity, so a near-tie never serves with less of the prompt than the cheapest.
    """
    cheapest = min(candidates, key=lambda candidate: (candidate.cost.seconds, candidate.rank))
    near_seconds = (
        parameters.near_tie_tokens * rates.prefill_seconds_per_token
        + parameters.near_tie_requests * rates.decode_step_seconds
    )
    near_ties = (
        candidate
        for candidate in candidates
        if candidate.cost.seconds <= cheapest.cost.seconds + near_seconds
        and candidate.load.num_requests <= cheapest.load.num_requests + parameters.near_tie_requests
    )
    return min(near_ties, key=lambda candidate: (-candidate.overlap_tokens, candidate.rank))


def _reason(chosen: Candidate, candidates: tuple[Candidate, ...]) -> DecisionReason:
    if len(candidates) == 1:
        return DecisionReason.ONLY_REPLICA
    if chosen.overlap_tokens and chosen.overlap_tokens == max(c.overlap_tokens for c in candidates):
        return DecisionReason.OVERLAP
    return DecisionReason.HOME if chosen.rank == 0 else DecisionReason.SPILL
