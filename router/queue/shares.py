"""Shares: whether a tenant has recently received more than its share.

Owns a decaying sum of work per tenant. A tenant above its share leaves room free for active others, in
proportion to the others' recent work; a tenant alone has no share to keep to, so an idle fleet serves it
whole.
"""

import math

MEMORY_SECONDS = 30.0
"""In this time a sum loses all but 1/e of it."""

LOOK_SECONDS = 0.5
"""Between two looks at all tenants."""

OVER = 1.25
"""Times the mean by weight."""

SPARED = 2.0
"""Factor on the others' share of the work: as much for running requests, and for cached blocks."""

LEAST_SPARED = 0.2
MOST_SPARED = 0.6
"""Largest share of a replica's KV blocks that a tenant above its share leaves free."""

LEAST_PART = 0.01
"""A tenant with less than this part of the work is not about any more."""

MAX_TENANTS = 10_000


class Shares:
    def __init__(self, *, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._sums: dict[str, tuple[float, float, float]] = {}
        """By tenant: its work at a time, and its weight."""
        self._looked_at = -math.inf
        self._mean: float | None = None
        """By weight; None with fewer than two tenants."""
        self._total = 0.0

    @property
    def num_tenants(self) -> int:
        return len(self._sums)

    def gives(self, tenant: str, weight: float, work: float, now: float) -> None:
        if tenant not in self._sums and len(self._sums) >= self._max_tenants:
            if now - self._looked_at >= LOOK_SECONDS:
                self._look(now)
            if len(self._sums) >= self._max_tenants:
                return
        self._sums[tenant] = self._sum(tenant, now) + work, now, weight

    def spared(self, tenant: str, now: float) -> float:
        """Return the share of a replica's KV blocks that this tenant leaves free for others; 0 while it is
        within its share.

        Its running requests would evict others' blocks, too.
        """
        if now - self._looked_at >= LOOK_SECONDS:
            self._look(now)
        found = self._sums.get(tenant)
        if found is None or self._mean is None:
            return 0.0
        own = self._sum(tenant, now)
        if own / found[2] <= OVER * self._mean:
            return 0.0
        return min(MOST_SPARED, max(LEAST_SPARED, SPARED * (1.0 - own / self._total)))

    def _sum(self, tenant: str, now: float) -> float:
        work, since, _ = self._sums.get(tenant, (0.0, now, 1.0))
        return work * math.exp(min(0.0, since - now) / MEMORY_SECONDS)

    def _look(self, now: float) -> None:
        """Update all tenants; those with almost no recent work are forgotten."""
        self._looked_at = now
        sums = {tenant: self._sum(tenant, now) for tenant in self._sums}
        total = sum(sums.values())
        for tenant, work in sums.items():
            if work <= LEAST_PART * total / len(sums):
                del self._sums[tenant]
        self._total = total
        weight = sum(weight for _, _, weight in self._sums.values())
        self._mean = total / weight if len(self._sums) > 1 and weight else None
