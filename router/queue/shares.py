"""Shares: which tenants have more than their share of the work, or of the places in running batches.

Owns two numbers per tenant: a decaying sum of its work, and the places that its requests have now. A tenant
above its share of the work leaves KV blocks free for active others, in proportion to the others' recent work;
above its share of the places, a fifth of a batch. A tenant alone has no share to keep to, so an idle fleet
serves it whole. One of several that have keys leaves a few places to the next that comes: what runs is not
stopped for it.
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

NEWCOMER = 1 / 16
"""Share of a replica's places that a tenant leaves free while no other has asked lately, but may."""

LEAST_PART = 0.01
"""A tenant with less than this part of the work, and without a place, is not about any more."""

MAX_TENANTS = 10_000


class Share:
    """One tenant's: `work` at the time `since`, with what was generated after it, and its places."""

    __slots__ = ("num_places", "since", "weight", "work")

    def __init__(self, since: float, weight: float) -> None:
        self.work = 0.0
        self.since = since
        self.weight = weight
        self.num_places = 0

    def work_at(self, now: float) -> float:
        return self.work * math.exp(min(0.0, self.since - now) / MEMORY_SECONDS)


class Shares:
    def __init__(self, *, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._shares: dict[str, Share] = {}
        self._looked_at = -math.inf
        self._weight: float | None = None
        """The sum over all tenants; None with fewer than two."""
        self._work = 0.0
        self._num_places = 0

    @property
    def num_tenants(self) -> int:
        return len(self._shares)

    def gives(self, tenant: str, weight: float, work: float, now: float) -> None:
        share = self._shares.get(tenant)
        if share is None:
            if len(self._shares) >= self._max_tenants:
                if now - self._looked_at >= LOOK_SECONDS:
                    self._look(now)
                if len(self._shares) >= self._max_tenants:
                    return
            share = self._shares[tenant] = Share(now, weight)
        share.work, share.since, share.weight = share.work_at(now) + work, now, weight

    def take_places(self, tenant: str, num_places: int) -> Share | None:
        """A request of this tenant goes, whose choices take places. Returns the share that what it generates
        is added to; None of a tenant too many."""
        share = self._shares.get(tenant)
        if share is not None:
            share.num_places += num_places
            self._num_places += num_places
        return share

    def return_places(self, share: Share, num_places: int) -> None:
        share.num_places -= num_places
        self._num_places -= num_places

    def spared(self, tenant: str, now: float) -> float:
        """Return the share of a replica's KV blocks that this tenant leaves free for others; 0 while it is
        within its share.

        Its running requests would evict others' blocks, too.
        """
        share = self._share(tenant, now)
        if share is None or self._weight is None:
            return 0.0
        own = share.work_at(now)
        if own / share.weight <= OVER * self._work / self._weight:
            return 0.0
        return min(MOST_SPARED, max(LEAST_SPARED, SPARED * (1.0 - own / max(own, self._work))))

    def spared_places(self, tenant: str, now: float, *, has_others: bool) -> float:
        """Return the share of a replica's places that this tenant leaves free. `has_others`: other tenants
        may come."""
        share = self._share(tenant, now)
        if share is None:
            return 0.0
        if self._weight is None:
            return NEWCOMER if has_others else 0.0
        is_within = share.num_places / share.weight <= OVER * self._num_places / self._weight
        return 0.0 if is_within else LEAST_SPARED

    def _share(self, tenant: str, now: float) -> Share | None:
        if now - self._looked_at >= LOOK_SECONDS:
            self._look(now)
        return self._shares.get(tenant)

    def _look(self, now: float) -> None:
        """Update all tenants; those with almost no recent work and without a place are forgotten."""
        self._looked_at = now
        shares = tuple(self._shares.items())
        for _, share in shares:
            share.work, share.since = share.work_at(now), now
        total = sum(share.work for _, share in shares)
        for tenant, share in shares:
            if share.work <= LEAST_PART * total / len(shares) and not share.num_places:
                del self._shares[tenant]
        self._work = total
        weight = sum(share.weight for share in self._shares.values())
        self._weight = weight if len(self._shares) > 1 and weight else None
