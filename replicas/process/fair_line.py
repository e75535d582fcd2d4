"""FairLine: which owner's work goes next into a few places.

Owns the order and the bounds. The waiting owner with the least time used goes next, and none gets all places:
one stays free for a newcomer. If the line is full, the owner with most items loses its last to one with
fewer. Pure; the caller reports durations, or any other measure of work.
"""

from collections import deque
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")

MAX_REMEMBERED = 1024
"""Idle owners whose time used is remembered while others wait or work."""


class _Waiting(NamedTuple, Generic[Item]):
    order: int
    item: Item


class _Owner(Generic[Item]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.waiting: deque[_Waiting[Item]] = deque()
        self.num_working = 0


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
        self._owners: dict[Hashable, _Owner[Item]] = {}
        """Owners that wait or work."""
        self._idle: dict[Hashable, float] = {}
        """Seconds used by the others."""
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
            largest = max(self._owners, key=lambda name: len(self._owners[name].waiting))
            if len(self._owners[largest].waiting) <= num_own + 1:
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
            found = self._owners[owner] = _Owner(max(least, self._idle.pop(owner, least)))
        return found

    def _has_left(self, owner: Hashable) -> None:
        self.num_waiting -= 1
        self._forget_idle(owner)

    def _forget_idle(self, owner: Hashable) -> None:
        found = self._owners[owner]
        if found.waiting or found.num_working:
            return
        del self._owners[owner]
        if not self._owners:
            self._idle.clear()
            return
        if len(self._idle) >= MAX_REMEMBERED:
            del self._idle[next(iter(self._idle))]
        self._idle[owner] = found.seconds
