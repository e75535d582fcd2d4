"""VirtualCounters: how much work each tenant has been given, by its weight.

Owns one number per tenant, in tokens of work over its weight, and the tenants' bound. Of those that wait the
one with the least goes next ("Fairness in Serving Large Language Models", OSDI 2024). Who comes back after a
while without waiting is lifted to the least of those that wait: nobody saves up for later.
"""

from collections import OrderedDict
from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace

MAX_TENANTS = 10_000

SPARE_ENTRIES = 64
"""Void entries that the heap may keep beside as many as it has valid ones."""


class _Account:
    __slots__ = ("counter", "name", "num_waiting", "stamp", "weight")

    def __init__(self, name: str, counter: float) -> None:
        self.name = name
        self.counter = counter
        self.weight = 1.0
        self.num_waiting = 0
        self.stamp = 0
        """Only a heap entry with this one is valid."""


class VirtualCounters:
    """A tenant is *active* while requests of it wait. `max_tenants` bounds those that do not: the one that
    was served longest ago is forgotten, and is lifted like everybody when it comes back."""

    def __init__(self, *, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self._heap: list[tuple[float, int, str]] = []
        """Of the active; counters have only grown since. Looked at where the least is wanted."""
        self._num_active = 0
        self._last = 0.0
        """Where the last one stood that was let go while nobody waited, or the last that waited."""

    @property
    def num_tenants(self) -> int:
        return len(self._accounts)

    @property
    def num_active(self) -> int:
        return self._num_active

    def counter(self, name: str) -> float:
        """Where it stands, or would if it came now."""
        account = self._accounts.get(name)
        if account is None:
            return self.floor()
        return account.counter if account.num_waiting else max(account.counter, self.floor())

    def counter_of_waiting(self, name: str) -> float:
        """Without looking for the floor."""
        return self._accounts[name].counter

    def behind(self, names: Iterable[str], counter: float) -> list[tuple[str, float]]:
        """Those of these, who all wait, that stand before it, and how much work brings each there."""
        accounts = self._accounts
        return [
            (name, (counter - account.counter) * account.weight)
            for name in names
            if (account := accounts[name]).counter < counter
        ]

    def weight(self, name: str) -> float:
        account = self._accounts.get(name)
        return 1.0 if account is None else account.weight

    def floor(self) -> float:
        """The least of the active; without any, where the last one stood."""
        heap = self._heap
        while heap:
            value, stamp, name = heap[0]
            account = self._accounts.get(name)
            if account is None or account.stamp != stamp:
                heappop(heap)
            elif account.counter > value:
                heapreplace(heap, (account.counter, stamp, name))
            else:
                return value
        return self._last

    def spread(self) -> float:
        """The most of the active less the least of them."""
        counters = [account.counter for account in self._accounts.values() if account.num_waiting]
        return max(counters) - min(counters) if counters else 0.0

    def starts_to_wait(self, name: str, weight: float) -> None:
        """One request more of this tenant waits."""
        account = self._touch(name, weight)
        if not account.num_waiting:
            account.counter = max(account.counter, self.floor())
            self._num_active += 1
            self._note(account)
        account.num_waiting += 1

    def stops_waiting(self, name: str) -> None:
        """One request less of it waits, for whatever reason."""
        account = self._accounts[name]
        account.num_waiting -= 1
        if account.num_waiting:
            return
        account.stamp += 1
        self._num_active -= 1
        if not self._num_active:
            self._heap.clear()
            self._last = account.counter

    def passes(self, name: str, weight: float, work: float) -> None:
        """A request of it goes without having waited, and is charged."""
        account = self._touch(name, weight)
        if not account.num_waiting:
            account.counter = max(account.counter, self.floor())
            if not self._num_active:
                self._last = account.counter
        account.counter += work / account.weight

    def charge(self, name: str, work: float) -> None:
        """More work was done for it. Of a tenant that is forgotten meanwhile, nothing is kept."""
        account = self._accounts.get(name)
        if account is not None:
            account.counter += work / account.weight

    def give_back(self, name: str, work: float) -> None:
        """It was charged for work that nobody did."""
        account = self._accounts.get(name)
        if account is None:
            return
        account.counter -= work / account.weight
        if account.num_waiting:
            account.stamp += 1
            self._note(account)

    def _touch(self, name: str, weight: float) -> _Account:
        account = self._accounts.get(name)
        if account is None:
            self._make_room()
            account = self._accounts[name] = _Account(name, 0.0)
        else:
            self._accounts.move_to_end(name)
        account.weight = weight
        return account

    def _make_room(self) -> None:
        while len(self._accounts) - self._num_active >= self._max_tenants:
            name = next(each for each, account in self._accounts.items() if not account.num_waiting)
            del self._accounts[name]

    def _note(self, account: _Account) -> None:
        heappush(self._heap, (account.counter, account.stamp, account.name))
        if len(self._heap) > 2 * self._num_active + SPARE_ENTRIES:
            self._heap = [
                (each.counter, each.stamp, each.name) for each in self._accounts.values() if each.num_waiting
            ]
            heapify(self._heap)
