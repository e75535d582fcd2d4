"""A fleet on a Ray cluster, as tests have it: the real command, controller, replicas, router and clients.

Where its machines come from is the test's business.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from cluster.local.processes import MARK, kill_marked
from cluster.local.ray_head import RAY_ENVIRONMENT
from loadtests.stacks.local_stack import free_port
from tests.cluster.controller_log import controller_log, wait_said
from tests.cluster.kvasir_command import COMMAND, wait_until
from tests.redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[2]
SECRET = "cluster-secret"

SECONDS = 240.0
ATTEMPTS = 3
PAUSE_SECONDS = 0.02
RESUMES = "router_resumes_total"

QUICK_TO_NOTICE = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_timeout_ms_task_wait_for_death_info": "200",
}


def new_client() -> httpx.Client:
    return httpx.Client(timeout=60, trust_env=False)


class RunningFleet:
    def __init__(self, folder: Path, ray_folder: Path, redis_url: str, environment: dict[str, str]) -> None:
        self.folder = folder
        self.ray_folder = ray_folder
        self.redis_url = redis_url
        self.environment = environment
        self.address = ""
        self.router_url = ""
        self.machines: subprocess.Popen[str] | None = None
        self.client = new_client()

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

    def apply(self, *pools: dict[str, Any], **fields: Any) -> "subprocess.CompletedProcess[str]":
        file = self.folder / "fleet.yaml"
        file.write_text(yaml.safe_dump({"redis_url": self.redis_url, "pools": list(pools), **fields}))
        return self.run("apply", str(file))

    def status(self) -> dict[str, Any]:
        """What `kvasir fleet status --json` prints, from a process that is connected to Ray already."""
        status: dict[str, Any] = json.loads(self.tell_machines("status"))
        return status

    def ready(self) -> dict[str, dict[str, Any]]:
        replicas = self.status()["replicas"]
        return {entry["replica_id"]: entry for entry in replicas if entry["state"] == "ready"}

    def epochs(self) -> dict[str, str]:
        """Of those that serve: equal for replicas that nobody has touched."""
        return {name: entry["epoch"] for name, entry in self.ready().items()}

    def tell_machines(self, line: str) -> str:
        """One line to the process that has made the machines, and its answer."""
        assert self.machines is not None
        assert self.machines.stdin is not None
        assert self.machines.stdout is not None
        self.machines.stdin.write(line + "\n")
        self.machines.stdin.flush()
        return self.machines.stdout.readline().strip()

    def controller_log(self) -> list[str]:
        """What controllers have said, with the time."""
        return controller_log(self.ray_folder)

    def wait_said(self, text: str, since: float) -> float:
        """When a controller said it."""
        return wait_said(self.controller_log, text, since, SECONDS)

    def ask(self, model: str, prompt: str, client: httpx.Client | None = None) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 24}
        url = f"{self.router_url}/v1/chat/completions"
        return (client or self.client).post(url, json=body)

    def num_resumes(self) -> int:
        """Answers that another replica had to finish."""
        lines = self.client.get(f"{self.router_url}/metrics").text.splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(RESUMES))

    def explain(self, model: str, prompt: str) -> dict[str, Any]:
        body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
        url = f"{self.router_url}/explain/v1/chat/completions"
        answer = self.client.post(url, json=body)
        explained: dict[str, Any] = answer.json()["prompts"][0] if answer.status_code == 200 else {}
        return explained

    @contextmanager
    def clients(self, model: str, count: int = 4) -> Iterator[Counter[str]]:
        """They ask all the time. What became of it, by status and replica; the last is awaited. A client
        sees nothing of a replica that ends amid its answer, since another goes on: that counts as well."""
        outcomes: Counter[str] = Counter()
        over = threading.Event()

        def ask(name: int, client: httpx.Client) -> None:
            number = 0
            # A pause: they are there to see every moment, and not to take the machine from what they watch.
            while not over.wait(PAUSE_SECONDS):
                number += 1
                try:
                    answer = self.ask(model, f"{name} asks for the {number}th time about a cat", client)
                    failed = answer.status_code != 200 or not answer.json()["usage"]["completion_tokens"]
                    outcomes[f"{answer.status_code} {answer.text}" if failed else "ok"] += 1
                    outcomes[answer.headers.get("x-kvasir-replica", "nobody")] += 1
                except httpx.HTTPError as error:
                    outcomes[repr(error)] += 1

        with ExitStack() as stack:
            clients = [stack.enter_context(new_client()) for _ in range(count)]
            threads = [threading.Thread(target=ask, args=item) for item in enumerate(clients)]
            for thread in threads:
                thread.start()
                stack.callback(thread.join)
            stack.callback(over.set)
            before = self.num_resumes()
            yield outcomes
        if self.num_resumes() != before:
            outcomes["continued elsewhere"] += self.num_resumes() - before


class Follower:
    """`kvasir fleet apply --follow` with the fleet's file: what has a pod of its own in the chart."""

    def __init__(self, fleet: RunningFleet) -> None:
        self._fleet = fleet
        self._said = fleet.folder / "follower.out"
        self.complaints = fleet.folder / "follower.err"
        self.ready_file = fleet.folder / "ready"
        self.file = fleet.folder / "fleet.yaml"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self) -> None:
        words = ["--redis-url", self._fleet.redis_url, "--follow", "--ready-file", str(self.ready_file)]
        with self._said.open("wb") as said, self.complaints.open("wb") as complaints:
            self.process = subprocess.Popen(
                [*COMMAND, "fleet", "apply", str(self.file), *words, "--address", self._fleet.address],
                **{"stdout": said, "stderr": complaints, "env": self._fleet.environment},
            )

    def said(self) -> list[str]:
        """By the one that runs, or ran last."""
        return self._said.read_text().splitlines()

    def says(self, text: str) -> bool:
        return any(text in line for line in self.said()[-1:])

    def num_applied(self) -> int:
        return self.said().count(f"{self.file} is applied")

    def wait_ready(self) -> None:
        wait_until(self.ready_file.exists, lambda: "\n".join(self.said()), SECONDS)

    def end(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(60)


@contextmanager
def open_fleet(folder: Path, name: str, *machines: str) -> Iterator[RunningFleet]:
    """A Redis, a router, and the Ray cluster that the module `machines` makes, given a folder and its other
    arguments. The router has the cluster secret that lies in the folder, if there is one. Nothing of it is
    left at the end."""
    ray_folder = Path("/tmp") / f"kvasir-{name}-{os.getpid()}"  # short: Ray puts sockets there
    environment = {key: value for key, value in os.environ.items() if key not in ("REDIS_URL", "RAY_ADDRESS")}
    environment |= {**RAY_ENVIRONMENT, "RAY_AUTH_TOKEN": "5e" * 32}
    environment |= {**QUICK_TO_NOTICE, MARK: str(folder), "OMP_NUM_THREADS": "1"}
    (folder / "logs").mkdir()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, ray_folder, ignore_errors=True)
        stack.callback(kill_marked, folder, ray_folder)
        server = RedisServer()
        server.start()
        stack.callback(server.close)
        fleet = RunningFleet(folder, ray_folder, server.url, environment)
        stack.callback(fleet.client.close)
        log = stack.enter_context((folder / "logs" / "all.log").open("w"))
        module, *arguments = machines
        # Ray gives up after 30 s, which are over soon where much else runs; so it may try again.
        for _ in range(ATTEMPTS):
            fleet.machines = process = subprocess.Popen(
                [sys.executable, "-m", module, str(ray_folder), *arguments],
                **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True},
                **{"env": environment, "cwd": ROOT},
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdin is not None
            assert process.stdout is not None
            stack.enter_context(process.stdin)
            stack.enter_context(process.stdout)
            fleet.address = process.stdout.readline().strip()
            if fleet.address:
                break
            kill_marked(folder, ray_folder)
            shutil.rmtree(ray_folder, ignore_errors=True)
        assert fleet.address, (folder / "logs" / "all.log").read_text()
        port = free_port()
        fleet.router_url = f"http://127.0.0.1:{port}"
        secret = ["--secret-file", str(folder / SECRET)] if (folder / SECRET).exists() else []
        router = subprocess.Popen(
            [sys.executable, "-m", "router", "--port", str(port), "--redis-url", server.url, *secret],
            **{"env": environment, "cwd": ROOT, "stdout": log, "stderr": log},
        )
        stack.callback(router.wait)
        stack.callback(router.kill)
        yield fleet


def pool(name: str, model: Path, replicas: int, **settings: Any) -> dict[str, Any]:
    settings = {"engine": "simulated", "model": str(model), "model_name": name, "num_blocks": 4096} | settings
    return {
        **{"name": name, "replicas": replicas, "settings": settings, "drain_seconds": 20},
        "resources": {"cpus": 0.1, "custom": {"slot": 1}},
    }
