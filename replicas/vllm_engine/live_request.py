"""LiveRequest: a request in vLLM, and how its prompt was served.

Owns the facts besides vLLM's own, and the arithmetic of its usage.
"""

from dataclasses import dataclass
from typing import Any

from replicas.engine import EngineRequest
from replicas.grammars.holding import HeldChoice
from replicas.kvcache.writers import NO_SHARES, Shares
from replicas.kvstore.leasing.lease_outcome import NO_OUTCOME, LeaseOutcome
from replicas.protocol.frames import PromptUsage
from replicas.scheduling.usage import shares_of
from replicas.vllm_engine.chunk_chain import ChunkChain
from replicas.vllm_engine.grammars import HeldGrammar


@dataclass(slots=True)
class LiveRequest:
    """`inner` is vLLM's own; `num_expected_tokens` it would have to compute.

    `num_found_tokens` were in the cache when it was first scheduled, `num_external_tokens` of them in a tier
    below the device. Some layers held `num_shared_tokens`, if that is more than was found.
    """

    request: EngineRequest
    inner: Any
    num_expected_tokens: int
    num_found_tokens: int = 0
    num_external_tokens: int = 0
    num_shared_tokens: int = 0
    shares: Shares = NO_SHARES
    has_output: bool = False
    lease_outcome: LeaseOutcome = NO_OUTCOME
    choice: HeldChoice | None = None
    """The choice's grammar."""
    grammar: HeldGrammar | None = None
    """vLLM's view of the grammar, once it is compiled."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids) - self.request.submit.num_output_tokens

    @property
    def num_tokens_found_on_arrival(self) -> int:
        return len(self.request.token_ids) - self.num_expected_tokens

    def usage(self, output: Any, block_size: int, chain: ChunkChain | None) -> PromptUsage:
        """Return vLLM's counters, corrected for an earlier run's output."""
        num_prompt_tokens = self.num_prompt_tokens
        num_cached_tokens = min(int(output.num_cached_tokens or 0), num_prompt_tokens)
        # Shares are of what was found when the request was first scheduled; loading it may have failed.
        num_cross_user_tokens = min(self.shares.cross_user, num_cached_tokens)
        num_full_tokens = num_prompt_tokens // block_size * block_size
        num_disk_tokens, num_pulled_tokens = self._tier_tokens(chain)
        num_unresumable, num_lost, num_unmoved, num_evicted_early, num_expired = shares_of(
            num_prompt_tokens - num_cached_tokens,
            (
                max(0, self.num_shared_tokens - num_cached_tokens),
                0 if chain is None else chain.num_lost_tokens,
                0 if chain is None else chain.num_unmoved_tokens,
                self.lease_outcome.num_evicted_early_tokens,
                self.lease_outcome.num_expired_tokens,
            ),
        )
        return PromptUsage(
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            num_written_tokens=min(
                int(output.num_cache_creation_tokens or 0), max(0, num_full_tokens - num_cached_tokens)
            ),
            num_cross_user_tokens=num_cross_user_tokens,
            num_own_tokens=min(self.shares.own, num_cached_tokens - num_cross_user_tokens),
            num_slower_tier_tokens=min(self.num_external_tokens, num_prompt_tokens),
            leases=self.lease_outcome.answers,
            num_evicted_early_tokens=num_evicted_early,
            broken_by=self.lease_outcome.broken_by,
            num_disk_tokens=num_disk_tokens,
            num_pulled_tokens=num_pulled_tokens,
            num_unmoved_tokens=num_unmoved,
            num_lost_tokens=num_lost,
            num_expired_tokens=num_expired,
            num_unresumable_tokens=num_unresumable,
        )

    def _tier_tokens(self, chain: ChunkChain | None) -> tuple[int, int]:
        """Count the loaded tokens that were read from disk for it, and those pulled from a peer."""
        if chain is None:
            return 0, 0
        first = self.num_found_tokens - self.num_external_tokens
        end = min(self.num_found_tokens, self.num_prompt_tokens)
        return chain.num_disk_tokens(first, end), chain.num_pulled_tokens(first, end)
