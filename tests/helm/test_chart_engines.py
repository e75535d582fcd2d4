"""Pools that find servers which run already: what looks for them, with which rights, and who reaches it."""

import argparse
import json
from typing import Any

import pytest
from helm_python import HelmRenderError, HelmValuesError

from cluster.commands.join import add_arguments
from cluster.config import EACH_SERVER, EngineSource, FleetSpec, FoundServer
from cluster.engines.kubernetes import ACCOUNT
from cluster.fleet_file import ENGINES_FIELDS, parse_fleet
from tests.helm.chart import FOLDER, Object, named, of_kind, pods, ports, render, rendered
from tests.helm.chart_programs import environment, reachable_from, replica_configs, router_config

SERVICE = "servers of a Service"
INFERENCE_POOL = "mTLS, servers of an InferencePool"
DNS = "servers in DNS, KubeRay"
CASES = [SERVICE, INFERENCE_POOL, DNS]
NAME = "demo-kvasir-pool-run"


def container_of(case: str) -> Object:
    (container,) = named("Deployment", NAME, rendered(case))["spec"]["template"]["spec"]["containers"]
    return dict(container)


def arguments_of(case: str) -> argparse.Namespace:
    container = container_of(case)
    assert container["command"][:2] == ["kvasir", "join"]
    parser, seen = argparse.ArgumentParser(), environment(container)
    add_arguments(parser)
    words = [seen[word[2:-1]] if word.startswith("$(") else word for word in container["command"][2:]]
    return parser.parse_args(words, argparse.Namespace(environment=seen))


def fleet_of(case: str) -> FleetSpec:
    arguments = arguments_of(case)
    text = named("ConfigMap", NAME, rendered(case))["data"][arguments.file.name]
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
    (pool,) = fleet_of(case).pools
    assert (pool.name, pool.engines) == ("run", source)
    replica, router = pool.replica, router_config(case)
    assert (replica.engine, replica.engine_url) == ("remote", EACH_SERVER)
    assert replica.redis_url.replace("//replica:", "//router:") == router.redis_url
    assert replica.secret_file == router.secret_file
    assert replica.index_stride == router.index_stride
    assert pool.drain_seconds == 120
    (member,) = fleet_of(case).with_servers({"run": [FoundServer("http://10.0.0.1:8000")]}).pools
    assert member.num_replicas == 1


def test_settings_key_and_model_reach_the_replicas() -> None:
    (pool,) = fleet_of(SERVICE).pools
    config = pool.replica
    assert (config.max_running, config.otlp_endpoint) == (512, "http://collector:4318")
    assert config.model == "/models/Qwen3-8B"
    pod = named("Deployment", NAME, rendered(SERVICE))["spec"]["template"]
    (key,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "engine-key"]
    assert key["secret"]["secretName"] == "for-servers"
    assert config.engine_key_file == f"/etc/kvasir/engine-key/{key['secret']['items'][0]['path']}"
    (download,) = pod["spec"]["initContainers"]
    assert "*.json" in download["command"]
    assert "*.safetensors" not in str(download["command"])
    (pool,) = fleet_of(DNS).pools
    assert (pool.replica.model, pool.replica.model_name) == ("/models/qwen", "qwen")
    (pool,) = fleet_of(INFERENCE_POOL).pools
    assert (pool.replica.tls_client_ca, pool.replica.model) == ("/etc/kvasir/tls/ca.crt", None)


@pytest.mark.parametrize("engine", ["", "remote", "openai"])
def test_the_engine_of_a_pool_that_finds_servers_is_that_of_its_replicas(engine: str) -> None:
    settings = {"routes": ["/v1/embeddings", "/rerank"]} if engine == "openai" else {}
    pools = {"run": {"engine": engine, "engines": {"urls": ["http://a:8080"]}, "settings": settings}}
    text = named("ConfigMap", NAME, tuple(render({"pools": pools})))["data"]["fleet.yaml"]
    (pool,) = parse_fleet(text, "redis://redis").pools
    assert (pool.replica.engine, pool.replica.model) == (engine or "remote", None)
    assert pool.replica.routes == tuple(settings.get("routes", ()))


@pytest.mark.parametrize("case", CASES)
def test_one_pod_listens_where_its_ports_say_and_another_never_runs_beside_it(case: str) -> None:
    arguments, deployment = arguments_of(case), named("Deployment", NAME, rendered(case))["spec"]
    assert ports(deployment["template"]) == {"grpc": arguments.port, "metrics": arguments.metrics_port}
    assert arguments.host == "10.1.2.3"
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    assert deployment["template"]["spec"]["terminationGracePeriodSeconds"] > 120


def test_another_file_makes_another_pod() -> None:
    def annotations(at_most: int) -> Any:
        pools = {"run": {"engines": {"dns": "http://vllm:8000", "atMost": at_most}}}
        deployment = named("Deployment", NAME, tuple(render({"pools": pools})))
        return deployment["spec"]["template"]["metadata"]["annotations"]

    assert annotations(3) == annotations(3) != annotations(4)


@pytest.mark.parametrize(
    ("case", "namespace", "rules"),
    [
        (SERVICE, "llm", [("discovery.k8s.io", "endpointslices", ["list", "watch"], None)]),
        (
            INFERENCE_POOL,
            "models",
            [
                ("inference.networking.k8s.io", "inferencepools", ["get"], ["qwen"]),
                ("", "pods", ["list", "watch"], None),
            ],
        ),
        (DNS, None, []),
    ],
)
def test_a_pool_may_ask_kubernetes_just_what_it_asks(
    case: str, namespace: str | None, rules: list[tuple[str, str, list[str], list[str] | None]]
) -> None:
    objects = rendered(case)
    roles, bindings = of_kind("Role", objects), of_kind("RoleBinding", objects)
    assert [item["metadata"].get("namespace") for item in (*roles, *bindings)] == [namespace] * 2 * bool(
        rules
    )
    found = [
        (*rule["apiGroups"], *rule["resources"], rule["verbs"], rule.get("resourceNames"))
        for role in roles
        for rule in role["rules"]
    ]
    assert found == rules
    for binding in bindings:
        assert binding["roleRef"]["name"] == NAME
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == ("demo-kvasir-engines", "llm")
    mounts = {mount["mountPath"] for mount in container_of(case)["volumeMounts"]}
    assert (str(ACCOUNT) in mounts) == bool(rules)


def test_routers_and_nobody_else_reach_its_replicas_and_it_reaches_redis() -> None:
    objects = rendered(INFERENCE_POOL)
    assert reachable_from("router", objects)["engines"] == {None}
    for component in ("replica", "redis", "engines"):
        assert reachable_from(component, objects)["engines"] == set()
    reached = reachable_from("engines", objects)
    assert (reached["redis"], reached["replica"]) == ({"redis"}, set())


def test_prometheus_takes_the_labels_of_replicas_from_the_pod() -> None:
    (endpoint,) = named("PodMonitor", "demo-kvasir-engines", rendered(SERVICE))["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["honorLabels"]) == ("metrics", True)
    assert [rule["targetLabel"] for rule in endpoint["relabelings"]] == ["job"]


def test_without_replicas_of_its_own_there_are_none_and_no_ray() -> None:
    objects = rendered(SERVICE)
    assert replica_configs(SERVICE) == []
    assert {item["kind"] for item in objects} & {"StatefulSet", "RayCluster"} <= {"StatefulSet"}
    assert [name for name, _ in pods(objects) if "pool" in name] == [NAME]
    only_found = {"fleet": {"mode": "kuberay"}, "pools": {"run": {"engines": {"urls": ["http://a:1"]}}}}
    assert of_kind("RayCluster", tuple(render(only_found))) == []


def test_there_is_a_value_for_every_way_but_the_file() -> None:
    schema = json.loads((FOLDER / "values.schema.json").read_text(encoding="utf-8"))
    values = set(schema["definitions"]["pool"]["properties"]["engines"]["properties"])
    names = {"inferencePool": "inference_pool", "atMost": "at_most"}
    found = {names.get(name, name) for name in values - {"keySecret", "keySecretKey"}}
    assert found == {*ENGINES_FIELDS} - {"file"}


@pytest.mark.parametrize(
    ("pool", "sentence"),
    [
        ({"engines": {"service": "a", "dns": "http://a:1"}}, "found by one of"),
        ({"engines": {"service": "a"}, "kv": {"memory": "1Gi"}}, "kv and autoscaling are for replicas"),
        ({"engines": {"service": "a"}, "model": {"source": "hub"}}, "model.repository must be"),
        (
            {"engines": {"service": "a"}, "engine": "torch"},
            "engine is remote .or empty. or openai, not torch",
        ),
        ({"engine": "openai"}, "engine openai is for servers that run already, so engines must say how"),
        ({"engine": "remote"}, "engine remote is for servers that run already"),
        ({"engines": {"dns": "https://a:1"}}, "engines/dns"),
        ({"engines": {"url": ["http://a:1"]}}, "url"),
    ],
)
def test_what_does_not_go_together_is_refused(pool: dict[str, Any], sentence: str) -> None:
    with pytest.raises((HelmRenderError, HelmValuesError), match=sentence):
        render({"pools": {"run": pool}})
