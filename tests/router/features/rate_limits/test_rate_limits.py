"""What tenants and keys may use, against a slow count with exact numbers, and what is given back."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.caller import OPEN_CALLER, Caller, Limits, Tenant
from router.errors import LimitReached
from router.features.rate_limits.rate_account import Ask
from router.features.rate_limits.rate_limits import RateLimits, Taken
from tests.examples import examples


def caller(
    of_tenant: Limits | None = None, of_key: Limits | None = None, *, tenant: str = "acme", key: str = "a1"
) -> Caller:
    return Caller(
        tenant=Tenant(name=tenant, limits=of_tenant or Limits()), key_id=key, limits=of_key or Limits()
    )


def refusal_of(limits: RateLimits, who: Caller, ask: Ask, now: float) -> LimitReached:
    with pytest.raises(LimitReached) as caught:
        limits.take(who, ask, now)
    return caught.value


@dataclass
class SlowBucket:
    """What is in it, told anew from all that was ever taken."""

    limit: int
    uses: list[tuple[Fraction, int]] = field(default_factory=list)

    def level(self, now: Fraction) -> Fraction:
        level, at = Fraction(self.limit), Fraction(0)
        for when, amount in [*self.uses, (now, 0)]:
            level = min(Fraction(self.limit), level + (when - at) * self.limit / 60) - amount
            level = min(Fraction(self.limit), level)
            at = when
        return level


@dataclass
class SlowAccount:
    limits: Limits
    requests: SlowBucket
    tokens: SlowBucket
    reserved: int = 0
    num_sequences: int = 0

    def counted(self, ask: Ask) -> int:
        assert self.limits.tokens_per_minute is not None
        room = self.limits.tokens_per_minute - ask.num_prompt_tokens
        return ask.num_prompt_tokens + max(0, min(ask.num_output_tokens, room))

    def fits(self, ask: Ask, now: Fraction) -> bool:
        assert self.limits.max_sequences is not None
        return (
            self.requests.level(now) >= 1
            and self.tokens.level(now) - self.reserved >= self.counted(ask)
            and self.num_sequences + ask.num_sequences <= self.limits.max_sequences
        )


def slow_account(limits: Limits) -> SlowAccount:
    assert limits.requests_per_minute is not None
    assert limits.tokens_per_minute is not None
    return SlowAccount(limits, SlowBucket(limits.requests_per_minute), SlowBucket(limits.tokens_per_minute))


some_limits = st.builds(
    Limits,
    requests_per_minute=st.integers(0, 12),
    tokens_per_minute=st.integers(0, 600),
    max_sequences=st.integers(0, 6),
)
some_asks = st.builds(Ask, st.integers(1, 400), st.integers(0, 400), st.integers(1, 4))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 1), some_asks),
        st.tuples(st.just("end"), st.integers(0, 9), st.integers(0, 500)),
        st.tuples(st.just("give_back"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 200), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=examples(400), deadline=None)
@given(some_limits, some_limits, some_limits, steps)
def test_a_request_is_served_exactly_if_it_fits_by_an_exact_count(
    of_tenant: Limits, of_first: Limits, of_second: Limits, steps: Sequence[tuple[str, int, object]]
) -> None:
    callers = [caller(of_tenant, of_first, key="a1"), caller(of_tenant, of_second, key="b2")]
    tenant = slow_account(of_tenant)
    slow = [[tenant, slow_account(of_first)], [tenant, slow_account(of_second)]]
    limits, now = RateLimits(), Fraction(0)
    open_: list[tuple[int, Ask, Taken]] = []
    for what, number, detail in steps:
        if what == "wait":
            now += Fraction(number, 8)
        elif what == "take":
            assert isinstance(detail, Ask)
            fits = all(account.fits(detail, now) for account in slow[number])
            try:
                taken = limits.take(callers[number], detail, float(now))
            except LimitReached as error:
                assert not fits
                _check_wait(limits, callers[number], slow[number], detail, now, error)
                continue
            assert fits
            assert taken is not None
            open_.append((number, detail, taken))
            for account in slow[number]:
                account.reserved += account.counted(detail) - detail.num_prompt_tokens
                account.num_sequences += detail.num_sequences
                account.requests.uses.append((now, 1))
                account.tokens.uses.append((now, detail.num_prompt_tokens))
        elif open_:
            whose, ask, taken = open_.pop(number % len(open_))
            assert isinstance(detail, int)
            if what == "end":
                limits.end(taken, detail, float(now))
            else:
                limits.give_back(taken, float(now))
            for account in slow[whose]:
                account.reserved -= account.counted(ask) - ask.num_prompt_tokens
                account.num_sequences -= ask.num_sequences
                is_end = what == "end"
                account.requests.uses.append((now, 0 if is_end else -1))
                account.tokens.uses.append((now, detail if is_end else -ask.num_prompt_tokens))
        _check_quotas(limits, callers[0], slow[0], now)
    for _, _, taken in open_:
        limits.give_back(taken, float(now))
    assert limits.num_sequences == 0


def _check_quotas(limits: RateLimits, who: Caller, slow: list[SlowAccount], now: Fraction) -> None:
    quotas = limits.quotas(who, float(now))
    assert quotas is not None
    assert quotas.requests is not None
    assert quotas.tokens is not None
    requests = min(max(Fraction(0), account.requests.level(now)) for account in slow)
    tokens = min(max(Fraction(0), account.tokens.level(now) - account.reserved) for account in slow)
    assert requests - 1 - Fraction(1, 1000) < quotas.requests.num_remaining < requests + Fraction(1, 1000)
    assert tokens - 1 - Fraction(1, 1000) < quotas.tokens.num_remaining < tokens + Fraction(1, 1000)


def _check_wait(
    limits: RateLimits,
    who: Caller,
    slow: list[SlowAccount],
    ask: Ask,
    now: Fraction,
    error: LimitReached,
) -> None:
    """It fits after the time that was told, and not before, if nobody else asks meanwhile."""
    never = any(
        account.limits.requests_per_minute == 0
        or ask.num_prompt_tokens > (account.limits.tokens_per_minute or 0)
        or ask.num_sequences > (account.limits.max_sequences or 0)
        for account in slow
    )
    assert (error.retry_after_seconds is None) == never
    if error.retry_after_seconds is None or error.what == "sequences":
        return
    wait = Fraction(error.retry_after_seconds)
    for account in slow:
        assert account.requests.level(now + wait) >= 1 - Fraction(1, 10**5)
        if not account.reserved:
            assert account.tokens.level(now + wait) >= account.counted(ask) - Fraction(1, 10**5)
    if not any(account.reserved for account in slow):
        sooner = now + wait * Fraction(99, 100)
        assert not all(account.fits(ask, sooner) for account in slow)


def test_who_has_no_limits_costs_nothing() -> None:
    limits = RateLimits()
    assert limits.take(OPEN_CALLER, Ask(10**9, 10**9, 10**6), 0.0) is None
    assert limits.quotas(OPEN_CALLER, 0.0) is None
    assert limits.num_accounts == 0


@pytest.mark.parametrize(
    ("bounds", "what"),
    [
        (Limits(requests_per_minute=0), "requests"),
        (Limits(tokens_per_minute=0), "tokens"),
        (Limits(max_sequences=0), "sequences"),
    ],
)
@pytest.mark.parametrize("is_keys", [True, False])
def test_a_limit_of_zero_refuses_everything_and_says_so(bounds: Limits, what: str, is_keys: bool) -> None:
    limits = RateLimits()
    who = caller(None, bounds) if is_keys else caller(bounds)
    error = refusal_of(limits, who, Ask(1, 1, 1), 0.0)
    assert (error.what, error.retry_after_seconds) == (what, None)
    assert "Nothing can be asked for" in error.message
    with pytest.raises(LimitReached):
        limits.begin(who, 0.0)


def test_a_clock_that_goes_back_fills_and_empties_nothing() -> None:
    limits = RateLimits()
    who = caller(Limits(requests_per_minute=1))
    limits.take(who, Ask(1, 0, 1), 1000.0)
    for now in (0.0, 999.0, 1000.0, 1059.0):
        refusal_of(limits, who, Ask(1, 0, 1), now)
    assert limits.take(who, Ask(1, 0, 1), 1060.0) is not None


def test_whose_buckets_are_full_again_is_forgotten() -> None:
    limits, ids = RateLimits(), itertools.count()
    bounds = Limits(requests_per_minute=60, max_sequences=4)
    running = limits.take(caller(bounds, tenant="long"), Ask(1, 0, 1), 0.0)
    assert running is not None
    most = 0
    for step in range(20_000):
        who = caller(None, bounds, key=f"{next(ids):012x}")
        taken = limits.take(who, Ask(1, 0, 1), step / 100)
        assert taken is not None
        limits.end(taken, 1, step / 100)
        most = max(most, limits.num_accounts)
    assert most < 300  # a second's, as each takes a second to fill again, and those that are looked at late
    assert limits.num_sequences == 1
    limits.end(running, 1, 1e6)
    limits.quotas(caller(bounds, tenant="long"), 1e6)
    assert limits.num_sequences == 0
