"""Nobody and nothing in the chart has more rights than it needs: pods, certificates, ports, secrets."""

import re
from pathlib import Path

import pytest
from helm_python import HelmRenderError
from ray.autoscaler._private.kuberay.node_provider import IN_CLUSTER_TOKEN_PATH

from cluster.engines.kubernetes import ACCOUNT
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
    matches,
    named,
    of_kind,
    pods,
    ports,
    ray_autoscaler,
    render,
    rendered,
)
from tests.helm.chart_programs import environment, reachable_from, replica_configs, router_config

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


def test_a_pool_may_ask_kubernetes_for_just_what_it_looks_for() -> None:
    rules = {
        "servers of a Service": ("llm", [("discovery.k8s.io", "endpointslices", ["list", "watch"], None)]),
        "mTLS, servers of an InferencePool": (
            "models",
            [
                ("inference.networking.k8s.io", "inferencepools", ["get"], ["qwen"]),
                ("", "pods", ["list", "watch"], None),
            ],
        ),
    }
    for case, (namespace, expected) in rules.items():
        (role,), (binding,) = of_kind("Role", rendered(case)), of_kind("RoleBinding", rendered(case))
        assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == namespace
        assert expected == [
            (*rule["apiGroups"], *rule["resources"], rule["verbs"], rule.get("resourceNames"))
            for rule in role["rules"]
        ]
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == ("demo-kvasir-engines", "llm")
        (pod,) = (pod for _, pod in pods(rendered(case)) if component_of(pod) == "engines")
        assert str(ACCOUNT) in {mount["mountPath"] for mount in containers(pod)[-1]["volumeMounts"]}


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


def test_routers_find_their_keys_in_a_folder_that_is_renewed() -> None:
    objects = rendered("keys in a Secret")
    (deployment,) = of_kind("Deployment", objects)
    pod = deployment["spec"]["template"]
    (container,) = containers(pod)
    config = router_config("keys in a Secret")
    assert config.has_keys and not config.open
    (mount,) = [it for it in container["volumeMounts"] if it["name"] == "keys"]
    assert "subPath" not in mount
    folder, _, name = str(config.keys_file).rpartition("/")
    assert mount["mountPath"] == folder
    (volume,) = [it for it in pod["spec"]["volumes"] if it["name"] == "keys"]
    assert volume["secret"] == {
        "secretName": "mine",
        "defaultMode": 0o440,
        "items": [{"key": "tenants", "path": name}],
    }
    (variable,) = named("Pod", "demo-kvasir-test", rendered("keys in a Secret"))["spec"]["containers"][0][
        "env"
    ]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "for-tests", "key": "token"}


def test_routers_without_keys_are_open_only_where_the_values_say_so() -> None:
    config = router_config("open to everyone")
    assert config.open and not config.has_keys
    both = {"router": {"keys": {"existingSecret": "keys", "open": True}}}
    for values, words in (
        ({"router": {"keys": {}}}, "router.keys.existingSecret is to name"),
        (both, "has both"),
    ):
        with pytest.raises(HelmRenderError, match=words):
            render(values)


@pytest.mark.parametrize("case", ["nothing set", "three-pools", "laptop"])
def test_only_routers_reach_replicas_and_only_routers_and_replicas_reach_redis(case: str) -> None:
    objects = rendered(case)
    assert reachable_from("router", objects) == {"router": {"http"}, "replica": {"grpc"}, "redis": {"redis"}}
    assert reachable_from("replica", objects) == {"router": {"http"}, "replica": set(), "redis": {"redis"}}
    assert reachable_from("redis", objects) == {"router": {"http"}, "replica": set(), "redis": set()}
    assert reachable_from("test", objects) == {"router": {"http"}, "replica": set(), "redis": set()}


def test_replicas_reach_each_other_only_where_they_pull_kv() -> None:
    objects = rendered("mTLS, KV pulled by peers")
    assert reachable_from("replica", objects)["replica"] == {"grpc"}
    assert reachable_from("redis", objects)["replica"] == set()
    (config,) = replica_configs("mTLS, KV pulled by peers")
    assert (config.pull_bytes_per_second, config.tls_peer_name) == (1e9, "replica.example")
    assert reachable_from("replica", rendered("KV in memory"))["replica"] == set()
    usages = {
        item["metadata"]["name"]: item["spec"].get("usages") for item in of_kind("Certificate", objects)
    }
    assert usages["demo-kvasir-replica-tls"] == ["digital signature", "server auth", "client auth"]


def test_where_few_may_reach_the_routers_helm_test_still_may() -> None:
    objects = rendered("ways in")
    assert reachable_from("test", objects)["router"] == {"http"}
    assert reachable_from("replica", objects)["router"] == set()


def test_prometheus_reaches_the_routers_admin_port_and_nobody_else_does_nor_does_it_reach_more() -> None:
    prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    for values in ({}, {"networkPolicy": {"routerFrom": [{"podSelector": {}}]}}):
        policy = named("NetworkPolicy", "demo-kvasir-router", tuple(render(values)))
        by_port = {rule["ports"][0]["port"]: rule.get("from") for rule in policy["spec"]["ingress"]}
        assert by_port.keys() == {"http", "admin"}
        assert by_port["admin"] == [prometheus]
        assert prometheus not in (by_port["http"] or ())


@pytest.mark.parametrize("case", CASES)
def test_no_service_and_no_way_in_leads_to_the_routers_admin_port(case: str) -> None:
    objects = rendered(case)
    port = router_config(case).admin_port
    for service in of_kind("Service", objects):
        assert not {"admin", port} & {each["targetPort"] for each in service["spec"]["ports"]}
        assert port not in {each["port"] for each in service["spec"]["ports"]}


@pytest.mark.parametrize("case", CASES)
def test_policies_name_ports_of_the_pods_that_they_protect(case: str) -> None:
    objects = rendered(case)
    for policy in of_kind("NetworkPolicy", objects):
        for _, pod in pods(objects):
            if matches(policy["spec"]["podSelector"]["matchLabels"], pod):
                for rule in policy["spec"]["ingress"]:
                    assert {port["port"] for port in rule.get("ports", [])} <= ports(pod).keys()


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


def test_routers_and_nobody_else_reach_its_replicas_and_it_reaches_redis() -> None:
    objects = rendered("mTLS, servers of an InferencePool")
    assert reachable_from("router", objects)["engines"] == {None}
    for component in ("replica", "redis", "engines"):
        assert reachable_from(component, objects)["engines"] == set()
    reached = reachable_from("engines", objects)
    assert (reached["redis"], reached["replica"]) == ({"redis"}, set())


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


def test_the_port_for_gateways_has_a_certificate_of_its_own() -> None:
    case = "endpoint picker over TLS"
    config, objects = router_config(case), rendered(case)
    (pod,) = (pod for _, pod in pods(objects) if component_of(pod) == "router")
    for path in (config.picker_tls_certificate, config.picker_tls_key):
        assert secret_at(path, pod) == "picker"
    (port,) = named("Service", "demo-kvasir-picker", objects)["spec"]["ports"]
    assert port["appProtocol"] == "http2"
    assert router_config("endpoint picker").picker_tls_certificate is None
