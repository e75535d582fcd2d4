"""UsageMetrics: what each tenant has read and written, and what it came to, for Prometheus.

Owns these names. Labels are tenants as `RouterMetrics` bounds them; keys have no series, since there may be a
hundred thousand: `/v1/usage` tells of them.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

from router.features.usage.amounts import READ, WRITTEN, Amount, Amounts, add, nothing
from router.features.usage.ratios import Cost, CostRatios, cost_of
from router.served import ServedRequest
from router.shared.instruments import Instrument, counter


class UsageMetrics:
    """`tenant_label` bounds how many tenants have series of their own. Costs are found when they are read."""

    def __init__(self, tenant_label: Callable[[str], str]) -> None:
        self._tenant_label = tenant_label
        self._totals: dict[tuple[str, CostRatios], Amounts] = {}
        """By the tenant's label and the ratios of its tokens."""

    def instruments(self) -> Iterator[Instrument]:
        yield counter(
            "router_tenant_cached_tokens_by_tier_total",
            "Prompt tokens that were read from a cache, by the tier that they were found in",
            lambda: self._tokens(READ),
            *("tenant", "tier"),
        )
        yield counter(
            "router_tenant_written_tokens_total",
            "Prompt tokens that were added to a cache, by the class of the lease that was granted (none: "
            "kept for as long as there is room)",
            lambda: self._tokens(WRITTEN),
            *("tenant", "ttl"),
        )
        yield counter(
            "router_tenant_cost_tokens_total",
            "What requests came to, in plain prompt tokens",
            lambda: self._costs(attrgetter("cost")),
            "tenant",
        )
        yield counter(
            "router_tenant_cost_without_cache_tokens_total",
            "What requests would have come to with nothing read and nothing kept, in plain prompt tokens",
            lambda: self._costs(attrgetter("without_cache")),
            "tenant",
        )

    def count(self, served: ServedRequest, amounts: Amounts, ratios: CostRatios) -> None:
        if not served.prompts:
            return
        key = self._tenant_label(served.prompts[0].generation.tenant), ratios
        total = self._totals.get(key)
        if total is None:
            total = self._totals[key] = nothing()
        add(total, amounts)

    def _tokens(self, places: Mapping[str, Amount]) -> Mapping[tuple[str, str], int]:
        found: Counter[tuple[str, str]] = Counter()
        for (tenant, _), total in self._totals.items():
            for name, place in places.items():
                found[tenant, name] += total[place]
        return found

    def _costs(self, read: Callable[[Cost], float]) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for (tenant, ratios), total in self._totals.items():
            found[tenant] = found.get(tenant, 0.0) + read(cost_of(total, ratios))
        return found
