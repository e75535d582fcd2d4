"""CacheShape: how vLLM divides its KV cache among a model's layers, and what follows for hits.

Owns the reading of vLLM's groups. Imports vLLM.
"""

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

from replicas.kvcache.cache_groups import CHUNKED, MAMBA, WINDOW_KINDS, CacheGroup, state_tokens_of
from replicas.vllm_engine.resume_points import peek_of, problem_of

WINDOW_RETENTION_TOKENS = 2048
"""Interval of the resume points that models with sliding windows keep where the operator says nothing: points
four times as dense cost coding agents hits (`loadtests/RESULTS.md`)."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """`hash_block` is the tokens of one of vLLM's hashes; hits are multiples of `alignment`. The cache holds
    `capacity_tokens` in sequences of the full context. `retention_interval` is vLLM's; None keeps all."""

    groups: tuple[CacheGroup, ...]
    hash_block: int
    alignment: int
    capacity_tokens: int
    vllm_retention_interval: int | None

    @property
    def is_sparse(self) -> bool:
        """Whether a hit needs more than blocks of full attention."""
        return len(self.groups) > 1 or not self.groups[0].is_full

    @property
    def peek_tokens(self) -> int:
        return peek_of(self.groups, self.alignment)

    @property
    def state_tokens(self) -> int:
        return state_tokens_of(group for group in self.groups if group.is_cacheable)

    @property
    def retention_interval(self) -> int:
        """The card's interval: the points that a router may count on."""
        if self.state_tokens:
            return 0  # states are kept where a step ended
        kinds = {group.kind for group in self.groups if not group.is_full}
        if kinds <= {CHUNKED} or self.vllm_retention_interval is None:
            return self.alignment
        return self.vllm_retention_interval

    @property
    def default_retention(self) -> int:
        """The interval that pays: some for windows, and none where a point is a state."""
        kinds = {group.kind for group in self.groups if group.is_cacheable}
        if MAMBA in kinds or kinds.isdisjoint(WINDOW_KINDS):
            return 0
        return -(-WINDOW_RETENTION_TOKENS // self.alignment) * self.alignment

    @property
    def problem(self) -> str | None:
        """Why hits in such a cache cannot be foretold; None if they can."""
        return problem_of(self.groups, self.alignment) if self.is_sparse else None


def read_cache_shape(config: Any, manager: Any) -> CacheShape:
    """Read the cache of a KVCacheManager."""
    cache, coordinator = manager.kv_cache_config, manager.coordinator
    groups = []
    for number, single in enumerate(coordinator.single_type_managers):
        spec = cache.kv_cache_groups[number].kv_cache_spec
        kind, window = manager.kv_cache_event_metadata[number]
        if kind == CHUNKED:
            window = spec.attention_chunk_size
        groups.append(
            CacheGroup(
                kind, int(single.block_size), window, bool(single.use_eagle), bool(spec.prefix_cacheable)
            )
        )
    hash_block = int(coordinator.block_pool.hash_block_size)
    alignment = hash_block if coordinator.enable_partial_hash_hits else int(coordinator.scheduler_block_size)
    capacity_tokens, _ = get_kv_cache_capacity(config, cache)
    interval = cache.prefix_cache_retention_interval
    return CacheShape(tuple(groups), hash_block, alignment, int(capacity_tokens), interval)
