"""`kvasir` as a user has it: in a process of its own, in a run directory of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.local.processes import find_marked, kill_marked
from cluster.local.run_directory import ClusterState, RunDirectory

COMMAND = (sys.executable, "-P", "-m", "cluster.cli")
START_SECONDS = 300.0


class KvasirCommand:
    def __init__(self, path: Path, environment: dict[str, str] | None = None) -> None:
        self.directory = RunDirectory(path)
        self.environment = {key: value for key, value in os.environ.items() if key != "REDIS_URL"}
        self.environment |= environment or {}

    def run(self, *words: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        """A command that ends by itself."""
        return subprocess.run(
            [*COMMAND, *words, "--run-dir", str(self.directory.path)],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            env=self.environment,
            check=False,
        )

    @contextmanager
    def up(self, *words: str) -> Iterator["subprocess.Popen[str]"]:
        """A cluster that serves, of simulated replicas. Killed at the end if the test has not ended it."""
        command = [*COMMAND, "up", "--engine", "simulated", "--port", "0", *words]
        command += ["--set", "simulated_hardware=instant", "--run-dir", str(self.directory.path)]
        output = self.directory.path.parent / "up.out"
        with output.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, text=True, start_new_session=True, env=self.environment
            )
        try:
            wait_until(lambda: process.poll() is not None or self.is_ready(), output.read_text, START_SECONDS)
            assert process.poll() is None, output.read_text()
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(120)
            kill_marked(self.directory.path, self.directory.ray_directory)

    def is_ready(self) -> bool:
        state = self.directory.read_state()
        return state is not None and state.ready

    def state(self) -> ClusterState:
        state = self.directory.read_state()
        assert state is not None
        return state

    def leftovers(self) -> list[str]:
        pids = find_marked(self.directory.path, self.directory.ray_directory)
        return [_title(pid).replace("\0", " ") for pid in pids]

    def pid_of(self, title: str) -> int:
        """The process of this cluster whose title starts so."""
        for pid in find_marked(self.directory.path, self.directory.ray_directory):
            if _title(pid).startswith(title):
                return pid
        raise AssertionError(f"no process is called {title}")


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return f"process {pid}, which has ended since"


def wait_until(condition: Callable[[], object], explain: Callable[[], str], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)
