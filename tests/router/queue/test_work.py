"""Tests of what a request counts for, and of what is given back."""

from hypothesis import given, strategies

from router.queue.counters import VirtualCounters
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


def test_what_nothing_was_computed_for_counts_for_nothing() -> None:
    counters = VirtualCounters()
    counters.passes("red", 1.0, 100.0)
    counters.passes("red", 1.0, 40.0)
    charge = Charge(counters, "red", num_tokens=40, work=40.0)
    charge.close()
    charge.close()
    assert counters.counter_of_waiting("red") == 100.0
