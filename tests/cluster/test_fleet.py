"""A fleet on a Ray cluster of several machines: the real command, controller, replicas, router and clients.

The tests follow each other on one fleet of two models, as a day with it would.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml

from cluster.processes import MARK, find_marked, kill_marked
from cluster.ray_head import RAY_ENVIRONMENT
from replicas.protocol.keys import BLOCKS_MARKER, PREFIX
from replicas.toy_model import toy_model_path
from tests.cluster.kvasir_command import COMMAND, wait_until
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
NUM_MACHINES = 3
SECONDS = 120.0
MODELS = ("alpha", "beta")

QUICK_TO_NOTICE = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_timeout_ms_task_wait_for_death_info": "200",
}


class Fleet:
    def __init__(self, folder: Path, ray_folder: Path, redis_url: str, environment: dict[str, str]) -> None:
        self.folder = folder
        self.ray_folder = ray_folder
        self.redis_url = redis_url
        self.environment = environment
        self.address = ""
        self.router_url = ""
        self.machines: subprocess.Popen[str] | None = None

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*COMMAND, "fleet", *words, "--address", self.address],
            **{"capture_output": True, "text": True, "timeout": SECONDS, "check": False},
            env=self.environment,
        )

    def do(self, *words: str) -> str:
        done = self.run(*words)
        assert done.returncode == 0, "\n".join((done.stdout, done.stderr, *self.controller_log()[-60:]))
        return done.stdout

    def apply(self, *pools: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
        file = self.folder / "fleet.yaml"
        file.write_text(yaml.safe_dump({"redis_url": self.redis_url, "pools": list(pools)}))
        return self.run("apply", str(file))

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.do("status", "--json"))
        return status

    def ready(self) -> dict[str, dict[str, Any]]:
        replicas = self.status()["replicas"]
        return {entry["replica_id"]: entry for entry in replicas if entry["state"] == "ready"}

    def kill_machine(self, number: int) -> None:
        assert self.machines is not None
        assert self.machines.stdin is not None
        assert self.machines.stdout is not None
        self.machines.stdin.write(f"kill {number}\n")
        self.machines.stdin.flush()
        assert self.machines.stdout.readline() == "killed\n"

    def controller_log(self) -> list[str]:
        """What controllers have said, with the time."""
        files = sorted(self.ray_folder.glob("session_latest/logs/worker-*.err"))
        return [
            line for file in files for line in file.read_text().splitlines() if "cluster.controller" in line
        ]

    def ask(self, model: str, prompt: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 24}
        url = f"{self.router_url}/v1/chat/completions"
        return httpx.post(url, json=body | fields, timeout=60, trust_env=False)

    def explain(self, model: str, prompt: str) -> dict[str, Any]:
        body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
        url = f"{self.router_url}/explain/v1/chat/completions"
        answer = httpx.post(url, json=body, timeout=60, trust_env=False)
        explained: dict[str, Any] = answer.json()["prompts"][0] if answer.status_code == 200 else {}
        return explained

    @contextmanager
    def clients(self, model: str, count: int = 4) -> Iterator[Counter[str]]:
        """They ask all the time. What became of it, by status and replica; the last is awaited."""
        outcomes: Counter[str] = Counter()
        over = threading.Event()

        def ask(client: int) -> None:
            number = 0
            while not over.is_set():
                number += 1
                try:
                    answer = self.ask(model, f"{client} asks for the {number}th time about a cat")
                    failed = answer.status_code != 200 or not answer.json()["usage"]["completion_tokens"]
                    outcomes[f"{answer.status_code} {answer.text}" if failed else "ok"] += 1
                    outcomes[answer.headers.get("x-kvasir-replica", "nobody")] += 1
                except httpx.HTTPError as error:
                    outcomes[repr(error)] += 1

        threads = [threading.Thread(target=ask, args=(client,)) for client in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield outcomes
        finally:
            over.set()
            for thread in threads:
                thread.join()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    ray_folder = Path("/tmp") / f"kvasir-fleet-test-{os.getpid()}"
    environment = {key: value for key, value in os.environ.items() if key not in ("REDIS_URL", "RAY_ADDRESS")}
    environment |= {**RAY_ENVIRONMENT, **QUICK_TO_NOTICE, MARK: str(folder), "OMP_NUM_THREADS": "1"}
    (folder / "logs").mkdir()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, ray_folder, ignore_errors=True)
        stack.callback(kill_marked, folder, ray_folder)
        server = RedisServer()
        server.start()
        stack.callback(server.close)
        running = Fleet(folder, ray_folder, server.url, environment)
        log = stack.enter_context((folder / "logs" / "all.log").open("w"))
        running.machines = machines = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.ray_machines", str(ray_folder), str(NUM_MACHINES)],
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True},
            **{"env": environment, "cwd": ROOT},
        )
        assert machines.stdin is not None
        assert machines.stdout is not None
        stack.callback(machines.wait)
        stack.callback(machines.kill)
        stack.enter_context(machines.stdin)
        stack.enter_context(machines.stdout)
        running.address = machines.stdout.readline().strip()
        port = free_port()
        running.router_url = f"http://127.0.0.1:{port}"
        router = subprocess.Popen(
            [sys.executable, "-m", "router", "--port", str(port), "--redis-url", server.url],
            **{"env": environment, "cwd": ROOT, "stdout": log, "stderr": log},
        )
        stack.callback(router.wait)
        stack.callback(router.kill)
        yield running


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def pool(name: str, model: Path, replicas: int, **settings: Any) -> dict[str, Any]:
    settings = {"engine": "simulated", "model": str(model), "model_name": name, "num_blocks": 4096} | settings
    return {
        **{"name": name, "replicas": replicas, "settings": settings, "drain_seconds": 20},
        "resources": {"cpus": 0.1, "custom": {"slot": 1}},
    }


@pytest.fixture(scope="module")
def pools(fleet: Fleet) -> list[dict[str, Any]]:
    """Two models: the one that ships, and one that differs from it in a comment of its template."""
    other = fleet.folder / "other"
    shutil.copytree(toy_model_path(), other, ignore=shutil.ignore_patterns("*.py", "corpus", "__pycache__"))
    template = other / "chat_template.jinja"
    template.write_text("{#- another model -#}" + template.read_text())
    return [pool("alpha", toy_model_path(), 2), pool("beta", other, 1)]


def wait_routed(fleet: Fleet, expected: Callable[[set[str]], bool]) -> None:
    """Until the router knows those replicas."""

    def known() -> set[str]:
        try:
            orders = [fleet.explain(model, "Hello").get("affinity_order", []) for model in MODELS]
            return {replica_id for order in orders for replica_id in order}
        except httpx.HTTPError:
            return set()

    wait_until(lambda: expected(known()), lambda: str(known()), SECONDS)


def test_apply_starts_what_the_file_says_wherever_there_is_room(
    fleet: Fleet, pools: list[dict[str, Any]]
) -> None:
    applied = fleet.apply(*pools)
    assert applied.returncode == 0, applied.stdout + applied.stderr
    assert applied.stdout.splitlines()[-1] == "ready: alpha 2, beta 1"
    ready = fleet.ready()
    assert sorted(ready) == ["alpha-0", "alpha-1", "beta-0"]
    hosts = {entry["address"].rpartition(":")[0] for entry in ready.values()}
    assert hosts <= {"127.0.0.11", "127.0.0.12", "127.0.0.13"}, "replicas listen where Ray has put them"
    assert len(hosts) > 1, "one machine has two slots"
    wait_routed(fleet, lambda known: known == set(ready))


STORY = "Tell me a story about a cat that sails, a dog that sings, and the long way home. " * 8


def test_two_models_never_share_a_block_a_bucket_or_a_queue(fleet: Fleet) -> None:
    answers = [fleet.ask(model, STORY) for model in ("alpha", "alpha", "beta", "beta")]
    cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert (cached[0], cached[2]) == (0, 0), "the first of each model finds nothing of the other's"
    assert cached[1] > 0
    assert cached[3] > 0
    assert [answer.headers["x-kvasir-replica"].split("-")[0] for answer in answers] == [
        *("alpha", "alpha", "beta", "beta")
    ]
    alpha, beta = (fleet.explain(model, STORY) for model in MODELS)
    assert alpha["bucket"] != beta["bucket"]
    assert not set(alpha["affinity_order"]) & set(beta["affinity_order"])
    assert not hashes(alpha) & hashes(beta)
    with redis.Redis.from_url(fleet.redis_url, protocol=2) as client:
        stored = {
            model: set().union(*map(client.smembers, client.keys(f"{PREFIX}:{{{model}}}:blocks:*")))
            for model in MODELS
        }
    assert stored["alpha"] & stored["beta"] == {BLOCKS_MARKER}
    assert hashes(alpha) & stored["alpha"]
    assert hashes(beta) & stored["beta"]


def hashes(explained: dict[str, Any]) -> set[bytes]:
    return {bytes.fromhex(entry["hash"]) for entry in explained["block_hashes"]}


def assert_none_failed(outcomes: Counter[str]) -> None:
    others = {name for name in outcomes if name != "ok" and not name.startswith("alpha-")}
    assert not others, outcomes
    assert outcomes["ok"] > 0


def test_more_than_the_cluster_can_hold_is_refused_before_anything_is_touched(fleet: Fleet) -> None:
    before = fleet.ready()
    refused = fleet.run("scale", "alpha", "6")
    assert refused.returncode == 2
    assert refused.stderr == (
        "kvasir: the cluster cannot hold 6 replicas of pool alpha: each asks for 0.1 CPU, 1 slot, "
        "and there is room for 5\n"
    )
    assert fleet.ready() == before


def test_a_pool_grows_and_shrinks_without_a_failed_request(fleet: Fleet) -> None:
    before = fleet.ready()
    assert "ready: alpha 4, beta 1" in fleet.do("scale", "alpha", "4")
    assert len({entry["address"].rpartition(":")[0] for entry in fleet.ready().values()}) == NUM_MACHINES
    wait_routed(fleet, lambda known: len(known) == 5)
    with fleet.clients("alpha") as outcomes:
        wait_until(lambda: len(set(outcomes) - {"ok"}) > 1, lambda: str(outcomes))
        assert "ready: alpha 1, beta 1" in fleet.do("scale", "alpha", "1")
    assert_none_failed(outcomes)
    after = fleet.ready()
    assert sorted(after) == ["alpha-0", "beta-0"]
    assert after["alpha-0"]["epoch"] == before["alpha-0"]["epoch"], "those that stay do not notice"


def test_a_pool_that_scales_itself_follows_its_load(fleet: Fleet, pools: list[dict[str, Any]]) -> None:
    scaling = {"min": 1, "max": 2, "target_in_flight": 2, "up_seconds": 1, "down_seconds": 2}
    alpha, beta = (json.loads(json.dumps(pool)) for pool in pools)
    applied = fleet.apply(alpha | {"replicas": 1}, beta | {"autoscaling": scaling})
    assert applied.returncode == 0, applied.stdout + applied.stderr
    with fleet.clients("beta", count=8):
        wait_until(lambda: "beta-1 is ready" in said(fleet), lambda: said(fleet), SECONDS)
    wait_until(lambda: "beta-1 has ended" in said(fleet), lambda: said(fleet), SECONDS)
    assert "tokens ask for 2 replicas" in said(fleet)
    assert fleet.apply(alpha | {"replicas": 1}, beta).returncode == 0
    assert sorted(fleet.ready()) == ["alpha-0", "beta-0"]


def said(fleet: Fleet) -> str:
    return "\n".join(fleet.controller_log())


def test_a_rollout_under_load_replaces_every_replica_without_a_failed_request(fleet: Fleet) -> None:
    fleet.do("scale", "alpha", "2")
    before = fleet.ready()
    with fleet.clients("alpha") as outcomes:
        done = fleet.do("rollout", "alpha", "--set", "max_running=99")
    assert "ready: alpha 2, beta 1" in done
    assert_none_failed(outcomes)
    after = fleet.ready()
    assert len(after) == 3
    revisions = {entry["revision"] for name, entry in after.items() if name.startswith("alpha")}
    assert len(revisions) == 1
    assert revisions != {before["alpha-0"]["revision"]}
    assert after["beta-0"] | {"load": None} == before["beta-0"] | {"load": None}, "the other pool stays"


def test_a_rollout_that_does_not_start_stops_and_the_old_replicas_serve_on(fleet: Fleet) -> None:
    before = {name: entry["epoch"] for name, entry in fleet.ready().items()}
    with fleet.clients("alpha") as outcomes:
        stopped = fleet.run("rollout", "alpha", "--set", "model=/nowhere")
    assert stopped.returncode == 2
    assert "the rollout of pool alpha was given up, the old replicas serve on" in stopped.stderr
    assert "/nowhere" in stopped.stderr
    assert_none_failed(outcomes)
    assert {name: entry["epoch"] for name, entry in fleet.ready().items()} == before
    assert "rollout given up" in fleet.do("status")


def test_a_drained_replica_finishes_what_it_has_and_is_replaced(fleet: Fleet) -> None:
    before = fleet.ready()
    victim = next(name for name in before if name.startswith("alpha"))
    with fleet.clients("alpha") as outcomes:
        wait_until(lambda: outcomes["ok"] > 5, lambda: str(outcomes))
        fleet.do("drain", victim)
    assert_none_failed(outcomes)
    assert fleet.ready()[victim]["epoch"] != before[victim]["epoch"]
    refused = fleet.run("drain", "gamma-7")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def test_a_killed_controller_starts_again_by_itself_and_knows_what_was_applied(fleet: Fleet) -> None:
    before = {name: entry["epoch"] for name, entry in fleet.ready().items()}
    for entry in Path("/proc").glob("[0-9]*"):
        if is_controller_of(fleet, entry):
            os.kill(int(entry.name), signal.SIGKILL)
    wait_until(lambda: fleet.run("status").returncode == 0, lambda: "no controller")
    done = fleet.do("scale", "alpha", "2")
    assert "ready: alpha 2, beta 1" in done
    assert {name: entry["epoch"] for name, entry in fleet.ready().items()} == before


def is_controller_of(fleet: Fleet, entry: Path) -> bool:
    try:
        title = (entry / "cmdline").read_text()
        return title.startswith("ray::FleetController") and int(entry.name) in find_marked(
            fleet.folder, fleet.ray_folder
        )
    except OSError:
        return False


def test_the_replicas_of_a_killed_machine_come_back_elsewhere(fleet: Fleet) -> None:
    before = fleet.ready()
    number = (
        min(int(entry["address"].rpartition(":")[0].rpartition(".")[2]) for entry in before.values()) - 11
    )
    gone = {name for name, entry in before.items() if entry["address"].startswith(f"127.0.0.{11 + number}:")}
    killed_at = time.time()
    fleet.kill_machine(number)
    ended = {name: wait_said(fleet, f"{name} has ended", killed_at) for name in gone}
    back = {name: wait_said(fleet, f"{name} is ready", ended[name]) for name in gone}
    for name in sorted(gone):
        sys.stdout.write(
            f"{name}: noticed {ended[name] - killed_at:.1f} s after its machine was killed, "
            f"ready elsewhere {back[name] - ended[name]:.1f} s later\n"
        )
    fleet.do("scale", "alpha", "2")
    after = fleet.ready()
    assert set(after) == set(before)
    assert not any(entry["address"].startswith(f"127.0.0.{11 + number}:") for entry in after.values())
    wait_routed(fleet, lambda known: known == set(after))
    assert fleet.ask("alpha", STORY).status_code == 200
    assert fleet.ask("beta", STORY).status_code == 200


def wait_said(fleet: Fleet, text: str, since: float) -> float:
    """When the controller said it."""

    def times() -> list[float]:
        lines = [line for line in fleet.controller_log() if text in line]
        said = [datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp() for line in lines]
        return [at for at in said if at >= since]

    wait_until(times, lambda: "\n".join(fleet.controller_log()[-30:]), SECONDS)
    return times()[0]


def test_stop_leaves_nothing_behind(fleet: Fleet) -> None:
    assert fleet.do("stop") == "The fleet is stopped.\n"
    nothing = fleet.run("status")
    assert nothing.returncode == 1
    assert nothing.stderr.startswith("kvasir: no fleet runs on this Ray cluster")
    with redis.Redis.from_url(fleet.redis_url, protocol=2) as client:
        assert client.keys(f"{PREFIX}:*:replica:*") == []
