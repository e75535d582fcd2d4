"""Tests of what tells an overload from a burst."""

import pytest

from router.queue.standing_delay import (
    CALM_SECONDS,
    LATEST_REQUESTS,
    LATEST_SECONDS,
    STANDING_SECONDS,
    TARGET_SECONDS,
    StandingDelay,
)

LONG = TARGET_SECONDS + 1.0


def test_an_idlest_replica_that_works_off_a_burst_is_no_overload() -> None:
    delay = StandingDelay()
    for tenth in range(30):
        long = LONG - tenth / 10
        assert not delay.sees(0.0, long, 2, tenth / 10), tenth


def test_an_idlest_replica_that_has_as_much_again_afterwards_is_an_overload() -> None:
    delay = StandingDelay()
    seen = [delay.sees(0.0, LONG, 2, second) for second in (0.0, LONG / 2, LONG, LONG + 0.1)]
    assert seen == [False, False, False, True]
    assert delay.is_overload(LONG + 0.1) and not delay.is_standing(LONG + 0.1)


def test_one_short_wait_at_the_idlest_replica_begins_anew() -> None:
    delay = StandingDelay()
    for second in range(20):
        assert not delay.sees(0.0, 0.0 if second % 3 == 2 else LONG, 2, float(second))


def began_at(waits: list[float], interval: float, num_replicas: int = 8) -> int | None:
    """Return the place of the request at which an overload is seen; the requests come at intervals."""
    delay = StandingDelay()
    for place, wait in enumerate(waits):
        if delay.sees(wait, 0.0, num_replicas, place * interval):
            return place
    return None


def test_it_counts_what_requests_meet_though_others_meet_an_idle_replica() -> None:
    assert began_at([LONG, 0.0] * 100, 1.0) is not None
    assert began_at([LONG, *[0.0] * 7] * 100, 1.0) is None


def test_a_burst_at_one_moment_is_no_overload() -> None:
    assert began_at([LONG] * 100, LATEST_SECONDS / 1000) is None
    assert began_at([LONG] * 1000, LATEST_SECONDS / 1000) is not None


def test_a_few_requests_are_no_overload_however_slowly_they_come() -> None:
    assert began_at([LONG] * (LATEST_REQUESTS // 4), 100.0) is None
    assert began_at([LONG] * (LATEST_REQUESTS // 2), 100.0) is not None


@pytest.mark.parametrize(("num_replicas", "is_overload"), [(1, False), (2, False), (3, True), (8, True)])
def test_one_busy_replica_of_two_is_no_overload(num_replicas: int, *, is_overload: bool) -> None:
    waits = [LONG, LONG, 0.0, 0.0, 0.0] * 100
    assert (began_at(waits, 1.0, num_replicas) is not None) == is_overload


def test_an_overload_stands_after_a_while_and_ends_when_none_is_held_back() -> None:
    delay = StandingDelay()
    seconds = float(LATEST_REQUESTS)
    assert [delay.sees(LONG, 0.0, 8, second) for second in range(LATEST_REQUESTS)].count(True) > 0
    assert delay.is_overload(seconds)
    delay.holds(seconds)
    assert delay.is_standing(seconds + STANDING_SECONDS)
    assert delay.is_overload(seconds + CALM_SECONDS)
    assert not delay.is_overload(seconds + CALM_SECONDS + 0.1)
    delay.holds(seconds + 100.0)
    assert delay.is_overload(seconds + 100.0)
    assert not delay.is_standing(seconds + 101.0 + STANDING_SECONDS), "nothing was seen at the replicas"


def test_what_requests_met_before_an_overload_counts_no_more_after_it() -> None:
    delay = StandingDelay()
    place = next(place for place in range(100) if delay.sees(LONG, 0.0, 8, float(place)))
    assert not delay.sees(LONG, 0.0, 8, place + 100.0)
