from hypothesis import given
from hypothesis import strategies as st

from router.history.canonical import ConversationKey
from router.history.tool_gaps import (
    LEAST_GAPS,
    LEAST_SECONDS,
    MARGIN,
    MOST_AWAITED,
    MOST_GAPS,
    MOST_TENANTS,
    ToolGaps,
)


def key(number: int) -> ConversationKey:
    return ConversationKey(number.to_bytes(16, "big"))


def loop(gaps: ToolGaps, seconds: float, *, times: int = 16, tenant: str = "ann", start: int = 0) -> None:
    """An agent whose tools take so long, again and again."""
    for number in range(start, start + times):
        gaps.ended(tenant, key(number), 100.0 * number, in_calls=True)
        gaps.came(key(number), 100.0 * number + seconds)


def test_a_prompt_is_kept_for_somewhat_longer_than_most_tools_have_taken() -> None:
    gaps = ToolGaps(300)
    loop(gaps, 20.0)
    assert gaps.seconds("ann") == 20 * MARGIN
    assert gaps.seconds("bob") is None
    loop(gaps, 60.0, times=MOST_GAPS, start=100)
    assert gaps.seconds("ann") == 60 * MARGIN


def test_nothing_is_concluded_from_little_or_where_few_turns_end_in_calls() -> None:
    gaps = ToolGaps(300)
    loop(gaps, 20.0, times=LEAST_GAPS - 1)
    assert gaps.seconds("ann") is None
    loop(gaps, 20.0, start=100)
    assert gaps.seconds("ann") is not None
    for number in range(20):
        gaps.ended("ann", key(1000 + number), 0.0, in_calls=False)
    assert gaps.seconds("ann") is None


@given(st.lists(st.floats(0, 1000), min_size=16, max_size=100))
def test_it_stays_within_its_bounds(taken: list[float]) -> None:
    gaps = ToolGaps(300)
    for number, seconds in enumerate(taken):
        gaps.ended("ann", key(number), 5000.0 * number, in_calls=True)
        gaps.came(key(number), 5000.0 * number + seconds)
    learnt = [seconds for seconds in taken if seconds <= 300][-MOST_GAPS:]
    kept = gaps.seconds("ann")
    assert (kept is None) == (len(learnt) < LEAST_GAPS)
    assert kept is None or LEAST_SECONDS <= kept <= 300
    assert kept is None or kept >= min(300, sorted(learnt)[len(learnt) // 2])


def test_what_never_comes_back_takes_a_bounded_room() -> None:
    gaps = ToolGaps(300)
    for number in range(3 * MOST_AWAITED):
        gaps.ended(f"tenant-{number}", key(number), 0.0, in_calls=True)
    assert len(gaps._awaited) == MOST_AWAITED
    assert len(gaps._tenants) == MOST_TENANTS


def test_off_is_off() -> None:
    gaps = ToolGaps(0)
    loop(gaps, 20.0)
    assert gaps.seconds("ann") is None
    assert not gaps._awaited
    assert not gaps._tenants
