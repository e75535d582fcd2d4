"""TenantOrder: the eviction order of cached blocks where several tenants share a device.

Owns the number of blocks that each tenant holds of a pool, and each tenant's free cached blocks, oldest
first. Pure, without a clock: time is counted in blocks handed out.

A tenant is *active* if a request of it came or ended within one turnover, which is as many blocks handed out
as the pool has. Active tenants have equal shares of the pool. When a cached block must be evicted::

    a tenant is inactive                its oldest block: without shares it would be gone by now
    the largest holds more than         its oldest block
      1.25 times its share
    else                                the pool's oldest block

So a tenant alone fills the pool, a flood evicts itself, and tenants of about equal size share one LRU queue.
A block is held by its first user, and by another tenant that finds it free: a shared block belongs to its
last user.
"""

from collections import OrderedDict
from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace

NO_TENANT = b""
"""Requests of clusters without keys are all alike."""

OVER = 1.25
"""Times a tenant's share. Below it age alone decides: of tenants that are about equally large, none should
lose its new blocks to old ones of the others."""

SPARE_ENTRIES = 64
"""Void entries that the heap may keep beside as many as it has valid ones."""


class _TenantHolding:
    __slots__ = ("free", "is_about", "num_held", "seen_at", "stamp", "tag")

    def __init__(self, tag: bytes) -> None:
        self.tag = tag
        self.free: OrderedDict[int, None] = OrderedDict()
        """Its free cached blocks, oldest first."""
        self.num_held = 0
        """These, and those that requests use."""
        self.is_about = True
        self.seen_at = 0
        self.stamp = 0
        """Only a heap entry with this one is valid."""


class TenantOrder:
    """The order for a pool with that many usable blocks, all of them unheld."""

    def __init__(self, num_usable: int) -> None:
        self._num_usable = num_usable
        self._num_handed_out = 0
        self._holdings: dict[bytes, _TenantHolding] = {}
        """Tenants that are active or hold blocks."""
        self._holder: dict[int, _TenantHolding] = {}
        """By block; a free block without a prefix has no holder."""
        self._about: OrderedDict[bytes, _TenantHolding] = OrderedDict()
        """Active tenants, least recent first."""
        self._gone: OrderedDict[bytes, _TenantHolding] = OrderedDict()
        """Inactive tenants with evictable blocks, least recent first."""
        self._heap: list[tuple[int, bytes, int]] = []
        """Tenants with evictable blocks; their holdings have only shrunk since they were pushed."""

    @property
    def num_tenants(self) -> int:
        return len(self._holdings)

    def num_held(self, tag: bytes) -> int:
        found = self._holdings.get(tag)
        return 0 if found is None else found.num_held

    def victim(self) -> int | None:
        """Return the block to evict; None means the oldest of all."""
        if self._gone:
            holding = next(iter(self._gone.values()))
        else:
            largest = self._largest()
            if largest is None or largest.num_held * len(self._about) <= OVER * self._num_usable:
                return None
            holding = largest
        return next(iter(holding.free))

    def comes(self, tag: bytes) -> None:
        """A request of this tenant wants blocks."""
        holding = self._holdings.get(tag)
        if holding is None:
            holding = self._holdings[tag] = _TenantHolding(tag)
        self._see(holding)

    def takes(self, block_ids: Iterable[int], tag: bytes) -> None:
        """The tenant of a new request starts to use these free blocks."""
        holding, holder = self._holdings[tag], self._holder
        num_before = holding.num_held
        for block_id in block_ids:
            before = holder.get(block_id)
            if before is not None:
                self._unfree(before, block_id)
            if before is not holding:
                if before is not None:
                    self._drop(before)
                holder[block_id] = holding
                holding.num_held += 1
        if holding.num_held > num_before and holding.free:
            self._note(holding)

    def handed_out(self, num_blocks: int) -> None:
        """Advance the clock by blocks handed out."""
        self._num_handed_out += num_blocks
        horizon = self._num_handed_out - self._num_usable
        while self._about:
            tag, holding = next(iter(self._about.items()))
            if holding.seen_at >= horizon:
                return
            del self._about[tag]
            holding.is_about = False
            if holding.free:
                self._gone[tag] = holding
            elif not holding.num_held:
                del self._holdings[tag]

    def is_free(self, block_id: int) -> None:
        """A block with a prefix becomes free. The tenant of a request that ran longer than a turnover is
        still active: the block is its newest."""
        holding = self._holder[block_id]
        holding.free[block_id] = None
        if holding.seen_at != self._num_handed_out:
            self._see(holding)
        if len(holding.free) == 1:
            self._note(holding)

    def is_empty(self, block_id: int) -> None:
        """A block without a prefix becomes free, or a free block loses its prefix."""
        holding = self._holder.pop(block_id)
        self._unfree(holding, block_id)
        self._drop(holding)

    def clear(self) -> None:
        """Release every block from its holder."""
        self._holdings = dict(self._about)
        self._holder.clear()
        self._gone.clear()
        self._heap.clear()
        for holding in self._holdings.values():
            holding.free.clear()
            holding.num_held = 0

    def check(self, used: Iterable[int], cached: Iterable[int]) -> None:
        """Assert every invariant; linear, for tests. `cached` are the free blocks that hold a prefix."""
        free = [block_id for holding in self._holdings.values() for block_id in holding.free]
        assert sorted(free) == sorted(cached)
        assert self._holder.keys() == {*used, *free}
        for holding in self._holdings.values():
            assert holding.num_held == sum(each is holding for each in self._holder.values())
            assert all(self._holder[block_id] is holding for block_id in holding.free)
            assert holding.is_about == (holding.tag in self._about)
            assert (holding.tag in self._gone) == (bool(holding.free) and not holding.is_about)
            assert holding.is_about or holding.num_held
        held = [holding.num_held for holding in self._holdings.values() if holding.free]
        largest = self._largest()
        assert (None if largest is None else largest.num_held) == max(held, default=None)

    def _see(self, holding: _TenantHolding) -> None:
        holding.seen_at = self._num_handed_out
        holding.is_about = True
        self._gone.pop(holding.tag, None)
        self._about[holding.tag] = holding
        self._about.move_to_end(holding.tag)

    def _unfree(self, holding: _TenantHolding, block_id: int) -> None:
        holding.free.pop(block_id, None)
        if not holding.free:
            self._gone.pop(holding.tag, None)

    def _drop(self, holding: _TenantHolding) -> None:
        """It holds one block less."""
        holding.num_held -= 1
        if not holding.num_held and not holding.is_about:
            del self._holdings[holding.tag]

    def _largest(self) -> _TenantHolding | None:
        """Return the tenant that holds most among those with evictable blocks."""
        heap = self._heap
        while heap:
            value, tag, stamp = heap[0]
            holding = self._holdings.get(tag)
            if holding is None or holding.stamp != stamp or not holding.free:
                heappop(heap)
            elif holding.num_held < -value:
                heapreplace(heap, (-holding.num_held, tag, stamp))
            else:
                return holding
        return None

    def _note(self, holding: _TenantHolding) -> None:
        holding.stamp += 1
        heappush(self._heap, (-holding.num_held, holding.tag, holding.stamp))
        if len(self._heap) > 2 * len(self._holdings) + SPARE_ENTRIES:
            self._heap = [
                (-each.num_held, each.tag, each.stamp) for each in self._holdings.values() if each.free
            ]
            heapify(self._heap)
