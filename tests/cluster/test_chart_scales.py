"""The chart's fleet where pools follow their load: as the chart renders it, on Ray's own autoscaler.

KubeRay is a stand-in whose pods are processes here. The tests follow each other on one fleet.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.cluster.kvasir_command import wait_until
from tests.cluster.loopback_kuberay import HEAD
from tests.cluster.running_fleet import SECONDS, Fleet, open_fleet
from tests.helm.chart import named, of_kind, render

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

VALUES: dict[str, Any] = {
    "fleet": {"mode": "kuberay"},
    "ray": {"autoscaler": {"idleSeconds": 3}},
    "pools": {
        "main": {
            **{"engine": "simulated", "surge": 1, "drainSeconds": 20},
            "model": {"name": "main"},
            "autoscaling": {
                **{"enabled": True, "minReplicas": 1, "maxReplicas": 2},
                **{"targetInFlight": 2.5, "upSeconds": 1, "downSeconds": 6},
            },
        }
    },
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("kuberay")
    objects = tuple(render(VALUES))
    (cluster,) = of_kind("RayCluster", objects)
    cluster["metadata"]["namespace"] = "llm"
    file = folder / "cluster.json"
    file.write_text(json.dumps(cluster))
    content = yaml.safe_load(named("ConfigMap", "demo-kvasir-fleet", objects)["data"]["fleet.yaml"])
    # Pods have addresses of their own; here ports are shared with whatever else runs.
    content |= {"metrics_host": HEAD, "metrics_port": 0}
    for pool in content["pools"]:
        pool["settings"] |= {"port": 0, "metrics_port": 0}
    (folder / "fleet.yaml").write_text(yaml.safe_dump(content))
    with open_fleet(folder, "kuberay", "tests.cluster.loopback_kuberay", str(file)) as running:
        yield running


def workers(fleet: Fleet) -> set[str]:
    return {pod for pod in json.loads(fleet.tell_machines("pods")) if "worker" in pod}


def machines(fleet: Fleet) -> set[str]:
    """Those that replicas listen on."""
    return {entry["address"].rpartition(":")[0] for entry in fleet.ready().values()}


def wait_for_workers(fleet: Fleet, count: int) -> None:
    wait_until(lambda: len(workers(fleet)) == count, lambda: f"{workers(fleet)}", SECONDS)


def test_the_fleet_is_taken_before_its_workers_are_there_and_begins_with_the_fewest(fleet: Fleet) -> None:
    fleet.tell_machines("join")
    applied = fleet.run("apply", str(fleet.folder / "fleet.yaml"), "--redis-url", fleet.redis_url)
    assert applied.returncode == 0, applied.stdout + applied.stderr
    assert "ready: main 1" in applied.stdout.splitlines(), applied.stdout
    assert len(workers(fleet)) == 1
    wait_until(lambda: fleet.ask("main", "Hello?").status_code == 200, lambda: "no router has it", SECONDS)


def test_under_load_the_pool_grows_and_ray_adds_a_worker_for_it(fleet: Fleet) -> None:
    with fleet.clients("main") as outcomes:
        wait_until(lambda: len(fleet.ready()) == 2, lambda: fleet.do("status"), SECONDS)
        assert len(workers(fleet)) == 2
        assert len(machines(fleet)) == 2, "each replica has a worker to itself"
    assert outcomes.keys() <= {"ok", "main-0", "main-1"}


def test_an_evicted_pod_finishes_what_it_does_and_its_replica_comes_back_elsewhere(fleet: Fleet) -> None:
    before, evicted = fleet.epochs(), sorted(workers(fleet))[-1]
    with fleet.clients("main") as outcomes:
        fleet.tell_machines(f"evict {evicted}")
        wait_until(lambda: len(workers(fleet) - {evicted}) == 2, lambda: fleet.do("status"), SECONDS)
        wait_until(lambda: len(fleet.ready()) == 2, lambda: fleet.do("status"), SECONDS)
    assert len(set(before.values()) & set(fleet.epochs().values())) == 1
    assert outcomes.keys() <= {"ok", "main-0", "main-1"}, "none failed, and none was continued elsewhere"


def test_without_load_it_shrinks_and_ray_takes_the_worker_away_that_has_no_replica(fleet: Fleet) -> None:
    before = fleet.epochs()
    wait_until(lambda: len(fleet.ready()) == 1, lambda: fleet.do("status"), SECONDS)
    wait_for_workers(fleet, 1)
    assert fleet.epochs().items() <= before.items(), "the one whose replica nobody touched is left"


def test_a_rollout_gets_a_worker_for_its_surge_and_gives_it_back(fleet: Fleet) -> None:
    before = fleet.epochs()
    with fleet.clients("main", 1) as outcomes:
        assert "ready: main 1" in fleet.do("rollout", "main")
        assert len(workers(fleet)) == 2
    assert fleet.epochs() != before
    assert [key for key in outcomes if key not in ("ok", "main-0", "main-1")] == [], "none failed or moved"
    kept = fleet.epochs()
    wait_for_workers(fleet, 1)
    assert fleet.epochs() == kept
