import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.workloads import cross_user
from loadtests.workloads.shapes import SHAPES, Shape, bend, make_shape


def slow_amount(shape: Shape, seconds: float, pieces: int = 20_000) -> float:
    """The area under the rate, summed up in small pieces."""
    width = seconds / pieces
    return sum(shape.rate_at((piece + 0.5) * width) * width for piece in range(pieces))


@pytest.mark.parametrize("name", SHAPES)
def test_the_time_of_an_amount_is_when_the_rate_has_added_up_to_it(name: str) -> None:
    shape = make_shape(name, 40.0)
    assert slow_amount(shape, shape.duration_seconds) == pytest.approx(shape.amount, rel=1e-3)
    for share in (0.1, 0.35, 0.5, 0.77, 0.99):
        seconds = shape.time_of(share * shape.amount)
        assert 0 < seconds <= 40.0
        assert slow_amount(shape, seconds) == pytest.approx(share * shape.amount, rel=5e-3)


@given(
    st.sampled_from(sorted(SHAPES)),
    st.floats(0, 5),
    st.floats(0.1, 5),
    st.floats(0.5, 30),
    st.lists(st.floats(0, 1), min_size=2, max_size=8),
)
def test_bending_keeps_the_order_and_ends_with_the_shape(
    name: str, low: float, high: float, period: float, shares: list[float]
) -> None:
    shape = make_shape(name, 20.0, low=low, high=high, period_seconds=period)
    times = [shape.time_of(share * shape.amount) for share in sorted(shares)]
    assert all(earlier <= later + 1e-9 for earlier, later in itertools.pairwise(times))
    assert all(0 <= at <= 20.0 + 1e-9 for at in times)


def test_a_burst_is_dense_where_it_is_high() -> None:
    shape = make_shape("burst", 40.0, low=0.5, high=5.0, period_seconds=20.0)
    workload = bend(cross_user(seed=1, qps=20.0, duration_seconds=shape.amount), shape)
    arrivals = [request.arrival_seconds for request in workload.requests]
    high = sum(at % 20 >= 15 for at in arrivals) / 10
    low = sum(at % 20 < 15 for at in arrivals) / 30
    assert high / low == pytest.approx(10, rel=0.2)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] < 40.0
