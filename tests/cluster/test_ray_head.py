"""Ray's start inside `kvasir up`, in processes of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.processes import find_marked, kill_marked
from cluster.ray_head import RAY_ENVIRONMENT
from cluster.run_directory import RunDirectory
from tests.cluster.kvasir_command import KvasirCommand

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

WITH_A_SLOW_FIRST_RAYLET = """
import os, signal, sys, threading, time
from contextlib import suppress
from pathlib import Path
from cluster.processes import find_marked
from cluster.ray_head import start_ray, stop_ray

directory = Path(sys.argv[1])

def program(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().partition("\\0")[0]
    return ""

def stop_the_first():
    while True:
        for pid in find_marked(directory, directory):
            if program(pid).endswith("raylet/raylet"):
                os.kill(pid, signal.SIGSTOP)
                print("stopped", flush=True)
                return
        time.sleep(0.01)

threading.Thread(target=stop_the_first, daemon=True).start()
print(start_ray(directory, 3, print).num_cpus)
stop_ray()
"""


@pytest.fixture
def ray_directory(tmp_path: Path) -> Iterator[Path]:
    directory = RunDirectory(tmp_path / "run").ray_directory
    yield directory
    kill_marked(directory, directory)
    if directory.is_file():
        directory.unlink()
    shutil.rmtree(directory, ignore_errors=True)


def test_ray_that_is_too_slow_for_its_own_patience_is_started_once_more(ray_directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_SLOW_FIRST_RAYLET, str(ray_directory)],
        env=os.environ | RAY_ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    stopped, tried, num_cpus = done.stdout.splitlines()
    assert (stopped, num_cpus) == ("stopped", "3.0")
    assert tried.startswith("Ray did not start (The current node timed out during startup")
    assert find_marked(ray_directory, ray_directory) == []


def test_ray_that_never_starts_is_one_sentence(tmp_path: Path, ray_directory: Path) -> None:
    ray_directory.touch()
    command = KvasirCommand(tmp_path / "run")
    done = command.run("up", "--engine", "simulated", "--port", "0")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("kvasir: Ray did not start, nor did it at a second try: ")
    assert str(ray_directory) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert command.leftovers() == []
