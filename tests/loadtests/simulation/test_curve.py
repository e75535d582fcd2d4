"""Hits over time: windows against counting by hand, and when they are back after a loss."""

import dataclasses

import pytest

from loadtests.simulation.curve import Window, back_after, curve, left_hits_of
from loadtests.simulation.options import FleetOptions, Kill
from loadtests.simulation.shape import TierShape
from loadtests.workloads import Loss, Workload, ideal_hits_by_request
from tests.loadtests.simulation.builders import plain_shape, random_workload, request, serve, small_shape

BIG = TierShape(1000, host_bytes=1e9, chunk_tokens=16, host_bytes_per_second=1e12)
PULLING = dataclasses.replace(BIG, pull_bytes_per_second=1e12)
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


def test_each_request_is_in_the_window_in_which_it_arrived() -> None:
    """Blocks of 10; the last token of a prompt is always computed, and counts as a miss of its block."""
    workload = Workload(
        "four",
        10,
        (
            request(0.0, [1, 2]),
            request(4.9, [1, 2, 3]),
            request(5.0, [1, 9]),
            request(17.0, [1, 2, 3, 4]),
        ),
    )
    records = serve(workload, FleetOptions(plain_shape(200), num_replicas=1)).records
    hits = [record.num_cached_tokens for record in records]
    assert hits == [0, 20, 10, 30]
    assert curve(workload, records, [], 5.0) == (
        Window(0.0, 2, 50, 20, 20, 20),
        Window(5.0, 1, 20, 10, 10, 10),
        Window(10.0, 0, 0, 0, 0, 0),
        Window(15.0, 1, 40, 30, 30, 30),
    )


def test_what_was_lost_is_not_known_until_it_is_asked_for_again() -> None:
    requests = tuple(request(float(second), [1, 2, 3, 4]) for second in range(4))
    workload = Workload("same", 10, requests)
    losses = [Loss(1.5, frozenset({2}))]
    assert [hits.num_cached for hits in ideal_hits_by_request(workload, losses=losses)] == [0, 30, 20, 30]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fleet_never_has_more_than_what_was_not_lost_and_pulls_bring_nearly_all_of_it(seed: int) -> None:
    workload = random_workload(seed, num_requests=300, qps=4.0)
    kills = tuple(Kill(number, 30.0, 1.0, keeps_disk=False) for number in range(2))
    missing = {}
    for tiers in (BIG, PULLING):
        options = FleetOptions(
            small_shape(80, tiers=tiers), num_replicas=4, num_routers=2, index_stride=16, kills=kills
        )
        result = serve(workload, options)
        windows = curve(workload, result.records, result.losses, 10.0)
        assert sum(window.num_requests for window in windows) == 300
        assert all(window.num_hits <= window.num_left_hits <= window.num_ideal_hits for window in windows)
        assert any(window.num_left_hits < window.num_ideal_hits for window in windows if window.start >= 30)
        missing[tiers] = sum(window.num_left_hits - window.num_hits for window in windows)
    assert missing[PULLING] < missing[BIG] / 2


@pytest.mark.parametrize("seed", SEEDS)
def test_what_replicas_that_drain_have_leased_is_lost_no_more(seed: int) -> None:
    workload = random_workload(seed, num_requests=300, qps=4.0)
    leased = dataclasses.replace(PULLING, lease_seconds=600)
    lost = {}
    for tiers, drain_seconds in ((PULLING, 20.0), (leased, 0.0), (leased, 20.0)):
        kills = tuple(
            Kill(number, 30.0 - drain_seconds, 1.0, keeps_disk=False, drain_seconds=drain_seconds)
            for number in range(2)
        )
        shape = small_shape(80, tiers=tiers)
        options = FleetOptions(shape, num_replicas=4, num_routers=2, index_stride=16, kills=kills)
        result = serve(workload, options)
        windows = curve(workload, result.records, result.losses, 10.0)
        after = [window for window in windows if window.start >= 30]
        lost[tiers, drain_seconds] = sum(window.num_ideal_hits - window.num_left_hits for window in after)
    assert min(lost[PULLING, 20.0], lost[leased, 0.0]) > 0
    assert lost[leased, 20.0] < 0.2 * min(lost[PULLING, 20.0], lost[leased, 0.0])


@pytest.mark.parametrize(
    ("hits", "seconds"),
    [
        ((50, 50, 50, 50), 0.0),
        ((0, 50, 50, 50), 0.0),
        ((50, 47, 50, 50), 5.0),
        ((50, 48, 47, 50), 15.0),
        ((50, 47, 50, 47), None),
    ],
)
def test_hits_are_back_after_the_last_window_that_lacks_more_than_two_points(
    hits: tuple[int, ...], seconds: float | None
) -> None:
    windows = [Window(10.0 * number, 1, 100, hit, 99, 50) for number, hit in enumerate(hits)]
    assert back_after(windows, 15.0, left_hits_of) == seconds
    assert back_after(windows, 15.0) is None
    assert back_after([], 15.0) == 0.0
