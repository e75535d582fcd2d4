"""The parts of the chart fit each other and the programs: selectors, ports, probes, settings, policies."""

import re

import pytest
from helm_python import HelmRenderError

from cluster.fleet_file import parse_fleet
from replicas.config import ENVIRONMENT_PREFIX as REPLICA_PREFIX
from replicas.config import ReplicaConfig
from router.api.context import ApiContext
from router.api.control import ControlRoutes
from tests.helm.chart import (
    CASES,
    Object,
    Values,
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
)
from tests.helm.chart_programs import config_of, reachable_from, replica_configs, router_config

CHECK_REPLICA = ["python", "/app/deploy/check_replica.py"]
FLEET_IS_READY = ["test", "-e", "/tmp/fleet-is-ready"]


@pytest.mark.parametrize("case", CASES)
def test_routers_and_replicas_take_every_setting_that_they_are_given_and_mean_the_same(case: str) -> None:
    router = router_config(case)
    for replica in replica_configs(case):
        assert replica.redis_url.replace("//replica:", "//router:") == router.redis_url
        assert replica.secret_file == router.secret_file == "/etc/kvasir/secret/secret"
        assert replica.index_stride == router.index_stride
        assert (replica.replica_id, replica.host) == ("pod-0", "10.1.2.3")


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


def replica_pod(case: str) -> tuple[Object, Object]:
    """The StatefulSet's spec, and its pod's."""
    spec = named("StatefulSet", "demo-kvasir-pool-main", rendered(case))["spec"]
    return spec, spec["template"]["spec"]


def test_memory_for_kv_comes_on_top_of_what_a_replica_asks_for() -> None:
    _, plain = replica_pod("nothing set")
    assert plain["containers"][0]["resources"]["requests"] == {"cpu": "250m", "memory": "512Mi"}
    (config,) = replica_configs("KV in memory")
    assert (config.host_kv_bytes, config.disk_kv_bytes, config.kv_folder) == (2**29, None, None)
    _, pod = replica_pod("KV in memory")
    resources = pod["containers"][0]["resources"]
    assert resources["requests"] == {"cpu": "250m", "memory": f"{512 + 512}Mi"}
    assert resources["limits"]["memory"] == f"{2 * 1024 + 512}Mi"


@pytest.mark.parametrize(
    ("case", "volume"),
    [
        ("KV on the node", {"emptyDir": {"sizeLimit": f"{500 * 1024 + 25 * 1024 + 2048}Mi"}}),
        ("KV in a folder of the node", {"hostPath": {"path": "/srv/kv", "type": "Directory"}}),
        ("KV in claims", None),
    ],
)
def test_each_replica_has_a_folder_for_kv_on_a_disk_that_is_large_enough(
    case: str, volume: Object | None
) -> None:
    (config,) = replica_configs(case)
    assert (config.host_kv_bytes, config.kv_folder) == (2**36, "/kv/pod-0")
    assert config.disk_kv_bytes == (2**41 if "folder" in case else 500 * 2**30)
    spec, pod = replica_pod(case)
    assert {"name": "kv", "mountPath": "/kv"} in pod["containers"][0]["volumeMounts"]
    assert [each for each in pod["volumes"] if each["name"] == "kv"] == (
        [{"name": "kv", **volume}] if volume else []
    )
    request = pod["containers"][0]["resources"]["requests"].get("ephemeral-storage")
    assert request == (volume["emptyDir"]["sizeLimit"] if volume and "emptyDir" in volume else None)
    if volume is None:
        claim, models = spec["volumeClaimTemplates"]
        assert (claim["metadata"]["name"], models["metadata"]["name"]) == ("kv", "models")
        assert claim["spec"]["storageClassName"] == "local-nvme"
        assert claim["spec"]["resources"]["requests"]["storage"] == f"{(500 + 25 + 100 + 1) * 1024}Mi"


def test_a_pod_has_time_to_write_its_kv_to_the_disk_before_it_ends() -> None:
    seconds = [
        replica_pod(case)[1]["terminationGracePeriodSeconds"]
        for case in ("KV in memory", "KV on the node", "KV in claims")
    ]
    assert seconds == [140, 150, 171]


def test_kubernetes_workers_have_a_volume_for_kv_and_their_replicas_a_folder_each() -> None:
    objects = rendered("KubeRay, KV in claims")
    fleet = parse_fleet(
        named("ConfigMap", "demo-kvasir-fleet", objects)["data"]["fleet.yaml"], "redis://r:1/0"
    )
    (pool,) = fleet.pools
    assert (pool.replica.host_kv_bytes, pool.replica.disk_kv_bytes) == (2**36, 500 * 2**30)
    assert pool.config_of(pool.replica_id(0)).kv_folder == "/kv/main-0"
    (cluster,) = of_kind("RayCluster", objects)
    (group,) = cluster["spec"]["workerGroupSpecs"]
    (volume,) = [each for each in group["template"]["spec"]["volumes"] if each["name"] == "kv"]
    claim = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["resources"]["requests"]["storage"] == f"{500 * 1024 + 25 * 1024 + 2048}Mi"
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] == 150


def test_redis_is_found_where_the_values_say() -> None:
    assert router_config("nothing set").redis_url == "redis://router:pass@demo-kvasir-redis:6379/0"
    assert router_config("external Redis").redis_url == "redis://:pass@redis.example:6379/0"
    assert router_config("external Redis without password").redis_url == "redis://redis.example:6379/0"
    assert router_config("external Redis by address").redis_url == "redis://given"
    over_tls = "rediss://:pass@redis.example:6379/0?ssl_ca_certs=/etc/kvasir/redis-ca/ca.crt"
    assert router_config("external Redis over TLS").redis_url == over_tls
    for _, pod in pods(rendered("external Redis over TLS")):
        names = [volume["name"] for volume in pod["spec"]["volumes"]]
        assert ("redis-ca" in names) == (component_of(pod) != "test")
    assert not [item for item in rendered("external Redis") if item["metadata"]["name"].endswith("-redis")]


def test_models_lie_where_their_source_puts_them() -> None:
    def model(case: str) -> str | None:
        return replica_configs(case)[0].model

    assert model("nothing set") is None
    assert model("model from a hub") == "/models/Qwen3-8B"
    assert model("model on a volume") == "/models/qwen"
    assert model("model in the image") == "/opt/model"
    spec = named("StatefulSet", "demo-kvasir-pool-main", rendered("model from a hub"))["spec"]["template"]
    (download,) = spec["spec"]["initContainers"]
    assert download["command"][:3] == ["hf", "download", "Qwen/Qwen3-8B"]
    assert download["command"][-1] == "/models/Qwen3-8B"


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
