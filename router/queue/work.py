"""Work: a request's charge to its tenant's share, in tokens of a prompt that must be computed.

Owns the prices. A cached token costs little, a decoded one more than a prompt's, since it takes a place in
every step.
"""

from router.queue.counters import VirtualCounters
from router.queue.shares import Shares

CACHED_TOKEN = 0.05
OUTPUT_TOKEN = 2.0

BYTES_PER_TOKEN = 40
"""Memory of a waiting prompt per token: a Python list of integers."""

LEAST_SECONDS = 1e-3
"""Least seconds of a prompt without further knowledge."""


def prompt_work(num_tokens: int, num_cached_tokens: int) -> float:
    return num_tokens - num_cached_tokens + CACHED_TOKEN * num_cached_tokens


class Charge:
    """One request's charge for its prompt, and its places; decoding is charged as it goes.

    A request that ends before its first token is refunded what was not computed by then, by the router's
    estimate: its replica has `wait_seconds` of other prompts before it, and needs `prompt_seconds` for this
    one. Withdrawing a request in time still costs what it took.
    """

    __slots__ = (
        *("_account", "_begins_at", "_counters", "_has_begun", "_num_tokens", "_prompt_seconds", "_tenant"),
        *("_num_places", "_share", "_shares", "_wait_seconds", "_work"),
    )

    def __init__(
        self,
        counters: VirtualCounters,
        tenant: str,
        *,
        num_tokens: int,
        work: float,
        wait_seconds: float = 0.0,
        prompt_seconds: float = 0.0,
        shares: Shares | None = None,
        num_places: int = 0,
    ) -> None:
        self._counters = counters
        self._account = counters.account(tenant)
        self._tenant = tenant
        self._num_tokens = num_tokens
        self._work = work
        self._wait_seconds = wait_seconds
        self._prompt_seconds = prompt_seconds
        self._shares = shares
        self._share = None if shares is None else shares.take_places(tenant, num_places)
        self._num_places = num_places
        self._begins_at: float | None = None
        self._has_begun = False

    def goes(self, now: float) -> None:
        """Its replica has been asked, which counts once."""
        if self._begins_at is None:
            self._begins_at = now + self._wait_seconds

    def begins(self, num_cached_tokens: int | None) -> None:
        """Record that its prompt has been computed, with that many cached tokens; None is not known, which
        leaves the charge as it was."""
        if self._has_begun:
            return
        self._has_begun = True
        if num_cached_tokens is None:
            return
        difference = prompt_work(self._num_tokens, num_cached_tokens) - self._work
        if difference:
            self._counters.charge(self._tenant, difference)

    def produces(self, num_tokens: int) -> None:
        """Nothing is recorded for a tenant that is forgotten meanwhile."""
        account, share, work = self._account, self._share, OUTPUT_TOKEN * num_tokens
        if account is not None:
            account.counter += work / account.weight
        if share is not None:
            share.work += work

    def close(self, now: float | None = None) -> None:
        """Close the charge for any reason; without `now`, nothing was computed. Closing it twice refunds
        nothing twice."""
        if self._shares is not None and self._share is not None:
            self._shares.return_places(self._share, self._num_places)
            self._share = None
        if not self._has_begun:
            self._has_begun = True
            self._counters.charge(self._tenant, -self._work * (1.0 - self._part_computed(now)))

    def _part_computed(self, now: float | None) -> float:
        if now is None or self._begins_at is None or now <= self._begins_at:
            return 0.0
        return min(1.0, (now - self._begins_at) / max(self._prompt_seconds, LEAST_SECONDS))
