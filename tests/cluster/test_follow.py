"""Looks that follow each other. With a fleet: test_chart_scales.py."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import cli, follow
from cluster.errors import ClusterError
from cluster.follow import Look

READY, MISSING = Look(True, "ready: main 1"), Look(False, "one is missing")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pauses, and signals that mean afterwards what they meant before."""
    monkeypatch.setattr(follow, "FOLLOW_SECONDS", 0.001)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Looks:
    """What is seen, one after the other, and whether the file was there before each; then the signal."""

    def __init__(self, ready_file: Path, seen: list[Look | str], number: signal.Signals) -> None:
        self.ready_file = ready_file
        self.marks: list[bool] = []
        self._seen = iter(seen)
        self._number = number

    def __call__(self) -> Look:
        self.marks.append(self.ready_file.exists())
        seen = next(self._seen, None)
        if seen is None:
            signal.raise_signal(self._number)
            return READY
        if isinstance(seen, str):
            raise ClusterError(seen)
        return seen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_looks_until_it_is_told_to_end_and_the_file_says_whether_all_is_well(
    tmp_path: Path, number: signal.Signals
) -> None:
    ready_file = tmp_path / "ready"
    ready_file.touch()
    said: list[str] = []
    looks = Looks(ready_file, [READY, READY, MISSING, "Ray is away", "Ray is away", READY], number)
    assert follow.follow(looks, ready_file, said.append) == 0
    assert looks.marks == [False, True, True, False, False, False, True]
    assert said == [READY.sentence, MISSING.sentence, "Ray is away", READY.sentence]
    assert not ready_file.exists(), "nobody looks any more"


def test_what_nobody_expected_ends_it_and_leaves_no_file(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready"
    seen = iter([READY])
    with pytest.raises(StopIteration):
        follow.follow(lambda: next(seen), ready_file, lambda text: None)
    assert not ready_file.exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--ready-file", "ready"], "--ready-file goes with --follow"),
        (["--follow", "--no-wait"], "not allowed with argument"),
        (["--follow", "--dry-run"], "not allowed with argument"),
    ],
)
def test_words_that_do_not_go_together_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    try:
        code = cli.main(["fleet", "apply", "deploy/fleet.yaml", *words])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    assert code == 2
    assert complaint in capsys.readouterr().err
