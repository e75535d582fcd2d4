"""Ends a cluster from outside, and runs one for as long as something else needs it.

Owns the waiting. Knows the other process only by its lock and its state file.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cluster.errors import ClusterError, StartFailed
from cluster.local.processes import death_with_parent, kill_marked
from cluster.local.run_directory import ClusterState, RunDirectory

PATIENCE_SECONDS = 20.0
"""Seconds to wait for a cluster that does not say how long it takes to stop."""


def take_down(directory: RunDirectory) -> str:
    """Stop the cluster, or clean up after an earlier one; returns a sentence about it."""
    owner = directory.owner()
    state = directory.read_state()
    if owner is not None:
        _end(owner, directory, PATIENCE_SECONDS if state is None else state.stop_seconds)
    num_leftovers = kill_marked(directory.path, directory.ray_directory)
    had_state = directory.read_state() is not None
    directory.forget()
    shutil.rmtree(directory.ray_directory, ignore_errors=True)
    if owner is not None:
        return f"The cluster in {directory.path} is stopped."
    if num_leftovers or had_state:
        return f"Cleared away what was left of a cluster in {directory.path}: {num_leftovers} processes."
    return f"No cluster runs in {directory.path}."


def _end(owner: int, directory: RunDirectory, patience_seconds: float) -> None:
    for number, patience in ((signal.SIGTERM, patience_seconds), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner, number)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if directory.owner() is None and not _is_running(owner):
                return
            time.sleep(0.05)
    raise ClusterError(f"process {owner} still holds {directory.path}, even after SIGKILL")


def _is_running(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


@contextlib.contextmanager
def own_cluster(directory: RunDirectory) -> Iterator[ClusterState]:
    """Run a cluster with default settings while the context lasts. Progress goes to stderr."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "cluster.cli",
        "up",
        "--port",
        "0",
        "--run-dir",
        str(directory.path),
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,  # a Ctrl-C that stops an answer is not for the cluster
        preexec_fn=death_with_parent(signal.SIGTERM),
    )
    try:
        yield _wait_ready(process, directory)
    finally:
        process.terminate()
        process.wait()


def _wait_ready(process: "subprocess.Popen[bytes]", directory: RunDirectory) -> ClusterState:
    while process.poll() is None:
        state = directory.read_state()
        if state is not None and state.ready and state.pid == process.pid:
            return state
        time.sleep(0.05)
    raise StartFailed("the cluster for this chat did not start")
