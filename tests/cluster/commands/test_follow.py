"""Looks that follow each other. With a fleet: test_chart_scales.py."""

import signal
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from cluster.commands import fleet, follow
from cluster.commands.follow import Look
from cluster.config import FleetSpec, PoolSpec
from cluster.controller import actors
from cluster.errors import ClusterError

READY, MISSING = Look(True, "ready: main 1"), Look(False, "one is missing")
APPLIES = Look(True, "ready: main 2")


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

    def __call__(self, unready: Callable[[], None]) -> Look:
        self.marks.append(self.ready_file.exists())
        seen = next(self._seen, None)
        if seen is APPLIES:
            unready()
            self.marks.append(self.ready_file.exists())
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
    looks = Looks(ready_file, [READY, READY, MISSING, "Ray is away", "Ray is away", READY, APPLIES], number)
    assert follow.follow(looks, ready_file, said.append) == 0
    assert looks.marks == [False, True, True, False, False, False, True, False, True]
    assert said == [
        *(READY.sentence, MISSING.sentence, "Ray is away"),
        READY.sentence,
        APPLIES.sentence,
        READY.sentence,
    ]
    assert not ready_file.exists(), "nobody looks any more"


def test_what_nobody_expected_ends_it_and_leaves_no_file(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready"
    seen = iter([READY])
    with pytest.raises(StopIteration):
        follow.follow(lambda unready: next(seen), ready_file, lambda text: None)
    assert not ready_file.exists()


def test_a_second_signal_ends_it_in_the_middle_of_a_look(tmp_path: Path) -> None:
    def look(unready: Callable[[], None]) -> Look:
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        return READY

    assert follow.follow(look, None, lambda text: None) == 0


def test_a_file_that_was_refused_is_tried_again_when_it_has_changed_or_a_while_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    size = 1

    def refuse(*arguments: object, **more: object) -> None:
        tried.append(size)
        raise ClusterError(f"not {size}")

    monkeypatch.setattr(fleet, "_read", lambda arguments: FleetSpec((PoolSpec(size),)))
    monkeypatch.setattr(fleet, "_find_controller", lambda ray, timeout: None)
    monkeypatch.setattr(actors, "machines", lambda: [{"CPU": 9.0}])
    monkeypatch.setattr(fleet, "_apply", refuse)
    followed = fleet._Followed(ray, Namespace(file=Path("fleet.yaml")), lambda text: None)

    def look() -> str:
        with pytest.raises(ClusterError) as refusal:
            followed.look(lambda: None)
        return str(refusal.value)

    assert [look(), look(), look()] == ["not 1"] * 3
    assert tried == [1], "machines are asked whether models load"
    size = 2
    assert [look(), look()] == ["not 2"] * 2
    monkeypatch.setattr(fleet, "REFUSED_SECONDS", 0.0)
    assert look() == "not 2"
    assert tried == [1, 2, 2]
