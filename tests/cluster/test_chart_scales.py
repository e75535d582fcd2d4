"""The chart's fleet where pools follow their load, rendered and applied as by the chart, on Ray's autoscaler.

KubeRay is a stand-in whose pods are processes here. The tests follow each other on one fleet.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.cluster.kvasir_command import wait_until
from tests.cluster.loopback_kuberay import HEAD
from tests.cluster.running_fleet import SECONDS, SECRET, Follower, RunningFleet, open_fleet
from tests.helm.chart import named, of_kind, render

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

VALUES: dict[str, Any] = {
    "fleet": {"mode": "kuberay"},
    "ray": {"autoscaler": {"idleSeconds": 8}},
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
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tmp_path_factory.mktemp("kuberay")
    objects = tuple(render(VALUES))
    (cluster,) = of_kind("RayCluster", objects)
    cluster["metadata"]["namespace"] = "llm"
    file = folder / "cluster.json"
    file.write_text(json.dumps(cluster))
    content = yaml.safe_load(named("ConfigMap", "demo-kvasir-fleet", objects)["data"]["fleet.yaml"])
    # Pods have addresses of their own; here ports are shared with whatever else runs.
    content |= {"metrics_host": HEAD, "metrics_port": 0, "secret_file": str(folder / SECRET)}
    (folder / SECRET).touch(mode=0o600)
    (folder / SECRET).write_text("5e" * 32)
    for pool in content["pools"]:
        pool["settings"] |= {"port": 0, "metrics_port": 0}
    (folder / "fleet.yaml").write_text(yaml.safe_dump(content))
    with open_fleet(folder, "kuberay", "tests.cluster.loopback_kuberay", str(file)) as running:
        yield running


@pytest.fixture(scope="module")
def follower(fleet: RunningFleet) -> Iterator[Follower]:
    with Follower(fleet) as running:
        yield running


def workers(fleet: RunningFleet) -> set[str]:
    return {pod for pod in json.loads(fleet.tell_machines("pods")) if "worker" in pod}


def machines(fleet: RunningFleet) -> set[str]:
    """Those that replicas listen on."""
    return {entry["address"].rpartition(":")[0] for entry in fleet.ready().values()}


def wait_for_workers(fleet: RunningFleet, count: int) -> None:
    wait_until(lambda: len(workers(fleet)) == count, lambda: f"{workers(fleet)}", SECONDS)


def test_the_fleet_is_taken_before_its_workers_are_there_and_begins_with_the_fewest(
    fleet: RunningFleet, follower: Follower
) -> None:
    fleet.tell_machines("join")
    follower.wait_ready()
    assert follower.said()[-1] == "ready: main 1"
    assert len(workers(fleet)) == 1
    wait_until(lambda: fleet.ask("main", "Hello?").status_code == 200, lambda: "no router has it", SECONDS)


def test_under_load_the_pool_grows_and_ray_adds_a_worker_for_it(fleet: RunningFleet) -> None:
    with fleet.clients("main") as outcomes:
        wait_until(lambda: len(fleet.ready()) == 2, lambda: fleet.do("status"), SECONDS)
        assert len(workers(fleet)) == 2
        assert len(machines(fleet)) == 2, "each replica has a worker to itself"
    assert outcomes.keys() <= {"ok", "main-0", "main-1"}


def test_an_evicted_pod_finishes_what_it_does_and_its_replica_comes_back_elsewhere(
    fleet: RunningFleet,
) -> None:
    before, evicted = fleet.epochs(), sorted(workers(fleet))[-1]
    with fleet.clients("main") as outcomes:
        fleet.tell_machines(f"evict {evicted}")
        wait_until(lambda: len(workers(fleet) - {evicted}) == 2, lambda: fleet.do("status"), SECONDS)
        wait_until(lambda: len(fleet.ready()) == 2, lambda: fleet.do("status"), SECONDS)
    assert len(set(before.values()) & set(fleet.epochs().values())) == 1
    assert outcomes.keys() <= {"ok", "main-0", "main-1"}, "none failed, and none was continued elsewhere"


def test_without_load_it_shrinks_and_ray_takes_the_worker_away_that_has_no_replica(
    fleet: RunningFleet,
) -> None:
    before = fleet.epochs()
    wait_until(lambda: len(fleet.ready()) == 1, lambda: fleet.do("status"), SECONDS)
    wait_for_workers(fleet, 1)
    assert fleet.epochs().items() <= before.items(), "the one whose replica nobody touched is left"


def test_a_rollout_gets_a_worker_for_its_surge_and_gives_it_back(fleet: RunningFleet) -> None:
    before = fleet.epochs()
    with fleet.clients("main", 1) as outcomes:
        assert "ready: main 1" in fleet.do("rollout", "main")
        assert len(workers(fleet)) == 2
    assert fleet.epochs() != before
    assert [key for key in outcomes if key not in ("ok", "main-0", "main-1")] == [], "none failed or moved"
    kept = fleet.epochs()
    wait_for_workers(fleet, 1)
    assert fleet.epochs() == kept


def test_what_applies_the_fleet_may_start_again_and_undoes_nothing(
    fleet: RunningFleet, follower: Follower
) -> None:
    before = fleet.status()["pools"], fleet.epochs()
    assert follower.end() == 0
    assert not follower.ready_file.exists()
    follower.start()
    follower.wait_ready()
    assert follower.said() == ["ready: main 1"], "nothing was applied"
    assert (fleet.status()["pools"], fleet.epochs()) == before, "not even the rollout was undone"


def test_another_file_is_applied_by_itself_and_a_wrong_one_is_told(
    fleet: RunningFleet, follower: Follower
) -> None:
    content = yaml.safe_load(follower.file.read_text())
    content["pools"][0]["settings"]["max_running"] = 0
    follower.file.write_text(yaml.safe_dump(content))
    wait_until(lambda: follower.says("max_running"), lambda: f"{follower.said()}", SECONDS)
    assert not follower.ready_file.exists()
    (before,) = fleet.status()["pools"]
    content["pools"][0]["settings"]["max_running"] = 9
    follower.file.write_text(yaml.safe_dump(content))
    follower.wait_ready()
    (after,) = fleet.status()["pools"]
    assert before["revision"] != after["revision"]
    assert after["is_settled"] and follower.said()[-1] == "ready: main 1"


def test_what_ray_complains_of_is_not_among_the_answers(fleet: RunningFleet, follower: Follower) -> None:
    complaint = "a raylet has seen better days"
    assert fleet.tell_machines(f"complain {complaint}") == "told"
    wait_until(lambda: complaint in follower.complaints.read_text(), lambda: f"{follower.said()}", SECONDS)
    assert not any(complaint in line for line in follower.said())


def test_a_fleet_that_ray_has_lost_is_applied_again(fleet: RunningFleet, follower: Follower) -> None:
    before = set(fleet.epochs().values())
    num_applied = follower.num_applied()
    fleet.do("stop")
    wait_until(lambda: follower.num_applied() > num_applied, lambda: f"{follower.said()}", SECONDS)
    wait_until(lambda: set(fleet.epochs().values()) - before, lambda: fleet.do("status"), SECONDS)
    follower.wait_ready()
    wait_until(lambda: fleet.ask("main", "Hello?").status_code == 200, lambda: "no router has it", SECONDS)
