"""No pod of the chart has more rights than it needs."""

import re
from pathlib import Path

import pytest
from ray.autoscaler._private.kuberay.node_provider import IN_CLUSTER_TOKEN_PATH

from tests.helm.chart import CASES, component_of, containers, of_kind, pods, ray_autoscaler, render, rendered

SAFE = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


FINDS_BY_KUBERNETES = {"running-servers", "servers of a Service", "mTLS, servers of an InferencePool"}


@pytest.mark.parametrize("case", CASES)
def test_no_process_is_root_or_can_become_it(case: str) -> None:
    for name, pod in pods(rendered(case)):
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["runAsUser"] > 0
        assert context["runAsGroup"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(pod):
            assert container["securityContext"] == SAFE
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod["spec"].keys()
        of_the_node = [volume["name"] for volume in pod["spec"]["volumes"] if "hostPath" in volume]
        is_wanted = case == "KV in a folder of the node" and component_of(pod) == "replica"
        assert of_the_node == (["kv"] if is_wanted else [])


@pytest.mark.parametrize("case", CASES)
def test_no_pod_can_ask_kubernetes_for_anything_but_servers_to_be_found(case: str) -> None:
    objects = rendered(case)
    for item in of_kind("ServiceAccount", objects):
        assert item["automountServiceAccountToken"] is False
    for _, pod in pods(objects):
        assert pod["spec"]["automountServiceAccountToken"] is False
    roles = {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"} & {item["kind"] for item in objects}
    assert roles == ({"Role", "RoleBinding"} if case in FINDS_BY_KUBERNETES else set())


@pytest.mark.parametrize("case", CASES)
def test_of_all_containers_only_rays_autoscaler_and_what_finds_servers_get_a_token_of_kubernetes(
    case: str,
) -> None:
    autoscaler = ray_autoscaler(rendered(case))
    for name, pod in pods(rendered(case)):
        tokens = {volume["name"] for volume in pod["spec"]["volumes"] if "projected" in volume}
        finds = component_of(pod) == "engines" and case in FINDS_BY_KUBERNETES
        assert bool(tokens) == ((component_of(pod) == "ray-head" and autoscaler is not None) or finds), name
        for container in containers(pod):
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert tokens & mounted == (tokens if container["name"] == "join" else set())
    if autoscaler is not None:
        assert autoscaler["securityContext"] == SAFE
        mounts = {mount["name"]: mount["mountPath"] for mount in autoscaler["volumeMounts"]}
        assert mounts["kubernetes-token"] == str(Path(IN_CLUSTER_TOKEN_PATH).parent)
        assert {"cpu", "memory"} <= autoscaler["resources"]["requests"].keys()
        assert "memory" in autoscaler["resources"]["limits"]


@pytest.mark.parametrize("case", CASES)
def test_every_container_says_what_it_needs_and_what_it_may_take(case: str) -> None:
    for _, pod in pods(rendered(case)):
        for container in containers(pod):
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("case", CASES)
def test_passwords_and_secrets_are_in_secrets_only(case: str) -> None:
    objects = rendered(case)
    hidden = [
        str(value)
        for item in of_kind("Secret", objects)
        for name, value in {**item.get("data", {}), **item.get("stringData", {})}.items()
        if name != "server.conf"
    ]
    shown = str([item for item in objects if item["kind"] != "Secret"])
    for value in hidden:
        assert len(value) >= 32
        assert value not in shown
    for name, pod in pods(objects):
        for container in containers(pod):
            words = str([*container.get("command", []), *container.get("args", [])])
            assert not re.search(r"\$\W?\w*(PASSWORD|REDIS_URL|SECRET|TOKEN)", words), name


def test_images_are_taken_by_digest_where_one_is_set() -> None:
    """Whatever a tag means on the day, containers run what was looked at."""
    digests = {
        name: f"sha256:{digit * 64}" for name, digit in (("router", "a"), ("redis", "b"), ("pool", "c"))
    }
    values = {
        "router": {"image": {"digest": digests["router"]}},
        "redis": {"builtin": {"image": {"digest": digests["redis"]}}},
        "poolDefaults": {"image": {"digest": digests["pool"]}},
    }
    images = {container["image"] for _, pod in pods(tuple(render(values))) for container in containers(pod)}
    assert len(images) >= 3
    for image in images:
        assert re.fullmatch(r"\S+:\S+@sha256:[0-9a-f]{64}", image), image
