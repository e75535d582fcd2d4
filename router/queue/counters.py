"""VirtualCounters: how much work each tenant has received, by its weight.

Owns one number per tenant, in tokens of work over its weight, and the bound on tenants. The waiting tenant
with the least goes next ("Fairness in Serving Large Language Models", OSDI 2024). A tenant that returns is
lifted to the least of those waiting, so that pauses earn no credit.
"""

from collections import OrderedDict
from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace

MAX_TENANTS = 10_000

SPARE_ENTRIES = 64
"""Void entries that the heap may keep beside as many as it has valid ones."""


class Account:
    """One tenant's. Read it; only the counters write."""

    __slots__ = ("counter", "name", "num_waiting", "orders", "weight")

    def __init__(self, name: str, counter: float) -> None:
        self.name = name
        self.counter = counter
        self.weight = 1.0
        self.num_waiting = 0
        self.orders: list[LeastFirst] = []
        """Orders that contain it."""


class LeastFirst:
    """Accounts by their counters, then by name. A counter may grow without a word, but not fall."""

    __slots__ = ("_accounts", "_heap", "_last_stamp", "_stamps")

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._stamps: dict[str, int] = {}
        """Only a heap entry with this one is valid."""
        self._heap: list[tuple[float, str, int]] = []
        """An entry's counter is put right where it is the first."""
        self._last_stamp = 0

    def __len__(self) -> int:
        return len(self._accounts)

    def __contains__(self, name: str) -> bool:
        return name in self._accounts

    @property
    def num_entries(self) -> int:
        """In memory, valid and void."""
        return len(self._heap)

    def add(self, account: Account) -> None:
        """Add an account, also again after its counter has fallen."""
        self._accounts[account.name] = account
        self._last_stamp += 1
        self._stamps[account.name] = self._last_stamp
        heappush(self._heap, (account.counter, account.name, self._last_stamp))
        if len(self._heap) > 2 * len(self._accounts) + SPARE_ENTRIES:
            accounts = self._accounts
            self._heap = [(accounts[name].counter, name, stamp) for name, stamp in self._stamps.items()]
            heapify(self._heap)

    def remove(self, account: Account) -> None:
        del self._accounts[account.name], self._stamps[account.name]
        if not self._accounts:
            self._heap.clear()

    def first(self) -> Account | None:
        heap = self._heap
        while heap:
            value, name, stamp = heap[0]
            if self._stamps.get(name) != stamp:
                heappop(heap)
                continue
            account = self._accounts[name]
            if account.counter == value:
                return account
            heapreplace(heap, (account.counter, name, stamp))
        return None

    def firsts(self, count: int) -> list[Account]:
        found: list[Account] = []
        entries = []
        while len(found) < count and (account := self.first()) is not None:
            found.append(account)
            entries.append(heappop(self._heap))
        for entry in entries:
            heappush(self._heap, entry)
        return found


class VirtualCounters:
    """A tenant is *active* while its requests wait. `max_tenants` bounds the inactive ones: the one served
    longest ago is forgotten, and is lifted like others when it returns."""

    def __init__(self, *, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._accounts: OrderedDict[str, Account] = OrderedDict()
        self._active = LeastFirst()
        self._last = 0.0
        """Counter of the last release while none waited, or of the last waiter."""

    @property
    def num_tenants(self) -> int:
        return len(self._accounts)

    @property
    def num_active(self) -> int:
        return len(self._active)

    def account(self, name: str) -> Account | None:
        """Return a tenant's account, if it is known."""
        return self._accounts.get(name)

    def counter(self, name: str) -> float:
        """Return its counter, or the one that it would start with now."""
        account = self._accounts.get(name)
        if account is None:
            return self.floor()
        return account.counter if account.num_waiting else max(account.counter, self.floor())

    def counter_of_waiting(self, name: str) -> float:
        """Without looking for the floor."""
        return self._accounts[name].counter

    def behind(self, names: Iterable[str], counter: float) -> list[tuple[str, float]]:
        """Return which of these waiting tenants are before `counter`, and the work that brings each there."""
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
        """Return the least of the active; without any, where the last one stood."""
        first = self._active.first()
        return self._last if first is None else first.counter

    def spread(self) -> float:
        """Return the most of the active less the least of them."""
        counters = [account.counter for account in self._accounts.values() if account.num_waiting]
        return max(counters) - min(counters) if counters else 0.0

    def starts_to_wait(self, name: str, weight: float) -> None:
        """One request more of this tenant waits."""
        account = self._touch(name, weight)
        if not account.num_waiting:
            account.counter = max(account.counter, self.floor())
            self._join(self._active, account)
        account.num_waiting += 1

    def stops_waiting(self, name: str) -> None:
        """Record that one of its requests no longer waits, for any reason."""
        account = self._accounts[name]
        account.num_waiting -= 1
        if account.num_waiting:
            return
        self.leave(self._active, name)
        if not self._active:
            self._last = account.counter

    def join(self, order: LeastFirst, name: str) -> None:
        """Add a waiting tenant to this order, until it leaves it."""
        if name not in order:
            self._join(order, self._accounts[name])

    def leave(self, order: LeastFirst, name: str) -> None:
        account = self._accounts[name]
        account.orders.remove(order)
        order.remove(account)

    def passes(self, name: str, weight: float, work: float) -> None:
        """A request of it goes without having waited, and is charged."""
        account = self._touch(name, weight)
        if not account.num_waiting:
            first = self._active.first()
            if first is None:
                account.counter = self._last = max(account.counter, self._last)
            else:
                account.counter = max(account.counter, first.counter)
        account.counter += work / account.weight

    def charge(self, name: str, work: float) -> None:
        """Charge more work; less than none is given back. Nothing is recorded for a forgotten tenant."""
        account = self._accounts.get(name)
        if account is None:
            return
        account.counter += work / account.weight
        if work < 0:
            for order in account.orders:
                order.add(account)

    def _join(self, order: LeastFirst, account: Account) -> None:
        order.add(account)
        account.orders.append(order)

    def _touch(self, name: str, weight: float) -> Account:
        account = self._accounts.get(name)
        if account is None:
            self._make_room()
            account = self._accounts[name] = Account(name, 0.0)
        else:
            self._accounts.move_to_end(name)
        account.weight = weight
        return account

    def _make_room(self) -> None:
        while len(self._accounts) - len(self._active) >= self._max_tenants:
            name = next(each for each, account in self._accounts.items() if not account.num_waiting)
            del self._accounts[name]
