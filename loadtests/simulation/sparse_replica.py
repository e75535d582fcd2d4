"""SparseReplica: a virtual replica of a model whose layers keep different KV.

Owns the tables of its requests. Which KV stays, and where a prompt can be resumed, is the simulated engine's
`GroupedCache`. A decode step costs what it does at a dense model of the same size.
"""

from collections.abc import Iterable, Sequence

from loadtests.simulation.replica import Foreseen, Meter, VirtualReplica
from loadtests.simulation.request import VirtualRequest, num_common
from loadtests.simulation.shape import ReplicaShape
from replicas.kvcache.block_pool import NULL_BLOCK
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import CacheEvent
from replicas.simulated_engine.grouped_cache import GroupedCache, GroupTable, Hit


class SparseReplica(VirtualReplica):
    """A hit is a number of blocks here, as a list of null blocks."""

    def __init__(self, shape: ReplicaShape, meter: Meter) -> None:
        super().__init__(shape, meter)
        self._cache = GroupedCache(
            shape.num_blocks + 1,
            shape.groups,
            max_batched_tokens=shape.max_batched_tokens,
            retention=shape.retention,
        )
        self.pool = self._cache.pool
        self._tables: dict[VirtualRequest, GroupTable] = {}

    def foresee(self, block_hashes: Sequence[BlockHash]) -> Foreseen:
        hit = self._cache.find(block_hashes)
        num_hit, num_reached = hit.num_tokens, max(hit)
        for request in self._pending():
            num_shared = num_common(block_hashes, request.block_hashes) * self.shape.block_size
            num_reached = max(num_reached, num_shared)
            ends = (end for end in self._leaves(request) if end <= num_shared)
            num_hit = max(num_hit, max(ends, default=0))
        return Foreseen(num_hit // self.shape.block_size, num_reached // self.shape.block_size)

    def _leaves(self, request: VirtualRequest) -> Iterable[int]:
        """Return where a prompt that is being computed can be resumed afterwards."""
        table, block_size = self._tables.get(request), self.shape.block_size
        last = (request.num_prompt_tokens - 1) // block_size * block_size
        boundaries = (last, self._find(request).junction) if table is None else table.boundaries
        every = self.shape.retention
        return (*boundaries, *(range(every, last + 1, every) if every else ()))

    def _find_cached(self, request: VirtualRequest) -> list[int]:
        return [NULL_BLOCK] * (self._find(request).num_tokens // self.shape.block_size)

    def _find(self, request: VirtualRequest) -> Hit:
        return self._cache.find(request.hashes(request.num_findable_blocks(self.shape.block_size)))

    def _take_blocks(self, request: VirtualRequest, cached: list[int]) -> bool:
        hit = self._find(request)
        hashes = request.hashes(hit.num_tokens // self.shape.block_size)
        if not self._cache.fits(hashes, self._end_of_block(request.num_tokens), hit):
            return False
        table = self._cache.begin(request.num_prompt_tokens, hit, request.tenant, request.user)
        self._cache.take(table, hashes, hit)
        self._tables[request] = table
        request.num_stored_blocks = len(cached)
        request.num_computed = hit.num_tokens
        self._num_waiting_tokens -= request.num_expected_tokens
        self._num_wanted_tokens -= request.num_tokens
        return True

    def _num_chunk_tokens(self, request: VirtualRequest, budget: int) -> int:
        start, num_tokens = request.num_computed, super()._num_chunk_tokens(request, budget)
        table = self._tables[request]
        return self._cache.chunk_end(table, start, start + num_tokens, request.num_tokens) - start

    def _allocate(self, request: VirtualRequest, num_tokens: int) -> bool:
        start = num_tokens - 1 if request.is_decoding else request.num_computed
        end = self._end_of_block(num_tokens)
        while not self._cache.allocate(self._tables[request], start, end):
            if self._preempt_last() is request:
                return False
        return True

    def _read_until(self, request: VirtualRequest) -> float:
        return self._tables[request].read_until

    def _end_of_block(self, num_tokens: int) -> int:
        return -(-num_tokens // self.shape.block_size) * self.shape.block_size

    def _store_up_to(self, request: VirtualRequest, num_blocks: int, *, is_computed: bool = True) -> None:
        if num_blocks > request.num_stored_blocks:
            request.num_stored_blocks = num_blocks
            end = num_blocks * self.shape.block_size
            self._cache.store(self._tables[request], request.hashes(num_blocks), end)

    def _release(self, request: VirtualRequest) -> None:
        self._cache.free(self._tables.pop(request))

    def _take_events(self) -> list[CacheEvent]:
        return self._cache.take_events()
