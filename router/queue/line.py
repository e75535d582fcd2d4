"""Line: the requests that wait for one replica, each tenant's in its own order.

Owns the waiters and their work. Knows no counters: its caller chooses the tenant.

Within a tenant the lower priority goes first, then the least work. Requests wait here only in an overload,
where not all can be served, and a prompt that is short or mostly cached leaves room for others. Refusing it
saves little: the next turn of its conversation has the same tokens to compute. `PATIENT_SHARE` of the work is
kept for the request that has waited longest, so that long prompts are served as well.
"""

from bisect import bisect_left, insort
from collections.abc import Collection
from operator import attrgetter

from replicas.protocol.status import ReplicaId

PATIENT_SHARE = 0.2
"""Part of a tenant's work in a line that is kept for its request that has waited longest."""


class Waiter:
    """A waiting request. `work` is its charge; after `latest_start` it is too late to begin.

    `order` grows with arrival.
    """

    __slots__ = (
        "latest_start",
        "line",
        "num_bytes",
        "num_moves",
        "order",
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
        self.num_bytes = num_bytes
        self.num_moves = 0

    @property
    def key(self) -> tuple[int, float, int]:
        return self.priority, self.work, -self.order

    def is_late(self, now: float) -> bool:
        return self.latest_start is not None and now > self.latest_start


_key = attrgetter("key")
_age = attrgetter("priority", "order")


class _Own:
    """One tenant's part of a line, made anew once it is empty: sums of floats drift."""

    __slots__ = ("by_age", "by_work", "patient_work", "work")

    def __init__(self) -> None:
        self.by_work: list[Waiter] = []
        self.by_age: list[Waiter] = []
        """Both have the lower priority first."""
        self.work = 0.0
        self.patient_work = 0.0
        """Kept for the one that has waited longest, and not yet given to it."""


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
        """Return the tenant's own work that is more urgent than a new request of this priority."""
        own = self._tenants.get(tenant)
        if own is None:
            return 0.0
        if own.by_work[0].priority >= priority:
            return 0.0
        return sum(waiter.work for waiter in own.by_work if waiter.priority < priority)

    def add(self, waiter: Waiter) -> None:
        own = self._tenants.get(waiter.tenant)
        if own is None:
            own = self._tenants[waiter.tenant] = _Own()
        insort(own.by_work, waiter, key=_key)
        insort(own.by_age, waiter, key=_age)
        own.work += waiter.work
        self.num_waiting += 1

    def remove(self, waiter: Waiter) -> None:
        own = self._tenants[waiter.tenant]
        for waiters, key in ((own.by_work, _key), (own.by_age, _age)):
            place = bisect_left(waiters, key(waiter), key=key)
            assert waiters[place] is waiter
            del waiters[place]
        own.work -= waiter.work
        self.num_waiting -= 1
        if not own.by_work:
            del self._tenants[waiter.tenant]

    def next_of(self, tenant: str) -> Waiter:
        """Return this tenant's next waiter."""
        own = self._tenants[tenant]
        patient = own.by_age[0]
        return patient if patient.work <= own.patient_work else own.by_work[0]

    def goes(self, waiter: Waiter) -> None:
        """It leaves the line to be served."""
        own = self._tenants[waiter.tenant]
        own.patient_work += PATIENT_SHARE * waiter.work
        if waiter is own.by_age[0]:
            own.patient_work = max(0.0, own.patient_work - waiter.work)
        self.remove(waiter)

    def last_of(self, tenant: str) -> Waiter:
        return self._tenants[tenant].by_work[-1]

    def all(self) -> list[Waiter]:
        return [waiter for own in self._tenants.values() for waiter in own.by_work]
