"""RateLimits: whether a request fits the limits of its tenant and its key, and its reservations.

Owns the accounts of tenants and keys with limits. Pure: the caller supplies the time. Full accounts are
forgotten: each request checks two, so there are never many more than were used in the last minutes.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from router.caller import Caller, Limits
from router.errors import LimitReached
from router.features.rate_limits.rate_account import Ask, Limited, Owner, Quota, RateAccount, Shortage
from router.shared.instruments import Instrument, counter, gauge

NUM_LOOKED_AT = 2
"""Accounts that each request looks at, to forget those that are idle."""


class Taken(NamedTuple):
    """A request's reservation. Pass it to `end` or `give_back`, once."""

    ask: Ask
    parts: Sequence[tuple[RateAccount, int]]


class Quotas(NamedTuple):
    """The tenant's or the key's quotas, whichever have less left."""

    requests: Quota | None
    tokens: Quota | None


LEAST_ASK = Ask(num_prompt_tokens=1, num_output_tokens=0, num_sequences=1)


class RateLimits:
    def __init__(self) -> None:
        self._accounts: tuple[dict[str, RateAccount], dict[str, RateAccount]] = ({}, {})
        self._hand: deque[RateAccount] = deque()
        """Each account once; the next one to look at comes first."""
        self.changed: dict[RateAccount, None] | None = None
        """Accounts to report to other routers, oldest first; None without other routers."""
        self.num_sequences = 0
        self.num_refused = dict.fromkeys(Limited, 0)

    def begin(self, caller: Caller, now: float) -> None:
        """Raises LimitReached if the request would be refused with any body. A lack of tokens that come back
        is left to `take`, which knows how many are needed."""
        for owner, account in self._limited(caller, now):
            if account.fits(LEAST_ASK):
                continue
            for shortage in account.shortages(LEAST_ASK):
                if shortage.what is not Limited.TOKENS or shortage.wait_seconds is None:
                    self._refuse(owner, shortage)

    def take(self, caller: Caller, ask: Ask, now: float) -> Taken | None:
        """Take all that it asks; None if the caller has no limits. Raises LimitReached and takes nothing."""
        self._forget_idle(now)
        accounts = self._limited(caller, now)
        if not accounts:
            return None
        if not all(account.fits(ask) for _, account in accounts):
            short = [(owner, each) for owner, account in accounts for each in account.shortages(ask)]
            self._refuse(*max(short, key=_lasts))
        self.num_sequences += ask.num_sequences
        taken = Taken(ask, [(account, account.take(ask)) for _, account in accounts])
        self._note_changed(taken)
        return taken

    def end(self, taken: Taken, num_output_tokens: int, now: float) -> None:
        """End a request whose answers had that many tokens."""
        self.num_sequences -= taken.ask.num_sequences
        for account, reserved in taken.parts:
            account.pass_time(now)
            account.end(taken.ask, reserved, num_output_tokens)
        self._note_changed(taken)

    def give_back(self, taken: Taken, now: float) -> None:
        """Undo `take` for a request that was not served."""
        self.num_sequences -= taken.ask.num_sequences
        for account, reserved in taken.parts:
            account.pass_time(now)
            account.give_back(taken.ask, reserved)
        self._note_changed(taken)

    def quotas(self, caller: Caller, now: float) -> Quotas | None:
        """None if the caller has no limits."""
        accounts = self._limited(caller, now)
        if not accounts:
            return None
        requests = tokens = None
        for _, account in accounts:
            requests = _tighter(requests, account.request_quota())
            tokens = _tighter(tokens, account.token_quota())
        return Quotas(requests, tokens)

    def known(self, owner: Owner, name: str) -> RateAccount | None:
        return self._accounts[owner].get(name)

    @property
    def num_accounts(self) -> int:
        return len(self._hand)

    def instruments(self) -> Iterator[Instrument]:
        yield gauge(
            "router_rate_accounts",
            "Tenants and keys whose use within the last minutes is remembered",
            lambda: self.num_accounts,
        )
        yield gauge(
            "router_rate_limited_sequences",
            "Sequences being served of tenants and keys that have limits",
            lambda: self.num_sequences,
        )
        yield counter(
            "router_rate_limit_refusals_total",
            "Requests refused by the limits of their tenant or key, by what there was too much of",
            lambda: self.num_refused,
            "limit",
        )

    def account(self, owner: Owner, name: str, limits: Limits, now: float) -> RateAccount:
        """Return the account as of now, under these limits; made if it is not there."""
        accounts = self._accounts[owner]
        account = accounts.get(name)
        if account is None:
            account = accounts[name] = RateAccount(owner, name, limits, now)
            self._hand.append(account)
        else:
            account.pass_time(now)
            account.limits = limits
        return account

    def _note_changed(self, taken: Taken) -> None:
        if self.changed is not None:
            for account, _ in taken.parts:
                self.changed[account] = None

    def _limited(self, caller: Caller, now: float) -> list[tuple[Owner, RateAccount]]:
        tenant, accounts = caller.tenant, []
        if _bounds(tenant.limits):
            accounts.append((Owner.TENANT, self.account(Owner.TENANT, tenant.name, tenant.limits, now)))
        if caller.key_id is not None and _bounds(caller.limits):
            accounts.append((Owner.KEY, self.account(Owner.KEY, caller.key_id, caller.limits, now)))
        return accounts

    def _forget_idle(self, now: float) -> None:
        for _ in range(min(NUM_LOOKED_AT, len(self._hand))):
            account = self._hand.popleft()
            if account.is_idle(now) and not (self.changed and account in self.changed):
                del self._accounts[account.owner][account.name]
            else:
                self._hand.append(account)

    def _refuse(self, owner: Owner, shortage: Shortage) -> None:
        self.num_refused[shortage.what] += 1
        raise LimitReached(
            _sentence(owner, shortage),
            what=shortage.what.value,
            retry_after_seconds=shortage.wait_seconds,
        )


def has_rates(caller: Caller) -> bool:
    return _bounds(caller.tenant.limits) or _bounds(caller.limits)


def _bounds(limits: Limits) -> bool:
    return (
        limits.requests_per_minute is not None
        or limits.tokens_per_minute is not None
        or limits.max_sequences is not None
    )


def _lasts(short: tuple[Owner, Shortage]) -> tuple[bool, float]:
    wait_seconds = short[1].wait_seconds
    return (True, 0.0) if wait_seconds is None else (False, wait_seconds)


def _tighter(one: Quota | None, other: Quota | None) -> Quota | None:
    if one is None or other is None:
        return one or other
    return one if one.num_remaining <= other.num_remaining else other


_OF = {Owner.TENANT: "this API key's tenant", Owner.KEY: "this API key"}
_LIMIT = {
    Limited.REQUESTS: "requests per minute",
    Limited.TOKENS: "tokens per minute",
    Limited.SEQUENCES: "sequences at a time",
}


def _sentence(owner: Owner, shortage: Shortage) -> str:
    limit = f"the limit of {_OF[owner]}, {shortage.limit} {_LIMIT[shortage.what]}"
    if shortage.limit == 0:
        return f"Nothing can be asked for under {limit}."
    if shortage.wait_seconds is None:
        return (
            f"This request is larger than {limit}, allows in all: it takes {shortage.num_asked}. Waiting does"
            " not help; make it smaller."
        )
    wait = max(1, round(shortage.wait_seconds * 1000 + 0.5))
    after = f"{wait}ms" if wait < 1000 else f"{wait / 1000:g}s"
    return (
        f"Rate limit reached: {limit}, has {shortage.num_used} in use, and this request takes"
        f" {shortage.num_asked}. Please try again in {after}."
    )
