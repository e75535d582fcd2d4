"""Hits of a workload in one cache that forgets nothing.

Owns the upper bound by which results are divided. Knows prompts only: that a next turn contains the last
answer is not known here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loadtests.workloads.workload import Workload


@dataclass(frozen=True, slots=True)
class IdealHits:
    """Shares of all prompt tokens."""

    token_hit_rate: float
    cross_user_hit_rate: float


class Loss(NamedTuple):
    """From `at` on the cache has only these prefixes left, and what they begin with."""

    at: float
    kept: frozenset[int]


class RequestHits(NamedTuple):
    """Prompt tokens of one request. The second are part of the first."""

    num_cached: int
    num_cross_user: int


def ideal_hits(workload: Workload, *, hit_tokens: int | None = None, warm_up: int = 0) -> IdealHits:
    """Return shares. The first `warm_up` requests fill the cache and are not counted."""
    hits = ideal_hits_by_request(workload, hit_tokens=hit_tokens)[warm_up:]
    total = sum(request.num_input_tokens for request in workload.requests[warm_up:])
    if not total:
        return IdealHits(0.0, 0.0)
    return IdealHits(
        sum(hit.num_cached for hit in hits) / total, sum(hit.num_cross_user for hit in hits) / total
    )


def ideal_hits_by_request(
    workload: Workload, *, hit_tokens: int | None = None, losses: Sequence[Loss] = ()
) -> list[RequestHits]:
    """Hits in an infinite cache of blocks of `hit_tokens` (default: the workload's own blocks).

    A request finds what earlier arrivals asked for, in whole blocks, less the last token, which is always
    computed. A token is a cross-user hit if another user's request was the first with that prefix.
    """
    coming_losses = sorted(losses, key=lambda loss: -loss.at)
    block_tokens = workload.block_tokens
    hit_tokens = hit_tokens or block_tokens
    writers: dict[int, str] = {}
    hits: list[RequestHits] = []
    for request in workload.requests:
        while coming_losses and coming_losses[-1].at <= request.arrival_seconds:
            kept = coming_losses.pop().kept
            writers = {prefix_id: user for prefix_id, user in writers.items() if prefix_id in kept}
        num_blocks = len(request.prefix_ids)
        num_known_blocks = next(
            (number for number in range(num_blocks, 0, -1) if request.prefix_ids[number - 1] in writers), 0
        )
        num_known = min(num_known_blocks * block_tokens, request.num_input_tokens - 1)
        num_hit = num_known // hit_tokens * hit_tokens
        num_cross_user = 0
        for number, prefix_id in enumerate(request.prefix_ids[:num_known_blocks]):
            if writers.get(prefix_id, request.user) != request.user:
                num_cross_user += max(0, min(num_hit - number * block_tokens, block_tokens))
        hits.append(RequestHits(num_hit, num_cross_user))
        for prefix_id in request.prefix_ids[num_known_blocks:]:
            writers[prefix_id] = request.user
    return hits
