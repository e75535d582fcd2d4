"""FairLine: which owner's work goes next into a few places.

Owns the order and the bounds. The waiting owner with the least time used goes next, and none gets all places:
one stays free for a newcomer. If the line is full, the owner with most items loses its last to one with
fewer. Pure; the caller reports durations, or any other measure of work.
"""

from collections import deque
from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")

MAX_REMEMBERED = 1024
"""Idle owners whose time used is remembered while others wait or work."""

MAX_STALE = 64
"""Outdated entries of the heap, besides one of each owner."""


class _InLine(NamedTuple, Generic[Item]):
    order: int
    item: Item


class _LineOwner(Generic[Item]):
    __slots__ = ("is_listed", "name", "num_working", "seconds", "waiting")

    def __init__(self, name: Hashable, seconds: float) -> None:
        self.name = name
        self.seconds = seconds
        self.waiting: deque[_InLine[Item]] = deque()
        self.num_working = 0
        self.is_listed = False
        """Whether the heap has an entry of it."""


class FairLine(Generic[Item]):
    """An owner that comes begins with the least time of those that wait or work, or with its own if that is
    more: pauses earn no credit and forgive no debt. An owner has at most `most_of_owner` places, by default
    all but one, and `most_waiting_of_owner` in the line."""

    def __init__(
        self,
        *,
        num_places: int,
        most_waiting: int,
        most_of_owner: int | None = None,
        most_waiting_of_owner: int | None = None,
    ) -> None:
        self._num_places = num_places
        self._most_of_owner = max(1, num_places - 1) if most_of_owner is None else most_of_owner
        self._most_waiting = most_waiting
        self._most_waiting_of_owner = most_waiting if most_waiting_of_owner is None else most_waiting_of_owner
        self._owners: dict[Hashable, _LineOwner[Item]] = {}
        """Owners that wait or work."""
        self._working: dict[Hashable, _LineOwner[Item]] = {}
        self._idle: dict[Hashable, float] = {}
        """Seconds used by the others."""
        self._ready: list[tuple[float, int, _LineOwner[Item]]] = []
        """A heap of owners that may go next, by seconds and their first item's order. An entry may be too
        low, since both only grow, or of an owner that may not go any more."""
        self._last_order = 0
        self.num_waiting = 0
        self.num_working = 0

    def enter(self, owner: Hashable, item: Item) -> Item | None:
        """Add an item; returns the one that loses its place if the line is full, which may be this one."""
        lost: Item | None = None
        known = self._owners.get(owner)
        num_own = 0 if known is None else len(known.waiting)
        if num_own >= self._most_waiting_of_owner:
            return item
        if self.num_waiting >= self._most_waiting:
            largest = max(self._owners.values(), key=lambda each: len(each.waiting))
            if len(largest.waiting) <= num_own + 1:
                return item
            lost = largest.waiting.pop().item
            self._has_left(largest)
        if known is None:
            least = self._least_seconds()
            known = self._owners[owner] = _LineOwner(owner, max(least, self._idle.pop(owner, least)))
        self._last_order += 1
        known.waiting.append(_InLine(self._last_order, item))
        self.num_waiting += 1
        self._list(known)
        return lost

    def leave(self, owner: Hashable, item: Item) -> bool:
        """Remove a waiting item; False if it did not wait."""
        found = self._owners.get(owner)
        waiting = None if found is None else next((each for each in found.waiting if each.item is item), None)
        if found is None or waiting is None:
            return False
        found.waiting.remove(waiting)
        self._has_left(found)
        return True

    def next(self) -> tuple[Hashable, Item] | None:
        """Return the item that starts now, in a place that `ends` returns; None if none may."""
        if self.num_working >= self._num_places:
            return None
        found = self._first()
        if found is None:
            return None
        heappop(self._ready)
        found.is_listed = False
        item = found.waiting.popleft().item
        found.num_working += 1
        self._working[found.name] = found
        self.num_waiting -= 1
        self.num_working += 1
        self._list(found)
        return found.name, item

    def ends(self, owner: Hashable, seconds: float) -> None:
        """Record that this owner's work is done, and its duration."""
        found = self._owners[owner]
        found.seconds += seconds
        found.num_working -= 1
        self.num_working -= 1
        if not found.num_working:
            del self._working[owner]
        self._list(found)
        self._forget_idle(found)

    def _list(self, owner: _LineOwner[Item]) -> None:
        if owner.waiting and owner.num_working < self._most_of_owner and not owner.is_listed:
            owner.is_listed = True
            heappush(self._ready, (owner.seconds, owner.waiting[0].order, owner))

    def _first(self) -> _LineOwner[Item] | None:
        """Return the owner that goes next, whose entry is then the heap's first."""
        while self._ready:
            seconds, order, owner = self._ready[0]
            may_go = bool(owner.waiting) and owner.num_working < self._most_of_owner
            if may_go and (seconds, order) == (owner.seconds, owner.waiting[0].order):
                return owner
            heappop(self._ready)
            owner.is_listed = False
            self._list(owner)
        return None

    def _least_seconds(self) -> float:
        """Return the least of those that wait or work; an owner that waits may go, or works."""
        first = self._first()
        known = [each.seconds for each in self._working.values()]
        return min(known if first is None else [first.seconds, *known], default=0.0)

    def _has_left(self, owner: _LineOwner[Item]) -> None:
        self.num_waiting -= 1
        self._forget_idle(owner)

    def _forget_idle(self, owner: _LineOwner[Item]) -> None:
        if owner.waiting or owner.num_working:
            return
        del self._owners[owner.name]
        if not self._owners:
            self._idle.clear()
            self._ready.clear()
            return
        if len(self._idle) >= MAX_REMEMBERED:
            del self._idle[next(iter(self._idle))]
        self._idle[owner.name] = owner.seconds
        if len(self._ready) > 2 * len(self._owners) + MAX_STALE:
            self._ready.clear()
            for each in self._owners.values():
                each.is_listed = False
                self._list(each)
