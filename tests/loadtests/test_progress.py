"""Progress is shown on standard error, on a terminal or not, and only there."""

import io
import time

import pytest

from cluster.cli import main
from loadtests import progress
from loadtests.progress import showing

SMALL = ["b2b", "--limit", "200", "--replicas", "2", "--policy", "kvasir,random"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "ELSEWHERE_SECONDS", 0.02)
    monkeypatch.setattr(progress, "ON_TERMINAL_SECONDS", 0.02)


def test_lines_where_there_is_no_terminal(soon: None, capsys: pytest.CaptureFixture[str]) -> None:
    texts = iter([None, "one", "two"])
    with showing(lambda seconds: next(texts, None)):
        time.sleep(0.5)
    assert tuple(capsys.readouterr()) == ("", "one\ntwo\n")


def test_one_line_on_a_terminal_which_is_empty_at_the_end(
    soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    texts = iter(["one", "two"])
    with showing(lambda seconds: next(texts, None)):
        time.sleep(0.5)
    assert terminal.getvalue() == "\r\x1b[Kone\r\x1b[Ktwo\r\x1b[K"


@pytest.mark.parametrize(("jobs", "said"), [("1", "  run 2 of 2, random: "), ("2", " of 2 runs done\n")])
def test_a_simulation_says_how_far_it_is(
    jobs: str, said: str, soon: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *SMALL, "--jobs", jobs]) == 0
    found = capsys.readouterr()
    assert said in found.err
    assert said not in found.out
