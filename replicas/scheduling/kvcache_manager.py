"""KVCacheManager: the block tables and block hashes of requests over one block pool.

Owns the rules of prefix caching: hits, when a block is hashed, and what an allocation needs. The scheduler
owns budgets, queues and stop rules, the engine the memory behind a block id.

Full blocks are hashed and shared as soon as they are *scheduled*: the engine writes the KV of a step's whole
batch before any of it is read, so a twin scheduled in the same step may already hit. The events of a step are
taken after it was computed.
"""

from collections.abc import Sequence

from replicas.kvcache.block_pool import BlockPool
from replicas.kvcache.writers import Shares
from replicas.protocol.blocks import hash_blocks
from replicas.protocol.events import CacheEvent
from replicas.protocol.frames import NO_USER, UserTag
from replicas.scheduling.request import Request


class KVCacheManager:
    """`num_blocks` counts the null block, which holds no tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"a block has at least one token, not {block_size}")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of KV in the whole pool: the most for one request."""
        return self.pool.num_usable * self.block_size

    @property
    def has_events(self) -> bool:
        return self.pool.has_events

    def find_cached(self, request: Request) -> list[int]:
        """Return the blocks of the longest cached prefix of a request that holds none, without changing the
        pool.

        The last token is always computed, since its logits are needed: a fully cached prompt of whole blocks
        still computes its last block.
        """
        self._hash_full_blocks(request, request.num_tokens)
        return self.pool.find_prefix(request.block_hashes[: self.num_findable_blocks(request)])

    def num_findable_blocks(self, request: Request) -> int:
        """How many blocks of its known tokens need not be computed, if they are cached."""
        return (request.num_tokens - 1) // self.block_size

    def token_shares(self, request: Request, num_cached_blocks: int) -> Shares:
        """Return the users of the prompt tokens in the leading blocks that `find_cached` has just found."""
        return self.pool.writers.token_shares(
            request.block_hashes[:num_cached_blocks],
            request.submit.user,
            block_size=self.block_size,
            num_prompt_tokens=request.num_prompt_tokens,
        )

    def fits(self, request: Request, cached_block_ids: Sequence[int]) -> bool:
        """Whether all known tokens of a request without blocks fit into the free ones."""
        return self._num_missing(request, request.num_tokens, cached_block_ids) <= self.pool.num_free

    def chunk_tokens(self, request: Request, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` tokens of a prompt to compute in one step."""
        return num_tokens

    def allocate(self, request: Request, num_new_tokens: int, cached_block_ids: Sequence[int] = ()) -> bool:
        """Allocate blocks for the next `num_new_tokens` tokens after the computed (or just found) ones.

        `cached_block_ids` come from `find_cached`, for a request that holds no blocks. Blocks that get full
        are hashed and shared at once. Returns False and does nothing if blocks run out.
        """
        block_size = self.block_size
        assert not cached_block_ids or not request.block_ids
        start = request.num_computed_tokens or len(cached_block_ids) * block_size
        end = start + num_new_tokens
        assert end <= len(request.token_ids)
        num_missing = self._num_missing(request, end, cached_block_ids)
        if num_missing > self.pool.num_free:
            return False
        if cached_block_ids:
            self.pool.acquire(cached_block_ids, request.submit.tenant)
            num_missing = -(-end // block_size) - len(cached_block_ids)
            request.block_ids.extend(cached_block_ids)
        if num_missing > 0:
            request.block_ids.extend(self.pool.allocate(num_missing, request.submit.tenant))
        if end // block_size > start // block_size:
            self._store(request, start // block_size, end // block_size, user=request.submit.user)
        return True

    def hold(self, request: Request, cached_block_ids: Sequence[int]) -> None:
        """Give a request blocks for all known tokens, for which `fits` has found room: the cached ones, and
        others whose KV will be computed or loaded."""
        num_missing = -(-request.num_tokens // self.block_size) - len(cached_block_ids)
        self.pool.acquire(cached_block_ids, request.submit.tenant)
        request.block_ids.extend(cached_block_ids)
        request.block_ids.extend(self.pool.allocate(num_missing, request.submit.tenant))

    def share_loaded(self, request: Request, first: int, end: int, writers: Sequence[UserTag]) -> None:
        """Share blocks `[first, end)`, which hold KV now that was computed by the requests of `writers`."""
        for block_hash, writer in zip(request.block_hashes[first:end], writers, strict=True):
            self.pool.writers.wrote([block_hash], writer)
        self._store(request, first, end, user=NO_USER)

    def free(self, request: Request) -> None:
        """Give back a request's blocks, tail first; those with a hash stay cached until handed out again."""
        self.pool.release(reversed(request.block_ids))
        request.block_ids.clear()

    def reset(self) -> bool:
        """Evict every cached block. Returns False and does nothing while any request holds blocks."""
        return self.pool.clear()

    def take_events(self) -> list[CacheEvent]:
        return self.pool.take_events()

    def _num_missing(self, request: Request, end: int, cached_block_ids: Sequence[int]) -> int:
        """Count the free blocks needed to hold `end` tokens; a free cached block is one of them."""
        num_missing = -(-end // self.block_size) - len(request.block_ids)
        if cached_block_ids:
            num_missing += self.pool.num_free_among(cached_block_ids) - len(cached_block_ids)
        return num_missing

    def _store(self, request: Request, first: int, end: int, *, user: UserTag) -> None:
        """Share blocks `[first, end)`, in two events if the prompt's last full block lies inside."""
        self._hash_full_blocks(request, end * self.block_size)
        prompt_end = request.num_prompt_tokens // self.block_size
        if first < prompt_end < end:
            self._store_run(request, first, prompt_end, ends_prompt=True, user=user)
            first = prompt_end
        self._store_run(request, first, end, ends_prompt=end == prompt_end, user=user)

    def _store_run(self, request: Request, first: int, end: int, *, ends_prompt: bool, user: UserTag) -> None:
        self.pool.store(
            request.block_ids[first:end],
            request.block_hashes[first:end],
            first_block_index=first,
            ends_prompt=ends_prompt,
            user=user,
        )

    def _hash_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Extend the request's hashes to the full blocks of its first `num_tokens` tokens, each once."""
        block_hashes = request.block_hashes
        start, end = len(block_hashes), num_tokens // self.block_size
        if start >= end:
            return
        block_hashes += hash_blocks(
            request.submit.root,
            request.token_ids[start * self.block_size : end * self.block_size],
            self.block_size,
            parent=block_hashes[-1] if block_hashes else None,
            start=start * self.block_size,
            media=request.submit.media,
            published=request.submit.published,
        )
