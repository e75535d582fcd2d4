"""deploy/compose.yaml runs: its own images as they are built, Valkey and Debian's Prometheus for the others.

Networks are namespaces, limits of memory and CPU are not tried, and Grafana is left out: its server is in no
package index.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.deploy.compose import REPLICAS, dockerfile
from tests.deploy.compose_cluster import ComposeCluster, compose_cluster
from tests.deploy.dockerfile import command, last_stage
from tests.deploy.images import Image, ImageStore
from tests.integration.observe import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.images, pytest.mark.timeout(900)]

PROMPT = "Tell me what a cache is. " * 30


@pytest.fixture(scope="module")
def cluster(
    project: dict[str, Any],
    images: ImageStore,
    router_image: Image,
    replica_image: Image,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ComposeCluster]:
    """Started as depends_on says, each when those that it needs find themselves healthy. A router that is
    healthy need not have met the replicas yet."""
    built = {"router": router_image, "replica-cpu": replica_image}
    folder = tmp_path_factory.mktemp("compose")
    with compose_cluster(project, images, built, folder) as cluster:
        cluster.start("redis", *REPLICAS)
        for name in REPLICAS:
            wait_until(lambda name=name: is_healthy(cluster, project, name), name, seconds=120)
        cluster.start("router", "prometheus")
        wait_until(lambda: is_healthy(cluster, project, "router"), "the router", seconds=60)
        wait_until(lambda: knows_both(cluster), "the router to know both replicas", seconds=60)
        yield cluster


def is_healthy(cluster: ComposeCluster, project: dict[str, Any], name: str) -> bool:
    """What the health check of its image says."""
    words = command(last_stage(dockerfile(project["services"][name])), "HEALTHCHECK")
    return cluster.containers[name].run(*words).returncode == 0


def knows_both(cluster: ComposeCluster) -> bool:
    answer = get(cluster, "router", 8000, "/ready")
    return answer.status_code == 200 and answer.json()["num_replicas"] == len(REPLICAS)


def get(cluster: ComposeCluster, name: str, port: int, path: str) -> "httpx.Response":
    machine = cluster.containers[name].machine
    with machine.network():
        return httpx.get(f"http://{machine.address}:{port}{path}", timeout=10)


def complete(cluster: ComposeCluster, prompt: str) -> "httpx.Response":
    machine = cluster.containers["router"].machine
    body = {"prompt": prompt, "max_tokens": 4, "model": "toy_model"}
    with machine.network():
        return httpx.post(f"http://{machine.address}:8000/v1/completions", json=body, timeout=60)


def test_prompts_are_answered_and_the_second_finds_the_firsts_blocks(cluster: ComposeCluster) -> None:
    first, second = complete(cluster, PROMPT), complete(cluster, PROMPT)
    assert first.status_code == 200, first.text
    assert first.headers["x-kvasir-replica"] in REPLICAS
    assert second.headers["x-kvasir-replica"] == first.headers["x-kvasir-replica"]
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_the_router_knows_both_replicas_by_their_names(cluster: ComposeCluster) -> None:
    metrics = get(cluster, "router", 8001, "/metrics").text
    for name in REPLICAS:
        assert f'replica="{name}"' in metrics


def test_prometheus_reaches_every_target_of_the_file_that_is_mounted(cluster: ComposeCluster) -> None:
    def targets() -> dict[str, str]:
        found = get(cluster, "prometheus", 9090, "/api/v1/targets").json()["data"]["activeTargets"]
        return {each["labels"]["instance"]: each["health"] for each in found}

    everyone = {"router:8001", *(f"{name}:9100" for name in REPLICAS)}
    wait_until(lambda: is_listening(cluster), "Prometheus", seconds=30)
    wait_until(lambda: set(targets().values()) == {"up"}, "its targets", seconds=60)
    assert set(targets()) == everyone


def test_prometheus_evaluates_the_rules_that_are_mounted(cluster: ComposeCluster) -> None:
    def health() -> list[str]:
        groups = get(cluster, "prometheus", 9090, "/api/v1/rules").json()["data"]["groups"]
        return [rule["health"] for group in groups for rule in group["rules"]]

    wait_until(lambda: is_listening(cluster), "Prometheus", seconds=30)
    wait_until(lambda: health() != [] and "unknown" not in health(), "the rules' first round", seconds=60)
    assert set(health()) == {"ok"}


def test_containers_write_only_where_the_file_lets_them(cluster: ComposeCluster) -> None:
    for name in ("router", *REPLICAS):
        container = cluster.containers[name]
        assert container.run("id", "-u").stdout.strip() == "10001"
        for path in ("/app/new", "/home/kvasir/new", "/run/secrets/new"):
            assert container.run("touch", path).returncode != 0, (name, path)
        assert container.run("touch", "/tmp/new").returncode == 0, name


@pytest.mark.parametrize("name", ["router", "replica-0"])
def test_a_container_that_is_told_to_stop_ends_in_the_time_that_it_has(
    cluster: ComposeCluster, name: str
) -> None:
    assert cluster.stop(name) == 0


def is_listening(cluster: ComposeCluster) -> bool:
    try:
        return get(cluster, "prometheus", 9090, "/-/ready").status_code == 200
    except httpx.TransportError:
        return False
