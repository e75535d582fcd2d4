"""What a soak test concludes from memory and metrics."""

import os
import random

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from loadtests.benches.soak_figures import RAISED_AT_REST, errors_by_kind, growth, raised_gauges
from loadtests.figures import memory_of
from replicas.observation.metrics import ReplicaMetrics
from tests.metric_catalog import families

SECONDS = [5.0 * number for number in range(60)]


def test_a_line_has_its_slope_and_no_margin() -> None:
    found = growth(SECONDS, [7 + 3 * second for second in SECONDS])
    assert found.per_second == pytest.approx(3)
    assert found.margin == pytest.approx(0, abs=1e-9)


def test_the_slope_of_what_only_wanders_lies_within_its_margin() -> None:
    outside = 0
    for seed in range(200):
        rng = random.Random(seed)
        found = growth(SECONDS, [100 + rng.gauss(0, 5) for _ in SECONDS])
        outside += abs(found.per_second) > found.margin
    assert 1 <= outside <= 25, "one in twenty may lie outside of a 95 % interval"


def test_too_few_samples_have_no_slope() -> None:
    with pytest.raises(ValueError, match="too few"):
        growth([1.0] * 19, [1.0] * 19)


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


def test_errors_are_summed_by_kind_over_models() -> None:
    text = (
        "# TYPE router_request_errors_total counter\n"
        'router_request_errors_total{model="a",kind="failed"} 2\n'
        'router_request_errors_total{model="b",kind="failed"} 1\n'
        'router_request_errors_total{model="b",kind="invalid"} 0\n'
    )
    assert errors_by_kind(text) == {"failed": 3}


def test_memory_that_is_touched_is_anonymous_and_resident() -> None:
    before = memory_of(os.getpid())
    held = bytearray(b"x" * (64 << 20))
    after = memory_of(os.getpid())
    assert len(held) == 64 << 20
    assert after.anonymous - before.anonymous > 60 << 20
    assert after.resident - before.resident > 60 << 20
