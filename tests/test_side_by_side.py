"""Tests side by side: what the workers of pytest-xdist are given, asked of real ones."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

FILE = """
import pytest

@pytest.mark.parametrize("number", range(6))
def test_numbers(number): ...

@pytest.mark.alone
def test_alone(): ...
"""
MARKS = "[pytest]\nmarkers =\n" + "".join(f"    {mark}: \n" for mark in ("alone", "slow"))


def ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    options = ("-v", "-c", "pytest.ini", "-p", "tests.side_by_side", "--color=no")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", "-p", "xdist.plugin", *words],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def run(folder: Path, *words: str) -> list[tuple[str, str]]:
    """Worker, or nothing, and test, in the order in which they passed."""
    done = ran(folder, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    side_by_side = re.findall(r"^\[(gw\d)\].* PASSED (\S+)", done.stdout, re.M)
    return side_by_side or [("", name) for name in re.findall(r"^(\S+) PASSED", done.stdout, re.M)]


def test_a_file_has_one_worker_a_slow_one_is_first_and_what_runs_alone_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(MARKS)
    for name in ("a", "b", "c", "d"):
        (tmp_path / f"test_{name}.py").write_text(FILE)
    (tmp_path / "test_e.py").write_text(f"{FILE}\npytestmark = pytest.mark.slow\n")
    passed = run(tmp_path, "-n", "2")
    files = [name.partition("::")[0] for _, name in passed]
    workers = {file: {worker for worker, name in passed if name.startswith(file)} for file in files}
    assert len(passed) == 5 * 6
    assert all(len(each) == 1 for each in workers.values()), workers
    assert set.union(*workers.values()) == {"gw0", "gw1"}
    first_tests = [next(name for each, name in passed if each == worker) for worker in ("gw0", "gw1")]
    assert any(name.startswith("test_e.py") for name in first_tests)
    alone = run(tmp_path, "--alone")
    assert sorted(name for _, name in alone) == [
        f"test_{name}.py::test_alone" for name in ("a", "b", "c", "d", "e")
    ]


def test_all_tests_of_clients_share_one_cluster_and_so_one_worker(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(MARKS)
    folder = tmp_path / "tests" / "clients"
    folder.mkdir(parents=True)
    for name in ("a", "b", "c", "d"):
        (folder / f"test_{name}.py").write_text(FILE)
    passed = run(tmp_path, "-n", "2")
    assert len(passed) == 4 * 6 and len({worker for worker, _ in passed}) == 1


LOADED = """
from pathlib import Path

with Path("loaded").open("a") as log:
    log.write(f"{__name__}\\n")

def test_one(): ...
def test_two(): ...
"""


def test_a_file_is_loaded_by_the_one_worker_that_runs_it(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(MARKS)
    for name in ("a", "b", "c", "d"):
        (tmp_path / f"test_{name}.py").write_text(LOADED)
    assert len(run(tmp_path, "-n", "2", "-k", "one")) == 4
    assert sorted((tmp_path / "loaded").read_text().split()) == ["test_a", "test_b", "test_c", "test_d"]


def test_a_file_without_a_test_that_is_meant_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(MARKS)
    for name, test in (("a/test_first", "one"), ("a/test_second", "two"), ("b/test_third", "one")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(f"def test_{test}(): ...\n")
    assert len(run(tmp_path, "-n", "1", "-k", "one")) == 2


def test_that_no_test_is_meant_has_a_status_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(MARKS)
    (tmp_path / "test_a.py").write_text(FILE)
    assert ran(tmp_path, "-n", "2", "-k", "nothing").returncode == pytest.ExitCode.NO_TESTS_COLLECTED


FAILS_ONCE = """
from pathlib import Path

def test_before(): ...

def test_once():
    file = Path("been-here")
    if not file.exists():
        file.touch()
        raise AssertionError("not steady")
"""


def test_the_files_of_tests_that_failed_are_listed_and_run_again_alone(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(MARKS)
    (tmp_path / "test_a.py").write_text(FILE)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "test_b.py").write_text(FAILS_ONCE)
    (folder / "test_c.py").write_text("def test_c(missing): ...")
    failed = tmp_path / "failed"
    with pytest.raises(AssertionError):
        run(tmp_path, "-n", "2", "--failed-to", str(failed))
    assert failed.read_text().split() == ["folder/test_b.py", "folder/test_c.py"]
    (folder / "test_c.py").write_text("def test_c(): ...")
    for what in (".", "folder/test_b.py", "test_a.py"):
        passed = {name for _, name in run(tmp_path, "-n", "1", "--only-files", str(failed), ".", what)}
        expected = {
            "folder/test_b.py::test_before",
            "folder/test_b.py::test_once",
            "folder/test_c.py::test_c",
        }
        assert passed == expected


def test_the_counts_of_the_closing_line_are_written_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(MARKS)
    (tmp_path / "test_a.py").write_text(FILE + "\n@pytest.mark.skip\ndef test_skipped(): ...\n")
    run(tmp_path, "-n", "2", "--counts-to", "counts")
    assert (tmp_path / "counts").read_text().startswith("6 passed, 1 skipped")
    run(tmp_path, "--alone", "--counts-to", "counts")
    assert (tmp_path / "counts").read_text().startswith("1 passed, 7 deselected")
