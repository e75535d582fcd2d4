"""How a request's prompt was served, as its first delta says it.

Owns the arithmetic from what the scheduler has noted of the request.
"""

from replicas.protocol.frames import PromptUsage
from replicas.scheduling.request import Request


def prompt_usage(request: Request, block_size: int) -> PromptUsage:
    """Measured at the first schedule; a later preemption changes nothing of it."""
    num_full_block_tokens = request.num_prompt_tokens // block_size * block_size
    num_cached_tokens = min(request.num_cached_tokens, request.num_prompt_tokens)
    outcome = request.lease_outcome
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
        num_evicted_early_tokens=min(
            outcome.num_evicted_early_tokens, request.num_prompt_tokens - num_cached_tokens
        ),
        broken_by=outcome.broken_by,
    )
