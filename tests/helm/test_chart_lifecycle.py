"""Install, upgrade, rollback and uninstall, against a server that records what it is sent."""

import base64
import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest

from tests.helm.api_server import KINDS, ApiServer, Key, Object, api_server, helm_at
from tests.helm.chart import FOLDER, PROMETHEUS, chart, objects_in, values_of, with_keys

pytestmark = pytest.mark.timeout(60)

LAPTOP: dict[str, Any] = {
    **values_of("laptop"),
    "mtls": {"enabled": False},
    "fleet": {"mode": "statefulset"},
}
CHANGED: dict[str, Any] = {
    **LAPTOP,
    "pools": {"one": {}, "two": {"replicas": 3}},
    "logLevel": "debug",
    "monitoring": {"rules": {"enabled": True}},
}


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with api_server() as server:
        yield server


@pytest.fixture
def helm(server: ApiServer) -> Iterator[helm_python.Config]:
    with helm_at(server, "llm") as helm:
        yield helm


def secrets_in(objects: dict[Key, Object]) -> dict[str, Any]:
    return {name: copy.deepcopy(item["data"]) for (kind, name), item in objects.items() if kind == "Secret"}


def test_an_upgrade_changes_what_the_values_change_and_a_rollback_restores_it(
    server: ApiServer, helm: helm_python.Config
) -> None:
    helm.install(chart(), "demo", LAPTOP, namespace="llm")
    before = copy.deepcopy(server.installed())
    helm.upgrade(chart(), "demo", CHANGED, namespace="llm")
    after = copy.deepcopy(server.installed())
    assert before.keys() - after.keys() == {("StatefulSet", "demo-kvasir-pool-main")}
    assert after.keys() - before.keys() == {
        ("StatefulSet", "demo-kvasir-pool-one"),
        ("StatefulSet", "demo-kvasir-pool-two"),
        ("PrometheusRule", "demo-kvasir"),
    }
    changed = {key for key in before.keys() & after.keys() if before[key] != after[key]}
    assert changed == {("Deployment", "demo-kvasir-router")}, (
        "of all that stays, the log level is the routers' only"
    )
    helm.rollback("demo", version=1)
    assert server.installed() == before


def test_secrets_are_made_once_and_kept(server: ApiServer, helm: helm_python.Config) -> None:
    helm.install(chart(), "demo", LAPTOP, namespace="llm")
    first = secrets_in(server.installed())
    secret = base64.b64decode(first["demo-kvasir-secret"]["secret"]).decode()
    assert len(bytes.fromhex(secret)) == 32
    helm.upgrade(chart(), "demo", CHANGED, namespace="llm")
    assert secrets_in(server.installed()) == first
    helm.uninstall("demo")
    helm.install(chart(), "demo", LAPTOP, namespace="llm")
    assert secrets_in(server.installed()) != first


def test_a_release_of_another_name_has_secrets_of_its_own(
    server: ApiServer, helm: helm_python.Config
) -> None:
    helm.install(chart(), "one", LAPTOP, namespace="llm")
    helm.install(chart(), "two", LAPTOP, namespace="llm")
    secrets = secrets_in(server.installed())
    assert secrets["one-kvasir-secret"] != secrets["two-kvasir-secret"]
    passwords = [
        secrets[f"{release}-kvasir-redis"][f"{user}-password"]
        for release in ("one", "two")
        for user in ("router", "replica")
    ]
    assert len(set(passwords)) == 4


def test_where_prometheus_operator_is_missing_nothing_is_installed(
    server: ApiServer, helm: helm_python.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(KINDS, "monitoring.coreos.com/v1")
    with pytest.raises(helm_python.HelmError, match="could not find the requested resource"):
        helm.install(chart(), "demo", CHANGED, namespace="llm")
    assert server.objects == {}


def has_tls(server: ApiServer) -> bool:
    certificates = {name for kind, name in server.installed() if kind == "Certificate"}
    router = str(server.installed()["Deployment", "demo-kvasir-router"])
    assert bool(certificates) == ("KVASIR_ROUTER_REPLICA_TLS_CERTIFICATE" in router)
    return bool(certificates)


UNSAID: dict[str, Any] = {**LAPTOP, "mtls": {}}


@pytest.mark.parametrize("said", [None, False])
def test_where_cert_manager_is_tls_is_the_default_and_stays_so(
    server: ApiServer, helm: helm_python.Config, said: bool | None
) -> None:
    values = UNSAID if said is None else {**LAPTOP, "mtls": {"enabled": said}}
    helm.install(chart(), "demo", values, namespace="llm")
    assert has_tls(server) == (said is None)
    helm.upgrade(chart(), "demo", {**values, "logLevel": "debug"}, namespace="llm")
    assert has_tls(server) == (said is None)


def test_where_cert_manager_comes_later_an_upgrade_turns_tls_on_only_if_it_is_told(
    server: ApiServer, helm: helm_python.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = KINDS["cert-manager.io/v1"]
    monkeypatch.delitem(KINDS, "cert-manager.io/v1")
    helm.install(chart(), "demo", UNSAID, namespace="llm")
    assert not has_tls(server)
    monkeypatch.setitem(KINDS, "cert-manager.io/v1", kinds)
    with helm_at(server, "llm") as later:  # one that has not asked yet which APIs there are
        later.upgrade(chart(), "demo", {**UNSAID, "logLevel": "debug"}, namespace="llm")
        assert not has_tls(server)
        later.upgrade(chart(), "demo", {**UNSAID, "mtls": {"enabled": True}}, namespace="llm")
        assert has_tls(server)


AUTO: dict[str, Any] = {**LAPTOP, "fleet": {"mode": "auto"}}


def is_in_ray(server: ApiServer) -> bool:
    kinds = {kind for kind, name in server.installed() if "redis" not in name}
    assert ("RayCluster" in kinds) != ("StatefulSet" in kinds)
    return "RayCluster" in kinds


@pytest.mark.parametrize("mode", ["auto", "statefulset", "kuberay"])
def test_where_kuberay_is_replicas_run_in_ray_unless_the_values_say_otherwise_and_stay_there(
    server: ApiServer, helm: helm_python.Config, mode: str
) -> None:
    values = {**LAPTOP, "fleet": {"mode": mode}}
    notes = helm.install(chart(), "demo", values, namespace="llm")["notes"]
    assert is_in_ray(server) == (mode != "statefulset")
    because = "KubeRay's API is there" if mode == "auto" else "fleet.mode says so"
    where = "StatefulSets" if mode == "statefulset" else "a RayCluster"
    assert f"Replicas run in {where}: {because}." in notes
    helm.upgrade(chart(), "demo", {**values, "pools": {"other": {}}}, namespace="llm")
    assert is_in_ray(server) == (mode != "statefulset")


def test_kuberay_that_comes_later_replaces_no_fleet(
    server: ApiServer, helm: helm_python.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = KINDS["ray.io/v1"]
    monkeypatch.delitem(KINDS, "ray.io/v1")
    notes = helm.install(chart(), "demo", AUTO, namespace="llm")["notes"]
    assert "Replicas run in StatefulSets: KubeRay's API is not there." in notes
    assert not is_in_ray(server)
    monkeypatch.setitem(KINDS, "ray.io/v1", kinds)
    with helm_at(server, "llm") as later:  # one that has not asked yet which APIs there are
        other = {**AUTO, "pools": {"other": {}}}
        notes = later.upgrade(chart(), "demo", other, namespace="llm")["notes"]
        assert "StatefulSets: they run already;" in notes
        assert not is_in_ray(server)
        later.install(chart(), "new", {**AUTO, "fullnameOverride": "new"}, namespace="llm")
        assert ("RayCluster", "new") in server.objects, "another release's StatefulSets are nothing to it"
        later.uninstall("new")
        later.upgrade(chart(), "demo", {**AUTO, "fleet": {"mode": "kuberay"}}, namespace="llm")
        assert is_in_ray(server), "where the values say so"


def test_without_a_look_at_the_cluster_there_are_statefulsets_though_kubernetes_is_said_to_have_kuberay(
    tmp_path: Path,
) -> None:
    """The same goes for `helm template --api-versions` and Argo CD, whose upgrades look like installs."""
    folder = shutil.copytree(FOLDER, tmp_path / "kvasir")
    helpers = folder / "templates" / "_helpers.tpl"
    text = helpers.read_text(encoding="utf-8")
    asked = '.Capabilities.APIVersions.Has "ray.io/v1/RayCluster"'
    assert text.count(asked) == 2
    helpers.write_text(text.replace(asked, "eq 1 1"), encoding="utf-8")
    with helm_python.Chart.load(folder) as told:
        files = told.render(with_keys({}), name="demo", namespace="llm", is_install=True)
    assert "StatefulSets: the chart was rendered without a look" in files["kvasir/templates/NOTES.txt"]
    assert "RayCluster" not in {item["kind"] for item in objects_in(files)}


SCALING: dict[str, Any] = {"enabled": True, "by": "keda", "prometheus": PROMETHEUS}


def test_what_begins_to_scale_keeps_its_size_until_the_autoscaler_changes_it() -> None:
    fixed: dict[str, Any] = with_keys(
        {
            "fleet": {"mode": "statefulset"},
            "router": {"replicas": 5},
            "pools": {"a": {"replicas": 5}},
        }
    )
    scaling = copy.deepcopy(fixed)
    scaling["router"]["autoscaling"] = {"enabled": True}
    scaling["pools"]["a"]["autoscaling"] = {**SCALING, "by": "hpa"}
    with api_server() as server, helm_at(server, "llm") as helm:
        helm.install(chart(), "demo", fixed, namespace="llm")

        def specs() -> list[Object]:
            names = ("StatefulSet", "demo-kvasir-pool-a"), ("Deployment", "demo-kvasir-router")
            return [server.installed()[name]["spec"] for name in names]

        for size in (5, 0, 7):
            for spec in specs():
                spec["replicas"] = size
            helm.upgrade(chart(), "demo", scaling, namespace="llm")
            assert [spec["replicas"] for spec in specs()] == [size, size]


def test_where_a_pool_scales_by_hpa_or_keda_auto_takes_statefulsets() -> None:
    values: dict[str, Any] = with_keys({"pools": {"a": {"autoscaling": SCALING}, "b": {}}})
    with api_server() as server, helm_at(server, "llm") as helm:
        notes = helm.install(chart(), "demo", values, namespace="llm")["notes"]
        assert "StatefulSets: a pool scales by hpa or keda." in notes
        assert ("RayCluster", "demo-kvasir") not in server.installed()
