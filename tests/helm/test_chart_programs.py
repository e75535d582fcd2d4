"""What the chart starts takes what it is given, listens where the chart says, and means the same."""

import argparse
import json
from typing import Any

import pytest
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from cluster.commands.fleet import add_arguments as add_fleet_arguments
from cluster.commands.join import add_arguments as add_join_arguments
from cluster.config import EACH_SERVER, EngineSource, FleetSpec, FoundServer
from cluster.controller.capacity import fits
from cluster.controller.changes import FleetState, applied
from cluster.fleet_file import parse_fleet
from replicas.config import ENVIRONMENT_PREFIX as REPLICA_PREFIX
from replicas.config import ReplicaConfig
from replicas.process.settings import SettingsError
from router.api.context import ApiContext
from router.api.control import ControlRoutes
from tests.helm.chart import (
    CASES,
    Object,
    component_of,
    containers,
    named,
    of_kind,
    pods,
    ports,
    render,
    rendered,
)
from tests.helm.chart_programs import config_of, environment, replica_configs, router_config
from tests.helm.promql import asked
from tests.metric_catalog import series_labels

CHECK_REPLICA = ["python", "/app/deploy/check_replica.py"]
FLEET_IS_READY = ["test", "-e", "/tmp/fleet-is-ready"]
IN_RAY = [case for case in CASES if of_kind("RayCluster", rendered(case))]
SCALES = "KubeRay, pools that scale"
SETS_SCALE = "pools that scale by hpa and keda"
SERVICE, DNS = "servers of a Service", "servers in DNS, KubeRay"
INFERENCE_POOL = "mTLS, servers of an InferencePool"
JOIN = "demo-kvasir-pool-run"


@pytest.mark.parametrize("case", CASES)
def test_routers_and_replicas_take_every_setting_that_they_are_given_and_mean_the_same(case: str) -> None:
    router = router_config(case)
    for replica in replica_configs(case):
        assert replica.redis_url.replace("//replica:", "//router:") == router.redis_url
        assert replica.secret_file == router.secret_file == "/etc/kvasir/secret/secret"
        assert replica.index_stride == router.index_stride
        assert (replica.replica_id, replica.host) == ("pod-0", "10.1.2.3")


@pytest.mark.parametrize("case", CASES)
def test_no_variable_is_set_twice_and_kubernetes_adds_none(case: str) -> None:
    """Service links would be KVASIR_ROUTER_PORT=tcp://…, which would be taken for a setting."""
    for name, pod in pods(rendered(case)):
        assert pod["spec"]["enableServiceLinks"] is False, name
        for container in containers(pod):
            names = [variable["name"] for variable in container.get("env", [])]
            assert sorted(set(names)) == sorted(names)


def test_settings_arrive_as_they_were_written() -> None:
    router, (replica,) = router_config("settings"), replica_configs("settings")
    assert (router.max_in_flight, router.room_price, router.log_requests) == (10_000_000, 1.5, True)
    assert (router.cors_origins, router.off) == (("https://a.example", "https://b.example"), ("caches",))
    assert replica.kv_cache_bytes == 2**40
    assert replica.engine_args == {"tensor_parallel_size": 2, "seed": None}
    assert replica.model_aliases == ("gpt-4o", "a,b")
    assert router.otlp_endpoint == replica.otlp_endpoint == "http://collector:4318"
    assert router.trace_sample_ratio == replica.trace_sample_ratio == 0.25


@pytest.mark.parametrize("case", CASES)
def test_programs_listen_where_their_ports_say(case: str) -> None:
    objects = rendered(case)
    for _, pod in pods(objects):
        for container in containers(pod):
            if container.get("command", [])[:3] == ["python", "-m", "router"]:
                config = router_config(case)
                picker = {} if config.picker_port is None else {"picker": config.picker_port}
                assert ports(pod) == {"http": config.port, "admin": config.admin_port, **picker}
                assert config.admin_host == config.host
            elif container.get("command", [])[:3] == ["python", "-m", "replicas"]:
                config = config_of(container, ReplicaConfig, REPLICA_PREFIX)
                assert ports(pod) == {"grpc": config.port, "metrics": config.metrics_port}


@pytest.mark.parametrize("case", CASES)
def test_probes_ask_for_routes_that_exist_and_ports_that_are_open(case: str) -> None:
    routes = {route.path for route in ControlRoutes(context=_unused_context()).health_routes()}
    for _, pod in pods(rendered(case)):
        for container in containers(pod):
            probes = [value for name, value in container.items() if name.endswith("Probe")]
            assert (
                len(probes) >= 2 or pod["spec"].get("restartPolicy") == "Never" or not container.get("ports")
            )
            for probe in probes:
                if "httpGet" in probe:
                    assert probe["httpGet"]["path"] in routes
                    assert probe["httpGet"]["port"] in ports(pod)
                elif "grpc" in probe:
                    assert probe["grpc"]["port"] == ports(pod)["grpc"]
                elif "exec" in probe:
                    assert probe["exec"]["command"] in (CHECK_REPLICA, FLEET_IS_READY)
                else:
                    assert probe["tcpSocket"]["port"] in ports(pod)


def _unused_context() -> ApiContext:
    return ApiContext.__new__(ApiContext)


def cluster_of(case: str) -> Object:
    (found,) = of_kind("RayCluster", rendered(case))
    spec: Object = found["spec"]
    return spec


def fleet_of(case: str) -> FleetSpec:
    text = named("ConfigMap", "demo-kvasir-fleet", rendered(case))["data"]["fleet.yaml"]
    return parse_fleet(text, redis_url="redis://redis")


@pytest.mark.parametrize("case", IN_RAY)
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


@pytest.mark.parametrize("case", IN_RAY)
def test_what_applies_the_fleet_asks_the_command_line_for_what_it_knows(case: str) -> None:
    template = named("Deployment", "demo-kvasir-fleet", rendered(case))["spec"]["template"]
    (container,) = template["spec"]["containers"]
    lines = container["command"][-1].splitlines()
    assert lines[1].startswith("ray start --address=demo-kvasir-head-svc:6379 ")
    assert f"--node-manager-port={ports(template)['raylet']}" in lines[1].split()
    (apply,) = [line.removeprefix("exec ") for line in lines if line.startswith("exec kvasir ")]
    parser = argparse.ArgumentParser()
    add_fleet_arguments(parser)
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


@pytest.mark.parametrize("case", IN_RAY)
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
    assert with_secret - {"engines"} == {"ray-head", "replica", "fleet", "router"}


def seen_by_ray(case: str) -> dict[str, Any]:
    """What Ray's autoscaler makes of the RayCluster. Raises if it cannot."""
    (cluster,) = of_kind("RayCluster", rendered(case))
    placed = {**cluster, "metadata": {**cluster["metadata"], "namespace": "llm"}}
    config: dict[str, Any] = _derive_autoscaling_config_from_ray_cr(placed)
    return config


@pytest.mark.parametrize("case", [SCALES, "kuberay"])
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


def test_rays_autoscaler_runs_only_where_a_pool_scales() -> None:
    for case in ("KubeRay", "KubeRay without fault tolerance"):
        (cluster,) = of_kind("RayCluster", rendered(case))
        assert not {"enableInTreeAutoscaling", "autoscalerOptions"} & cluster["spec"].keys()
        assert not fleet_of(case).is_growing
        with pytest.raises(SettingsError, match="no machine of the cluster can hold"):
            applied(FleetState(FleetSpec(())), fleet_of(case), [{"node:__internal_head__": 1.0}])
    assert fleet_of(SCALES).is_growing


OF_REPLICAS = {
    "in_flight": {"replica_open_sequences", "router_unplaced_requests"},
    "pending_tokens": {"replica_pending_tokens", "router_unplaced_tokens"},
    "queue_seconds": {
        *("replica_pending_tokens", "router_unplaced_tokens"),
        "replica_prefill_seconds_per_token",
    },
    "kv_share": {"replica_used_blocks", "replica_total_blocks"},
}


def queries(pool: str) -> list[str]:
    name = f"demo-kvasir-pool-{pool}"
    for item in of_kind("PrometheusRule", rendered(SETS_SCALE)):
        if item["metadata"]["name"] == name:
            return [rule["expr"] for rule in item["spec"]["groups"][0]["rules"]]
    scaler = named("ScaledObject", name, rendered(SETS_SCALE))["spec"]
    return [trigger["metadata"]["query"] for trigger in scaler["triggers"]]


@pytest.mark.parametrize("pool", ["a", "b"])
def test_queries_ask_for_metrics_and_labels_that_exist_and_give_one_number(pool: str) -> None:
    known = series_labels()
    found = [asked(query, known) for query in queries(pool)]
    assert [each.metrics for each in found] == list(OF_REPLICAS.values())
    for each in found:
        assert each.metrics <= known.keys()
        assert not each.complaints
        assert not each.labels


def container_of(case: str) -> Object:
    (container,) = named("Deployment", JOIN, rendered(case))["spec"]["template"]["spec"]["containers"]
    return dict(container)


def arguments_of(case: str) -> argparse.Namespace:
    container = container_of(case)
    assert container["command"][:2] == ["kvasir", "join"]
    parser, seen = argparse.ArgumentParser(), environment(container)
    add_join_arguments(parser)
    words = [seen[word[2:-1]] if word.startswith("$(") else word for word in container["command"][2:]]
    return parser.parse_args(words, argparse.Namespace(environment=seen))


def join_fleet_of(case: str) -> FleetSpec:
    arguments = arguments_of(case)
    text = named("ConfigMap", JOIN, rendered(case))["data"][arguments.file.name]
    assert {"name": "fleet", "mountPath": str(arguments.file.parent), "readOnly": True} in container_of(case)[
        "volumeMounts"
    ]
    return parse_fleet(text, arguments.environment["REDIS_URL"])


@pytest.mark.parametrize(
    ("case", "source"),
    [
        (SERVICE, EngineSource(service="vllm", port="8000", at_most=16)),
        (INFERENCE_POOL, EngineSource(inference_pool="qwen", namespace="models", at_most=16)),
        (DNS, EngineSource(dns="http://vllm:8000", at_most=3)),
    ],
)
def test_kvasir_join_takes_the_file_and_finds_what_the_values_say(case: str, source: EngineSource) -> None:
    (pool,) = join_fleet_of(case).pools
    assert (pool.name, pool.engines) == ("run", source)
    replica, router = pool.replica, router_config(case)
    assert (replica.engine, replica.engine_url) == ("remote", EACH_SERVER)
    assert replica.redis_url.replace("//replica:", "//router:") == router.redis_url
    assert replica.secret_file == router.secret_file
    assert replica.index_stride == router.index_stride
    assert pool.drain_seconds == 120
    (member,) = join_fleet_of(case).with_servers({"run": [FoundServer("http://10.0.0.1:8000")]}).pools
    assert member.num_replicas == 1


@pytest.mark.parametrize("engine", ["", "remote", "openai"])
def test_the_engine_of_a_pool_that_finds_servers_is_that_of_its_replicas(engine: str) -> None:
    settings = {"routes": ["/v1/embeddings", "/rerank"]} if engine == "openai" else {}
    pools = {"run": {"engine": engine, "engines": {"urls": ["http://a:8080"]}, "settings": settings}}
    text = named("ConfigMap", JOIN, tuple(render({"pools": pools})))["data"]["fleet.yaml"]
    (pool,) = parse_fleet(text, "redis://redis").pools
    assert (pool.replica.engine, pool.replica.model) == (engine or "remote", None)
    assert pool.replica.routes == tuple(settings.get("routes", ()))
