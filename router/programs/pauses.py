"""Pauses: how long the programs of one tenant pause between turns, and whether one that pauses returns.

Owns counts of observed pauses, by how the turn before has ended. No agent tells when a session has ended:
its program returns with a probability that falls with the time that it has paused,

    P(returns | paused for t) = p S(t) / (p S(t) + 1 - p),

with p the share of turns that another one follows, and S(t) the share of pauses longer than t.
"""

import enum
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise


class Pause(enum.IntEnum):
    """How a turn ended: a tool runs, its user is asked, or it is not known."""

    TOOL = 0
    USER = 1
    UNKNOWN = 2


BOUNDS = (
    *(0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0),
    *(256.0, 384.0, 512.0, 768.0, 1024.0, 1536.0, 2048.0, 3600.0),
)
"""Seconds. Within two of them pauses count as evenly spread; none is longer than the last."""

QUANTILES = {
    Pause.TOOL: (0.0, 4.0, 8.0, 19.0, 79.0, 607.0),
    Pause.USER: (0.0, 8.0, 127.0, 439.0, 1498.0, 3600.0),
    Pause.UNKNOWN: (0.0, 4.0, 14.0, 80.0, 500.0, 3600.0),
}
"""Seconds within which SHARES of the pauses ended, as recorded of Claude Code. They count until a tenant's
own are known. Source: callanjfox/kv-cache-tester 94f6046."""

SHARES = (0.0, 0.1, 0.5, 0.75, 0.9, 1.0)

PRIOR_PAUSES = 5.0

GONE_SHARE = 1 / 40
"""The part of turns that no other one follows, at least: a recorded session has some forty."""

MOST_COUNTED = 4096.0
"""Counts are halved there, so that a tenant's habits may change."""


class Pauses:
    def __init__(self) -> None:
        self._counts = {pause: list(counts) for pause, counts in _PRIORS.items()}
        self._gone = dict.fromkeys(Pause, 0.0)
        self._longer = {pause: _from_each(counts) for pause, counts in self._counts.items()}
        """By bound: pauses that were longer, or as long."""

    def ended(self, pause: Pause, seconds: float) -> None:
        """A program has returned after so long."""
        counts = self._counts[pause]
        counts[min(len(counts), max(1, bisect_right(BOUNDS, seconds))) - 1] += 1.0
        self._counted(pause)

    def gone(self, pause: Pause) -> None:
        """A program that paused was forgotten."""
        self._gone[pause] += 1.0
        self._counted(pause)

    def return_probability(self, pause: Pause, seconds: float) -> float:
        """Return the probability that a program that has paused for `seconds` returns."""
        all_longer = self._longer[pause]
        longer = 0.0
        place = max(1, bisect_right(BOUNDS, seconds))
        if place < len(BOUNDS):
            low, high = BOUNDS[place - 1], BOUNDS[place]
            within = self._counts[pause][place - 1] * (high - max(low, seconds)) / (high - low)
            longer = all_longer[place] + within
        return longer / (longer + max(self._gone[pause], GONE_SHARE * all_longer[0]))

    def _counted(self, pause: Pause) -> None:
        if sum(self._counts[pause]) + self._gone[pause] > MOST_COUNTED:
            self._counts[pause] = [count / 2 for count in self._counts[pause]]
            self._gone[pause] /= 2
        self._longer[pause] = _from_each(self._counts[pause])


def _from_each(counts: Sequence[float]) -> list[float]:
    """Return the sums from each place to the end, and 0."""
    return [*accumulate(reversed(counts), initial=0.0)][::-1]


def _spread(quantiles: Sequence[float]) -> list[float]:
    """Return counts of PRIOR_PAUSES pauses with these quantiles."""
    counts = [0.0] * (len(BOUNDS) - 1)
    for (low, high), (below, above) in zip(pairwise(quantiles), pairwise(SHARES), strict=True):
        for place, (start, end) in enumerate(pairwise(BOUNDS)):
            common = max(0.0, min(high, end) - max(low, start)) / (high - low)
            counts[place] += PRIOR_PAUSES * (above - below) * common
    assert math.isclose(sum(counts), PRIOR_PAUSES)
    return counts


_PRIORS = {pause: _spread(quantiles) for pause, quantiles in QUANTILES.items()}
