"""The size that a pool's load asks for: by table, and what holds for every load."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import AutoscaleSpec
from cluster.controller.autoscale import LoadSample, decide, kept

SPEC = AutoscaleSpec(1, 6, target_in_flight=10, up_seconds=5, down_seconds=20, tolerance=0.1)
NOW = 100.0


def history(*loads: tuple[float, int]) -> list[LoadSample]:
    """One sample a second: (for how long, requests in flight), until now."""
    numbers = [number for seconds, number in loads for _ in range(int(seconds))]
    return [LoadSample(NOW - len(numbers) + 1 + place, number, 0) for place, number in enumerate(numbers)]


@pytest.mark.parametrize(
    ("num_replicas", "samples", "wanted"),
    [
        pytest.param(2, [], 2, id="nothing is known"),
        pytest.param(2, history((30, 20)), 2, id="just right"),
        pytest.param(2, history((30, 22)), 2, id="within the tolerance above"),
        pytest.param(2, history((30, 23)), 3, id="beyond it"),
        pytest.param(2, history((4, 60)), 2, id="too young to tell"),
        pytest.param(2, history((20, 20), (6, 60)), 6, id="long enough"),
        pytest.param(2, history((20, 20), (4, 60)), 2, id="not long enough"),
        pytest.param(2, history((20, 20), (3, 60), (1, 20), (3, 60)), 2, id="with a pause"),
        pytest.param(2, history((20, 20), (3, 60), (3, 35)), 4, id="the least that was asked for"),
        pytest.param(2, history((30, 900)), 6, id="no more than the most"),
        pytest.param(4, history((30, 11)), 2, id="less for long enough"),
        pytest.param(4, history((10, 11)), 4, id="less, but not for long"),
        pytest.param(4, history((30, 11), (1, 25), (10, 11)), 3, id="the most that was asked for"),
        pytest.param(2, history((30, 9)), 1, id="what one can do"),
        pytest.param(2, history((30, 10)), 2, id="what one could only just do"),
        pytest.param(4, history((30, 0)), 1, id="no fewer than the least"),
        pytest.param(9, [], 6, id="beyond the bounds"),
        pytest.param(0, [], 1, id="below the bounds"),
    ],
)
def test_decide(num_replicas: int, samples: list[LoadSample], wanted: int) -> None:
    assert decide(SPEC, num_replicas, samples, NOW) == wanted


def test_of_two_targets_the_one_that_asks_for_more_counts() -> None:
    spec = AutoscaleSpec(1, 9, target_in_flight=10, target_pending_tokens=1000, up_seconds=0)
    assert decide(spec, 1, [LoadSample(NOW, 10, 4500)], NOW) == 5
    assert decide(spec, 1, [LoadSample(NOW, 70, 4500)], NOW) == 7


specs = st.builds(
    lambda least, more, target, up, down, tolerance: AutoscaleSpec(
        least, least + more, target, None, up, down, tolerance
    ),
    *(st.integers(1, 5), st.integers(0, 20), st.floats(0.5, 50)),
    *(st.floats(0, 10), st.floats(0, 60), st.floats(0, 0.5)),
)
loads = st.lists(st.integers(0, 500), min_size=1, max_size=90)


@settings(deadline=None)
@given(specs, loads, st.integers(0, 30))
def test_the_bounds_hold_and_forgetting_old_samples_changes_nothing(
    spec: AutoscaleSpec, numbers: list[int], num_replicas: int
) -> None:
    samples = [LoadSample(float(second), number, 0) for second, number in enumerate(numbers)]
    now = samples[-1].at
    wanted = decide(spec, num_replicas, samples, now)
    assert spec.min_replicas <= wanted <= spec.max_replicas
    assert decide(spec, num_replicas, kept(spec, samples, now), now) == wanted


@settings(deadline=None)
@given(specs, st.integers(0, 500), st.integers(1, 25))
def test_under_a_load_that_stays_a_pool_finds_its_size_and_keeps_it(
    spec: AutoscaleSpec, number: int, num_replicas: int
) -> None:
    samples = [LoadSample(float(second), number, 0) for second in range(80)]
    sizes = [num_replicas]
    for _ in range(4):
        sizes.append(decide(spec, sizes[-1], samples, 79.0))
    assert len(set(sizes[2:])) == 1, sizes


@settings(deadline=None)
@given(specs, loads, st.integers(1, 25))
def test_more_load_never_asks_for_fewer(spec: AutoscaleSpec, numbers: list[int], num_replicas: int) -> None:
    less = [LoadSample(float(second), number, 0) for second, number in enumerate(numbers)]
    more = [LoadSample(sample.at, sample.num_in_flight + 7, 0) for sample in less]
    now = less[-1].at
    assert decide(spec, num_replicas, more, now) >= decide(spec, num_replicas, less, now)
