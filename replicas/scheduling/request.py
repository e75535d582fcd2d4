"""Request, Chunk, SampledToken: one request while the scheduler owns it, and a step's share of it.

Owns the token sequence with its block table. Only the scheduler and its cache manager write to a Request.
"""

from typing import NamedTuple

from replicas.engine import EngineRequest
from replicas.grammars.constraint import Constraint
from replicas.kvstore.leasing.lease_outcome import LeaseOutcome, without_tiers
from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import RequestKey, SamplingParams, Submit, TokenLogprobs


class Request:
    """A prompt on its way to being answered.

    ::

        token_ids   | prompt                      | resumed output | output of this run |
                      num_prompt_tokens             \\--------- num_output_tokens -----/
        computed    | num_computed_tokens ... |       have KV in the blocks of block_ids

    The newest output token has no KV until the step after the one that sampled it.
    """

    __slots__ = (
        "awaits_grammar",
        "block_hashes",
        "block_ids",
        "constraint",
        "key",
        "lease_outcome",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_cross_user_tokens",
        "num_disk_tokens",
        "num_expected_tokens",
        "num_lost_tokens",
        "num_own_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_pulled_tokens",
        "num_slower_tier_tokens",
        "num_submitted_tokens",
        "num_unmoved_tokens",
        "num_unresumable_tokens",
        "rank",
        "sampling",
        "seed",
        "submit",
        "token_ids",
    )

    def __init__(
        self, engine_request: EngineRequest, arrival: int, constraint: Constraint | None = None
    ) -> None:
        self.submit: Submit = engine_request.submit
        self.key: RequestKey = engine_request.key
        self.sampling: SamplingParams = self.submit.sampling
        self.seed: int = engine_request.seed
        self.rank: tuple[int, int] = (self.submit.priority, arrival)
        """Lower ranks go first; higher ranks are preempted first."""
        self.token_ids: list[int] = list(engine_request.token_ids)
        self.num_submitted_tokens: int = len(self.token_ids)
        self.num_prompt_tokens: int = self.num_submitted_tokens - self.submit.num_output_tokens
        self.block_hashes: list[BlockHash] = []
        """Hashes of the leading full blocks of `token_ids` needed so far."""
        self.block_ids: list[int] = []
        self.num_computed_tokens: int = 0
        self.num_cached_tokens: int = 0
        """Tokens found in the cache when the request was first scheduled."""
        self.num_cross_user_tokens: int = 0
        """The part of these that another user's request computed."""
        self.num_own_tokens: int = 0
        """And those that an earlier request of the same user had."""
        self.num_slower_tier_tokens: int = 0
        """Cached tokens that were copied to the device for it."""
        self.num_disk_tokens: int = 0
        """And of these, those that were read from disk for it."""
        self.num_pulled_tokens: int = 0
        """And those that were pulled from a peer for it."""
        self.num_lost_tokens: int = 0
        """To be brought to the device, and not come."""
        self.num_unmoved_tokens: int = 0
        """Below the device, and sooner computed than moved."""
        self.num_unresumable_tokens: int = 0
        """Held by some layers, behind the last point that all of them can resume at."""
        self.lease_outcome: LeaseOutcome = without_tiers(self.submit.leases if self.key.choice == 0 else ())
        """Outcome of its leases, for its submit's first choice."""
        self.num_expected_tokens: int = 0
        """While it waits: the tokens that it would have to compute, by the cache when it was queued."""
        self.num_preemptions: int = 0
        self.constraint: Constraint | None = constraint
        """The grammar of its output, which takes each output token once, even if its KV is computed again."""
        self.awaits_grammar: bool = constraint is not None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output so far, including an earlier run's part."""
        return len(self.token_ids) - self.num_prompt_tokens

    def __repr__(self) -> str:
        return f"Request({self.key}, {self.num_computed_tokens}/{self.num_tokens} tokens computed)"


class Chunk(NamedTuple):
    """Compute tokens `[start, start + num_tokens)` of a request in this step.

    `samples` iff the chunk reaches the last known token, so that the logits of its last position
    yield the next one.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool

    @property
    def is_decode(self) -> bool:
        """Whether it computes a single output token, not a part of a prompt (or of what was preempted)."""
        return self.num_tokens == 1 and self.start >= self.request.num_prompt_tokens


class SampledToken(NamedTuple):
    """The sampler's choice for one request in one step."""

    token_id: int
    logprobs: TokenLogprobs | None = None
