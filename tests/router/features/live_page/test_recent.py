"""Counts by slot, percentiles and the last decisions."""

import random

import pytest

from replicas.protocol.frames import NO_USER
from router.features.live_page.recent import (
    MAX_DECISIONS,
    NUM_SLOTS,
    SLOT_SECONDS,
    Durations,
    Origins,
    Recent,
    RecentDecision,
)


def decision(number: int) -> RecentDecision:
    return RecentDecision(
        number=number,
        request_id="req",
        route="chat_completions",
        model="toy",
        adapter=None,
        tenant="default",
        user=NO_USER,
        key=None,
        status=200,
        error=None,
        arrived_at=0.0,
        first_token_seconds=None,
        ended_seconds=1.0,
        num_output_tokens=0,
        num_prompt_tokens=0,
        usage=None,
        decision=None,
        misses=None,
        block_size=16,
    )


def test_requests_are_counted_in_the_slot_of_their_time() -> None:
    rng = random.Random(1)
    recent, times, now = Recent(), [], 1e9
    for _ in range(500):
        now += rng.expovariate(1 / 2)
        times.append(now)
        recent.slot(now).num_requests += 1
    start, slots = recent.slots(now)
    assert len(slots) == NUM_SLOTS and start % SLOT_SECONDS == 0
    for place, slot in enumerate(slots):
        begin = start + place * SLOT_SECONDS
        assert slot.num_requests == sum(begin <= time < begin + SLOT_SECONDS for time in times)


def test_time_without_requests_is_empty_slots_and_after_long_nothing_is_left() -> None:
    recent = Recent()
    recent.slot(1000.0).num_requests += 1
    start, slots = recent.slots(1000.0 + 3 * SLOT_SECONDS)
    assert start == 1000
    assert [slot.num_requests for slot in slots] == [1, 0, 0, 0]
    _, slots = recent.slots(1000.0 + 1e7)
    assert len(slots) == NUM_SLOTS
    assert not any(slot.num_requests for slot in slots)


def test_time_that_goes_back_counts_where_it_was() -> None:
    recent = Recent()
    assert recent.slot(1000.0) is recent.slot(900.0)


def test_percentiles_are_within_a_few_percent() -> None:
    rng = random.Random(2)
    durations, values = Durations(), [rng.lognormvariate(-3, 1.5) for _ in range(2000)]
    for value in values:
        durations.add(value)
    values.sort()
    for share in (0.1, 0.5, 0.9, 0.99):
        assert durations.percentile(share) == pytest.approx(values[int(share * 2000) - 1], rel=0.05)
    assert Durations().percentile(0.5) is None
    durations.add(0.0)


def test_the_last_decisions_are_found_by_number_and_older_ones_are_not_kept() -> None:
    recent = Recent()
    for number in range(1, MAX_DECISIONS + 51):
        recent.add(decision(number))
    kept = [one.number for one in recent.decisions(0)]
    assert kept == list(range(MAX_DECISIONS + 50, 50, -1))
    assert [one.number for one in recent.decisions(MAX_DECISIONS + 48)] == kept[:2]
    for number in range(MAX_DECISIONS + 60):
        found = recent.decision(number)
        assert (found is not None) == (number in kept)
        assert found is None or found.number == number


def test_origins_add_up() -> None:
    total = Origins(1, 2, 3, 4) + Origins(10, 20, 30, 40)
    assert total == Origins(11, 22, 33, 44)
    assert (total.num_tokens, total.num_cached) == (110, 99)
