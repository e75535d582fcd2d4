"""A local cluster with two routers on one port, each a process of its own."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.local.processes import named_children
from tests.cluster.commands.test_status import row
from tests.cluster.kvasir_command import KvasirCommand, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvasirCommand]:
    command = KvasirCommand(tmp_path_factory.mktemp("routers") / "run")
    with command.up("--replicas", "1", "--routers", "2"):
        yield command


def routers(command: KvasirCommand) -> dict[str, int]:
    return named_children(command.state().router_pid)


def complete(command: KvasirCommand) -> int:
    body = {"model": "toy_model", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}
    url = f"{command.state().router_url}/v1/chat/completions"
    return httpx.post(url, json=body, trust_env=False, timeout=60).status_code


def test_each_router_has_a_page_and_metrics_of_its_own(running: KvasirCommand) -> None:
    pages = running.state().router_pages
    assert len(pages) == 2
    said = running.directory.path.parent / "up.out"
    wait_until(
        lambda: all(f"page       {page}/" in said.read_text() for page in pages), lambda: said.read_text()
    )
    names = {
        httpx.get(f"{page}/live/state", trust_env=False, timeout=60).json()["router"]["name"]
        for page in pages
    }
    assert {int(name.rpartition(" ")[2]) for name in names} == set(routers(running).values())
    targets = [
        target
        for group in json.loads(running.directory.targets_file.read_text())
        if group["labels"]["job"] == "kvasir-router"
        for target in group["targets"]
    ]
    assert [f"http://{target}" for target in targets] == [*pages]
    assert all(httpx.get(f"{page}/metrics", trust_env=False, timeout=60).is_success for page in pages)


def test_status_explain_where_and_chat_work_with_two_routers(running: KvasirCommand) -> None:
    status = running.run("status").stdout
    for name, pid in routers(running).items():
        assert f"{name}  pid {pid}" in status
    explained = running.run("explain", "--json", "Tell me a story about a cat. " * 20)
    assert explained.returncode == 0, explained.stderr
    found = running.run("where", "Tell me a story about a cat. " * 20)
    assert found.returncode == 0, found.stderr
    assert "replica-0" in found.stdout
    chat = running.run("chat", "--max-tokens", "2", stdin="Hello\n/quit\n")
    assert chat.returncode == 0, chat.stderr


def test_a_killed_router_is_replaced_and_requests_go_on_meanwhile(running: KvasirCommand) -> None:
    before = routers(running)
    os.kill(before["router-1"], signal.SIGKILL)
    for _ in range(20):
        assert complete(running) == 200
    wait_until(
        lambda: routers(running).get("router-1", before["router-1"]) != before["router-1"],
        lambda: str(routers(running)),
    )
    assert routers(running)["router-0"] == before["router-0"]


@pytest.mark.slow  # Ray and two replicas start anew, twice
def test_a_killed_raylet_comes_back_and_new_replicas_take_over_from_those_that_serve_on(
    running: KvasirCommand,
) -> None:
    (before,) = running.state().replicas
    raylet = named_children(running.state().pid)["raylet"]
    os.kill(raylet, signal.SIGKILL)

    def is_replaced() -> bool:
        assert complete(running) == 200, "somebody serves all the while"
        replicas = running.state().replicas
        return [each.state for each in replicas] == ["ready"] and replicas[0].pid != before.pid

    said = running.directory.path.parent / "up.out"

    def outlives_it() -> bool:
        is_told = str(before.metrics_address) in running.directory.targets_file.read_text()
        return running.state().replicas[0].state != "ready" and is_told

    wait_until(outlives_it, lambda: said.read_text(), 60)
    assert row(running.run("status").stdout, before.replica_id)[1] == "ready", "it serves on"
    wait_until(is_replaced, lambda: said.read_text(), 300)
    assert "Ray's raylet ended" in said.read_text()
    assert before.pid is not None
    wait_until(lambda: not Path(f"/proc/{before.pid}").exists(), lambda: "the old replica is still there")
    (now,) = running.state().replicas
    assert now.pid is not None
    raylet = psutil.Process(now.pid).parent()
    assert raylet is not None
    (told,) = [word for word in raylet.cmdline() if word.startswith("--dashboard_agent_listen_port=")]
    assert int(told.partition("=")[2]), "else it ends unless an agent starts within 15 s"
    raylet.kill()
    wait_until(lambda: said.read_text().count("Ray's raylet ended") == 2, lambda: said.read_text())
    until = time.monotonic() + 4.0  # Ray's workers look after their raylet every second
    while time.monotonic() < until:
        assert psutil.pid_exists(now.pid), "a replica outlives every raylet, not the first alone"
        assert complete(running) == 200
    os.kill(now.pid, signal.SIGKILL)
    wait_until(
        lambda: (
            [each.pid for each in running.state().replicas if each.state == "ready"] not in ([], [now.pid])
        ),
        lambda: said.read_text(),
    )


def test_the_parent_of_the_routers_may_die_too(running: KvasirCommand) -> None:
    parent, page = running.state().router_pid, running.state().router_pages[1]
    assert parent is not None
    os.kill(parent, signal.SIGKILL)
    wait_until(lambda: running.state().router_pid != parent, lambda: str(running.state()))
    wait_until(lambda: is_ready(page), lambda: f"{page} is not ready")
    assert complete(running) == 200


def is_ready(page: str) -> bool:
    try:
        return httpx.get(f"{page}/ready", trust_env=False, timeout=60).is_success
    except httpx.HTTPError:
        return False


def test_all_of_it_ends_with_up(running: KvasirCommand) -> None:
    """Last in this file."""
    down = running.run("down")
    assert down.returncode == 0, down.stderr
    assert running.leftovers() == []
