"""TLS between routers and replicas in the chart: which certificates there are, and who has which."""

from pathlib import Path

import pytest
import yaml

from cluster.fleet_file import parse_fleet
from replicas.config import ReplicaConfig
from replicas.process.tls import TlsFiles
from tests.helm.chart import (
    CASES,
    FOLDER,
    Object,
    component_of,
    containers,
    main_containers,
    named,
    of_kind,
    pods,
    rendered,
)
from tests.helm.chart_programs import (
    environment,
    reachable_from,
    replica_configs,
    router_config,
)

OWN_CA = ["mTLS", "mTLS, KubeRay", "mTLS, KV pulled by peers", "mTLS, servers of an InferencePool"]
BY_CERT_MANAGER = [*OWN_CA, "mTLS, given issuer"]
WITH_TLS = [*BY_CERT_MANAGER, "mTLS, given secrets"]
KEYS = {"ca.crt", "tls.crt", "tls.key"}
"""What cert-manager puts into a Secret, and what a Secret of somebody's own must have."""


def certificate(side: str, case: str) -> Object:
    spec: Object = named("Certificate", f"demo-kvasir-{side}-tls", rendered(case))["spec"]
    return spec


def configs_in_the_fleet(case: str) -> list[ReplicaConfig]:
    text = named("ConfigMap", "demo-kvasir-fleet", rendered(case))["data"]["fleet.yaml"]
    return [pool.replica for pool in parse_fleet(text, redis_url="redis://redis").pools]


def secret_at(path: str | None, pod: Object) -> str:
    """The Secret whose key lies at that path in the pod."""
    assert path is not None
    assert Path(path).name in KEYS
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    for container in containers(pod):
        for mount in container["volumeMounts"]:
            if mount["mountPath"] == str(Path(path).parent):
                assert mount["readOnly"] is True
                assert "subPath" not in mount, "what is mounted by its own name never changes"
                secret = volumes[mount["name"]]["secret"]
                assert "items" not in secret
                return str(secret["secretName"])
    raise AssertionError(f"{path} is mounted nowhere")


@pytest.mark.parametrize("case", WITH_TLS)
def test_each_side_has_its_certificate_where_its_settings_say(case: str) -> None:
    found: dict[str, set[str]] = {"router": set(), "replica": set()}
    router = router_config(case)
    replicas = configs_in_the_fleet(case) if "KubeRay" in case else replica_configs(case)
    files = {
        "router": TlsFiles(router.replica_tls_certificate, router.replica_tls_key, router.replica_tls_ca),
        "replica": TlsFiles(replicas[0].tls_certificate, replicas[0].tls_key, replicas[0].tls_client_ca),
    }
    for _, pod in pods(rendered(case)):
        if (side := component_of(pod).replace("engines", "replica")) in found:
            for path in (files[side].certificate, files[side].key, files[side].ca):
                found[side].add(secret_at(path, pod))
        else:
            assert "tls" not in [volume["name"] for volume in pod["spec"]["volumes"]]
    if "given secrets" in case:
        assert found == {"router": {"for-routers"}, "replica": {"for-replicas"}}
    else:
        made = {side: {certificate(side, case)["secretName"]} for side in found}
        assert found == made


@pytest.mark.parametrize("case", BY_CERT_MANAGER)
def test_routers_expect_the_name_that_replicas_have_and_neither_side_can_pose_as_the_other(case: str) -> None:
    replica, router = certificate("replica", case), certificate("router", case)
    assert replica["dnsNames"] == [router_config(case).replica_tls_name]
    assert "server auth" in replica["usages"]
    assert ("client auth" in replica["usages"]) == ("pulled" in case), "only who pulls calls replicas"
    assert "client auth" in router["usages"] and "server auth" not in router["usages"]
    assert not set(router["dnsNames"]) & set(replica["dnsNames"])


@pytest.mark.parametrize("case", OWN_CA)
def test_a_ca_of_the_releases_own_signs_both_certificates_and_nothing_else_has_its_key(case: str) -> None:
    objects = rendered(case)
    ca = named("Certificate", "demo-kvasir-ca", objects)["spec"]
    assert ca["isCA"] is True
    assert "selfSigned" in named("Issuer", ca["issuerRef"]["name"], objects)["spec"]
    assert ca["privateKey"]["rotationPolicy"] == "Never", "a new key would make all certificates void at once"
    for side in ("router", "replica"):
        issuer = named("Issuer", certificate(side, case)["issuerRef"]["name"], objects)
        assert issuer["spec"] == {"ca": {"secretName": ca["secretName"]}}
    assert ca["secretName"] not in [
        volume["secret"]["secretName"]
        for _, pod in pods(objects)
        for volume in pod["spec"]["volumes"]
        if "secret" in volume
    ]


def test_a_given_issuer_signs_both_certificates_for_as_long_as_the_values_say() -> None:
    case = "mTLS, given issuer"
    assert not of_kind("Issuer", rendered(case))
    assert len(of_kind("Certificate", rendered(case))) == 2
    for side in ("router", "replica"):
        spec = certificate(side, case)
        assert spec["issuerRef"] == {"name": "private", "kind": "ClusterIssuer", "group": "cert-manager.io"}
        assert (spec["duration"], spec["renewBefore"]) == ("48h", "16h")
    assert certificate("replica", case)["dnsNames"] == ["replica.example"]


@pytest.mark.parametrize("case", [case for case in CASES if case not in BY_CERT_MANAGER])
def test_cert_manager_is_needed_by_nobody_else(case: str) -> None:
    assert not [item for item in rendered(case) if item["apiVersion"].startswith("cert-manager.io")]


@pytest.mark.parametrize("case", [case for case in CASES if case not in WITH_TLS])
def test_without_it_nothing_is_set_or_mounted_and_kubernetes_probes_replicas_itself(case: str) -> None:
    assert "/etc/kvasir/tls" not in str(rendered(case))
    assert router_config(case).replica_tls_ca is None
    for container in main_containers("replicas", rendered(case)):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"] == {"port": 50051}


@pytest.mark.parametrize("case", ["mTLS", "mTLS, given secrets"])
def test_with_it_the_images_own_check_asks_the_health_socket_and_has_the_time(case: str) -> None:
    for _, pod in pods(rendered(case)):
        if component_of(pod) != "replica":
            continue
        (container,) = containers(pod)
        socket = Path(environment(container)["KVASIR_REPLICA_HEALTH_SOCKET"])
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert not mounts[str(socket.parent)].get("readOnly")
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["exec"]["command"] == ["python", "/app/deploy/check_replica.py"]
            assert container[probe]["timeoutSeconds"] >= 5


def test_the_check_lies_where_the_probes_look_for_it_in_every_image_of_a_replica() -> None:
    dockerfiles = sorted((FOLDER.parent / "deploy" / "images").glob("replica-*.Dockerfile"))
    assert dockerfiles
    for path in dockerfiles:
        text = path.read_text(encoding="utf-8")
        assert "COPY deploy/images/check_replica.py /app/deploy/\n" in text, path.name


@pytest.mark.parametrize("case", WITH_TLS)
def test_keys_are_in_secrets_and_nowhere_else(case: str) -> None:
    for item in of_kind("ConfigMap", rendered(case)):
        for text in item["data"].values():
            assert "PRIVATE KEY" not in text
    for _, pod in pods(rendered(case)):
        for container in containers(pod):
            for variable in container.get("env", []):
                source = variable.get("valueFrom", {}).get("secretKeyRef", {})
                assert source.get("key") not in KEYS, variable["name"]


@pytest.mark.parametrize(("case", "before"), [("mTLS", "nothing set"), ("mTLS, KubeRay", "KubeRay")])
def test_network_policies_are_the_same_with_it(case: str, before: str) -> None:
    def replica_policy(name: str) -> str:
        return yaml.safe_dump(named("NetworkPolicy", "demo-kvasir-replica", rendered(name))["spec"])

    assert replica_policy(case) == replica_policy(before)
    assert reachable_from("router", rendered(case))["replica"] == {"grpc"}


def test_the_port_for_gateways_has_a_certificate_of_its_own() -> None:
    case = "endpoint picker over TLS"
    config, objects = router_config(case), rendered(case)
    (pod,) = (pod for _, pod in pods(objects) if component_of(pod) == "router")
    for path in (config.picker_tls_certificate, config.picker_tls_key):
        assert secret_at(path, pod) == "picker"
    (port,) = named("Service", "demo-kvasir-picker", objects)["spec"]["ports"]
    assert port["appProtocol"] == "http2"
    assert router_config("endpoint picker").picker_tls_certificate is None
