"""Figures of a soak test: the growth of memory, errors, gauges that should return to zero.

Owns which gauges may be above zero on an idle cluster.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

NUM_BINS = 10
T_95 = 2.306
"""Student's t for two parameters from `NUM_BINS` means, two-sided."""

RAISED_AT_REST = frozenset(
    {
        # what exists, or is kept on purpose
        "router_replicas",
        "router_replicas_known",
        "router_index_connected",
        "router_retry_budget",
        "router_suspects",
        "router_connections_limit",
        "replica_redis_memory_ratio",
        "router_index_entries",
        "router_hash_cache_bytes",
        "router_token_cache_bytes",
        "router_index_departures",
        "router_explain_bytes",
        "router_explain_prompts",
        "router_usage_entries",
        "router_rate_accounts",
        "router_rate_exchange_routers",
        "router_history_bytes",
        "router_history_conversations",
        "router_named_caches_remembered",
        "router_named_cache_memory_bytes",
        "router_stored_responses_remembered",
        "router_stored_response_memory_bytes",
        "router_keys",
        "router_key_tenants",
        "router_keys_age_seconds",
        "router_tls_expiry_timestamp_seconds",
        "replica_info",
        "replica_streams",
        "replica_total_blocks",
        "replica_cached_blocks",
        "replica_index_hashes",
        "replica_resident_hashes",
        "replica_tier_chunks",
        "replica_tier_bytes",
        "replica_tier_bytes_limit",
        "replica_disk_write_budget_ratio",
        "replica_disk_other_bytes",
        # the latest value of a time
        "router_event_loop_lag_seconds",
        "router_index_lag_seconds",
        "replica_index_lag_seconds",
    }
)
"""Any other gauge of ours counts what is under way."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A slope per second and the half width of its 95 % interval."""

    per_second: float
    margin: float


def growth(seconds: Sequence[float], values: Sequence[float]) -> Growth:
    """Fit a line through the means of ten parts of the time: neighbouring samples are alike, and would make
    the interval too narrow. Raises ValueError with fewer than two samples for each."""
    if len(seconds) < 2 * NUM_BINS:
        raise ValueError(f"{len(seconds)} samples are too few")
    edges = [round(number * len(seconds) / NUM_BINS) for number in range(NUM_BINS + 1)]
    bins = [slice(start, end) for start, end in itertools.pairwise(edges)]
    times = [statistics.fmean(seconds[each]) for each in bins]
    means = [statistics.fmean(values[each]) for each in bins]
    slope, intercept = statistics.linear_regression(times, means)
    rest = sum((y - intercept - slope * x) ** 2 for x, y in zip(times, means, strict=True))
    middle = statistics.fmean(times)
    spread = sum((x - middle) ** 2 for x in times)
    return Growth(slope, T_95 * math.sqrt(rest / (NUM_BINS - 2) / spread))


def raised_gauges(metrics_text: str) -> dict[str, float]:
    """The gauges of a router or replica that count something under way, by name, summed over labels."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(metrics_text):
        name = family.name
        # Prometheus' library says of each counter when it was made, and calls that a gauge.
        is_ours = name.startswith(("router_", "replica_")) and not name.endswith("_created")
        if family.type == "gauge" and is_ours and name not in RAISED_AT_REST:
            for sample in family.samples:
                found[sample.name] += abs(sample.value)  # type: ignore[assignment]
    return {name: value for name, value in found.items() if value}


def errors_by_kind(metrics_text: str) -> dict[str, int]:
    """Count a router's errors by kind."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(metrics_text):
        if family.name == "router_request_errors":
            for sample in family.samples:
                if sample.name == "router_request_errors_total":
                    found[sample.labels["kind"]] += int(sample.value)
    return {kind: count for kind, count in found.items() if count}
