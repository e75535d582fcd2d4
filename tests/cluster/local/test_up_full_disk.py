"""`kvasir up` on a disk that is full: what dies meanwhile comes back, and files are made good afterwards."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.kvasir_command import KvasirCommand, wait_until
from tests.tools import need_root

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    need_root("mounts a file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        ballast.unlink()


def num_ready(url: str) -> int:
    try:
        return int(httpx.get(f"{url}/ready", trust_env=False, timeout=60).json()["num_replicas"])
    except httpx.TransportError:
        return -1


@pytest.mark.slow
def test_a_full_disk_ends_nothing_and_is_said_once_and_then_made_good(small_disk: Path) -> None:
    command = KvasirCommand(small_disk / "run")
    # What `up` says goes to the full disk too.
    with command.up("--replicas", "2") as process:
        state = command.state()
        victim = state.replicas[0]
        assert victim.pid is not None and state.redis_pid is not None and state.router_pid is not None
        said = small_disk / "up.out"
        with full(small_disk):
            for pid in (victim.pid, state.redis_pid, state.router_pid):
                os.kill(pid, signal.SIGKILL)
            (command.directory.logs / "redis.log").unlink()
            wait_until(lambda: num_ready(state.router_url) == 2, said.read_text)
            wait_until(lambda: not Path(f"/proc/{victim.pid}").exists(), said.read_text)
            assert process.poll() is None
            # Of before or of a moment with room, since what goes from the disk makes some; but whole.
            known = {each.replica_id for each in command.state().replicas}
            assert known == {each.replica_id for each in state.replicas}
        wait_until(lambda: command.state().replicas[0].epoch != victim.epoch, said.read_text)
        wait_until(lambda: command.state().replicas[0].state == "ready", said.read_text)
        assert command.state().router_pid != state.router_pid
        assert said.read_text().count("No space left on device") <= 2
        body = {"model": "toy_model", "max_tokens": 2, "prompt": "Hello"}
        url = f"{state.router_url}/v1/completions"
        assert httpx.post(url, json=body, trust_env=False, timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert command.leftovers() == []


def test_a_run_directory_that_cannot_be_written_is_one_sentence(small_disk: Path) -> None:
    command = KvasirCommand(small_disk / "run")
    with full(small_disk):
        done = command.run("up", "--engine", "simulated", "--port", "0")
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert done.stderr.strip().count("\n") == 0
