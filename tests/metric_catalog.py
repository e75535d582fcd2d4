"""Every metric that a process of Kvasir shows, and its labels: asked of the processes' own registries."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from cluster.metrics import FleetMetrics
from replicas.observation.metrics import ReplicaMetrics
from router.instruments import Distributions
from router.metrics import RouterMetrics

Labels = frozenset[str]

EVERY_TARGET = frozenset({"job", "instance", "namespace"})
TARGET_LABELS = {
    "router": EVERY_TARGET | {"router"},
    "replica": EVERY_TARGET | {"replica", "pool"},
    "fleet": EVERY_TARGET,
}
"""What Prometheus adds to each series: see `kvasir up`'s file of targets, and the chart's monitors."""

OF_PROMETHEUS = {
    "up": EVERY_TARGET,
    "ALERTS": EVERY_TARGET | {"alertname", "alertstate", "severity"},
}


def families() -> dict[str, tuple[str, Labels]]:
    """What documents name (counters with `_total`), to its type and its own labels."""
    found = {name: (kind, labels) for _, name, kind, labels in _all()}
    return dict(sorted(found.items()))


def series_labels() -> dict[str, Labels]:
    """Every series that an expression may name, to its labels in Prometheus."""
    found = dict(OF_PROMETHEUS)
    for process, name, kind, labels in _all():
        own = labels | TARGET_LABELS[process]
        if kind == "histogram":
            found |= {name + "_bucket": own | {"le"}, name + "_count": own, name + "_sum": own}
        else:
            found[name] = own
    return found


def _all() -> Iterator[tuple[str, str, str, Labels]]:
    """Process, name, type, labels."""
    for family in RouterMetrics(CollectorRegistry()).families():
        is_histogram = isinstance(family, Distributions)
        kind = "histogram" if is_histogram else "counter" if family.name.endswith("_total") else "gauge"
        yield "router", family.name, kind, frozenset(family.labels)
    yield from _registered("replica", ReplicaMetrics)
    yield from _registered("fleet", FleetMetrics)


def _registered(process: str, metrics: type) -> Iterator[tuple[str, str, str, Labels]]:
    registry = CollectorRegistry()
    metrics(registry)
    for collector in registry._collector_to_names:
        for family in (
            collector.describe() if isinstance(collector, MetricWrapperBase) else collector.collect()
        ):
            suffix = "_total" if family.type == "counter" else ""
            yield process, family.name + suffix, family.type, _labels_of(collector, family)


def _labels_of(collector: Collector, family: Metric) -> Labels:
    if isinstance(collector, MetricWrapperBase):
        return frozenset(collector._labelnames)
    assert family.samples, f"{family.name} does not say which labels it has"
    return frozenset(family.samples[0].labels)
