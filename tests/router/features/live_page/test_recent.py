"""Counts by slot, percentiles and the last decisions."""

import random

import pytest

from replicas.protocol.frames import PromptUsage
from replicas.protocol.status import ReplicaId
from router.features.live_page.recent import MAX_DECISIONS, NUM_SLOTS, SLOT_SECONDS, Recent, Slot
from tests.router.features.usage.test_ledger import served


def new_recent() -> Recent:
    return Recent(lambda model: 16)


def test_requests_are_counted_in_the_slot_of_their_time() -> None:
    rng = random.Random(1)
    recent, times, now = new_recent(), [], 1e9
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
    recent = new_recent()
    recent.slot(1000.0).num_requests += 1
    start, slots = recent.slots(1000.0 + 3 * SLOT_SECONDS)
    assert start == 1000
    assert [slot.num_requests for slot in slots] == [1, 0, 0, 0]
    _, slots = recent.slots(1000.0 + 1e7)
    assert len(slots) == NUM_SLOTS
    assert not any(slot.num_requests for slot in slots)


def test_time_that_goes_back_counts_where_it_was() -> None:
    recent = new_recent()
    assert recent.slot(1000.0) is recent.slot(900.0)


def test_percentiles_are_within_a_few_percent() -> None:
    rng = random.Random(2)
    slot, values = Slot(), [rng.lognormvariate(-3, 1.5) for _ in range(2000)]
    assert slot.percentile(0.5) is None
    for value in values:
        slot.add_ttft(value)
    values.sort()
    for share in (0.1, 0.5, 0.9, 0.99):
        assert slot.percentile(share) == pytest.approx(values[int(share * 2000) - 1], rel=0.05)
    slot.add_ttft(0.0)


def test_the_last_decisions_are_found_by_number_and_older_ones_are_not_kept() -> None:
    recent = new_recent()
    for _ in range(MAX_DECISIONS + 50):
        recent.observe(served(PromptUsage(10, 4, 0)))
    kept = [one.number for one in recent.decisions(0)]
    assert kept == list(range(MAX_DECISIONS + 50, 50, -1))
    assert [one.number for one in recent.decisions(MAX_DECISIONS + 48)] == kept[:2]
    for number in range(MAX_DECISIONS + 60):
        found = recent.decision(number)
        assert (found is not None) == (number in kept)
        assert found is None or found.number == number


def test_tokens_are_counted_by_origin_and_none_of_an_unknown_one() -> None:
    slot = Slot()
    for num_cached in (70, None):
        slot.add_usage(
            ReplicaId("r1"), PromptUsage(100, num_cached, 0, num_own_tokens=20, num_cross_user_tokens=30)
        )
    assert (slot.num_computed, slot.num_own, slot.num_cross_user, slot.num_unattributed) == (30, 20, 30, 20)
    assert slot.replicas == {"r1": (2, 100, 70)}
