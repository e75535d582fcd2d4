"""TenantOrder: whose cached blocks are forgotten first, where several tenants share one device.

Owns who holds how many blocks of a pool, and each tenant's free cached blocks by themselves, oldest first.
Pure, and without a clock: time is counted in blocks that were handed out.

A tenant is *about* while a request of it has come or ended within one turnover, which is as many blocks
handed out as the pool has. Those that are about have equal shares of the pool. When a cached
block must go for a new one::

    a tenant is not about any more     its oldest goes: without shares it would have gone by now
    the largest holds more than        its oldest goes
      1.25 times its share
    else                               the pool's oldest, whose it may be

So one that is alone fills the pool, one that floods evicts itself, and tenants that are about equally large
are one queue, as if there were no shares. A block is held by the tenant that used it first, and by another
that finds it while nobody uses it: what several share belongs to who used it last.
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


class _Holding:
    __slots__ = ("free", "is_about", "num_held", "seen_at", "stamp", "tag")

    def __init__(self, tag: bytes) -> None:
        self.tag = tag
        self.free: OrderedDict[int, None] = OrderedDict()
        """Its cached blocks that nobody uses, oldest first."""
        self.num_held = 0
        """These, and those that requests use."""
        self.is_about = True
        self.seen_at = 0
        self.stamp = 0
        """Only a heap entry with this one is valid."""


class TenantOrder:
    """Of a pool with so many usable blocks, all of which are still nobody's."""

    def __init__(self, num_usable: int) -> None:
        self._num_usable = num_usable
        self._num_handed_out = 0
        self._holdings: dict[bytes, _Holding] = {}
        """Of those that are about or hold something."""
        self._holder: dict[int, _Holding] = {}
        """By block; those that hold no prefix and that nobody uses have none."""
        self._about: OrderedDict[bytes, _Holding] = OrderedDict()
        """Who came longest ago first."""
        self._gone: OrderedDict[bytes, _Holding] = OrderedDict()
        """Those not about of whom something can go, who left longest ago first."""
        self._heap: list[tuple[int, bytes, int]] = []
        """Of those of whom something can go; what they hold has only shrunk since."""

    @property
    def num_tenants(self) -> int:
        return len(self._holdings)

    def num_held(self, tag: bytes) -> int:
        found = self._holdings.get(tag)
        return 0 if found is None else found.num_held

    def victim(self) -> int | None:
        """The block that goes next; None says that it is the oldest of all."""
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
            holding = self._holdings[tag] = _Holding(tag)
        self._see(holding)

    def takes(self, block_ids: Iterable[int], tag: bytes) -> None:
        """These blocks, which nobody used until now, are used by the tenant that has just come."""
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
        """So many blocks were, and time has gone on."""
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
        """Nobody uses it any more, and it holds a prefix. Whose request has run for longer than a turnover is
        about still: what it leaves is its newest."""
        holding = self._holder[block_id]
        holding.free[block_id] = None
        if holding.seen_at != self._num_handed_out:
            self._see(holding)
        if len(holding.free) == 1:
            self._note(holding)

    def is_empty(self, block_id: int) -> None:
        """Nobody uses it any more, and it holds nothing; or what it held is forgotten."""
        holding = self._holder.pop(block_id)
        self._unfree(holding, block_id)
        self._drop(holding)

    def clear(self) -> None:
        """Every block is nobody's."""
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

    def _see(self, holding: _Holding) -> None:
        holding.seen_at = self._num_handed_out
        holding.is_about = True
        self._gone.pop(holding.tag, None)
        self._about[holding.tag] = holding
        self._about.move_to_end(holding.tag)

    def _unfree(self, holding: _Holding, block_id: int) -> None:
        holding.free.pop(block_id, None)
        if not holding.free:
            self._gone.pop(holding.tag, None)

    def _drop(self, holding: _Holding) -> None:
        """It holds one block less."""
        holding.num_held -= 1
        if not holding.num_held and not holding.is_about:
            del self._holdings[holding.tag]

    def _largest(self) -> _Holding | None:
        """Of those of whom something can go."""
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

    def _note(self, holding: _Holding) -> None:
        holding.stamp += 1
        heappush(self._heap, (-holding.num_held, holding.tag, holding.stamp))
        if len(self._heap) > 2 * len(self._holdings) + SPARE_ENTRIES:
            self._heap = [
                (-each.num_held, each.tag, each.stamp) for each in self._holdings.values() if each.free
            ]
            heapify(self._heap)
