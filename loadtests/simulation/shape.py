"""ReplicaShape and TierShape: the size and the habits of a simulated replica.

Owns what they are called. Does not know what a replica does with them.
"""

from dataclasses import dataclass

from replicas.config import DEFAULT_SLO_TPOT
from replicas.kvcache.cache_groups import CacheGroup
from replicas.simulated_engine.groups import longest_prompt
from replicas.simulated_engine.hardware import CostModel


@dataclass(frozen=True, slots=True)
class TierShape:
    """One replica's memory below its device, and its speeds.

    `host_bytes_per_second` is one way between device and host memory, `pull_bytes_per_second` one way between
    two replicas; without it none pulls.
    """

    bytes_per_token: int
    host_bytes: float
    disk_bytes: float = 0.0
    chunk_tokens: int = 128
    host_bytes_per_second: float = 25e9
    disk_bytes_per_second: float = 5e9
    pull_bytes_per_second: float | None = None
    write_bytes_per_second: float | None = None
    lease_seconds: int | None = None
    """Every prompt is leased for this long after each use, within `lease_share` of each tier."""
    lease_share: float = 0.5

    def __post_init__(self) -> None:
        if min(self.host_bytes_per_second, self.disk_bytes_per_second) <= 0:
            raise ValueError("KV moves at more than 0 bytes a second")


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """One replica's capacity. `num_blocks` do not count the null block.

    With `decodes_beside`, prefill and decode do not slow each other down: requests decode at their own pace
    while a prompt is computed. Published comparisons of routers often assume this; an engine whose steps do
    both is slower. With `reads_shared_once`, a decode step reads a block once for all requests that attend to
    it. Without `counts_arrivals`, its load counts a request only from the end of the step that follows its
    arrival.

    `groups` are those of a sparse model, whose blocks they share; its requests leave a resume point every
    `retention` tokens, besides those that vLLM's cache always keeps.
    """

    cost: CostModel
    num_blocks: int
    block_size: int
    max_batched_tokens: int
    max_running: int
    decodes_beside: bool = False
    reads_shared_once: bool = False
    counts_arrivals: bool = True
    tiers: TierShape | None = None
    groups: tuple[CacheGroup, ...] = ()
    retention: int = 0
    slo_tpot: float | None = DEFAULT_SLO_TPOT
    """Seconds that a step with decoding requests should take at most, as a replica's setting says it."""

    def __post_init__(self) -> None:
        if self.groups and self.tiers is not None:
            raise ValueError("a sparse model keeps no KV below the device")

    @property
    def alignment(self) -> int:
        """Tokens at whose multiples a chunk of a sparse model may have to end."""
        return self.block_size if self.groups else 1

    @property
    def capacity_tokens(self) -> int:
        if self.groups:
            return longest_prompt(self.num_blocks, self.groups, self.max_batched_tokens)
        return self.num_blocks * self.block_size
