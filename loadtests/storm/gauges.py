"""Gauges that a cluster at rest has back at zero.

Owns which may be above zero there.
"""

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

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


def raised_gauges(metrics_text: str) -> dict[str, float]:
    """Return the gauges of a router or replica that count something under way, by name, summed over
    labels."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(metrics_text):
        name = family.name
        # Prometheus' library says of each counter when it was made, and calls that a gauge.
        is_ours = name.startswith(("router_", "replica_")) and not name.endswith("_created")
        if family.type == "gauge" and is_ours and name not in RAISED_AT_REST:
            for sample in family.samples:
                found[sample.name] += abs(sample.value)  # type: ignore[assignment]
    return {name: value for name, value in found.items() if value}
