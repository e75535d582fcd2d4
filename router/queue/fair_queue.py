"""FairQueue: requests that wait for busy replicas, and which of them goes next.

Owns the lines, one per replica, the bounds, and the tenants' counters. Knows no clock and no replica's load:
its caller says when a replica has room.

In each line the tenant that received the least goes next, and is charged as it goes. So a tenant that floods
waits behind its own requests, and another with a single one is next. When the queue is full, the tenant with
most requests for its weight loses its last one to a tenant with fewer.
"""

from replicas.protocol.status import ReplicaId
from router.queue.counters import MAX_TENANTS, LeastFirst, VirtualCounters
from router.queue.line import Line, Waiter

MAX_WAITING = 4096
MAX_WAITING_BYTES = 256 << 20


class FairQueue:
    def __init__(
        self,
        *,
        max_waiting: int = MAX_WAITING,
        max_bytes: int = MAX_WAITING_BYTES,
        max_tenants: int = MAX_TENANTS,
    ) -> None:
        self.counters = VirtualCounters(max_tenants=max_tenants)
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self._lines: dict[ReplicaId, Line] = {}
        self._orders: dict[ReplicaId, LeastFirst] = {}
        """Tenants of each line."""
        self._num_of: dict[str, int] = {}
        self.num_waiting = 0
        self.num_bytes = 0

    def num_in_line(self, line: ReplicaId) -> int:
        found = self._lines.get(line)
        return 0 if found is None else found.num_waiting

    def enter(self, waiter: Waiter) -> list[Waiter] | None:
        """Add a waiter; returns those displaced, or None if the queue is full."""
        lost: list[Waiter] = []
        if not self._has_room(waiter.num_bytes):
            last = self._last_of_the_largest(waiter)
            if last is None or not self._has_room(waiter.num_bytes, without=last):
                return None
            self.leave(last)
            lost.append(last)
        self._add(waiter)
        return lost

    def leave(self, waiter: Waiter) -> None:
        """Remove an unserved waiter, without a charge."""
        self._lines[waiter.line].remove(waiter)
        self._has_left_line(waiter)
        self._is_out(waiter)

    def next(self, line: ReplicaId) -> Waiter | None:
        """Return the next waiter of this line."""
        return next(iter(self.firsts(line, 1)), None)

    def firsts(self, line: ReplicaId, count: int) -> list[Waiter]:
        """Return the next waiter, the one after it if its tenant had none, and so on."""
        order = self._orders.get(line)
        if order is None:
            return []
        found = self._lines[line]
        return [found.next_of(account.name) for account in order.firsts(count)]

    def goes(self, waiter: Waiter) -> None:
        """It goes to be served, and its tenant is charged."""
        self._lines[waiter.line].goes(waiter)
        self._has_left_line(waiter)
        self.counters.charge(waiter.tenant, waiter.work)
        self._is_out(waiter)

    def move(self, waiter: Waiter, line: ReplicaId) -> None:
        """To another line, in the place that its order gives it there."""
        self._lines[waiter.line].remove(waiter)
        self._has_left_line(waiter)
        waiter.line = line
        waiter.num_moves += 1
        self._join_line(waiter)

    def in_line(self, line: ReplicaId) -> list[Waiter]:
        found = self._lines.get(line)
        return [] if found is None else found.all()

    def work_ahead(self, line: ReplicaId, tenant: str, *, weight: float, priority: int) -> float:
        """Return the work before a new request in fair order, if no other comes.

        It counts its own tenant's more urgent requests, and for each other tenant the work until its counter
        reaches this tenant's. Its own tenant's requests with less work are left out.
        """
        found = self._lines.get(line)
        if found is None:
            return 0.0
        own = found.work_before(tenant, priority)
        counters = self.counters
        turn = counters.counter(tenant) + own / weight
        if turn <= counters.floor():  # as for most who come: nobody is behind it
            return own
        return own + sum(
            min(found.work_of(name), room)
            for name, room in counters.behind(found.tenants, turn)
            if name != tenant
        )

    def oldest_since(self) -> float | None:
        """Arrival of the one that has waited longest."""
        return min((waiter.since for line in self._lines.values() for waiter in line.all()), default=None)

    def _has_room(self, num_bytes: int, without: Waiter | None = None) -> bool:
        num_waiting, held = self.num_waiting, self.num_bytes
        if without is not None:
            num_waiting, held = num_waiting - 1, held - without.num_bytes
        return num_waiting < self._max_waiting and held + num_bytes <= self._max_bytes

    def _add(self, waiter: Waiter) -> None:
        self.counters.starts_to_wait(waiter.tenant, waiter.weight)
        self._join_line(waiter)
        self._num_of[waiter.tenant] = self._num_of.get(waiter.tenant, 0) + 1
        self.num_waiting += 1
        self.num_bytes += waiter.num_bytes

    def _is_out(self, waiter: Waiter) -> None:
        self.counters.stops_waiting(waiter.tenant)
        self.num_waiting -= 1
        self.num_bytes -= waiter.num_bytes
        self._num_of[waiter.tenant] -= 1
        if not self._num_of[waiter.tenant]:
            del self._num_of[waiter.tenant]

    def _join_line(self, waiter: Waiter) -> None:
        self._lines.setdefault(waiter.line, Line()).add(waiter)
        self.counters.join(self._orders.setdefault(waiter.line, LeastFirst()), waiter.tenant)

    def _has_left_line(self, waiter: Waiter) -> None:
        line = self._lines[waiter.line]
        if waiter.tenant not in line.tenants:
            self.counters.leave(self._orders[waiter.line], waiter.tenant)
        if not line.num_waiting:
            del self._lines[waiter.line], self._orders[waiter.line]

    def _last_of_the_largest(self, waiter: Waiter) -> Waiter | None:
        """Return the last waiter of the tenant with most requests for its weight, if that has more than the
        newcomer's."""
        if not self._num_of:
            return None
        weight = self.counters.weight
        largest = max(self._num_of, key=lambda name: (self._num_of[name] / weight(name), name))
        wanted = (self._num_of.get(waiter.tenant, 0) + 1) / waiter.weight
        if largest == waiter.tenant or self._num_of[largest] / weight(largest) <= wanted:
            return None
        lines = [line for line in self._lines.values() if line.work_of(largest) or largest in line.tenants]
        return max((line.last_of(largest) for line in lines), key=lambda last: last.key)
