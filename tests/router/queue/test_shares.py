"""Who has lately been given more than its part."""

import math

import pytest

from router.queue.shares import LEAST_SPARED, MOST_SPARED, NEWCOMER, Shares


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
