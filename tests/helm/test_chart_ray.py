"""The fleet in a RayCluster: what KubeRay, Ray and `kvasir fleet apply` are given fits together."""

import argparse
import copy
import json
from typing import Any

import jsonschema
import pytest

from cluster.commands.fleet import add_arguments
from cluster.config import FleetSpec
from cluster.fleet_file import parse_fleet
from tests.helm.chart import (
    Object,
    component_of,
    named,
    of_kind,
    pods,
    ports,
    render,
    rendered,
)
from tests.helm.chart_programs import reachable_from, router_config
from tests.kuberay import ray_cluster_schema

CASES = [
    "kuberay",
    "KubeRay",
    "KubeRay, external Redis",
    "KubeRay without fault tolerance",
    "KubeRay, pools that scale",
    "mTLS, KubeRay",
]


def cluster_of(case: str) -> Object:
    (found,) = of_kind("RayCluster", rendered(case))
    spec: Object = found["spec"]
    return spec


def fleet_of(case: str) -> FleetSpec:
    text = named("ConfigMap", "demo-kvasir-fleet", rendered(case))["data"]["fleet.yaml"]
    return parse_fleet(text, redis_url="redis://redis")


@pytest.fixture(scope="module")
def schema() -> Object:
    return ray_cluster_schema()


def complaints(schema: Object, case: str, change: Any = None) -> list[str]:
    (item,) = of_kind("RayCluster", rendered(case))
    plain = {**copy.deepcopy(item), "metadata": {}}
    if change is not None:
        change(plain["spec"])
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(plain)]


@pytest.mark.parametrize("case", CASES)
def test_kuberay_takes_the_cluster(schema: Object, case: str) -> None:
    assert complaints(schema, case) == []


def test_a_misspelt_field_of_the_cluster_would_be_seen(schema: Object) -> None:
    def misspell(spec: Object) -> None:
        spec["headGroupSpec"]["rayStartParam"] = {}

    assert "rayStartParam" in complaints(schema, "KubeRay", misspell)[0]


@pytest.mark.parametrize("case", CASES)
def test_kvasir_takes_the_fleet_file_and_every_replica_has_a_worker_to_itself(case: str) -> None:
    fleet = fleet_of(case)
    groups = {group["groupName"]: group for group in cluster_of(case)["workerGroupSpecs"]}
    assert [pool.name for pool in fleet.pools] == list(groups)
    for pool in fleet.pools:
        group = groups[pool.name]
        assert group["replicas"] == group["minReplicas"] <= group["maxReplicas"]
        assert group["scaleStrategy"] == {}, "KubeRay would write it, and take the whole list for its own"
        assert group["minReplicas"] == pool.num_replicas + (0 if fleet.is_growing else pool.surge)
        most = pool.num_replicas if pool.autoscaling is None else pool.autoscaling.max_replicas
        assert group["maxReplicas"] == most + pool.surge
        has = json.loads(json.loads(group["rayStartParams"]["resources"]))
        assert pool.custom_resources == has == {f"kvasir-pool-{pool.name}": 1}
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert pool.num_gpus == limits.get("nvidia.com/gpu", 0)
        assert ports(group["template"])["grpc"] == pool.replica.port
        assert ports(group["template"])["metrics"] == pool.replica.metrics_port
        (worker,) = group["template"]["spec"]["containers"]
        variables = {variable["name"]: variable.get("value") for variable in worker["env"]}
        waits = float(variables["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert pool.replica.drain_seconds < waits < grace
        assert pool.is_on_node_address
        assert pool.replica.index_stride == router_config(case).index_stride


def test_settings_of_pools_reach_their_replicas() -> None:
    values = {
        "fleet": {"mode": "kuberay"},
        "pools": {
            "a": {
                "model": {"source": "image", "path": "/opt/model", "name": "big"},
                "settings": {"kv_cache_bytes": 2**40, "engine_args": {"seed": 1}},
            },
            "b": {"engine": "torch", "settings": {"num_threads": 4}},
        },
    }
    text = named("ConfigMap", "demo-kvasir-fleet", tuple(render(values)))["data"]["fleet.yaml"]
    first, second = parse_fleet(text, redis_url="redis://redis").pools
    assert (first.replica.model, first.replica.model_name) == ("/opt/model", "big")
    assert first.replica.kv_cache_bytes == 2**40
    assert first.replica.engine_args == {"seed": 1}
    assert (second.replica.engine, second.replica.model, second.num_threads) == ("torch", None, 4)


@pytest.mark.parametrize("case", CASES)
def test_the_head_runs_no_replica_and_serves_the_controllers_metrics(case: str) -> None:
    head = cluster_of(case)["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    fleet = fleet_of(case)
    assert ports(head["template"])["metrics"] == fleet.metrics_port
    assert fleet.metrics_host == "0.0.0.0"


@pytest.mark.parametrize("case", CASES)
def test_what_applies_the_fleet_asks_the_command_line_for_what_it_knows(case: str) -> None:
    template = named("Deployment", "demo-kvasir-fleet", rendered(case))["spec"]["template"]
    (container,) = template["spec"]["containers"]
    lines = container["command"][-1].splitlines()
    assert lines[1].startswith("ray start --address=demo-kvasir-head-svc:6379 ")
    assert f"--node-manager-port={ports(template)['raylet']}" in lines[1].split()
    (apply,) = [line.removeprefix("exec ") for line in lines if line.startswith("exec kvasir ")]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    command = apply.split()
    assert command[:2] == ["kvasir", "fleet"]
    arguments = parser.parse_args(command[2:])
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(arguments.file.parent) in mounted
    assert arguments.follow
    assert container["readinessProbe"]["exec"]["command"] == ["test", "-e", str(arguments.ready_file)]
    assert str(arguments.ready_file.parent) in mounted, "the rest of its file system is read-only"
    assert lines[0] == f"rm -f {arguments.ready_file}", "a container that was killed may have left it"
    variables = {variable["name"]: variable for variable in container["env"]}
    assert "REDIS_URL" in variables
    token = variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert cluster_of(case)["authOptions"] == {"mode": "token", "secretName": token["name"]}
    assert token["key"] in named("Secret", token["name"], rendered(case))["data"]


def test_another_fleet_is_applied_at_once_and_an_equal_one_is_left_alone() -> None:
    def template(**values: Any) -> str:
        objects = tuple(render({"fleet": {"mode": "kuberay"}, **values}))
        deployment = named("Deployment", "demo-kvasir-fleet", objects)
        assert deployment["spec"]["strategy"] == {"type": "Recreate"}, "two would take turns"
        return json.dumps(deployment["spec"]["template"], sort_keys=True)

    changes: list[dict[str, Any]] = [
        {"ray": {"image": {"tag": "2"}}},
        {"pools": {"main": {"replicas": 3}}},
        {"pools": {"main": {"settings": {"max_running": 7}}}},
    ]
    assert template() == template(router={"replicas": 3})
    assert len({template(), *(template(**values) for values in changes)}) == len(changes) + 1


def test_rays_state_is_in_the_same_redis_and_in_the_builtin_one_under_a_user_of_its_own() -> None:
    builtin = cluster_of("KubeRay")["gcsFaultToleranceOptions"]
    assert builtin["redisAddress"] == "demo-kvasir-redis:6379"
    assert builtin["redisUsername"] == {"value": "ray"}
    password = builtin["redisPassword"]["valueFrom"]["secretKeyRef"]
    assert password["key"] in named("Secret", password["name"], rendered("KubeRay"))["stringData"]


@pytest.mark.parametrize("case", CASES)
def test_the_fleets_secret_file_is_in_every_pod_that_has_to_do_with_it(case: str) -> None:
    text = named("ConfigMap", "demo-kvasir-fleet", rendered(case))["data"]["fleet.yaml"]
    file = parse_fleet(text, redis_url="redis://redis").secret_file
    assert file is not None
    with_secret = set()
    for _, pod in pods(rendered(case)):
        for container in pod["spec"]["containers"]:
            for mount in container["volumeMounts"]:
                if file.startswith(mount["mountPath"] + "/secret"):
                    assert mount["readOnly"] is True
                    with_secret.add(component_of(pod))
    assert with_secret == {"ray-head", "replica", "fleet", "router"}


def test_rays_state_is_in_the_external_redis_that_the_values_name() -> None:
    external = cluster_of("KubeRay, external Redis")
    options = external["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "rediss://redis.example:6379"
    assert options["redisUsername"] == {"value": "me"}
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"]["name"] == "credentials"
    variables = external["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "RAY_REDIS_CA_CERT", "value": "/etc/kvasir/redis-ca/ca.crt"} in variables
    assert "gcsFaultToleranceOptions" not in cluster_of("KubeRay without fault tolerance")


def test_only_rays_own_pods_reach_all_its_ports_and_only_routers_the_replicas() -> None:
    objects = rendered("KubeRay")
    everything = {"ray-head": {None}, "fleet": {None}, "redis": {"redis"}}
    assert reachable_from("router", objects) == {
        "router": set(),
        "replica": {"grpc"},
        "redis": {"redis"},
        "ray-head": set(),
        "fleet": set(),
    }
    for component in ("replica", "ray-head", "fleet"):
        assert reachable_from(component, objects) == {**everything, "router": set(), "replica": {None}}
    assert set().union(*reachable_from("redis", objects).values()) == set()


def test_prometheus_finds_the_controller() -> None:
    objects = rendered("KubeRay")
    monitor = named("PodMonitor", "demo-kvasir-controller", objects)["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "kvasir-controller"}]
    assert monitor["selector"]["matchLabels"]["app.kubernetes.io/component"] == "ray-head"


@pytest.mark.parametrize("case", CASES)
def test_there_are_no_replicas_outside_ray(case: str) -> None:
    names = {item["metadata"]["name"] for item in of_kind("StatefulSet", rendered(case))}
    assert names <= {"demo-kvasir-redis"}
    components = {component_of(pod) for _, pod in pods(rendered(case))}
    assert {"router", "replica", "ray-head", "fleet"} <= components
