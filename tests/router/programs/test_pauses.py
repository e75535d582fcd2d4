"""How probably a program that pauses returns."""

import random
from itertools import pairwise

import pytest

from router.programs import pauses as module
from router.programs.pauses import (
    BOUNDS,
    GONE_SHARE,
    MOST_COUNTED,
    PRIOR_PAUSES,
    QUANTILES,
    SHARES,
    Pause,
    Pauses,
)


class Twin:
    """Slow and obvious: keeps each pause with its weight, as the ends of a stretch that it is spread over."""

    def __init__(self) -> None:
        self.stretches: dict[Pause, list[tuple[float, float, float]]] = {pause: [] for pause in Pause}
        self.gone = dict.fromkeys(Pause, 0.0)
        for pause, quantiles in QUANTILES.items():
            for (low, high), (below, above) in zip(pairwise(quantiles), pairwise(SHARES), strict=True):
                for start, end in pairwise(BOUNDS):
                    share = max(0.0, min(high, end) - max(low, start)) / (high - low)
                    self.stretches[pause].append((start, end, PRIOR_PAUSES * (above - below) * share))

    def ended(self, pause: Pause, seconds: float) -> None:
        for start, end in pairwise(BOUNDS):
            if start <= min(max(seconds, 0.0), BOUNDS[-1] - 1.0) < end:
                self.stretches[pause].append((start, end, 1.0))

    def return_probability(self, pause: Pause, seconds: float) -> float:
        longer = total = 0.0
        for start, end, weight in self.stretches[pause]:
            total += weight
            longer += weight * min(1.0, max(0.0, (end - seconds) / (end - start)))
        return longer / (longer + max(self.gone[pause], GONE_SHARE * total))


@pytest.mark.parametrize("seed", range(3))
def test_probabilities_are_those_of_a_twin_that_keeps_every_pause(seed: int) -> None:
    rng = random.Random(seed)
    pauses, twin = Pauses(), Twin()
    for _ in range(1000):
        pause = rng.choice(list(Pause))
        if rng.random() < 0.2:
            pauses.gone(pause)
            twin.gone[pause] += 1
        else:
            seconds = rng.choice([rng.expovariate(0.02), rng.choice(BOUNDS), -5.0, 1e9])
            pauses.ended(pause, seconds)
            twin.ended(pause, seconds)
        at = rng.choice([rng.uniform(0, 4000), rng.choice(BOUNDS), -1.0])
        assert pauses.return_probability(pause, at) == pytest.approx(twin.return_probability(pause, at))


@pytest.mark.parametrize("pause", Pause)
def test_a_probability_falls_with_time_to_nothing(pause: Pause) -> None:
    at = [-10.0, *(seconds / 2 for seconds in range(8000))]
    found = [Pauses().return_probability(pause, seconds) for seconds in at]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.97 and found[-1] == 0.0


def test_a_tool_is_awaited_for_less_long_than_a_user() -> None:
    pauses = Pauses()
    tool, user = (pauses.return_probability(pause, 300.0) for pause in (Pause.TOOL, Pause.USER))
    assert tool < 0.8 < 0.9 < user


def test_a_million_that_never_returned_are_soon_outweighed() -> None:
    pauses = Pauses()
    for _ in range(100_000):
        pauses.gone(Pause.UNKNOWN)
    assert pauses._gone[Pause.UNKNOWN] <= MOST_COUNTED
    for _ in range(20_000):
        pauses.ended(Pause.UNKNOWN, 5.0)
    assert pauses.return_probability(Pause.UNKNOWN, 0.0) > 0.95


def test_no_tenant_learns_into_what_all_begin_with() -> None:
    Pauses().ended(Pause.TOOL, 5.0)
    for counts in module._PRIORS.values():
        assert sum(counts) == pytest.approx(PRIOR_PAUSES)
