"""How much a peer is asked at once, and when it is asked nothing more."""

import pytest

from replicas.leaving.pace import MAX_LATE, MAX_PAUSE_SECONDS, Pace, busy_pauses
from replicas.protocol.hand_overs import HandOverOutcome

LATE, BUSY = HandOverOutcome.LATE, HandOverOutcome.BUSY


def test_one_that_is_late_is_asked_for_half_and_left_alone_if_it_is_late_again() -> None:
    pace = Pace(100)
    pace.failed(LATE, 100)
    assert (pace.num_chunks, pace.given_up) == (50, None)
    pace.answered()
    for _ in range(MAX_LATE):
        assert pace.given_up is None
        pace.failed(LATE, pace.num_chunks)
    assert (pace.num_chunks, pace.given_up) == (12, LATE)
    pace.recover()
    assert (pace.num_chunks, pace.given_up) == (12, None)


def test_no_less_than_one_chunk_is_asked_for() -> None:
    pace = Pace(1)
    pace.failed(LATE, 1)
    assert pace.num_chunks == 1


@pytest.mark.parametrize(("outcome", "recovers"), [(BUSY, True), (HandOverOutcome.REFUSED, False)])
def test_other_failures_end_it_and_some_for_good(outcome: HandOverOutcome, recovers: bool) -> None:
    pace = Pace(100)
    pace.failed(outcome, 100)
    assert pace.given_up is outcome
    pace.recover()
    assert (pace.given_up is None) is recovers


def test_the_pauses_for_one_that_is_busy_grow_and_end() -> None:
    pauses = [*busy_pauses()]
    assert pauses == sorted(pauses) and pauses[-1] == MAX_PAUSE_SECONDS and sum(pauses) < 6
