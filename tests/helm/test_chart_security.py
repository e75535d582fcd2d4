"""No pod of the chart has more rights than it needs."""

import pytest

from tests.helm.chart import CASES, containers, of_kind, pods, rendered


@pytest.mark.parametrize("case", CASES)
def test_no_process_is_root_or_can_become_it(case: str) -> None:
    for name, pod in pods(rendered(case)):
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["runAsUser"] > 0
        assert context["runAsGroup"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod["spec"].keys()
        assert not [volume for volume in pod["spec"]["volumes"] if "hostPath" in volume]


@pytest.mark.parametrize("case", CASES)
def test_no_pod_can_ask_kubernetes_for_anything(case: str) -> None:
    objects = rendered(case)
    for item in of_kind("ServiceAccount", objects):
        assert item["automountServiceAccountToken"] is False
    for _, pod in pods(objects):
        assert pod["spec"]["automountServiceAccountToken"] is False
    assert not {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"} & {
        item["kind"] for item in objects
    }


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
