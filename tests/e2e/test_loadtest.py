"""`kvasir loadtest` as a newcomer types it: two real clusters, real traffic, a report.

And what a Ctrl-C leaves: what was measured, and nothing that runs.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.local.processes import find_marked
from cluster.local.run_directory import RunDirectory
from loadtests.reports.report import make_report
from loadtests.reports.run_file import Run, read_run
from tests.integration.observe import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

CHECKOUT = Path(__file__).parents[2]


class LoadtestCommand:
    """The command in a process group of its own, as on a terminal, with a temporary folder of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.output = folder / "output"
        self._said = folder / "said"
        command = [
            sys.executable,
            "-P",
            "-m",
            "cluster.cli",
            "loadtest",
            *words,
            "--output",
            str(self.output),
        ]
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                command,
                stdout=said,
                stderr=said,
                cwd=CHECKOUT,
                env=os.environ | {"TMPDIR": str(folder)},
                start_new_session=True,
            )

    def said(self) -> str:
        return self._said.read_text(encoding="utf-8")

    def run_directories(self) -> list[Path]:
        return list(self.folder.glob("kvasir-loadtest-*"))

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def leftovers(self, run_directories: list[Path]) -> list[str]:
        """Processes that have our temporary folder in their environment, or are of one of these clusters."""
        mark = f"TMPDIR={self.folder}\0".encode()
        pids = {pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _has(pid, mark)}
        for path in run_directories:
            pids.update(find_marked(path, RunDirectory(path).ray_directory))
        return [f"{pid} {_command_of(pid)}" for pid in sorted(pids)]


def _has(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")


@contextmanager
def loadtest(folder: Path, *words: str) -> Iterator[LoadtestCommand]:
    command = LoadtestCommand(folder, *words)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.process.terminate()
            command.process.wait(60)


def the_run(command: LoadtestCommand, policy: str) -> Run:
    return read_run(command.output / f"run-1-{policy}.json.gz")


def hit_rate(run: Run) -> float:
    rate = make_report(run.records).token_hit_rate
    assert rate is not None
    return rate


def test_a_load_test_shows_what_the_policy_is_worth_and_counts_as_the_engines_do(tmp_path: Path) -> None:
    with loadtest(tmp_path, "cross-user", "--quick") as command:
        assert command.process.wait(240) == 0, command.said()
        ours, theirs = the_run(command, "kvasir"), the_run(command, "round_robin")
        assert hit_rate(ours) > hit_rate(theirs)
        for run in (ours, theirs):
            assert run.engine_totals is not None
            totals = run.engine_totals
            assert (
                sum(each.num_cross_user_tokens or 0 for each in run.records) == totals.num_cross_user_tokens
            )
            assert totals.num_cross_user_tokens > 0
            assert sum(each.num_cached_tokens or 0 for each in run.records) == totals.num_cached_tokens
            assert {sample.replica for sample in run.samples} == {"replica-0", "replica-1"}
        assert len(ours.records) == len(theirs.records)
        page = (command.output / "report.html").read_text(encoding="utf-8")
        assert "round_robin" in page
        assert (command.output / "report.md").is_file()
        assert (command.output / "logs/run-1-kvasir/replica-0.log").is_file()
        assert "kvasir answered the same traffic with " in command.said()
        assert (command.output / "report.html").as_uri() in command.said()
        assert command.run_directories() == []
        assert command.leftovers([]) == []


def test_overload_is_a_load_test_like_the_others_whose_tenants_have_keys(tmp_path: Path) -> None:
    with loadtest(
        tmp_path, "overload", "--quick", "--policy", "kvasir", "--rate", "2", "--seed", "3"
    ) as command:
        assert command.process.wait(240) == 0, command.said()
        run = the_run(command, "kvasir")
        assert run.info.seed == 3
        assert "--rate 2" in run.info.command
        assert len({record.tenant for record in run.records}) > 1
        assert any(record.error is None for record in run.records)
        assert {record.error for record in run.records} <= {None, "refused (429)", "refused (503)"}
        assert "Jain's index" in command.said()
        assert (command.output / "report.html").is_file()
        assert list(tmp_path.glob("kvasir-keys-*")) == []


def test_ctrl_c_in_the_middle_keeps_what_was_measured_and_leaves_nothing_running(tmp_path: Path) -> None:
    with loadtest(tmp_path, "cross-user", "--quick", "--duration", "120") as command:
        wait_until(lambda: "  sent " in command.said(), "progress", seconds=120)
        directories = command.run_directories()
        assert directories
        assert command.leftovers(directories)
        command.interrupt()
        command.interrupt()  # the impatient do it twice
        assert command.process.wait(120) == 130, command.said()
        assert command.leftovers(directories) == []
        assert command.run_directories() == []
        assert not any(RunDirectory(path).ray_directory.exists() for path in directories)
        records = the_run(command, "round_robin").records
        assert sum(each.error is None for each in records) > 10
        assert (command.output / "report.html").is_file()
        assert "Traceback" not in command.said()
        assert "PROBLEM" not in command.said(), "what was cut off is no fault"


def test_ctrl_c_while_the_cluster_comes_up_leaves_nothing_at_all(tmp_path: Path) -> None:
    with loadtest(tmp_path, "cross-user", "--quick") as command:
        wait_until(
            lambda: any(path.joinpath("logs").is_dir() for path in command.run_directories()), "start", 120
        )
        directories = command.run_directories()
        command.interrupt()
        assert command.process.wait(120) == 130, command.said()
        assert command.leftovers(directories) == []
        assert command.run_directories() == []
        assert not command.output.exists()
        assert "Traceback" not in command.said()


def test_a_setting_that_no_replica_takes_starts_nothing(tmp_path: Path) -> None:
    with loadtest(tmp_path, "cross-user", "--quick", "--set", "nonsense=1") as command:
        assert command.process.wait(120) == 2
        assert command.said() == "kvasir: unknown setting nonsense\n"
        assert not command.output.exists()


def test_a_cluster_that_does_not_come_up_is_one_sentence_and_its_logs(tmp_path: Path) -> None:
    with loadtest(tmp_path, "cross-user", "--quick", "--model", "/nowhere") as command:
        assert command.process.wait(120) == 2
        last = command.said().splitlines()[-1]
        assert last.startswith("kvasir: the cluster did not come up: ")
        assert "/nowhere" in last
        assert "Traceback" not in command.said()
        assert "/nowhere" in (command.output / "logs/run-1-round_robin/up.log").read_text(encoding="utf-8")
        assert command.run_directories() == []
        assert command.leftovers([]) == []
