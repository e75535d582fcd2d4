"""What the chart makes was looked at, is taken by Kubernetes and KubeRay, and fits together."""

import copy
import re
from collections import Counter
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from cluster.controller.plan import SETTLE_SECONDS
from cluster.fleet_file import ROLE_TARGETS, parse_fleet
from replicas.protocol.status import Role
from tests.helm import golden
from tests.helm.chart import (
    BASES,
    CASES,
    EXAMPLES,
    FOLDER,
    Values,
    chart,
    check_fields,
    component_of,
    containers,
    matches,
    named,
    of_kind,
    pods,
    ports,
    ray_autoscaler,
    render,
    rendered,
    values_of,
    with_keys,
)
from tests.kuberay import ray_cluster_schema

POOL = "demo-kvasir-pool-main"


def test_the_chart_renders_as_it_was_looked_at() -> None:
    for name, text in golden.made().items():
        known = (golden.FOLDER / name).read_text(encoding="utf-8")
        assert yaml.safe_load(text) == yaml.safe_load(known), f"{name}: python -m tests.helm.golden --write"


@pytest.mark.parametrize("case", [*EXAMPLES, *BASES])
def test_every_object_has_only_fields_that_kubernetes_knows(case: str) -> None:
    objects = rendered(case)
    for item in objects:
        check_fields(item)
    for name, pod in pods(objects):
        check_fields({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod["spec"]})


def test_a_misspelt_field_would_be_seen() -> None:
    service = of_kind("Service", rendered("laptop"))[0]
    with pytest.raises(kubernetes_validate.ValidationError):
        check_fields({**service, "spec": {**service["spec"], "port": 1}})


def complaints(case: str, change: Any = None) -> list[str]:
    found = []
    for item in of_kind("RayCluster", rendered(case)):
        plain = {**copy.deepcopy(item), "metadata": {}}
        if change is not None:
            change(plain["spec"])
        found += jsonschema.Draft7Validator(ray_cluster_schema()).iter_errors(plain)
    return [error.message for error in found]


def test_kuberay_takes_every_cluster_and_a_misspelt_field_would_be_seen() -> None:
    assert not [said for case in (*EXAMPLES, *BASES) for said in complaints(case)]
    (said, *_) = complaints("KubeRay", lambda spec: spec["headGroupSpec"].update(rayStartParam={}))
    assert "rayStartParam" in said


@pytest.mark.parametrize("case", CASES)
def test_names_are_unique_and_short_enough_for_what_is_made_of_them(case: str) -> None:
    objects = rendered(case)
    counted = Counter((item["kind"], item["metadata"]["name"]) for item in objects)
    assert set(counted.values()) == {1}
    for item in objects:
        assert len(item["metadata"]["name"]) <= 63
        for name, value in item["metadata"]["labels"].items():
            assert len(str(value)) <= 63, name
    for item in of_kind("StatefulSet", objects):
        assert len(item["metadata"]["name"]) <= 52, "its pods get a label with a hash behind the name"


@pytest.mark.parametrize("case", EXAMPLES)
def test_helm_finds_nothing_to_complain_about(case: str) -> None:
    report = helm_python.lint(FOLDER, dict(values_of(case)), strict=True, kube_version="v1.30.0")
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("case", CASES)
def test_the_notes_tell_commands_that_name_what_exists(case: str) -> None:
    files = chart().render(dict(values_of(case)), name="demo", namespace="llm")
    (notes,) = [text for path, text in files.items() if path.endswith("NOTES.txt")]
    commands = [line.split() for line in notes.splitlines() if line.startswith(("   kubectl", "   helm"))]
    assert len(commands) == 4
    for command in commands:
        assert command[1:3] == ["--namespace", "llm"]
    routers = [item for item in of_kind("Deployment", rendered(case)) if component_of(item) == "router"]
    assert [f"deployment/{item['metadata']['name']}" in commands[0] for item in routers] == [True]
    assert "demo" in commands[1]
    service = next(
        item for item in of_kind("Service", rendered(case)) if f"service/{item['metadata']['name']}" in notes
    )
    assert commands[2][-1] == f"8000:{service['spec']['ports'][0]['port']}"
    assert commands[3][-2:] == [f"deployment/{routers[0]['metadata']['name']}", "8001:8001"]


def test_pods_get_as_long_to_end_as_draining_may_take() -> None:
    values: dict[str, Any] = {
        "router": {"drainSeconds": 300, "preStopSeconds": 7},
        "poolDefaults": {"drainSeconds": 900},
    }
    objects = tuple(render(values))
    router = of_kind("Deployment", objects)[0]["spec"]["template"]["spec"]
    replica = named("StatefulSet", "demo-kvasir-pool-main", objects)["spec"]["template"]["spec"]
    assert router["terminationGracePeriodSeconds"] >= 300 + 7
    assert router["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"] == 7
    assert replica["terminationGracePeriodSeconds"] > 900
    liveness = replica["containers"][0]["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > 900, "a draining replica is not healthy"


def test_routers_have_found_a_new_replica_before_the_next_old_one_goes() -> None:
    replicas = named("StatefulSet", "demo-kvasir-pool-main", rendered("laptop"))["spec"]
    assert replicas["minReadySeconds"] > SETTLE_SECONDS


@pytest.mark.parametrize("case", CASES)
def test_pods_that_are_broken_anyway_never_keep_a_node_from_being_drained(case: str) -> None:
    for budget in of_kind("PodDisruptionBudget", rendered(case)):
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


PARALLEL = {"engine_args": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}}
IN_IMAGE = {"source": "image", "path": "/m"}


@pytest.mark.parametrize(
    ("pool", "image", "engine", "memory", "num_gpus"),
    [
        ({}, "replica-cpu", "torch", "2Gi", 0),
        ({"engine": "simulated"}, "replica-cpu", "simulated", "2Gi", 0),
        ({"engine": "vllm"}, "replica-cuda", "vllm", "16Gi", 1),
        ({"engine": "vllm", "settings": PARALLEL}, "replica-cuda", "vllm", "16Gi", 8),
        ({"engine": "vllm", "gpu": {"count": 16, "perNode": 16}}, "replica-cuda", "vllm", "16Gi", 16),
        ({"engine": "vllm", "gpu": {"count": 0}}, "replica-cuda", "vllm", "16Gi", 0),
        ({"gpu": {"count": 2}}, "replica-cuda", "vllm", "16Gi", 2),
        ({"model": IN_IMAGE}, "replica-cuda", "vllm", "16Gi", 1),
        ({"model": IN_IMAGE, "engine": "torch"}, "replica-cuda", "torch", "16Gi", 0),
        ({"image": {"repository": "mine/replica"}}, "mine/replica", "torch", "2Gi", 0),
        ({"resources": {"limits": {"memory": "4Gi"}}}, "replica-cpu", "torch", "4Gi", 0),
    ],
)
def test_what_a_pool_does_not_say_follows_from_its_engine_model_and_gpus(
    pool: Values, image: str, engine: str, memory: str, num_gpus: int
) -> None:
    made = named("StatefulSet", POOL, tuple(render({"pools": {"main": pool}})))
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert image in container["image"]
    assert {"name": "KVASIR_REPLICA_ENGINE", "value": engine} in container["env"]
    limits = container["resources"]["limits"]
    assert (limits["memory"], limits.get("nvidia.com/gpu", 0)) == (memory, num_gpus)


def test_the_notes_speak_of_vllm_without_a_gpu() -> None:
    for pool, is_said in (({"engine": "vllm", "gpu": {"count": 0}}, True), ({"engine": "vllm"}, False)):
        files = chart().render(with_keys({"pools": {"odd": pool}}), name="demo", namespace="llm")
        assert ("Pool odd runs vLLM and asks for no GPU" in files["kvasir/templates/NOTES.txt"]) == is_said


PULLED = {"kv": {"memory": "1Gi"}, "settings": {"pull_bytes_per_second": 1e9}}


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ({"a": {}, "b": {}}, []),
        ({"a": {"role": "prefill"}, "b": {"role": "decode"}}, []),
        (
            {"a": {"role": "prefill", "settings": {"pull_bytes_per_second": None}}, "b": {"role": "decode"}},
            [
                "Pool a has the role prefill, but no prompt will be split there, because settings.pull_bytes",
                "No prompt of toy_model will be split, because its pools all have the role decode: each",
            ],
        ),
        (
            {"a": {"role": "prefill", "model": {"name": "a"}}, "b": {"engines": {"urls": ["http://b:1"]}}},
            ["No prompt of a will be split, because its pools all have the role prefill: each"],
        ),
    ],
)
def test_the_notes_say_which_roles_can_do_nothing(pools: Values, said: list[str]) -> None:
    values = {"pools": pools, "poolDefaults": PULLED}
    if "engines" in pools["b"]:
        values = {"pools": {**pools, "a": {**PULLED, **pools["a"]}}}
    files = chart().render(with_keys(values), name="demo", namespace="llm")
    lines = files["kvasir/templates/NOTES.txt"].splitlines()
    lines = [line for line in lines if "will be split" in line]
    assert len(lines) == len(said) and all(map(str.startswith, lines, said)), lines


@pytest.mark.parametrize("role", Role)
def test_a_pool_that_scales_in_ray_has_the_targets_that_a_fleet_file_would_give_its_role(role: Role) -> None:
    scaling = {"autoscaling": {"enabled": True}, "role": role.value}
    values = {"fleet": {"mode": "kuberay"}, "pools": {"main": scaling}}
    (made,) = [item for item in of_kind("ConfigMap", tuple(render(values))) if "fleet.yaml" in item["data"]]
    (pool,) = parse_fleet(made["data"]["fleet.yaml"], "redis://r/0").pools
    assert pool.replica.role == role and pool.autoscaling is not None
    targets = {"target_in_flight": 16.0} if role is Role.BOTH else ROLE_TARGETS[role]
    assert {
        name: getattr(pool.autoscaling, name)
        for name in ("target_in_flight", "target_pending_tokens")
        if getattr(pool.autoscaling, name) is not None
    } == targets


def test_pools_take_what_they_do_not_set_from_the_defaults_even_where_they_set_nothing_and_no() -> None:
    values = {
        "poolDefaults": {"replicas": 3, "podDisruptionBudget": True, "settings": {"max_running": 8}},
        "pools": {"none": {"replicas": 0, "podDisruptionBudget": False}, "some": {}},
    }
    objects = tuple(render(values))
    assert named("StatefulSet", "demo-kvasir-pool-none", objects)["spec"]["replicas"] == 0
    assert named("StatefulSet", "demo-kvasir-pool-some", objects)["spec"]["replicas"] == 3
    budgets = {item["metadata"]["name"] for item in of_kind("PodDisruptionBudget", objects)}
    assert budgets == {"demo-kvasir-pool-some", "demo-kvasir-router"}


def test_rules_and_dashboards_come_word_for_word() -> None:
    objects = rendered("monitoring")
    (rule,) = of_kind("PrometheusRule", objects)
    assert rule["spec"] == yaml.safe_load((FOLDER / "rules/kvasir.yaml").read_text(encoding="utf-8"))
    texts = {
        name: text
        for item in of_kind("ConfigMap", objects)
        if "dashboard" in item["metadata"]["name"]
        for name, text in item["data"].items()
    }
    files = {
        f"kvasir-{path.name}": path.read_text(encoding="utf-8")
        for path in (FOLDER / "dashboards").glob("*.json")
    }
    assert {name: text.strip() for name, text in texts.items()} == {
        name: text.strip() for name, text in files.items()
    }


def redis_memory(values: Values) -> tuple[int, str]:
    """Megabytes of data, and the container's limit."""
    objects = render(values)
    (secret,) = [it for it in of_kind("Secret", objects) if "server.conf" in it.get("stringData", {})]
    (megabytes,) = re.findall(r"^maxmemory ([0-9]+)mb$", secret["stringData"]["server.conf"], re.MULTILINE)
    (limit,) = [
        container["resources"]["limits"]["memory"]
        for it in of_kind("StatefulSet", objects)
        for container in it["spec"]["template"]["spec"]["containers"]
        if container["name"] == "redis"
    ]
    return int(megabytes), limit


def test_the_memory_of_redis_follows_from_the_fleet_and_the_containers_from_that() -> None:
    small, _ = redis_memory({"pools": {"a": {"replicas": 1}}})
    large, limit = redis_memory({"pools": {"a": {"replicas": 100}, "b": {"replicas": 20}}})
    assert small >= 256 and large >= small + 16 * 119
    assert limit == f"{2 * large + 64}Mi"
    streams, _ = redis_memory({"pools": {"a": {"replicas": 1, "settings": {"events_stream_bytes": 2**30}}}})
    assert streams >= 2 * 1024
    answers, _ = redis_memory(
        {"router": {"settings": {"all_history_bytes": 2**30}}, "pools": {"a": {"replicas": 1}}}
    )
    without, _ = redis_memory(
        {"router": {"settings": {"all_history_bytes": 0}}, "pools": {"a": {"replicas": 1}}}
    )
    assert answers == small + 1024 - 64 and without == small - 64
    budget, _ = redis_memory(
        {"router": {"settings": {"redis_bytes": 3 * 2**30}}, "pools": {"a": {"replicas": 1}}}
    )
    assert budget == answers
    for off in ("shared_history", "explain, history", "history,caches"):
        off_values = {"router": {"settings": {"off": off}}, "pools": {"a": {"replicas": 1}}}
        assert redis_memory(off_values)[0] == without
    others_off = {"router": {"settings": {"off": "caches,explain"}}, "pools": {"a": {"replicas": 1}}}
    assert redis_memory(others_off)[0] == small
    assert redis_memory({"redis": {"builtin": {"maxMemory": "3gb"}}}) == (3072, "6208Mi")
    own = {"redis": {"builtin": {"maxMemory": "300mb", "resources": {"limits": {"memory": "1Gi"}}}}}
    assert redis_memory(own) == (300, "1Gi")


@pytest.mark.parametrize("case", CASES)
def test_every_selector_selects_the_pods_that_it_is_for_and_no_others(case: str) -> None:
    objects = rendered(case)
    by_name = dict(pods(objects))
    for item in objects:
        name, spec = item["metadata"]["name"], item.get("spec", {})
        if item["kind"] in ("Deployment", "StatefulSet") or item["kind"] == "PodDisruptionBudget":
            labels = spec["selector"]["matchLabels"]
            assert [other for other, pod in by_name.items() if matches(labels, pod)] == [name]
        elif item["kind"] == "Service":
            component = component_of(item)
            selected = [pod for pod in by_name.values() if matches(spec["selector"], pod)]
            assert selected
            for pod in selected:
                assert component_of(pod) == component
                assert {port["targetPort"] for port in spec["ports"]} <= ports(pod).keys()
        elif item["kind"] in ("Ingress", "HTTPRoute"):
            service = named("Service", "demo-kvasir-router", objects)["spec"]["ports"][0]
            port = "'name': 'http'" if item["kind"] == "Ingress" else f"'port': {service['port']}"
            assert port in str(spec)
            assert "'name': 'demo-kvasir-router'" in str(spec)


@pytest.mark.parametrize("case", CASES)
def test_every_mount_has_its_volume_and_every_secret_and_account_exists_or_was_named_by_the_values(
    case: str,
) -> None:
    objects = rendered(case)
    made = {item["metadata"]["name"] for item in of_kind("Secret", objects)}
    made |= {item["spec"]["secretName"] for item in of_kind("Certificate", objects)}
    accounts = {item["metadata"]["name"] for item in of_kind("ServiceAccount", objects)}
    claims = {
        item["metadata"]["name"]: [
            claim["metadata"]["name"] for claim in item["spec"]["volumeClaimTemplates"]
        ]
        for item in of_kind("StatefulSet", objects)
        if "volumeClaimTemplates" in item["spec"]
    }
    for name, pod in pods(objects):
        volumes = [volume["name"] for volume in pod["spec"]["volumes"]] + claims.get(name, [])
        assert sorted(set(volumes)) == sorted(volumes)
        mounting = containers(pod)
        if component_of(pod) == "ray-head" and (autoscaler := ray_autoscaler(objects)) is not None:
            mounting.append(autoscaler)
        mounted = {mount["name"] for item in mounting for mount in item["volumeMounts"]}
        assert mounted == set(volumes)
        assert pod["spec"].get("serviceAccountName", "default") in {*accounts, "default"}
        secrets = re.findall(r"'(?:secretName|secretKeyRef': \{'key': '\w+', 'name)': '([^']+)'", str(pod))
        for secret in secrets:
            assert secret in made or not secret.startswith("demo-"), secret


def test_prometheus_gives_targets_the_labels_that_rules_and_dashboards_ask_for() -> None:
    objects = rendered("monitoring")
    wanted = {
        "router": ("admin", {"job", "router"}),
        "replica": ("metrics", {"job", "replica", "pool"}),
    }
    for component, (port, labels) in wanted.items():
        monitor = named("PodMonitor", f"demo-kvasir-{component}", objects)
        assert set(monitor["spec"]) == {"selector", "podMetricsEndpoints"}
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] == port
        assert set(endpoint) == {"port", "path", "interval", "relabelings"}
        rules = {rule["targetLabel"]: rule for rule in endpoint["relabelings"]}
        assert rules.keys() == labels
        assert "kvasir" in rules["job"]["replacement"]
        assert rules[component]["sourceLabels"] == ["__meta_kubernetes_pod_name"]
        for _, pod in pods(objects):
            if component_of(pod) == component:
                assert matches(monitor["spec"]["selector"]["matchLabels"], pod)
                assert endpoint["port"] in ports(pod)
                if "pool" in labels:
                    assert "kvasir/pool" in pod["metadata"]["labels"]
