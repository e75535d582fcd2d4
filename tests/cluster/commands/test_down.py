"""`kvasir down`: how the process that owns a run directory is ended."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.commands.down import take_down
from cluster.local.processes import MARK
from cluster.local.run_directory import RunDirectory

OWNER = """
import signal, sys, time
from pathlib import Path
from cluster.local.run_directory import RunDirectory

signal.signal(signal.SIGTERM, lambda *_: signal.setitimer(signal.ITIMER_REAL, 0.01))
signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
try:
    with RunDirectory(Path(sys.argv[1])).claim():
        print("claimed", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)  # an interpreter takes a moment to end
    print("ended", flush=True)
"""


def test_a_cluster_that_gives_its_directory_back_ends_by_itself(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(directory.path)],
        stdout=subprocess.PIPE,
        text=True,
        env={MARK: str(directory.path)},
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "claimed\n"
        assert take_down(directory) == f"The cluster in {directory.path} is stopped."
        assert (process.stdout.read(), process.wait(30)) == ("ended\n", 0)


def test_nothing_to_stop_is_said_and_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down", "--run-dir", str(tmp_path)]) == 0
    assert tuple(capsys.readouterr()) == (f"No cluster runs in {tmp_path}.\n", "")
