"""Which gauges count what is under way."""

from prometheus_client import CollectorRegistry, generate_latest

from loadtests.storm.gauges import RAISED_AT_REST, raised_gauges
from replicas.observation.metrics import ReplicaMetrics
from tests.metric_catalog import families


def test_a_gauge_of_what_is_under_way_is_told_from_what_exists_and_from_counters() -> None:
    registry = CollectorRegistry()
    metrics = ReplicaMetrics(registry)
    metrics.running.set(2)
    metrics.total_blocks.set(64)
    metrics.cached_blocks.set(10)
    metrics.steps.inc(5)
    metrics.step_seconds.observe(0.1)
    assert raised_gauges(generate_latest(registry).decode()) == {"replica_running_requests": 2.0}


def test_what_may_stand_above_zero_at_rest_are_gauges_that_exist() -> None:
    gauges = {name for name, (kind, _) in families().items() if kind == "gauge"}
    assert gauges >= RAISED_AT_REST
