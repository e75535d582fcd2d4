"""What dashboards and rules ask for is really moved by what happens in a cluster.

A real Prometheus scrapes a real cluster that much happens to; then every expression of every panel is asked
for that time. One that never has a number, or never another than 0, shows nothing to whoever looks at it.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from loadtests.stacks.fresh_cluster import fresh_cluster
from tests.helm.eventful_traffic import EventfulTraffic
from tests.helm.promql import asked
from tests.helm.real_prometheus import SCRAPE_SECONDS, RealPrometheus, real_prometheus
from tests.metric_catalog import series_labels
from tests.tools import needed_tool

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parent.parent.parent
RULES = ROOT / "helm/rules/kvasir.yaml"
NAMES = ("fleet", "router", "cache", "tenant")
CLUSTER = (
    *("--engine", "simulated", "--replicas", "2"),
    *("--set", "simulated_hardware=h100x4-70b", "--set", "simulated_speed=2"),
    *("--set", "num_blocks=100", "--set", "max_running=8", "--set", "max_waiting=8"),
    *("--set", "otlp_endpoint=http://127.0.0.1:9"),  # nobody takes traces there
)

ENVIRONMENT = {"KVASIR_ROUTER_WAIT_SECONDS": "0.5"}
"""Replicas that died are back within seconds, and requests that wait for them would never get a 503."""

MOST_ROUNDS = 4
"""Some of what should happen is a matter of luck, such as a replica that dies in the middle of an answer."""

MAY_STAY_ZERO = {
    "router_index_malformed_total": "only a replica of another version writes what a router cannot read",
    "replica_index_withheld": "Redis has room",
    "router_index_lag_seconds": "a router keeps up with two replicas",
    "router_overdue_attempts_total": "no replica hangs",
    "router_waiting": "requests wait for half a second here, between two scrapes",
    "router_ended_connections_total": "no client is slow, or one of too many",
    "router_refused_bodies_total": "there is memory for all bodies",
    'outcome!="done"': "no large body is too much work, or one of too many",
    "ALERTS": "no rule fires before it has held for a minute",
    "router_queue_refusals_total": "nobody waits for long enough here, nor do many wait",
}
"""What need not happen here, and why."""


NOT_HERE = ("replica_tier_", "replica_disk_", "replica_quarantined_", "replica_prefix_lease", "_image")
"""Simulated engines have no memory below the device, and the toy model takes no images."""


@dataclass(frozen=True, slots=True)
class Watched:
    prometheus: RealPrometheus
    start: float
    end: float


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    needed_tool("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield from watched_traffic(folder)


def watched_traffic(folder: Path) -> Iterator[Watched]:
    """Run rounds of traffic until nothing is silent. A counter has to be seen before it moves."""
    with (
        fresh_cluster(CLUSTER, folder / "logs") as cluster,
        real_prometheus(folder, cluster.directory.targets_file, RULES) as prometheus,
    ):
        start = time.time()
        traffic = EventfulTraffic(cluster.directory)
        for _ in range(MOST_ROUNDS):
            traffic.run()
            time.sleep(3 * SCRAPE_SECONDS)
            watched = Watched(prometheus, start, time.time())
            if not any(silent(watched, name) for name in NAMES):
                break
        yield watched


def expressions(name: str) -> Iterator[tuple[str, str]]:
    """Title and legend, and what is asked for."""
    dashboard = json.loads((ROOT / f"helm/dashboards/{name}.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield f"{panel['title']}: {target['legendFormat']}", filled(target["expr"])


def filled(expression: str) -> str:
    """As Grafana asks with every variable at All."""
    for name, value in {"$__rate_interval": "5s", "$__range": "1m"}.items():
        expression = expression.replace(name, value)
    for name in ("namespace", "router", "model", "replica", "tenant"):
        expression = expression.replace(f"${name}", ".*")
    assert "$" not in expression
    return expression


def silent(watched: Watched, name: str) -> list[str]:
    """List what of a dashboard shows nothing."""
    found = []
    for title, expression in expressions(name):
        if any(metric in expression for metric in NOT_HERE):
            continue
        series = watched.prometheus.over_time(expression, watched.start, watched.end)
        numbers = [value for values in series for value in values if math.isfinite(value)]
        if not numbers:
            found.append(f"{title}: no number in {len(series)} series: {expression}")
        elif not any(numbers) and not any(metric in expression for metric in MAY_STAY_ZERO):
            found.append(f"{title}: always 0: {expression}")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_line_of_every_panel_has_numbers_and_moves(watched: Watched, name: str) -> None:
    found = silent(watched, name)
    assert not found, "\n".join(found)


def test_every_rule_has_series_to_go_by(watched: Watched) -> None:
    def has_numbers(expression: str) -> bool:
        series = watched.prometheus.over_time(expression, watched.start, watched.end)
        return any(math.isfinite(value) for values in series for value in values)

    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    records = {rule["record"]: frozenset[str]() for rule in rules if "record" in rule}
    for rule in rules:
        if any(metric in rule["expr"] for metric in ("tls_expiry", *NOT_HERE)):
            continue  # nothing is encrypted here
        wanted = (
            {rule["record"]} if "record" in rule else asked(rule["expr"], series_labels() | records).metrics
        )
        for metric in wanted:
            assert has_numbers(metric), f"{metric}, for {rule}"
