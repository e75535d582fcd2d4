"""What a workload would hit in one cache that forgets nothing.

Owns the upper bound that results are given as a share of. Knows prompts only: that a next turn contains the
answer of the last one is not known here.
"""

from dataclasses import dataclass

from loadtests.workloads.workload import Workload


@dataclass(frozen=True, slots=True)
class IdealHits:
    """Shares of all prompt tokens."""

    token_hit_rate: float
    cross_user_hit_rate: float


def ideal_hits(workload: Workload, *, hit_tokens: int | None = None, warm_up: int = 0) -> IdealHits:
    """Hits in an infinite cache of blocks of `hit_tokens` (default: the workload's own blocks).

    A request finds what earlier arrivals asked for, in whole blocks, less the last token, which is always
    computed. A token is a cross-user hit if another user's request was the first with that prefix. The first
    `warm_up` requests fill the cache and are not counted.
    """
    block_tokens = workload.block_tokens
    hit_tokens = hit_tokens or block_tokens
    writers: dict[int, str] = {}
    num_cached = num_cross_user = 0
    for request_number, request in enumerate(workload.requests):
        num_known_blocks = 0
        for prefix_id in request.prefix_ids:
            if prefix_id not in writers:
                break
            num_known_blocks += 1
        if request_number >= warm_up:
            num_known = min(num_known_blocks * block_tokens, request.num_input_tokens - 1)
            num_hit = num_known // hit_tokens * hit_tokens
            num_cached += num_hit
            for number, prefix_id in enumerate(request.prefix_ids[:num_known_blocks]):
                if writers[prefix_id] != request.user:
                    num_cross_user += max(0, min(num_hit - number * block_tokens, block_tokens))
        for prefix_id in request.prefix_ids[num_known_blocks:]:
            writers[prefix_id] = request.user
    total = sum(request.num_input_tokens for request in workload.requests[warm_up:])
    return IdealHits(num_cached / total, num_cross_user / total) if total else IdealHits(0.0, 0.0)
