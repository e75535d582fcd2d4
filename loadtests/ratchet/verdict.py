"""Verdict: whether figures are worse than others by more than their tolerance, and the text for it. Pure.

Owns the tolerances. They are a few times what a figure moves where near ties are decided otherwise.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Figures: TypeAlias = Mapping[str, Mapping[str, float]]
"""By row, then by name."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A figure may lose `share` of what it was, and `slack` besides."""

    share: float
    slack: float = 0.0
    more_is_better: bool = False

    def is_worse(self, old: float, new: float) -> bool:
        loss = old - new if self.more_is_better else new - old
        return loss > self.share * abs(old) + self.slack

    def is_much_better(self, old: float, new: float) -> bool:
        """By as much as would be worse."""
        return self.is_worse(new, old)


TOLERANCES: Mapping[str, Tolerance] = {
    "hits": Tolerance(0.01, more_is_better=True),
    "session": Tolerance(0.02),
    "p50": Tolerance(0.05, 0.01),
    "p90": Tolerance(0.05, 0.01),
    "p99": Tolerance(0.10, 0.01),
    "goodput": Tolerance(0.02, 0.02, more_is_better=True),
    "failed": Tolerance(0.05, 1.0),
    "bytes": Tolerance(0.05),
    "instructions": Tolerance(0.02),
}
"""By a figure's last word. Times are in seconds, goodput is requests a second. Counts of instructions differ
by up to 0.2 % from run to run, and by more between versions of libraries.
"""

MEAN_SHARE = 0.02
"""Tolerance for the geometric mean of many rows."""


@dataclass(frozen=True, slots=True)
class Change:
    row: str
    figure: str
    old: float
    new: float

    def __str__(self) -> str:
        percent = f" ({100 * (self.new / self.old - 1):+.1f} %)" if self.old else ""
        return f"{self.row}: {self.figure} {self.old:.4g} -> {self.new:.4g}{percent}"


def worse(old: Figures, new: Figures) -> list[Change]:
    """Compare the rows that both have."""
    return [each for each in _changes(old, new) if _tolerance(each.figure).is_worse(each.old, each.new)]


def much_better(old: Figures, new: Figures) -> list[Change]:
    return [each for each in _changes(old, new) if _tolerance(each.figure).is_much_better(each.old, each.new)]


def worse_on_average(old: Figures, new: Figures) -> list[Change]:
    """The geometric means of times, hits and goodput over all rows that both have."""
    changes = list(_changes(old, new))
    found = []
    for figure in ("hits", "p50", "p90", "p99", "goodput"):
        own = [each for each in changes if each.figure == figure and each.old > 0 < each.new]
        if not own:
            continue
        before, after = _geometric_mean(each.old for each in own), _geometric_mean(each.new for each in own)
        if Tolerance(MEAN_SHARE, more_is_better=_tolerance(figure).more_is_better).is_worse(before, after):
            found.append(Change(f"mean of {len(own)} rows", figure, before, after))
    return found


def text(changes: Iterable[Change]) -> str:
    return "\n".join(f"  {each}" for each in changes)


def _changes(old: Figures, new: Figures) -> Iterator[Change]:
    for row, figures in new.items():
        for figure, value in figures.items():
            before = old.get(row, {}).get(figure)
            if before is not None:
                yield Change(row, figure, before, value)


def _tolerance(figure: str) -> Tolerance:
    return TOLERANCES[figure.rpartition(" ")[2]]


def _geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))
