"""TenantTurns: whose request the event loop prepares next.

Owns when tenants take turns at a busy router: a request beside a hundred of another tenant's waits for one of
them, not for all. `router/queue/` shares the replicas; this shares the router's own work, most of it with the
prompt's text.
"""

import asyncio
import sys

from router.caller import Tenant
from router.shared.fair_places import FairPlaces

REQUEST_BYTES = 4 * 2**10
"""Fixed cost of a request in bytes, besides its body."""

MIXED_SECONDS = 1.0
"""Seconds without a request of another tenant after which a tenant counts as alone, and is not held back."""


class TenantTurns:
    """For one event loop. While several tenants ask, a pass of the loop prepares one request besides its
    other work. Turns go by the bytes that a tenant was given over its weight."""

    def __init__(self) -> None:
        self._tenant = ""
        """The last tenant that asked."""
        self._mixed_until = 0.0
        self.places = FairPlaces(num_places=1, most_waiting=sys.maxsize)  # requests in flight are bounded

    async def turn(self, tenant: Tenant, num_bytes: int) -> None:
        """Wait for a turn to prepare `num_bytes`. Start right away, without awaiting. Safe to cancel."""
        now = asyncio.get_running_loop().time()
        if tenant.name != self._tenant:
            if self._tenant:
                self._mixed_until = now + MIXED_SECONDS
            self._tenant = tenant.name
        if now < self._mixed_until or self.places.line.num_waiting:
            await self.places.turn(tenant.name, (num_bytes + REQUEST_BYTES) / tenant.weight)
