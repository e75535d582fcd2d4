"""Tests of what a request counts for, and of what is given back."""

import pytest
from hypothesis import given, strategies

from router.queue.counters import VirtualCounters
from router.queue.shares import Shares
from router.queue.work import CACHED_TOKEN, OUTPUT_TOKEN, Charge, prompt_work

counts = strategies.integers(0, 10_000)


@given(num_tokens=counts, expected=counts, found=counts, produced=strategies.lists(counts, max_size=5))
def test_a_request_counts_for_what_was_found_and_decoded(
    num_tokens: int, expected: int, found: int, produced: list[int]
) -> None:
    expected, found = min(expected, num_tokens), min(found, num_tokens)
    counters = VirtualCounters()
    work = prompt_work(num_tokens, expected)
    counters.passes("red", 2.0, work)
    charge = Charge(counters, "red", num_tokens=num_tokens, work=work)
    charge.begins(found)
    charge.begins(0)  # another attempt's, after a loss: the client's prompt was computed once
    for number in produced:
        charge.produces(number)
    charge.close()
    charge.close()
    whole = num_tokens - found + CACHED_TOKEN * found + OUTPUT_TOKEN * sum(produced)
    assert abs(counters.counter("red") - whole / 2.0) < 1e-6


def test_what_nobody_says_leaves_the_charge_as_it_was() -> None:
    counters = VirtualCounters()
    charge = charged(counters)
    charge.begins(None)
    charge.close()
    assert counters.counter("red") == 140


def test_its_places_are_taken_until_it_ends_and_returned_once() -> None:
    counters, shares = VirtualCounters(), Shares()
    shares.gives("red", 1.0, 10.0, now=0.0)
    options = {"num_tokens": 10, "work": 10.0, "shares": shares, "num_places": 16}
    first, second = (Charge(counters, "red", **options) for _ in range(2))  # type: ignore[arg-type]
    first.produces(50)
    assert shares._shares["red"].num_places == 32
    assert shares._shares["red"].work == 10.0 + OUTPUT_TOKEN * 50
    for charge in (first, first, second):
        charge.begins(0)
        charge.close()
    assert shares._shares["red"].num_places == shares._num_places == 0


def charged(counters: VirtualCounters, *, wait_seconds: float = 0.0, prompt_seconds: float = 0.0) -> Charge:
    """For a prompt of 40 tokens, beside 100 of another request."""
    counters.passes("red", 1.0, 100.0)
    counters.passes("red", 1.0, 40.0)
    return Charge(
        counters,
        "red",
        num_tokens=40,
        work=40.0,
        wait_seconds=wait_seconds,
        prompt_seconds=prompt_seconds,
    )


@pytest.mark.parametrize(("has_gone", "ends_at"), [(False, None), (True, None), (False, 1e6), (True, 12.0)])
def test_what_nothing_was_computed_for_counts_for_nothing(has_gone: bool, ends_at: float | None) -> None:
    """Its replica was not asked, or failed, or had others before it until its end."""
    counters = VirtualCounters()
    charge = charged(counters, wait_seconds=2.0, prompt_seconds=4.0)
    if has_gone:
        charge.goes(10.0)
    charge.close(ends_at)
    charge.close(1e6)
    assert counters.counter_of_waiting("red") == 100.0


@pytest.mark.parametrize(("ends_at", "computed"), [(12.5, 5.0), (15.0, 30.0), (16.0, 40.0), (99.0, 40.0)])
def test_who_takes_a_request_back_pays_for_what_was_computed_by_then(ends_at: float, computed: float) -> None:
    counters = VirtualCounters()
    charge = charged(counters, wait_seconds=2.0, prompt_seconds=4.0)
    charge.goes(10.0)
    charge.goes(14.0)  # another attempt's
    charge.close(ends_at)
    charge.close()
    assert counters.counter_of_waiting("red") == 100.0 + computed


def test_of_a_replica_whose_speed_nobody_knows_a_prompt_counts_once_it_has_begun() -> None:
    counters = VirtualCounters()
    charge = charged(counters)
    charge.goes(10.0)
    charge.close(10.1)
    assert counters.counter_of_waiting("red") == 140.0
