"""Every metric that a process of Kvasir shows, and its labels: asked of the processes' own registries."""

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from cluster.controller.metrics import FleetMetrics
from replicas.observation.metrics import ReplicaMetrics
from router.assembly import Router
from router.config import RouterConfig
from router.shared.instruments import Instrument

Labels = frozenset[str]


@dataclass(frozen=True, slots=True)
class Described:
    """A metric as documents name it: counters with `_total`, labels without the target's."""

    process: str
    name: str
    kind: str
    labels: Labels
    help_text: str


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
    """Name to type and own labels."""
    return {
        metric.name: (metric.kind, metric.labels)
        for metric in sorted(described(), key=lambda metric: metric.name)
    }


def series_labels() -> dict[str, Labels]:
    """Every series that an expression may name, to its labels in Prometheus."""
    found = dict(OF_PROMETHEUS)
    for metric in described():
        name, own = metric.name, metric.labels | TARGET_LABELS[metric.process]
        if metric.kind == "histogram":
            found |= {name + "_bucket": own | {"le"}, name + "_count": own, name + "_sum": own}
        else:
            found[name] = own
    return found


def described() -> Iterator[Described]:
    """All metrics of all processes."""
    for family in _router_families():
        first, second = family.text().splitlines()[:2]
        help_text = first.removeprefix(f"# HELP {family.name} ")
        kind = second.removeprefix(f"# TYPE {family.name} ")
        yield Described("router", family.name, kind, frozenset(family.labels), help_text)
    yield from _registered("replica", ReplicaMetrics)
    yield from _registered("fleet", FleetMetrics)


def _router_families() -> Iterator[Instrument]:
    """Those of a router in which every part is on."""
    with tempfile.TemporaryDirectory() as folder:
        config = RouterConfig(
            secret="5" * 64,
            keys_in_redis=True,
            record_bodies=f"{folder}/bodies.jsonl",
            picker_port=0,
        )
        yield from Router(config, rng=random.Random(0)).metrics.families()


def _registered(process: str, metrics: type) -> Iterator[Described]:
    registry = CollectorRegistry()
    metrics(registry)
    for collector in registry._collector_to_names:
        for family in (
            collector.describe() if isinstance(collector, MetricWrapperBase) else collector.collect()
        ):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = _labels_of(collector, family)
            yield Described(process, name, family.type, labels, family.documentation)


def _labels_of(collector: Collector, family: Metric) -> Labels:
    if isinstance(collector, MetricWrapperBase):
        return frozenset(collector._labelnames)
    assert family.samples, f"{family.name} does not say which labels it has"
    return frozenset(family.samples[0].labels)
