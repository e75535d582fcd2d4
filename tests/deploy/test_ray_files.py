"""The Ray cluster on bare machines and the plain KubeRay manifest: valid for Ray, Kubernetes and KubeRay, and
their parts fit together."""

import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray._private.ray_constants import RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S

from cluster.fleet_file import parse_fleet
from replicas.process.settings import load_settings
from router.config import ENVIRONMENT_PREFIX, RouterConfig
from tests.deploy.dockerfile import ROOT, environment, last_stage, only
from tests.kuberay import ray_cluster_schema

MANIFEST = ROOT / "deploy/kuberay.yaml"
KUBERNETES = "1.31"

Object = dict[str, Any]


def objects(kind: str) -> list[Object]:
    documents = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    return [document for document in documents if document["kind"] == kind]


def ray_cluster() -> Object:
    (found,) = objects("RayCluster")
    return found


def pod_specs() -> dict[str, Object]:
    """By deployment or group of the Ray cluster."""
    spec = ray_cluster()["spec"]
    found = {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in objects("Deployment")}
    found["head"] = spec["headGroupSpec"]["template"]["spec"]
    return found | {group["groupName"]: group["template"]["spec"] for group in spec["workerGroupSpecs"]}


def container(name: str) -> Object:
    (found,) = pod_specs()[name]["containers"]
    return dict(found)


def service_links(spec: Object) -> dict[str, str]:
    """Variables that Kubernetes adds for the services of the namespace, unless a pod wants none."""
    if spec.get("enableServiceLinks") is False:
        return {}
    names = [each["metadata"]["name"].upper().replace("-", "_") for each in objects("Service")]
    return {f"{name}_PORT": "tcp://10.0.0.1:80" for name in names} | {
        f"{name}_SERVICE_HOST": "10.0.0.1" for name in names
    }


def ray_pin() -> str:
    lock = (ROOT / "requirements/lock.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^ray==(\S+)", lock, re.M)
    return str(version)


@pytest.fixture(scope="module")
def schema() -> Object:
    return ray_cluster_schema()


def test_the_objects_of_kubernetes_own_kinds_are_valid() -> None:
    for kind in ("ConfigMap", "Deployment", "Service"):
        for each in objects(kind):
            kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_the_ray_cluster_is_valid_for_kuberay(schema: Object) -> None:
    jsonschema.validate(ray_cluster(), schema)


def test_ray_has_the_version_of_the_images_and_asks_for_a_token() -> None:
    spec = ray_cluster()["spec"]
    assert spec["rayVersion"] == ray_pin()
    assert spec["authOptions"] == {"mode": "token"}


def test_no_container_is_root_or_can_become_it() -> None:
    for name, spec in pod_specs().items():
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
        security = container(name)["securityContext"]
        assert security["allowPrivilegeEscalation"] is False, name
        assert security["capabilities"] == {"drop": ["ALL"]}, name


def test_our_pods_run_as_the_user_of_the_images() -> None:
    for name, image in {"kvasir-router": "router", "head": "replica-cpu", "workers": "replica-cpu"}.items():
        security = pod_specs()[name]["securityContext"]
        user = only(last_stage(ROOT / f"deploy/images/{image}.Dockerfile"), "USER")
        assert f"{security['runAsUser']}:{security['runAsGroup']}" == user
        assert container(name)["image"].partition(":")[0].endswith(f"/{image}")


def test_probes_ask_ports_that_the_containers_have() -> None:
    for name in pod_specs():
        ports = {port["name"] for port in container(name)["ports"]}
        for probe in ("readinessProbe", "livenessProbe"):
            asked = container(name)[probe]
            port = (asked.get("tcpSocket") or asked.get("httpGet") or {}).get("port")
            assert port is None or port in ports, name


def test_services_lead_to_pods() -> None:
    for service in objects("Service"):
        (deployment,) = [
            each
            for each in objects("Deployment")
            if each["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
        ]
        names = {port["name"] for port in container(deployment["metadata"]["name"])["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


def test_what_pods_mount_is_there() -> None:
    config_maps = {each["metadata"]["name"] for each in objects("ConfigMap")}
    for name, spec in pod_specs().items():
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        assert {mount["name"] for mount in container(name).get("volumeMounts", ())} == set(volumes), name
        for volume in volumes.values():
            assert "configMap" not in volume or volume["configMap"]["name"] in config_maps
            secret = volume.get("secret", {}).get("secretName")
            assert secret is None or f"create secret generic {secret} " in MANIFEST.read_text(
                encoding="utf-8"
            )


def test_the_fleet_is_one_that_fits_the_cluster_and_shares_redis_with_the_routers() -> None:
    (config_map,) = objects("ConfigMap")
    (redis_url,) = re.findall(r'REDIS_URL="([^"]+)" kvasir', MANIFEST.read_text(encoding="utf-8"))
    fleet = parse_fleet(
        config_map["data"]["fleet.yaml"], redis_url=redis_url.replace("$REDIS_PASSWORD", "pass")
    )
    (pool,) = fleet.pools
    (group,) = ray_cluster()["spec"]["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    num_cpus = group["replicas"] * float(group["rayStartParams"]["num-cpus"])
    assert pool.num_replicas * pool.num_cpus <= num_cpus
    grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert pool.drain_seconds is not None
    assert pool.drain_seconds < RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S < grace
    variables = {
        each["name"]: each.get("value", "pass").replace("$(REDIS_PASSWORD)", "pass")
        for each in container("kvasir-router")["env"]
    }
    variables |= service_links(pod_specs()["kvasir-router"])
    router = load_settings(
        RouterConfig,
        arguments=(),
        environment=environment(ROOT / "deploy/images/router.Dockerfile") | variables,
        prefix=ENVIRONMENT_PREFIX,
        program="",
        description="",
    )
    assert pool.replica.redis_url == router.redis_url == "redis://:pass@kvasir-redis:6379/0"
    (mount,) = container("kvasir-router")["volumeMounts"]
    assert router.secret_file is not None
    assert Path(router.secret_file).parent == Path(mount["mountPath"])
    assert fleet.secret_file == router.secret_file
    for name in ("head", "workers"):
        assert mount in container(name)["volumeMounts"]
    assert f"--from-literal={Path(router.secret_file).name}=" in MANIFEST.read_text(encoding="utf-8")
    sleep = container("kvasir-router")["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert router.drain_seconds + sleep < pod_specs()["kvasir-router"]["terminationGracePeriodSeconds"]


def test_ray_up_understands_the_cluster_of_bare_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((ROOT / "deploy/ray-cluster.yaml").read_text(encoding="utf-8"))
    understood = prepare_config(config)
    validate_config(understood)
    (node_type,) = understood["available_node_types"].values()
    assert node_type["min_workers"] == node_type["max_workers"] == len(config["provider"]["worker_ips"])
