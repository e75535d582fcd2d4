"""Results per tenant, and how fairly an overloaded fleet was shared. Pure.

Owns the figures per tenant and Jain's index.

The index compares each tenant's service with its max-min fair share, in which no tenant gets more than it
asked for and the others share the rest: (Σx)² / (n·Σx²), 1 if all had their fair share. Work is counted in
prompt tokens of whole answers, which every server reports.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtests.figures import percentiles
from loadtests.reports.report import RequestRecord, Slo


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """Shares are from 0 to 1; None if a figure has no data."""

    num_requests: int
    num_refused: int
    good_share: float
    ttft_p50: float | None
    ttft_p90: float | None
    token_hit_rate: float | None
    asked_tokens: int
    served_tokens: int
    fair_tokens: float


@dataclass(frozen=True, slots=True)
class Fairness:
    tenants: Mapping[str, TenantFigures]
    jain: float | None
    ttft_p90_of_others: float | None
    """For all tenants but the one that asked for most."""
    hit_rate_of_others: float | None


def fairness(records: Sequence[RequestRecord], slo: Slo) -> Fairness:
    by_tenant: dict[str, list[RequestRecord]] = {}
    for record in records:
        by_tenant.setdefault(record.tenant or "default", []).append(record)
    asked = {name: sum(each.num_input_tokens for each in own) for name, own in by_tenant.items()}
    served = {name: _served_tokens(own) for name, own in by_tenant.items()}
    fair = max_min(asked, sum(served.values()))
    largest = max(asked, key=lambda name: asked[name], default=None)
    others = [each for name, own in by_tenant.items() if name != largest for each in own]
    return Fairness(
        {
            name: _figures(own, slo, asked[name], served[name], fair[name])
            for name, own in sorted(by_tenant.items())
        },
        jain([served[name] / fair[name] for name in by_tenant if fair[name]]),
        _percentiles(others)[1],
        _hit_rate(others),
    )


def jain(values: Sequence[float]) -> float | None:
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def max_min(asked: Mapping[str, float], total: float) -> dict[str, float]:
    """Divide a total into equal shares, none larger than what was asked for."""
    parts: dict[str, float] = {}
    left, num_left = total, len(asked)
    for name in sorted(asked, key=lambda each: asked[each]):
        parts[name] = min(asked[name], left / num_left)
        left -= parts[name]
        num_left -= 1
    return parts


def _figures(
    records: Sequence[RequestRecord], slo: Slo, asked: int, served: int, fair: float
) -> TenantFigures:
    p50, p90 = _percentiles(records)
    return TenantFigures(
        len(records),
        sum(record.error is not None for record in records),
        statistics.fmean(slo.is_met(record) for record in records),
        p50,
        p90,
        _hit_rate(records),
        asked,
        served,
        fair,
    )


def _served_tokens(records: Sequence[RequestRecord]) -> int:
    return sum(record.num_input_tokens for record in records if record.error is None)


def _percentiles(records: Sequence[RequestRecord]) -> tuple[float | None, float | None]:
    """Return the median and the 90th percentile of the answered requests' TTFTs."""
    known = [
        record.ttft_seconds for record in records if record.error is None and record.ttft_seconds is not None
    ]
    if not known:
        return None, None
    found = percentiles(known)
    return found.p50, found.p90


def _hit_rate(records: Sequence[RequestRecord]) -> float | None:
    known = [record for record in records if record.num_cached_tokens is not None]
    num_tokens = sum(record.num_input_tokens for record in known)
    return sum(record.num_cached_tokens or 0 for record in known) / num_tokens if num_tokens else None
