"""Line: the requests that wait for one replica, each tenant's in its own order.

Owns the waiters and their work. Knows no counters: its caller chooses the tenant.

Within a tenant the lower priority goes first, then the newest: requests wait here only in an overload, where
the oldest have the least time left ("Fail at Scale", ACM Queue 2015). A request with the same beginning as
its tenant's last one passes a few newer ones, so that the two meet in the cache. Only a tenant's own requests
are ordered so: order must not tell what others have asked.
"""

from bisect import bisect_left, insort
from collections.abc import Collection
from operator import attrgetter

from replicas.protocol.status import ReplicaId

MAX_OVERTAKEN = 4
"""Times that others of its tenant may overtake a request for their common beginning."""

NUM_LOOKED_AT = 16
"""Waiters that are searched for one with the same beginning."""


class Waiter:
    """A waiting request. `work` is its charge; after `latest_start` it is too late to begin.

    `prefix` identifies its prompt's beginning. `order` grows with arrival.
    """

    __slots__ = (
        "latest_start",
        "line",
        "num_bytes",
        "num_moves",
        "num_overtaken",
        "order",
        "prefix",
        "priority",
        "since",
        "tenant",
        "weight",
        "work",
    )

    def __init__(
        self,
        line: ReplicaId,
        tenant: str,
        *,
        work: float,
        order: int,
        since: float,
        weight: float = 1.0,
        priority: int = 0,
        latest_start: float | None = None,
        prefix: bytes = b"",
        num_bytes: int = 0,
    ) -> None:
        self.line = line
        self.tenant = tenant
        self.work = work
        self.order = order
        self.since = since
        self.weight = weight
        self.priority = priority
        self.latest_start = latest_start
        self.prefix = prefix
        self.num_bytes = num_bytes
        self.num_moves = 0
        self.num_overtaken = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.priority, -self.order

    def is_late(self, now: float) -> bool:
        return self.latest_start is not None and now > self.latest_start


_key = attrgetter("key")


class _Own:
    """One tenant's part of a line, made anew once it is empty: sums of floats drift."""

    __slots__ = ("last_prefix", "waiters", "work")

    def __init__(self) -> None:
        self.waiters: list[Waiter] = []
        self.work = 0.0
        self.last_prefix = b""


class Line:
    def __init__(self) -> None:
        self._tenants: dict[str, _Own] = {}
        self.num_waiting = 0

    @property
    def tenants(self) -> Collection[str]:
        """Return the waiting tenants."""
        return self._tenants

    def work_of(self, tenant: str) -> float:
        own = self._tenants.get(tenant)
        return 0.0 if own is None else own.work

    def work_before(self, tenant: str, priority: int) -> float:
        """Return the tenant's own work before a new request of this priority."""
        own = self._tenants.get(tenant)
        if own is None:
            return 0.0
        if own.waiters[0].priority >= priority:
            return 0.0
        return sum(waiter.work for waiter in own.waiters if waiter.priority < priority)

    def add(self, waiter: Waiter) -> None:
        own = self._tenants.get(waiter.tenant)
        if own is None:
            own = self._tenants[waiter.tenant] = _Own()
        insort(own.waiters, waiter, key=_key)
        own.work += waiter.work
        self.num_waiting += 1

    def remove(self, waiter: Waiter) -> None:
        own = self._tenants[waiter.tenant]
        place = bisect_left(own.waiters, waiter.key, key=_key)
        assert own.waiters[place] is waiter
        del own.waiters[place]
        own.work -= waiter.work
        self.num_waiting -= 1
        if not own.waiters:
            del self._tenants[waiter.tenant]

    def next_of(self, tenant: str) -> Waiter:
        """Return this tenant's next waiter."""
        own = self._tenants[tenant]
        first = own.waiters[0]
        if own.last_prefix and first.prefix != own.last_prefix and first.num_overtaken < MAX_OVERTAKEN:
            for waiter in own.waiters[1:NUM_LOOKED_AT]:
                if waiter.priority != first.priority:
                    break
                if waiter.prefix == own.last_prefix:
                    return waiter
        return first

    def goes(self, waiter: Waiter) -> None:
        """It leaves the line to be served; those of its tenant that came before it have been overtaken."""
        own = self._tenants[waiter.tenant]
        own.last_prefix = waiter.prefix
        for other in own.waiters:
            if other is waiter:
                break
            other.num_overtaken += 1
        self.remove(waiter)

    def last_of(self, tenant: str) -> Waiter:
        return self._tenants[tenant].waiters[-1]

    def all(self) -> list[Waiter]:
        return [waiter for own in self._tenants.values() for waiter in own.waiters]
