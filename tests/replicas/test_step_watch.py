"""When an engine counts as hung, on times that are made up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.step_watch import StepWatch


def watch(floor: float = 30.0, *, max_step_tokens: int = 2048, seconds_per_token: float = 0.0) -> StepWatch:
    return StepWatch(floor, 1.0, max_step_tokens, seconds_per_token)


def hangs_after(watch: StepWatch, *, from_second: int = 0, has_work: bool = True) -> int | None:
    """With a look every second and no step, in how many seconds; None: not within a day."""
    for second in range(86_400):
        if watch.look(float(from_second + second), has_work=has_work):
            return second
    return None


def test_an_engine_with_work_and_without_an_end_of_a_step_hangs_after_the_floor() -> None:
    assert hangs_after(watch()) == 31


def test_an_idle_engine_never_hangs() -> None:
    assert hangs_after(watch(), has_work=False) is None


def test_every_end_of_a_step_begins_the_count_anew() -> None:
    one = watch()
    for second in range(1000):
        if second % 29 == 0:
            one.step_ended(0.1, 0.0)
        assert not one.look(float(second), has_work=True)
    assert one.silent_seconds < 30


def test_work_that_is_taken_back_does_not_hide_a_hang() -> None:
    """Requests come, wait for nothing and are aborted, and others come."""
    one = watch()
    looks = [one.look(float(second), has_work=second % 5 == 0) for second in range(60)]
    assert looks.index(True) == 31


def test_an_engine_that_has_done_what_was_taken_back_owes_nothing() -> None:
    one = watch()
    one.look(0.0, has_work=True)
    one.step_ended(0.1, 0.0)
    assert hangs_after(one, from_second=1, has_work=False) is None


@pytest.mark.parametrize(
    ("rate", "tokens", "limit"),
    [(3e-5, 8192, 30.0), (0.02, 2048, 5 * 0.02 * 2048), (0.0, 2048, 30.0), (0.02, 0, 30.0)],
)
def test_a_slow_engine_may_take_as_long_as_a_few_whole_steps(rate: float, tokens: int, limit: float) -> None:
    one = watch(max_step_tokens=tokens)
    one.step_ended(0.5, rate)
    assert one.limit_seconds == pytest.approx(limit)


def test_what_the_proof_measured_holds_until_a_prompt_was_measured_and_only_so_far() -> None:
    one = watch(seconds_per_token=0.02)
    assert one.limit_seconds == pytest.approx(2 * 0.02 * 2048)
    slow_start = watch(seconds_per_token=10.0)  # a first compilation lies in it
    assert slow_start.limit_seconds == pytest.approx(600.0)
    slow_start.step_ended(0.5, 0.0)
    assert slow_start.limit_seconds == pytest.approx(600.0)
    slow_start.step_ended(0.5, 3e-5)
    assert slow_start.limit_seconds == pytest.approx(30.0)


def test_a_long_step_makes_patient_for_a_while() -> None:
    one = watch()
    one.step_ended(20.0, 0.0)
    assert one.limit_seconds == pytest.approx(100.0)
    for _ in range(5000):
        one.step_ended(0.01, 0.0)
    assert one.limit_seconds == pytest.approx(30.0)


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """The machine slept for an hour, or the whole process was stopped."""
    one = watch()
    one.look(0.0, has_work=True)
    assert not one.look(3600.0, has_work=True)
    assert one.silent_seconds <= 2.0
    assert hangs_after(one, from_second=3601) == 28


@given(
    st.lists(
        st.tuples(st.floats(0.0, 100.0), st.booleans(), st.one_of(st.none(), st.floats(1e-6, 50.0))),
        max_size=60,
    )
)
def test_it_hangs_only_after_looks_for_the_whole_limit_without_a_step(
    happenings: list[tuple[float, bool, float | None]],
) -> None:
    one, now, seen, had_work = watch(), 0.0, 0.0, False
    for passed, has_work, step in happenings:
        now += passed
        if step is not None:
            one.step_ended(step, 0.0)
        hung = one.look(now, has_work=has_work)
        seen = 0.0 if step is not None else seen + min(passed, 2.0)
        had_work = has_work or (had_work and step is None)
        if hung:
            assert had_work
            assert seen > 30.0 and seen >= one.silent_seconds > one.limit_seconds >= 30.0
