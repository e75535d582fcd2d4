"""The write budget: never more than was gained, whatever the clock does."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from replicas.kvstore.write_budget import BURST_OF_DAY, BURST_SECONDS, DAY_SECONDS, WriteBudget


def test_without_bounds_everything_is_allowed_and_never_short() -> None:
    budget = WriteBudget()
    assert budget.take(0.0, 10**18) and budget.take(0.0, 10**18) and not budget.is_short(0.0)
    assert budget.left_ratio(0.0) == 1


def test_a_burst_is_what_some_seconds_bring_and_then_the_rate_holds() -> None:
    budget = WriteBudget(bytes_per_second=100)
    num_taken = 0
    while budget.take(5.0, 100):
        num_taken += 1
    assert num_taken == BURST_SECONDS
    assert not budget.take(5.0, 1)
    assert budget.take(6.0, 100) and not budget.take(6.0, 1)


def test_it_is_short_below_half_and_no_longer_when_it_has_been_refilled() -> None:
    budget = WriteBudget(bytes_per_second=100)
    assert budget.take(0.0, 500) and not budget.is_short(0.0)
    assert budget.left_ratio(0.0) == 0.5
    assert budget.take(0.0, 1) and budget.is_short(0.0)
    assert not budget.is_short(1.0)


def test_a_day_has_its_own_bound() -> None:
    budget = WriteBudget(bytes_per_second=1e9, bytes_per_day=24_000)
    assert budget.take(0.0, int(24_000 * BURST_OF_DAY))
    assert budget.left_ratio(0.0) == 0
    assert not budget.take(0.0, 1)
    assert budget.left_ratio(1800.0) == 0.5
    assert budget.take(DAY_SECONDS / 24, 1)


def test_what_is_larger_than_a_burst_is_written_and_paid_for_by_waiting() -> None:
    budget = WriteBudget(bytes_per_second=1)
    assert budget.take(0.0, 100) and budget.left_ratio(0.0) == 0
    assert not budget.take(90.0, 1)
    assert budget.take(91.0, 1)


@pytest.mark.parametrize("bound", [0, -1, float("nan")])
def test_a_bound_that_is_none_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        WriteBudget(bytes_per_second=bound)
    with pytest.raises(ValueError, match="above 0"):
        WriteBudget(bytes_per_day=bound)


@given(
    times=st.lists(st.floats(min_value=-10, max_value=1000), min_size=1, max_size=50),
    sizes=st.lists(st.integers(min_value=1, max_value=300), min_size=50, max_size=50),
)
def test_no_span_of_time_has_more_than_its_gain_and_one_burst(times: list[float], sizes: list[int]) -> None:
    """A clock that goes back gains nothing."""
    budget = WriteBudget(bytes_per_second=10)
    taken = 0
    for now, size in zip(times, sizes, strict=False):
        taken += size if budget.take(now, size) else 0
    span = max(times) - times[0]
    assert taken <= 10 * BURST_SECONDS + 10 * span + max(sizes)
