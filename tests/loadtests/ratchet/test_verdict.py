"""What is worse, what is better by much, and what is said of both."""

import pytest

from loadtests.ratchet.verdict import TOLERANCES, much_better, text, worse, worse_on_average


@pytest.mark.parametrize(
    ("figure", "old", "as_good", "too_bad"),
    [
        ("hits", 0.50, 0.496, 0.49),
        ("p50", 0.010, 0.020, 0.022),
        ("p90", 2.0, 2.1, 2.2),
        ("p99", 2.0, 2.2, 2.3),
        ("goodput", 10.0, 9.8, 9.7),
        ("failed", 0.0, 1.0, 2.0),
        ("a decision, instructions", 1000.0, 1015.0, 1025.0),
    ],
)
def test_a_figure_may_lose_its_tolerance_and_no_more(
    figure: str, old: float, as_good: float, too_bad: float
) -> None:
    before = {"row": {figure: old}}
    for value in (old, as_good):
        assert not worse(before, {"row": {figure: value}})
        assert not much_better({"row": {figure: value}}, before)
    (lost,) = worse(before, {"row": {figure: too_bad}})
    assert (lost.old, lost.new) == (old, too_bad)
    assert text([lost]).startswith(f"  row: {figure} {old:.4g} -> {too_bad:.4g}")
    assert not much_better(before, {"row": {figure: too_bad}})


def test_what_gets_better_is_not_worse_and_is_told_when_it_is_much() -> None:
    old, new = {"row": {"p90": 2.0, "hits": 0.5}}, {"row": {"p90": 1.5, "hits": 0.501}}
    assert not worse(old, new)
    assert [change.figure for change in much_better(old, new)] == ["p90"]


def test_many_rows_that_are_each_a_little_worse_are_worse_on_average() -> None:
    old = {f"row {number}": {"p90": 1.0 + number, "goodput": 5.0} for number in range(9)}
    new = {row: {**own, "p90": 1.04 * own["p90"]} for row, own in old.items()}
    assert not worse(old, new)
    (lost,) = worse_on_average(old, new)
    assert lost.figure == "p90" and lost.new == pytest.approx(1.04 * lost.old)
    assert not worse_on_average(old, old)


def test_rows_that_only_one_side_has_are_passed_over() -> None:
    assert not worse({"gone": {"p50": 1.0}}, {"new": {"p50": 9.0}})
    assert not worse_on_average({}, {"new": {"p50": 9.0}})
    assert set(TOLERANCES) >= {"hits", "p50", "p90", "p99", "goodput", "failed"}
