"""FairLine: which owner's work goes next into a few places.

Owns the order. The waiting owner with the least time used goes next, and none gets all places: one stays free
for a newcomer. If the line is full, the owner with most items loses its last to one with fewer. Pure; the
caller reports durations.
"""

from collections import deque
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")


class _Waiting(NamedTuple, Generic[Item]):
    order: int
    item: Item


class _Owner(Generic[Item]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.waiting: deque[_Waiting[Item]] = deque()
        self.num_working = 0


class FairLine(Generic[Item]):
    """An owner is known while it waits or works. A newcomer begins with the least time of those known, so
    that pauses earn no credit."""

    def __init__(self, *, num_places: int, most_waiting: int) -> None:
        self._num_places = num_places
        self._most_of_owner = max(1, num_places - 1)
        self._most_waiting = most_waiting
        self._owners: dict[Hashable, _Owner[Item]] = {}
        self._last_order = 0
        self.num_waiting = 0
        self.num_working = 0

    def enter(self, owner: Hashable, item: Item) -> Item | None:
        """Add an item; returns the one that loses its place if the line is full, which may be this one."""
        lost: Item | None = None
        if self.num_waiting >= self._most_waiting:
            largest = max(self._owners, key=lambda name: len(self._owners[name].waiting))
            own = self._owners.get(owner)
            if len(self._owners[largest].waiting) <= (0 if own is None else len(own.waiting)) + 1:
                return item
            lost = self._owners[largest].waiting.pop().item
            self._has_left(largest)
        self._last_order += 1
        self._known(owner).waiting.append(_Waiting(self._last_order, item))
        self.num_waiting += 1
        return lost

    def leave(self, owner: Hashable, item: Item) -> bool:
        """Remove a waiting item; False if it did not wait."""
        found = self._owners.get(owner)
        waiting = None if found is None else next((each for each in found.waiting if each.item is item), None)
        if found is None or waiting is None:
            return False
        found.waiting.remove(waiting)
        self._has_left(owner)
        return True

    def next(self) -> tuple[Hashable, Item] | None:
        """Return the item that starts now, in a place that `ends` returns; None if none may."""
        if self.num_working >= self._num_places:
            return None
        ready = [
            (found.seconds, found.waiting[0].order, name)
            for name, found in self._owners.items()
            if found.waiting and found.num_working < self._most_of_owner
        ]
        if not ready:
            return None
        _, _, name = min(ready, key=lambda each: each[:2])
        found = self._owners[name]
        item = found.waiting.popleft().item
        found.num_working += 1
        self.num_waiting -= 1
        self.num_working += 1
        return name, item

    def ends(self, owner: Hashable, seconds: float) -> None:
        """Record that this owner's work is done, and its duration."""
        found = self._owners[owner]
        found.seconds += seconds
        found.num_working -= 1
        self.num_working -= 1
        self._forget_idle(owner)

    def _known(self, owner: Hashable) -> _Owner[Item]:
        found = self._owners.get(owner)
        if found is None:
            least = min((each.seconds for each in self._owners.values()), default=0.0)
            found = self._owners[owner] = _Owner(least)
        return found

    def _has_left(self, owner: Hashable) -> None:
        self.num_waiting -= 1
        self._forget_idle(owner)

    def _forget_idle(self, owner: Hashable) -> None:
        found = self._owners[owner]
        if not found.waiting and not found.num_working:
            del self._owners[owner]
