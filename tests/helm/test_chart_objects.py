"""What the chart makes is what Kubernetes takes, in every example and with every toggle."""

from collections import Counter
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from cluster.controller.plan import SETTLE_SECONDS
from tests.helm.chart import (
    CASES,
    EXAMPLES,
    FOLDER,
    GATEWAYS,
    chart,
    check_fields,
    component_of,
    named,
    of_kind,
    pods,
    render,
    rendered,
    values_of,
    with_keys,
)

POOL = "demo-kvasir-pool-main"


@pytest.mark.parametrize("case", CASES)
def test_every_object_has_only_fields_that_kubernetes_knows(case: str) -> None:
    for item in rendered(case):
        check_fields(item)


def test_a_misspelt_field_would_be_seen() -> None:
    service = of_kind("Service", rendered("laptop"))[0]
    with pytest.raises(kubernetes_validate.ValidationError):
        check_fields({**service, "spec": {**service["spec"], "port": 1}})


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


def test_routers_scale_by_requests_in_flight_and_by_cpu_and_nobody_else_sets_their_number() -> None:
    objects = rendered("autoscaling")
    (scaler,) = of_kind("HorizontalPodAutoscaler", objects)
    (router,) = of_kind("Deployment", objects)
    assert scaler["spec"]["scaleTargetRef"]["name"] == router["metadata"]["name"]
    assert "replicas" not in router["spec"]
    in_flight, cpu = scaler["spec"]["metrics"]
    assert in_flight["pods"]["metric"]["name"] == "router_in_flight"
    assert in_flight["pods"]["target"]["averageValue"] == "100"
    assert cpu["resource"]["target"]["averageUtilization"] == 60
    assert rendered("nothing set") and not of_kind("HorizontalPodAutoscaler", rendered("nothing set"))


def test_a_pool_of_servers_asks_the_routers_where_to() -> None:
    objects = rendered("endpoint picker")
    (pool,) = of_kind("InferencePool", objects)
    assert pool["spec"] == {
        "selector": {"matchLabels": {"app": "vllm"}},
        "targetPorts": [{"number": 8000}, {"number": 8001}],
        "endpointPickerRef": {
            "name": "demo-kvasir-picker",
            "port": {"number": 9002},
            "failureMode": "FailClose",
        },
    }
    (port,) = named("Service", "demo-kvasir-picker", objects)["spec"]["ports"]
    assert (port["port"], port["targetPort"], port["appProtocol"]) == (9002, "picker", "kubernetes.io/h2c")
    (router,) = of_kind("Deployment", objects)
    (container,) = router["spec"]["template"]["spec"]["containers"]
    assert {"name": "picker", "containerPort": 9002} in container["ports"]
    assert {"name": "KVASIR_ROUTER_PICKER_PORT", "value": "9002"} in container["env"]
    clients, gateways, _ = named("NetworkPolicy", "demo-kvasir-router", objects)["spec"]["ingress"]
    assert clients == {"ports": [{"port": "http"}]}
    assert gateways == {"ports": [{"port": "picker"}], "from": GATEWAYS["gatewayFrom"]}
    assert not of_kind("InferencePool", rendered("nothing set"))


def test_from_outside_only_openais_api_is_reached_unless_the_values_say_otherwise() -> None:
    def paths(path: dict[str, str]) -> set[str]:
        values = {
            "ingress": {"enabled": True, "hosts": ["a.example"], **path},
            "gateway": {"enabled": True, "parentRefs": [{"name": "public"}], **path},
        }
        objects = tuple(render(values))
        (ingress,), (route,) = of_kind("Ingress", objects), of_kind("HTTPRoute", objects)
        (rule,) = ingress["spec"]["rules"]
        (match,) = route["spec"]["rules"][0]["matches"]
        return {rule["http"]["paths"][0]["path"], match["path"]["value"]}

    assert paths({}) == {"/v1"}
    assert paths({"path": "/"}) == {"/"}


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


def test_gpus_are_asked_for_and_found_by_their_kind() -> None:
    objects = rendered("three-pools")
    pod = named("StatefulSet", "demo-kvasir-pool-large", objects)["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert "nvidia.com/gpu" not in str(of_kind("Deployment", objects))


def test_with_nothing_said_but_that_it_is_open_the_chart_runs_anywhere() -> None:
    """What ships, in the image that has what it needs, on a node without GPUs."""
    pool = named("StatefulSet", POOL, tuple(render({"router": {"keys": {"open": True}}})))
    (container,) = pool["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith("ghcr.io/kvasir/replica-cpu:")
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["KVASIR_REPLICA_ENGINE"] == "torch"
    assert "KVASIR_REPLICA_MODEL" not in variables
    assert container["resources"] == {
        "requests": {"cpu": "250m", "memory": "512Mi"},
        "limits": {"memory": "2Gi"},
    }


@pytest.mark.parametrize(
    ("pool", "image", "engine", "memory"),
    [
        ({}, "replica-cpu", "torch", "2Gi"),
        ({"engine": "simulated"}, "replica-cpu", "simulated", "2Gi"),
        ({"engine": "vllm"}, "replica-cuda", "vllm", "16Gi"),
        ({"gpu": {"count": 1}}, "replica-cuda", "vllm", "16Gi"),
        ({"model": {"source": "image", "path": "/m"}}, "replica-cuda", "vllm", "16Gi"),
        ({"model": {"source": "image", "path": "/m"}, "engine": "torch"}, "replica-cuda", "torch", "16Gi"),
        ({"image": {"repository": "mine/replica"}}, "mine/replica", "torch", "2Gi"),
        ({"resources": {"limits": {"memory": "4Gi"}}}, "replica-cpu", "torch", "4Gi"),
    ],
)
def test_what_a_pool_does_not_say_of_image_engine_and_resources_follows_from_its_model_and_gpus(
    pool: dict[str, Any], image: str, engine: str, memory: str
) -> None:
    made = named("StatefulSet", POOL, tuple(render({"pools": {"main": pool}})))
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert image in container["image"]
    assert {"name": "KVASIR_REPLICA_ENGINE", "value": engine} in container["env"]
    assert container["resources"]["limits"]["memory"] == memory
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()


@pytest.mark.parametrize(
    ("pool", "num_gpus"),
    [
        ({"engine": "vllm"}, 1),
        ({"model": {"source": "image", "path": "/m"}}, 1),
        ({"engine": "vllm", "settings": {"engine_args": {"tensor_parallel_size": 4}}}, 4),
        (
            {
                "engine": "vllm",
                "settings": {"engine_args": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}},
            },
            8,
        ),
        ({"engine": "vllm", "gpu": {"count": 2}}, 2),
        ({"engine": "vllm", "gpu": {"count": 16, "perNode": 16}}, 16),
        ({"engine": "vllm", "gpu": {"count": 0}}, 0),
        ({}, 0),
        ({"engine": "simulated"}, 0),
    ],
)
def test_a_pool_that_runs_vllm_asks_for_the_gpus_that_it_needs(pool: dict[str, Any], num_gpus: int) -> None:
    made = named("StatefulSet", POOL, tuple(render({"pools": {"main": pool}})))
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == num_gpus


def test_the_notes_speak_of_vllm_without_a_gpu() -> None:
    for pool, is_said in (({"engine": "vllm", "gpu": {"count": 0}}, True), ({"engine": "vllm"}, False)):
        files = chart().render(with_keys({"pools": {"odd": pool}}), name="demo", namespace="llm")
        assert ("Pool odd runs vLLM and asks for no GPU" in files["kvasir/templates/NOTES.txt"]) == is_said


ADDED: dict[str, Any] = {
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "extraVolumes": [{"name": "authorities", "configMap": {"name": "our-ca"}}],
    "extraVolumeMounts": [{"name": "authorities", "mountPath": "/etc/ssl/ours", "readOnly": True}],
    "extraInitContainers": [
        {
            "name": "look",
            "image": "busybox:1.37",
            "command": ["ls", "/models"],
            "volumeMounts": [{"name": "models", "mountPath": "/models"}],
        }
    ],
    "podSecurityContext": {"fsGroup": 2000, "supplementalGroups": [3000], "runAsUser": 1000660000},
    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}, "readOnlyRootFilesystem": False},
    "model": {"source": "hub", "repository": "Qwen/Qwen3-8B"},
}


@pytest.mark.parametrize("mode", ["statefulset", "kuberay"])
def test_pools_take_volumes_init_containers_and_security_contexts_besides(mode: str) -> None:
    values = {"fleet": {"mode": mode}, "pools": {"main": ADDED, "plain": {}}}
    objects = tuple(render(values))
    for item in objects:
        check_fields(item)
    found = {name.rpartition("-")[2]: pod["spec"] for name, pod in pods(objects) if "-pool-" in name}
    pod, plain = found["main"], found["plain"]
    assert ADDED["extraVolumes"][0] in pod["volumes"]
    download, look = pod["initContainers"]
    assert (download["name"], look) == ("model", ADDED["extraInitContainers"][0])
    for container in (download, pod["containers"][0]):
        assert ADDED["extraVolumeMounts"][0] in container["volumeMounts"]
        assert ADDED["extraEnv"][0] in container["env"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": False,
            "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
        }
    assert pod["securityContext"] == {**plain["securityContext"], **ADDED["podSecurityContext"]}
    assert plain["securityContext"]["fsGroup"] == 10001
    assert "initContainers" not in plain


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
