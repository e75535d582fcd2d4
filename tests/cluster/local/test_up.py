"""A local cluster as a whole: real Ray, real Redis, real router, simulated engines."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.local.ray_head import RAY_ENVIRONMENT, TOKEN_PATH
from cluster.registry import Registry, read_registry
from tests.cluster.kvasir_command import KvasirCommand, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvasirCommand]:
    command = KvasirCommand(tmp_path_factory.mktemp("running") / "run")
    with command.up("--replicas", "2"):
        yield command


def output(command: KvasirCommand) -> str:
    return (command.directory.path.parent / "up.out").read_text()


def epochs(command: KvasirCommand) -> dict[str, str | None]:
    return {
        replica.replica_id: replica.epoch for replica in command.state().replicas if replica.state == "ready"
    }


def complete(command: KvasirCommand) -> httpx.Response:
    body = {"model": "toy_model", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}
    url = f"{command.state().router_url}/v1/chat/completions"
    return httpx.post(url, json=body, trust_env=False, timeout=60)


def test_up_says_what_runs_where_and_what_to_try(running: KvasirCommand) -> None:
    said, state = output(running), running.state()
    for stage in ("Redis", "Ray", "replicas", "router"):
        assert stage in said
    for replica in state.replicas:
        assert f"{replica.replica_id}  {replica.address}  pid {replica.pid}  epoch {replica.epoch}" in said
    assert f"curl {state.router_url}/v1/chat/completions" in said
    assert f"./kvasir chat --run-dir {running.directory.path}\n" in said


def test_a_request_goes_to_a_replica(running: KvasirCommand) -> None:
    response = complete(running)
    assert response.status_code == 200, response.text
    assert response.headers["x-kvasir-replica"] in epochs(running)


def scraped(command: KvasirCommand) -> dict[str, str]:
    """Every target's metrics, by its job and replica."""
    groups = json.loads(command.directory.targets_file.read_text())
    return {
        group["labels"]["job"] + group["labels"].get("replica", ""): httpx.get(
            f"http://{target}/metrics", trust_env=False, timeout=60
        ).text
        for group in groups
        for target in group["targets"]
    }


def test_one_file_says_where_everybodys_metrics_are(running: KvasirCommand) -> None:
    assert str(running.directory.targets_file) in output(running)
    found = scraped(running)
    assert set(found) == {
        *("kvasir-router", "kvasir-controller"),
        *("kvasir-replicareplica-0", "kvasir-replicareplica-1"),
    }
    line = 'router_replica_requests{replica="replica-1"} 0.0'
    wait_until(lambda: line in scraped(running)["kvasir-router"], lambda: f"no {line}")
    assert "replica_lease_renewals_total" in found["kvasir-replicareplica-1"]
    named = 'replica_info{engine="simulated",model="toy_model",replica_id="replica-1"} 1.0'
    assert named in found["kvasir-replicareplica-1"]
    for line in (
        'fleet_replicas{pool="replica",state="ready"} 2.0',
        'fleet_replicas_desired{pool="replica"} 2.0',
        'fleet_replica_starts_total{pool="replica"} 2.0',
        'fleet_replica_start_seconds_count{pool="replica"} 2.0',
        "fleet_ray_nodes 1.0",
    ):
        wait_until(lambda line=line: line in scraped(running)["kvasir-controller"], lambda: f"no {line}")  # type: ignore[misc]  # noqa: B023


def test_status_shows_every_replica_with_its_blocks(running: KvasirCommand) -> None:
    shown = running.run("status")
    assert shown.returncode == 0, shown.stderr
    header, *rows = shown.stdout.splitlines()
    assert header.split()[:5] == ["REPLICA", "STATE", "EPOCH", "PID", "ADDRESS"]
    for row, replica in zip(rows, running.state().replicas, strict=False):
        assert row.split()[:5] == [
            replica.replica_id,
            "ready",
            replica.epoch,
            str(replica.pid),
            replica.address,
        ]
        assert "/8192" in row
    assert running.state().router_url in shown.stdout
    assert running.state().redis_url in shown.stdout


def test_chat_streams_an_answer_and_says_what_it_cost(running: KvasirCommand) -> None:
    chat = running.run(
        "chat", "--max-tokens", "4", stdin="Tell me a story about a cat that sails\nGo on\n/quit\n"
    )
    assert chat.returncode == 0, chat.stderr
    costs = [line for line in chat.stdout.splitlines() if " · prompt " in line]
    assert len(costs) == 2
    assert all(line.startswith("replica-") and "TTFT" in line for line in costs)
    assert "cached 0," not in costs[1], "the second turn reads what the first has written"


def test_a_second_up_is_refused_and_says_why(running: KvasirCommand) -> None:
    second = running.run("up", "--port", "0")
    assert second.returncode == 2
    assert second.stderr.startswith("kvasir: a cluster already runs in ")
    assert second.stderr.count("\n") == 1
    assert running.is_ready()


def test_a_killed_replica_comes_back_under_its_name_with_a_new_epoch(running: KvasirCommand) -> None:
    before = epochs(running)
    victim = running.state().replicas[0]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    wait_until(
        lambda: epochs(running).get(victim.replica_id, victim.epoch) != victim.epoch,
        lambda: output(running),
    )
    other = running.state().replicas[1].replica_id
    assert epochs(running)[other] == before[other], "the other one has not even noticed"
    assert complete(running).status_code == 200


def test_a_killed_controller_finds_the_replicas_again_and_starts_none_twice(running: KvasirCommand) -> None:
    before, controller = epochs(running), running.pid_of("ray::FleetController")
    os.kill(controller, signal.SIGKILL)
    wait_until(lambda: output(running).count("which runs already") >= 2, lambda: output(running))
    wait_until(lambda: epochs(running) == before, lambda: f"{before} → {epochs(running)}")
    victim = running.state().replicas[0]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    wait_until(
        lambda: epochs(running).get(victim.replica_id, victim.epoch) != victim.epoch,
        lambda: output(running),
    )


RESIZE = """
import sys, ray
from cluster.controller.actors import CONTROLLER_NAME, NAMESPACE
ray.init(address=sys.argv[1], namespace=NAMESPACE, _node_ip_address="127.0.0.10", log_to_driver=False)
controller = ray.get_actor(CONTROLLER_NAME)
assert ray.get(controller.scale.remote("replica", int(sys.argv[2]))) is None
"""


def resize(command: KvasirCommand, num_replicas: int) -> None:
    arguments = [sys.executable, "-P", "-c", RESIZE, command.state().ray_address, str(num_replicas)]
    token = {TOKEN_PATH: str(command.directory.ray_token_file)}
    subprocess.run(arguments, check=True, env=command.environment | RAY_ENVIRONMENT | token)


def test_a_smaller_fleet_drains_the_surplus_and_a_larger_one_brings_it_back(running: KvasirCommand) -> None:
    before = epochs(running)
    resize(running, 1)
    wait_until(lambda: len(running.state().replicas) == 1, lambda: output(running))
    assert epochs(running) == {"replica-0": before["replica-0"]}
    assert "drain: replica-1 is surplus" in output(running)
    resize(running, 2)
    wait_until(lambda: len(epochs(running)) == 2, lambda: output(running))
    assert epochs(running)["replica-1"] != before["replica-1"]
    assert "died" not in output(running).rsplit("drain: replica-1", 1)[1], "drained on purpose is not dead"


def test_a_killed_router_and_a_killed_redis_come_back_on_their_ports(running: KvasirCommand) -> None:
    state = running.state()
    assert state.router_pid is not None
    assert state.redis_pid is not None
    os.kill(state.router_pid, signal.SIGKILL)
    os.kill(state.redis_pid, signal.SIGKILL)
    wait_until(lambda: running.state().router_pid != state.router_pid, lambda: output(running))
    wait_until(lambda: running.state().redis_pid != state.redis_pid, lambda: output(running))
    wait_until(lambda: serves(running), lambda: output(running))
    assert running.state().router_url == state.router_url


def serves(command: KvasirCommand) -> bool:
    try:
        return complete(command).status_code == 200
    except httpx.HTTPError:
        return False


def test_what_a_killed_up_leaves_behind_is_cleared_away_by_down(running: KvasirCommand) -> None:
    os.kill(running.state().pid, signal.SIGKILL)
    down = running.run("down")
    assert down.returncode == 0, down.stderr
    assert running.leftovers() == []
    again = running.run("down")
    nothing = f"No cluster runs in {running.directory.path}.\n"
    assert (again.returncode, again.stdout) == (0, nothing)


def test_ctrl_c_ends_all_of_it_and_signs_off_from_a_redis_that_stays(tmp_path: Path, redis_url: str) -> None:
    command = KvasirCommand(tmp_path / "run", {"REDIS_URL": redis_url})
    with command.up("--replicas", "1") as process:
        assert list(read_registry(redis_url).records) == ["replica-0"]
        os.killpg(process.pid, signal.SIGINT)  # a terminal tells the whole group
        assert process.wait(120) == 0
        assert command.leftovers() == []
        assert read_registry(redis_url) == Registry({})
        assert command.directory.read_state() is None
        assert not command.directory.ray_directory.exists()
    assert command.run("status").returncode == 1


def test_a_bad_model_ends_up_with_the_replicas_own_sentence(tmp_path: Path) -> None:
    command = KvasirCommand(tmp_path / "run")
    up = command.run("up", "--port", "0", "--engine", "simulated", "--model", str(tmp_path / "nothing"))
    assert up.returncode == 2
    assert str(tmp_path / "nothing") in up.stderr
    assert "Traceback" not in up.stderr
    assert command.leftovers() == []


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    command = KvasirCommand(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        up = command.run("up", "--port", str(taken.getsockname()[1]))
    assert up.returncode == 2
    assert (up.stdout, up.stderr.count("\n")) == ("", 1)
    assert "cannot listen on 127.0.0.1 port" in up.stderr


@pytest.mark.slow
def test_some_replicas_compute_prompts_for_others_if_up_is_asked_to(tmp_path: Path) -> None:
    command = KvasirCommand(tmp_path / "run")
    with command.up("--engine", "torch", "--replicas", "3", "--prefill", "1"):
        roles = {"decode-0": "decode", "decode-1": "decode", "prefill-0": "prefill"}
        assert {entry.replica_id: entry.role for entry in command.state().replicas} == roles
        url = f"{command.state().router_url}/live/state"

        def live_roles() -> dict[str, str]:
            live = httpx.get(url, trust_env=False, timeout=60).json()
            return {each["id"]: each["role"] for each in live["replicas"]}

        wait_until(lambda: live_roles() == roles, lambda: f"{live_roles()}")
        live = httpx.get(url, trust_env=False, timeout=60).json()
        assert all(tier["max_bytes"] > 2**27 for each in live["replicas"] for tier in each["tiers"])
        said = output(command)
        assert all(f"role {role}" in said for role in roles.values())
        assert "ROLE" in command.run("status").stdout
        for log in command.directory.logs.glob("*-0.log"):
            assert "no prompt is split" not in log.read_text()
        assert complete(command).status_code == 200


@pytest.mark.slow
def test_kv_on_disk_is_found_by_the_next_cluster_in_the_same_directory(tmp_path: Path) -> None:
    command = KvasirCommand(tmp_path / "run")
    text = "A prompt that is long enough to make some chunks of KV. " * 30
    body = {"model": "toy_model", "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
    words = ("--engine", "torch", "--replicas", "1", "--ram", "16MiB", "--disk", "64MiB")
    said = "16 MiB of memory and 64 MiB of disk in "
    cached = []
    for _ in range(2):
        with command.up(*words):
            wait_until(lambda: said in output(command), lambda: output(command), 30)
            url = f"{command.state().router_url}/v1/chat/completions"
            usage = httpx.post(url, json=body, trust_env=False, timeout=60).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            assert command.run("down").returncode == 0
    assert cached == [0, usage["prompt_tokens"] // 128 * 128]
    kept = list((command.directory.kv_directory / "replica-0").rglob("*.kv"))
    assert len(kept) == usage["prompt_tokens"] // 128
    assert {file.stat().st_mode & 0o777 for file in kept} == {0o600}
