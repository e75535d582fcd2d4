"""RateNews: the use of tenants and keys at each router, as the routers tell each other.

Owns which account is reported when, and how many sequences other routers serve. Pure: transport and time are
the caller's. Each router reports its use since its last message, and the sequences that it serves now; it
charges the others' use to its own accounts. So all of them come to the same numbers, as late as messages are;
what was admitted beyond a limit meanwhile is paid off first.
"""

from typing import Annotated

from msgspec import Meta, Struct, msgpack

from router.caller import Limits
from router.features.rate_limits.rate_account import Owner, RateAccount
from router.features.rate_limits.rate_limits import RateLimits

MAX_ENTRIES = 512
"""In one message; the rest waits for the next one."""

QUIET_SECONDS = 4.0
"""A router that is silent for this long counts as serving nothing."""

_Amount = Annotated[int, Meta(ge=-(2**48), le=2**48)]
_Limit = Annotated[int, Meta(ge=0, le=2**48)]


class Entry(Struct, frozen=True, array_like=True):
    """One account: its use since the router's last message, and the sequences that are served there now. The
    limits are those of the router that sends it."""

    owner: Owner
    name: Annotated[str, Meta(max_length=512)]
    num_requests: _Amount
    num_tokens: _Amount
    num_sequences: _Limit
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None


class News(Struct, frozen=True, array_like=True):
    router_id: Annotated[str, Meta(max_length=64)]
    entries: Annotated[tuple[Entry, ...], Meta(max_length=MAX_ENTRIES)]


encode_news = msgpack.Encoder().encode
decode_news = msgpack.Decoder(News).decode


class RateNews:
    """Makes `limits` note changed accounts from now on."""

    def __init__(self, limits: RateLimits, router_id: str) -> None:
        self.router_id = router_id
        self._limits = limits
        self._changed: dict[RateAccount, None] = {}
        limits.changed = self._changed
        self._served: dict[str, dict[RateAccount, int]] = {}
        """By other routers, by their last messages."""
        self._heard_at: dict[str, float] = {}

    @property
    def num_routers(self) -> int:
        """Other routers that sent something lately."""
        return len(self._heard_at)

    def tell(self, now: float) -> News | None:
        """Return the next message, or None if nothing changed. Accounts with running sequences are in every
        message."""
        entries: list[Entry] = []
        for account in list(self._changed)[:MAX_ENTRIES]:
            del self._changed[account]
            account.pass_time(now)
            entries.append(_told(account))
            if entries[-1].num_sequences:
                self._changed[account] = None
        return News(self.router_id, tuple(entries)) if entries else None

    def untell(self, news: News) -> None:
        """Take back a message that was not sent."""
        for entry in news.entries:
            account = self._limits.known(entry.owner, entry.name)
            if account is not None:
                account.untold_requests += entry.num_requests
                account.untold_tokens += entry.num_tokens
                self._changed[account] = None

    def hear(self, news: News, now: float) -> None:
        """`now` is when it was sent, by the same clock as everything else."""
        if news.router_id == self.router_id:
            return
        self._heard_at[news.router_id] = now
        served = self._served.setdefault(news.router_id, {})
        for entry in news.entries:
            account = self._account(entry, now)
            account.use_elsewhere(entry.num_requests, entry.num_tokens)
            account.num_others_sequences += entry.num_sequences - served.pop(account, 0)
            if entry.num_sequences:
                served[account] = entry.num_sequences

    def forget_quiet(self, now: float) -> None:
        """Drop routers that are silent, with the sequences that they served."""
        quiet = [router_id for router_id, at in self._heard_at.items() if now - at > QUIET_SECONDS]
        for router_id in quiet:
            del self._heard_at[router_id]
            for account, num_sequences in self._served.pop(router_id).items():
                account.num_others_sequences -= num_sequences

    def _account(self, entry: Entry, now: float) -> RateAccount:
        known = self._limits.known(entry.owner, entry.name)
        if known is not None:
            limits = known.limits
        else:
            limits = Limits(
                requests_per_minute=entry.requests_per_minute, tokens_per_minute=entry.tokens_per_minute
            )
        return self._limits.account(entry.owner, entry.name, limits, now)


def _told(account: RateAccount) -> Entry:
    limits = account.limits
    num_requests, num_tokens = account.untold_requests, account.untold_tokens
    account.untold_requests = account.untold_tokens = 0
    return Entry(
        account.owner,
        account.name,
        # What has come back meanwhile needs no telling: after a pause there is never more than is missing.
        min(num_requests, round(account.requests + 0.5)),
        min(num_tokens, round(account.tokens + 0.5)),
        account.num_sequences if limits.max_sequences is not None else 0,
        limits.requests_per_minute,
        limits.tokens_per_minute,
    )
