"""Pools in Ray whose size follows their load: what controller, Ray and KubeRay are told about it agrees."""

from typing import Any

import pytest
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from cluster.config import AutoscaleSpec, FleetSpec
from cluster.controller.capacity import fits
from cluster.controller.changes import FleetState, applied
from cluster.fleet_file import AUTOSCALING_FIELDS, parse_fleet
from replicas.process.settings import SettingsError
from tests.helm.chart import chart, named, of_kind, render, rendered, values_of

CASE = "KubeRay, pools that scale"
HEAD = {"node:__internal_head__": 1.0}


def fleet_of(case: str) -> FleetSpec:
    text = named("ConfigMap", "demo-kvasir-fleet", rendered(case))["data"]["fleet.yaml"]
    return parse_fleet(text, redis_url="redis://redis")


def seen_by_ray(case: str) -> dict[str, Any]:
    """What Ray's autoscaler makes of the RayCluster. Raises if it cannot."""
    (cluster,) = of_kind("RayCluster", rendered(case))
    placed = {**cluster, "metadata": {**cluster["metadata"], "namespace": "llm"}}
    config: dict[str, Any] = _derive_autoscaling_config_from_ray_cr(placed)
    return config


def test_the_values_reach_the_fleet_file_and_a_pool_begins_with_its_fewest_replicas() -> None:
    a, b, c = fleet_of(CASE).pools
    defaults = {"up_seconds": 5, "down_seconds": 300, "tolerance": 0.1}
    assert a.autoscaling == AutoscaleSpec(2, 5, target_in_flight=16, **defaults)
    assert b.autoscaling == AutoscaleSpec(
        *(1, 4), target_pending_tokens=1e6, up_seconds=2.5, down_seconds=0, tolerance=0
    )
    assert c.autoscaling is None
    assert [pool.num_replicas for pool in (a, b, c)] == [2, 1, 3]


def test_there_is_a_value_for_every_field_of_the_fleet_file() -> None:
    values = chart().values["poolDefaults"]["autoscaling"]
    in_camel_case = {
        {"min": "minReplicas", "max": "maxReplicas"}.get(
            name, name.split("_")[0] + name.title().replace("_", "")[len(name.split("_")[0]) :]
        )
        for name in AUTOSCALING_FIELDS
    }
    elsewhere = {"by", "targetQueueSeconds", "targetKvShare", "prometheus"}
    assert set(values) == {"enabled", *elsewhere, *in_camel_case}


@pytest.mark.parametrize("case", [CASE, "kuberay"])
def test_ray_adds_workers_on_which_a_replica_fits_and_never_more_than_a_rollout_of_the_largest_pool_needs(
    case: str,
) -> None:
    config = seen_by_ray(case)
    for pool in fleet_of(case).pools:
        kind = config["available_node_types"][pool.name]
        (bundle,) = pool.bundles()
        assert fits(bundle, kind["resources"])
        assert kind["resources"][f"kvasir-pool-{pool.name}"] == 1, "so a worker without a replica is idle"
        most = pool.num_replicas if pool.autoscaling is None else pool.autoscaling.max_replicas
        assert (kind["min_workers"], kind["max_workers"]) == (pool.num_replicas, most + pool.surge)
    for name, kind in config["available_node_types"].items():
        others = [pool for pool in fleet_of(case).pools if pool.name != name]
        assert not any(fits(pool.bundles()[0], kind["resources"]) for pool in others)


def test_workers_go_when_they_have_been_idle_for_as_long_as_the_values_say() -> None:
    assert seen_by_ray(CASE)["idle_timeout_minutes"] * 60 == 90


def test_rays_autoscaler_runs_only_where_a_pool_scales() -> None:
    for case in ("KubeRay", "KubeRay without fault tolerance"):
        (cluster,) = of_kind("RayCluster", rendered(case))
        assert not {"enableInTreeAutoscaling", "autoscalerOptions"} & cluster["spec"].keys()
        assert not fleet_of(case).is_growing
        with pytest.raises(SettingsError, match="no machine of the cluster can hold"):
            applied(FleetState(FleetSpec(())), fleet_of(case), [HEAD])
    assert fleet_of(CASE).is_growing


def test_a_fleet_that_scales_is_not_refused_while_its_workers_are_still_to_come() -> None:
    state = applied(FleetState(FleetSpec(())), fleet_of(CASE), [HEAD])
    assert state.spec == fleet_of(CASE)


def test_the_head_belongs_to_the_account_that_kuberay_gives_its_rights() -> None:
    (cluster,) = of_kind("RayCluster", rendered(CASE))
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    others = [group["template"]["spec"] for group in cluster["spec"]["workerGroupSpecs"]]
    assert head["serviceAccountName"] == "demo-kvasir-ray-head"
    assert "demo-kvasir-ray-head" not in {pod["serviceAccountName"] for pod in others}
    named("ServiceAccount", "demo-kvasir-ray-head", rendered(CASE))
    for pod in (head, *others):
        assert pod.get("restartPolicy", "Never") == "Never", "KubeRay refuses others with this autoscaler"


def test_ray_autoscaler_is_pulled_as_ray_is() -> None:
    (cluster,) = of_kind("RayCluster", rendered(CASE))
    options = cluster["spec"]["autoscalerOptions"]
    assert (options["version"], options["imagePullPolicy"]) == ("v2", "Always")
    assert "image" not in options, "KubeRay takes the head's"


def test_node_drains_leave_all_but_one_of_the_fewest_replicas() -> None:
    budgets = {
        item["metadata"]["labels"]["kvasir/pool"]: item["spec"]["minAvailable"]
        for item in of_kind("PodDisruptionBudget", rendered(CASE))
        if "kvasir/pool" in item["metadata"]["labels"]
    }
    assert budgets == {"a": 1, "c": 2}


def test_the_notes_say_between_which_sizes_a_pool_is() -> None:
    files = chart().render(dict(values_of(CASE)), name="demo", namespace="llm")
    (notes,) = [text for path, text in files.items() if path.endswith("NOTES.txt")]
    assert "pool a: 2 to 5 ×" in notes
    assert "pool c: 3 ×" in notes


def test_a_pool_that_does_not_scale_keeps_workers_for_its_rollouts() -> None:
    (cluster,) = of_kind("RayCluster", tuple(render({**values_of("KubeRay"), "poolDefaults": {"surge": 1}})))
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (3, 3, 3)
