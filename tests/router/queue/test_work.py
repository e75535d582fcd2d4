"""What a request counts for, what is given back, and who has been given more than its part."""

import math

import pytest
from hypothesis import given, strategies

from router.queue.counters import VirtualCounters
from router.queue.shares import LEAST_SPARED, MOST_SPARED, NEWCOMER, Shares
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


def test_a_tenant_alone_spares_nothing_and_one_of_two_by_what_the_other_was_given() -> None:
    shares = Shares()
    shares.gives("a", 1.0, 900.0, now=0.0)
    assert shares.spared("a", now=1.0) == 0.0
    shares.gives("b", 1.0, 200.0, now=1.0)
    assert shares.spared("a", now=2.0) == pytest.approx(2 * 200 / (900 * math.exp(-1 / 30) + 200), rel=0.01)
    assert shares.spared("b", now=2.0) == 0.0
    assert shares.spared("c", now=2.0) == 0.0


@pytest.mark.parametrize(("others", "spared"), [(50.0, LEAST_SPARED), (590.0, MOST_SPARED)])
def test_however_little_or_much_the_others_are_given_what_is_spared_is_bounded(
    others: float, spared: float
) -> None:
    shares = Shares()
    shares.gives("a", 1.0, 1000.0, now=0.0)
    shares.gives("b", 1.0, others, now=0.0)
    assert shares.spared("a", now=1.0) == spared


def test_weight_is_a_part() -> None:
    shares = Shares()
    shares.gives("a", 10.0, 1000.0, now=0.0)
    shares.gives("b", 1.0, 100.0, now=0.0)
    assert shares.spared("a", now=1.0) == 0.0


def test_however_many_tenants_come_to_a_full_memory_all_are_looked_at_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = Shares(max_tenants=3)
    looks: list[float] = []
    look = shares._look

    def counted(now: float) -> None:
        looks.append(now)
        look(now)

    monkeypatch.setattr(shares, "_look", counted)
    for number in range(100):
        shares.gives(f"t{number}", 1.0, 10.0, now=10.0 + number / 100)
    assert looks == [10.03, 10.53]


def test_after_a_long_rest_nobody_has_had_anything() -> None:
    shares = Shares()
    for tenant in "ab":
        shares.gives(tenant, 1.0, 1000.0, now=0.0)
    for tenant in "ab":
        assert shares.spared(tenant, now=1e6) == 0.0
        shares.gives(tenant, 1.0, 1000.0, now=1e6)
    assert shares.spared("a", now=1e6 + 0.1) == 0.0


def test_a_tenant_above_its_share_of_the_places_leaves_a_fifth_and_one_alone_a_few_if_others_may_come() -> (
    None
):
    shares = Shares()
    shares.gives("a", 1.0, 10.0, now=0.0)
    flood = shares.take_places("a", 500)
    assert flood is not None
    for has_others, spared in ((False, 0.0), (True, NEWCOMER)):
        assert shares.spared_places("a", now=1.0, has_others=has_others) == spared
        assert shares.spared_places("b", now=1.0, has_others=has_others) == 0.0, "nobody has seen it yet"
    for tenant, weight in (("b", 1.0), ("c", 600.0)):
        shares.gives(tenant, weight, 1000.0, now=1.0)
        shares.take_places(tenant, 8)
    for tenant, spared in (("a", LEAST_SPARED), ("b", LEAST_SPARED), ("c", 0.0)):
        assert shares.spared_places(tenant, now=2.0, has_others=True) == spared
    assert shares.spared_places("a", now=600.0, has_others=True) == LEAST_SPARED, "what runs is remembered"
    shares.return_places(flood, 500)
    assert shares.spared_places("a", now=601.0, has_others=True) == 0.0


def test_what_is_generated_counts_while_it_is() -> None:
    shares = Shares()
    for tenant in "ab":
        shares.gives(tenant, 1.0, 100.0, now=0.0)
    share = shares.take_places("a", 1)
    assert share is not None and shares.spared("a", now=0.0) == 0.0
    share.work += 1000.0
    assert shares.spared("a", now=1.0) == LEAST_SPARED
