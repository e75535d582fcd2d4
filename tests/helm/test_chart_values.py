"""Values are documented, a typo is refused with its name, and settings are those that the programs have."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from helm_python import HelmRenderError, HelmValuesError

from helm.make_readme import documented_values, values_table, with_table
from replicas.config import ReplicaConfig
from router.config import RouterConfig
from tests.helm.chart import FOLDER, PROMETHEUS, render, with_keys

VALUES = (FOLDER / "values.yaml").read_text(encoding="utf-8")
SCHEMA = json.loads((FOLDER / "values.schema.json").read_text(encoding="utf-8"))

CHART_SETS = {"redis_url", "secret", "secret_file", "host", "port", "index_stride", "drain_seconds"}
CHART_SETS |= {"log_format", "log_level", "otlp_endpoint", "trace_sample_ratio"}
"""Settings with values of their own in the chart, for routers and replicas."""

ROUTER_PORTS = {"admin_host", "admin_port", "picker_host", "picker_port", "admin_socket", "processes"}
ROUTER_PORTS |= {"picker_tls_certificate", "picker_tls_key"}
"""The chart sets all but `admin_socket` and `processes`, which are for machines: pods are for themselves."""

ROUTER_KEYS = {"keys_file", "keys_in_redis", "open"}
"""What `router.keys` sets; in Kubernetes a Secret has the keys, so Redis has none."""

REPLICA_TLS = {"tls_certificate", "tls_key", "tls_client_ca", "tls_peer_name", "health_socket"}
ROUTER_TLS = {"replica_tls_ca", "replica_tls_certificate", "replica_tls_key", "replica_tls_name"}
"""What `mtls` sets."""

REPLICA_KV = {"host_kv_bytes", "disk_kv_bytes", "kv_folder"}
"""What `kv` sets."""


def test_the_readme_has_the_table_that_the_comments_make() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert with_table(readme, values_table(VALUES)) == readme, "run python helm/make_readme.py"


def test_every_comment_is_a_sentence() -> None:
    for value in documented_values(VALUES):
        assert value.text.endswith("."), value.path


def test_a_value_without_a_comment_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"a\.c has no comment"):
        list(documented_values("a:\n  # Said.\n  b: 1\n  c: 2\n"))


def groups(schema: Any) -> Iterator[Any]:
    """Every object of the schema whose names are fixed."""
    if isinstance(schema, dict):
        if "properties" in schema and "additionalProperties" in schema:
            yield schema
        for inner in schema.values():
            yield from groups(inner)


def test_the_schema_has_just_the_values_that_are_documented() -> None:
    def walk(values: Any, schema: Mapping[str, Any], path: str) -> None:
        if "$ref" in schema:
            schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
        if "properties" in schema and path.rpartition(".")[2] not in ("settings", "resources"):
            assert set(schema["properties"]) - {"global"} == set(values), path
            for name, item in values.items():
                walk(item, schema["properties"][name], f"{path}.{name}")

    walk(yaml.safe_load(VALUES), SCHEMA, "")
    assert all(group["additionalProperties"] is False for group in groups(SCHEMA))


@pytest.mark.parametrize(
    ("definition", "kind", "chart_sets"),
    [
        ("router", RouterConfig, CHART_SETS | ROUTER_TLS | ROUTER_PORTS | ROUTER_KEYS),
        (
            "pool",
            ReplicaConfig,
            CHART_SETS
            | REPLICA_TLS
            | REPLICA_KV
            | {"replica_id", "engine", "model", "model_name", "metrics_port"},
        ),
    ],
)
def test_every_setting_of_the_programs_can_be_set_once(
    definition: str, kind: type[Any], chart_sets: set[str]
) -> None:
    known = set(SCHEMA["definitions"][definition]["properties"]["settings"]["properties"])
    assert known | chart_sets == {field.name for field in dataclasses.fields(kind)}
    assert not known & chart_sets


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"routers": {}}, "routers"),
        ({"router": {"replica": 3}}, "replica"),
        ({"router": {"settings": {"max_inflight": 3}}}, "max_inflight"),
        ({"router": {"settings": {"max_in_flight": "many"}}}, "/router/settings/max_in_flight"),
        ({"router": {"settings": {"port": 1}}}, "port"),
        ({"router": {"image": {"tagg": "1"}}}, "tagg"),
        ({"router": {"image": {"digest": "latest"}}}, "digest"),
        ({"router": {"resources": {"limit": {}}}}, "limit"),
        ({"router": {"extraEnv": [{"name": "KVASIR_ROUTER_PORT", "value": "1"}]}}, "/router/extraEnv/0/name"),
        ({"pools": {"a": {"replcas": 3}}}, "replcas"),
        ({"pools": {"a": {"settings": {"max_runing": 3}}}}, "max_runing"),
        ({"pools": {"a": {"model": {"source": "hug"}}}}, "/pools/a/model/source"),
        ({"pools": {"A_b": {}}}, "A_b"),
        ({"pools": {"a": {"gpu": {"counts": 1}}}}, "counts"),
        ({"poolDefaults": {"engine": "vlm"}}, "/poolDefaults/engine"),
        ({"pools": {"a": {"kv": {"ram": "64Gi"}}}}, "ram"),
        ({"pools": {"a": {"kv": {"memory": "64GB"}}}}, "/pools/a/kv/memory"),
        ({"pools": {"a": {"kv": {"volume": "nfs"}}}}, "/pools/a/kv/volume"),
        ({"pools": {"a": {"kv": {"hostPath": "kv"}}}}, "/pools/a/kv/hostPath"),
        ({"pools": {"a": {"settings": {"host_kv_bytes": 1}}}}, "host_kv_bytes"),
        ({"pools": {"a": {"autoscaling": {"targetInflight": 3}}}}, "targetInflight"),
        ({"pools": {"a": {"autoscaling": {"tolerance": 1}}}}, "/pools/a/autoscaling/tolerance"),
        ({"pools": {"a": {"autoscaling": {"by": "vpa"}}}}, "/pools/a/autoscaling/by"),
        ({"pools": {"a": {"autoscaling": {"prometheus": "here:9090"}}}}, "/pools/a/autoscaling/prometheus"),
        ({"poolDefaults": {"autoscaling": {"minReplicas": -1}}}, "/poolDefaults/autoscaling/minReplicas"),
        ({"ray": {"autoscaler": {"idleSecond": 3}}}, "idleSecond"),
        ({"runAsUser": 0}, "/runAsUser"),
        ({"redis": {"mode": "external"}}, "/redis/external/host"),
        ({"redis": {"builtin": {"maxMemory": "1Gi"}}}, "/redis/builtin/maxMemory"),
        ({"redis": {"external": {"tls": {"enable": True}}}}, "enable"),
        ({"ingress": {"enabled": True}}, "/ingress/hosts"),
        ({"gateway": {"enabled": True}}, "/gateway/parentRefs"),
        ({"router": {"picker": {"enabled": True}}}, "/router/picker/selector"),
        ({"ingress": {"path": "v1"}}, "/ingress/path"),
        ({"networkPolicy": {"enabeld": False}}, "enabeld"),
        ({"mtls": {"existingSecret": {}}}, "existingSecret"),
        ({"mtls": {"certManager": {"issuer": {}}}}, "issuer"),
        ({"mtls": {"certManager": {"duration": "90d"}}}, "/mtls/certManager/duration"),
        ({"mtls": {"replicaName": ""}}, "/mtls/replicaName"),
        ({"monitoring": {"rule": {}}}, "rule"),
        ({"monitoring": {"monitors": {"labels": {"a": 1}}}}, "/monitoring/monitors/labels/a"),
        ({"traces": {"endpoint": "collector:4318"}}, "/traces/endpoint"),
        ({"test": {"timeout": 3}}, "timeout"),
        ({"extraObjects": [{"kind": "ConfigMap", "metadata": {}}]}, "apiVersion"),
    ],
)
def test_a_typo_is_refused_with_a_message_that_names_it(values: Mapping[str, Any], named: str) -> None:
    with pytest.raises(HelmValuesError) as refusal:
        render(values)
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    "pool",
    [
        {"extraVolumes": [{"name": "kv", "emptyDir": {}}]},
        {"extraVolumes": [{"emptyDir": {}}]},
        {"extraVolumeMounts": [{"name": "a"}]},
        {"extraInitContainers": [{"name": "model", "image": "a"}]},
        {"podSecurityContext": []},
    ],
)
def test_additions_that_would_take_the_place_of_the_charts_own_are_refused(pool: Mapping[str, Any]) -> None:
    with pytest.raises(HelmValuesError):
        render({"poolDefaults": pool})


KUBERAY = {"fleet": {"mode": "kuberay"}}
ZERO = {"enabled": True, "by": "keda", "prometheus": PROMETHEUS, "minReplicas": 0}
WAITING = {"router": {"settings": {"wait_for_replica_seconds": 600}}}
SIXTEEN = {"engine_args": {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}}
HUB = {"source": "hub", "repository": "Qwen/Qwen3-8B"}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"pools": {"a": {"model": {"source": "hub"}}}}, "pool a: model.source is hub, so model.repository"),
        ({"pools": {"a": {"model": {"source": "claim", "claim": "x"}}}}, "pool a: .* model.path must be set"),
        (
            {"pools": {"a": {"model": {"source": "image", "path": "x"}}}},
            "pool a: .* directory in the image",
        ),
        (
            {"pools": {"a": {"engine": "torch", "settings": {"engine_args": {"seed": 1}}}}},
            "pool a: settings.engine_args is for the engine vllm, not for torch",
        ),
        ({"pools": {"a": {"kv": {"disk": "1Ti"}}}}, "pool a: kv.disk needs kv.memory, through which KV goes"),
        (
            {"pools": {"a": {"settings": {"pull_bytes_per_second": 1e9}}}},
            "pool a: settings.pull_bytes_per_second needs kv.memory, into which KV is pulled",
        ),
        (
            {"pools": {"a": {"engine": "simulated", "kv": {"memory": "1Gi"}}}},
            "pool a: kv.memory is for the engines torch and vllm, not for simulated",
        ),
        (
            {"pools": {"a": {"kv": {"memory": "1Gi"}, "resources": {"limits": {"memory": "8e9"}}}}},
            "pool a: with kv.memory, resources.limits.memory is a whole number of Ki, Mi, Gi or Ti, not 8e9",
        ),
        (
            {"pools": {"a": {"model": HUB}, "b": {"model": {**HUB, "revision": "v2"}}}},
            'pools a and b both serve "Qwen3-8B", but not the same model',
        ),
        (
            {"pools": {"a": {"model": HUB}, "b": {"model": HUB, "settings": {"block_size": 64}}}},
            'pools a and b both serve "Qwen3-8B"',
        ),
        (
            {"router": {"autoscaling": {"enabled": True, "targetCPUPercent": 0}}},
            "neither targetCPUPercent nor targetInFlight",
        ),
        (
            {"router": {"autoscaling": {"enabled": True, "minReplicas": 20}}},
            "router.autoscaling.minReplicas is 20, more than maxReplicas, 10",
        ),
        (
            {"pools": {"a": {"autoscaling": {"enabled": True}}}},
            "pool a: autoscaling.by is kuberay, and its replicas are in a StatefulSet: set it to hpa or keda",
        ),
        (
            {**KUBERAY, "pools": {"a": {"autoscaling": {"enabled": True, "by": "hpa"}}}},
            "pool a: autoscaling.by hpa needs fleet.mode statefulset",
        ),
        (
            {"pools": {"a": {"autoscaling": {"enabled": True, "by": "keda"}}}},
            "pool a: autoscaling.by is keda, so autoscaling.prometheus must be",
        ),
        (
            {**KUBERAY, "pools": {"a": {"autoscaling": {"enabled": True, "targetKvShare": 0.8}}}},
            "pool a: autoscaling.targetQueueSeconds and targetKvShare are for hpa and keda",
        ),
        (
            {**KUBERAY, "pools": {"a": {"autoscaling": {"enabled": True, "minReplicas": 9}}}},
            "pool a: autoscaling.minReplicas is 9, more than maxReplicas, 4",
        ),
        (
            {**KUBERAY, "pools": {"a": {"autoscaling": {"enabled": True, "minReplicas": 0}}}},
            "pool a: autoscaling.minReplicas is 0, which needs autoscaling.by keda",
        ),
        (
            {"pools": {"a": {"autoscaling": {**ZERO, "targetInFlight": 0, "targetKvShare": 0.5}}}},
            "pool a: .* so targetInFlight must not be",
        ),
        (
            {"pools": {"a": {"autoscaling": ZERO}}},
            "pool a: .* so router.settings.wait_for_replica_seconds must say how long",
        ),
        (
            {"pools": {"a": {"autoscaling": ZERO}}, "router": with_keys(WAITING)["router"]},
            "pool a: .* so redis.builtin.persistence must be enabled",
        ),
        (
            {**KUBERAY, "poolDefaults": {"autoscaling": {"enabled": True, "targetInFlight": 0}}},
            "pool main: .* no target says by what",
        ),
        (
            {"router": {"picker": {"enabled": True, "selector": {"app": "vllm"}}}},
            "router.picker is enabled, so networkPolicy.gatewayFrom must say who reaches its port",
        ),
        (
            {"pools": {"a": {"engine": "vllm", "settings": SIXTEEN}}},
            "pool a: a replica is one pod, and would ask for 16 GPUs, more than a node has .gpu.perNode is 8",
        ),
        (
            {"mtls": {"enabled": True, "existingSecrets": {"router": "mine"}}},
            "mtls.existingSecrets needs both, router and replica",
        ),
        (
            {
                "mtls": {
                    "enabled": True,
                    "existingSecrets": {"router": "a", "replica": "b"},
                    "certManager": {"issuerRef": {"name": "mine"}},
                }
            },
            "mtls.existingSecrets and mtls.certManager.issuerRef exclude each other",
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused_with_one_sentence(
    values: Mapping[str, Any], sentence: str
) -> None:
    with pytest.raises(HelmRenderError, match=sentence):
        render(values)


def test_pools_of_one_model_may_differ_in_everything_else() -> None:
    render({"pools": {"a": {"model": HUB}, "b": {"model": HUB, "settings": {"context_length": 4096}}}})
    render({"pools": {"a": {"model": HUB}, "b": {"model": {**HUB, "revision": "v2", "name": "other"}}}})
