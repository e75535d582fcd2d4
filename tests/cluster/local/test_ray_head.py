"""Ray's start inside `kvasir up`, in processes of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.local.processes import find_marked, kill_marked
from cluster.local.ray_head import RAY_ENVIRONMENT
from cluster.local.run_directory import RunDirectory
from tests.cluster.kvasir_command import KvasirCommand

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

WITH_A_SLOW_FIRST_RAYLET = """
import sys
from pathlib import Path
from ray._private import services
from cluster.local.ray_head import start_ray, stop_ray

directory, slow = map(Path, sys.argv[1:])
real = services.RAYLET_EXECUTABLE
services.RAYLET_EXECUTABLE = str(slow)

def say(text):
    services.RAYLET_EXECUTABLE = real
    print(text)

print(start_ray(directory, 3, say).num_cpus)
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


@pytest.mark.slow  # Ray's patience is half a minute
def test_ray_that_is_too_slow_for_its_own_patience_is_started_once_more(
    tmp_path: Path, ray_directory: Path
) -> None:
    slow = tmp_path / "raylet"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_SLOW_FIRST_RAYLET, str(ray_directory), str(slow)],
        env=os.environ | RAY_ENVIRONMENT | {"RAY_AUTH_TOKEN": "5e" * 32},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tried, num_cpus = done.stdout.splitlines()
    assert tried.startswith("Ray did not start (The current node timed out during startup")
    assert num_cpus == "3.0"
    assert find_marked(ray_directory, ray_directory) == []


def test_ray_that_never_starts_is_one_sentence(tmp_path: Path, ray_directory: Path) -> None:
    ray_directory.touch()
    command = KvasirCommand(tmp_path / "run")
    done = command.run("up", "--engine", "simulated", "--port", "0")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "kvasir: Ray did not start, and a second attempt failed, too: "
    )
    assert str(ray_directory) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert command.leftovers() == []
