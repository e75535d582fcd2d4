"""A cluster for one run of a load test: `kvasir up` as a child, on free ports, with empty caches.

Owns its run directory and its end: whatever happens, no process, port or file of it is left. Knows the
cluster as any user does, by its state file, and nothing of what is sent to it.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import StartFailed
from cluster.local.processes import death_with_parent, kill_marked
from cluster.local.run_directory import ClusterState, RunDirectory

START_SECONDS = 300.0
STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class FreshCluster:
    directory: RunDirectory
    state: ClusterState
    start_seconds: float
    """Seconds until it was up."""


@contextlib.contextmanager
def fresh_cluster(words: Sequence[str], logs: Path) -> Iterator[FreshCluster]:
    """`words` follow `kvasir up`. However it ends, its logs are left in `logs`. Raises StartFailed."""
    began = time.monotonic()
    directory = RunDirectory(Path(tempfile.mkdtemp(prefix="kvasir-loadtest-")))
    said = directory.path / "up.log"
    process: subprocess.Popen[bytes] | None = None
    try:
        process = _start(words, directory, said)
        state = _wait_ready(process, directory, said, logs)
        yield FreshCluster(directory, state, time.monotonic() - began)
    finally:
        if process is not None:
            _stop(process)
        kill_marked(directory.path, directory.ray_directory)
        _keep_logs(directory, said, logs)
        shutil.rmtree(directory.ray_directory, ignore_errors=True)
        shutil.rmtree(directory.path, ignore_errors=True)


def _start(words: Sequence[str], directory: RunDirectory, said: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "cluster.cli", "up", "--port", "0"]
    command += ["--run-dir", str(directory.path), *words]
    # A Redis that others use would bring what they have cached, and keep what is cached here.
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    with said.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the load test, which then ends the cluster
            preexec_fn=death_with_parent(signal.SIGTERM),
        )


def _wait_ready(
    process: "subprocess.Popen[bytes]", directory: RunDirectory, said: Path, logs: Path
) -> ClusterState:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        state = directory.read_state()
        if state is not None and state.ready:
            return state
        time.sleep(0.05)
    cause = f"it was not ready within {START_SECONDS:g} s" if process.poll() is None else _last_words(said)
    raise StartFailed(f"the cluster did not come up: {cause}; logs are in {logs}")


def _keep_logs(directory: RunDirectory, said: Path, logs: Path) -> None:
    """Ray's too: what its own processes say is all there is if they took the replicas with them."""
    logs.mkdir(parents=True, exist_ok=True)
    of_ray = directory.ray_directory / "session_latest" / "logs"
    for log in (said, *directory.logs.glob("*.log"), *of_ray.glob("raylet.*"), *of_ray.glob("gcs_server.*")):
        with contextlib.suppress(OSError):
            shutil.copy(log, logs)


def _last_words(said: Path) -> str:
    lines = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("kvasir: ").rstrip(".") if lines else "it ended without a word"


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
