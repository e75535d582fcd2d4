"""UsageMetrics: what each tenant has read and written, and what it came to, for Prometheus.

Owns these names. Labels are tenants as `RouterMetrics` bounds them; keys have no series, since there may be a
hundred thousand: `/v1/usage` tells of them.
"""

from collections.abc import Callable, Sequence

from router.features.usage.amounts import READ, WRITTEN, Amount, Amounts
from router.features.usage.ratios import Cost
from router.served import ServedRequest
from router.shared.instruments import Number, Numbers


class UsageMetrics:
    """`tenant_label` bounds how many tenants have series of their own."""

    def __init__(self, tenant_label: Callable[[str], str]) -> None:
        self._tenant_label = tenant_label
        self._read = Numbers(
            "counter",
            "router_tenant_cached_tokens_by_tier_total",
            "Prompt tokens that were read from a cache, by the tier that they were found in",
            ("tenant", "tier"),
        )
        self._written = Numbers(
            "counter",
            "router_tenant_written_tokens_total",
            "Prompt tokens that were added to a cache, by the class of the lease that was granted (none: "
            "kept for as long as there is room)",
            ("tenant", "ttl"),
        )
        self._cost = Numbers(
            "counter",
            "router_tenant_cost_tokens_total",
            "What requests came to, in plain prompt tokens",
            ("tenant",),
        )
        self._without_cache = Numbers(
            "counter",
            "router_tenant_cost_without_cache_tokens_total",
            "What requests would have come to with nothing read and nothing kept, in plain prompt tokens",
            ("tenant",),
        )
        self.families = [self._read, self._written, self._cost, self._without_cache]
        self._of_tenant: dict[str, tuple[Sequence[tuple[Amount, Number]], Number, Number]] = {}

    def count(self, served: ServedRequest, amounts: Amounts, cost: Cost) -> None:
        if not served.prompts:
            return
        tenant = self._tenant_label(served.prompts[0].generation.tenant)
        found = self._of_tenant.get(tenant)
        if found is None:
            own = [(place, self._read.of(tenant, tier)) for tier, place in READ.items()]
            own += [(place, self._written.of(tenant, ttl)) for ttl, place in WRITTEN.items()]
            found = own, self._cost.of(tenant), self._without_cache.of(tenant)
            self._of_tenant[tenant] = found
        series, paid, without_cache = found
        for place, number in series:
            number.value += amounts[place]
        paid.value += cost.cost
        without_cache.value += cost.without_cache
