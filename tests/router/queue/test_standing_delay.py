"""Tests of what tells an overload from a burst."""

from router.queue.standing_delay import CALM_SECONDS, STANDING_SECONDS, TARGET_SECONDS, StandingDelay

LONG = TARGET_SECONDS + 1.0


def test_a_burst_that_is_worked_off_is_no_overload() -> None:
    delay = StandingDelay()
    for tenth in range(30):
        delay.sees(LONG - tenth / 10, tenth / 10)
        assert not delay.is_overload(tenth / 10)


def test_one_short_wait_begins_anew() -> None:
    delay = StandingDelay()
    for second in range(20):
        delay.sees(0.0 if second % 3 == 2 else LONG, float(second))
        assert not delay.is_overload(float(second))


def test_as_much_again_when_what_was_there_is_done_is_an_overload() -> None:
    delay = StandingDelay()
    delay.sees(LONG, 0.0)
    delay.sees(LONG, LONG)
    assert not delay.is_overload(LONG)
    delay.sees(LONG, LONG + 0.1)
    assert delay.is_overload(LONG + 0.1) and not delay.is_standing(LONG + 0.1)
    assert delay.is_standing(LONG + 0.2 + STANDING_SECONDS)


def test_it_is_over_when_none_was_held_back_for_a_while() -> None:
    delay = StandingDelay()
    delay.holds(0.0)
    delay.holds(5.0)
    assert delay.is_overload(5.0 + CALM_SECONDS)
    assert not delay.is_overload(5.1 + CALM_SECONDS)
    delay.sees(LONG, 20.0)
    assert not delay.is_overload(20.0), "what was seen before counts no more"


def test_who_sees_an_overload_begin_is_told() -> None:
    delay = StandingDelay()
    assert [delay.sees(LONG, second) for second in (0.0, LONG / 2, LONG + 1.0)] == [False, False, True]
    assert delay.is_overload(LONG + 1.0)
