"""GroupedManager: the cache manager of a scheduler over a `GroupedCache`.

Owns the tables of the requests that hold blocks. Knows no tiers below the device: sparse models have none.
"""

from collections.abc import Sequence

from replicas.kvcache.block_pool import NULL_BLOCK
from replicas.protocol.events import CacheEvent
from replicas.protocol.frames import RequestKey
from replicas.scheduling.kvcache_manager import KVCacheManager
from replicas.scheduling.request import Request
from replicas.simulated_engine.grouped_cache import GroupedCache, GroupTable


class GroupedManager(KVCacheManager):
    """A hit is a number of aligned blocks here, since no one list of ids would say what it consists of."""

    def __init__(self, cache: GroupedCache) -> None:
        self.block_size = cache.alignment
        self.pool = cache.pool
        self._cache = cache
        self._tables: dict[RequestKey, GroupTable] = {}

    @property
    def capacity_tokens(self) -> int:
        return self._cache.capacity_tokens

    @property
    def has_events(self) -> bool:
        return self._cache.has_events

    def find_cached(self, request: Request) -> list[int]:
        self._hash_full_blocks(request, request.num_tokens)
        hit = self._cache.find(request.block_hashes[: self.num_findable_blocks(request)])
        return [NULL_BLOCK] * (hit.num_tokens // self.block_size)

    def fits(self, request: Request, cached_block_ids: Sequence[int]) -> bool:
        hit = self._cache.find(request.block_hashes[: self.num_findable_blocks(request)])
        return self._cache.fits(request.block_hashes, request.num_tokens, hit)

    def chunk_tokens(self, request: Request, num_tokens: int) -> int:
        start = request.num_computed_tokens
        table = self._tables.get(request.key) or self._begin(request)
        return self._cache.chunk_end(table, start, start + num_tokens, request.num_tokens) - start

    def allocate(self, request: Request, num_new_tokens: int, cached_block_ids: Sequence[int] = ()) -> bool:
        table = self._tables.get(request.key) or self._begin(request)
        start = request.num_computed_tokens
        end = start + num_new_tokens
        if not self._cache.allocate(table, start, end):
            return False
        if end // self.block_size > table.stored // self.block_size:
            self._hash_full_blocks(request, end)
            self._cache.store(table, request.block_hashes, end)
        return True

    def free(self, request: Request) -> None:
        table = self._tables.pop(request.key, None)
        if table is not None:
            self._cache.free(table)
        request.block_ids.clear()

    def reset(self) -> bool:
        return self._cache.clear()

    def take_events(self) -> list[CacheEvent]:
        return self._cache.take_events()

    def _begin(self, request: Request) -> GroupTable:
        """The request starts: with its hit, and the blocks of that."""
        hit = self._cache.find(request.block_hashes[: self.num_findable_blocks(request)])
        assert hit.num_tokens == request.num_computed_tokens, "it starts where its hit ends"
        request.num_unresumable_tokens = max(0, hit.junction - hit.num_tokens)
        submit = request.submit
        table = self._cache.begin(request.num_prompt_tokens, hit, submit.tenant, submit.user)
        self._cache.take(table, request.block_hashes, hit)
        self._tables[request.key] = table
        request.block_ids.append(NULL_BLOCK)  # that it holds some is all that the scheduler reads of them
        return table
