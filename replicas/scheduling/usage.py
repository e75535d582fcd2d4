"""How a request's prompt was served, for its first delta.

Owns the arithmetic on the scheduler's notes about the request.
"""

from collections.abc import Iterable, Iterator

from replicas.protocol.frames import PromptUsage
from replicas.scheduling.request import Request


def prompt_usage(request: Request, block_size: int) -> PromptUsage:
    """Return the usage at the first schedule; later preemptions do not change it."""
    num_full_block_tokens = request.num_prompt_tokens // block_size * block_size
    num_cached_tokens = min(request.num_cached_tokens, request.num_prompt_tokens)
    outcome = request.lease_outcome
    num_unresumable, num_lost, num_unmoved, num_evicted_early, num_expired = shares_of(
        request.num_prompt_tokens - num_cached_tokens,
        (
            request.num_unresumable_tokens,
            request.num_lost_tokens,
            request.num_unmoved_tokens,
            outcome.num_evicted_early_tokens,
            outcome.num_expired_tokens,
        ),
    )
    return PromptUsage(
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        num_written_tokens=max(0, num_full_block_tokens - request.num_cached_tokens),
        num_cross_user_tokens=request.num_cross_user_tokens,
        num_own_tokens=request.num_own_tokens,
        num_slower_tier_tokens=min(request.num_slower_tier_tokens, request.num_prompt_tokens),
        num_disk_tokens=min(request.num_disk_tokens, request.num_prompt_tokens),
        num_pulled_tokens=min(request.num_pulled_tokens, request.num_prompt_tokens),
        leases=outcome.answers,
        num_evicted_early_tokens=num_evicted_early,
        broken_by=outcome.broken_by,
        num_unmoved_tokens=num_unmoved,
        num_lost_tokens=num_lost,
        num_expired_tokens=num_expired,
        num_unresumable_tokens=num_unresumable,
    )


def shares_of(num_tokens: int, wanted: Iterable[int]) -> Iterator[int]:
    """Yield each amount, limited by what the earlier ones leave."""
    for number in wanted:
        share = min(number, num_tokens)
        num_tokens -= share
        yield share
