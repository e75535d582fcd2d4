"""CostRatios: the cost of a token relative to a plain prompt token, and the cost of a tenant's amounts.

Owns the table and the sums. The unit is a plain prompt token: computed and not leased, it costs 1.
"""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from router.features.usage.amounts import ALL_READ, ALL_WRITTEN, Amount

MAX_RATIO = 1000.0


class CostRatios(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`write` is for tokens that are kept for as long as there is room; the others are for those under a
    lease of up to that time. What a read costs is the same for every tier. Raises ValueError."""

    read: float = 0.1
    write: float = 1.0
    write_5m: float = 1.25
    write_30m: float = 1.25
    write_1h: float = 2.0
    write_12h: float = 2.0
    write_24h: float = 2.0
    output: float = 5.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            ratio = getattr(self, name)
            if not (math.isfinite(ratio) and 0 <= ratio <= MAX_RATIO):
                raise ValueError(f"the ratio {name} must be between 0 and {MAX_RATIO:g}, not {ratio:g}")


DEFAULT_RATIOS = CostRatios()

_WRITE_RATIOS = {
    Amount.WRITTEN: "write",
    Amount.WRITTEN_5M: "write_5m",
    Amount.WRITTEN_30M: "write_30m",
    Amount.WRITTEN_1H: "write_1h",
    Amount.WRITTEN_12H: "write_12h",
    Amount.WRITTEN_24H: "write_24h",
}


class Cost(NamedTuple):
    """`without_cache` is what the same tokens would have cost if nothing could be read or kept."""

    cost: float
    without_cache: float

    @property
    def saved(self) -> float:
        """Less than nothing where more was paid for keeping than reading has saved."""
        return self.without_cache - self.cost


NO_COST = Cost(0.0, 0.0)


def cost_of(amounts: Sequence[int], ratios: CostRatios) -> Cost:
    output = ratios.output * amounts[Amount.OUTPUT]
    num_read, num_written = sum(amounts[ALL_READ]), sum(amounts[ALL_WRITTEN])
    plain = amounts[Amount.UNCACHED] + amounts[Amount.UNREPORTED]
    cost = plain + ratios.read * num_read
    if num_written:
        cost += sum([getattr(ratios, name) * amounts[amount] for amount, name in _WRITE_RATIOS.items()])
    return Cost(cost + output, plain + num_read + num_written + output)


class RatioTable:
    """Ratios of each tenant. Parses texts such as `read=0.05`, for all, and `TENANT:read=0.02`; missing ones
    have their defaults. Raises ValueError."""

    def __init__(self, texts: Collection[str] = ()) -> None:
        self._default = DEFAULT_RATIOS
        self._of_tenant: dict[str, CostRatios] = {}
        for of_tenants in (False, True):
            for text in texts:
                tenant, colon, ratio = text.rpartition(":")
                if bool(colon) is not of_tenants:
                    continue
                changed = _changed(self.of(tenant) if colon else self._default, ratio)
                if colon:
                    self._of_tenant[tenant] = changed
                else:
                    self._default = changed

    def of(self, tenant: str) -> CostRatios:
        return self._of_tenant.get(tenant, self._default)


def _changed(ratios: CostRatios, text: str) -> CostRatios:
    name, _, number = text.partition("=")
    if name not in CostRatios.__struct_fields__:
        known = ", ".join(CostRatios.__struct_fields__)
        raise ValueError(f"there is no ratio {name[:40]!r}: there are {known}")
    try:
        ratio = float(number)
    except ValueError:
        raise ValueError(f"the ratio {name} is no number: {number[:40]!r}") from None
    return msgspec.structs.replace(ratios, **{name: ratio})
