"""RateAccount: recent use of one tenant or key, against its limits.

Pure: its caller supplies the time, in seconds of a clock that need not agree with any other.

Two buckets store what is missing: each use takes from one, and it refills at its limit per minute. So a
changed limit holds at once, and a full account can be forgotten. The possible use of running answers is
*reserved*: it takes room and returns not with time but at the answer's end, when the real use replaces it.
Use beyond the bucket (an answer longer than reserved, use at another router) makes it negative, and is paid
off before anything else.
"""

import enum
from collections.abc import Iterator
from typing import NamedTuple

from router.caller import Limits

SECONDS_PER_MINUTE = 60.0

SEQUENCE_WAIT_SECONDS = 1.0
"""Retry delay for a sequence: the length of the running answers is unknown."""

_ROUNDING = 1e-6


class Owner(enum.IntEnum):
    """Owner of a limit."""

    TENANT = 0
    KEY = 1


class Limited(enum.StrEnum):
    """The kind of limit."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    SEQUENCES = "sequences"


class Ask(NamedTuple):
    """A request's use: `num_output_tokens` is the part of its answers that is reserved beforehand."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_sequences: int


class Shortage(NamedTuple):
    """Why a request does not fit, and when it will: never, for None."""

    what: Limited
    limit: int
    num_used: int
    num_asked: int
    wait_seconds: float | None


class Quota(NamedTuple):
    """After `reset_seconds` nothing is missing, if nothing more is used."""

    limit: int
    num_remaining: int
    reset_seconds: float


class RateAccount:
    __slots__ = (
        "at",
        "limits",
        "name",
        "num_others_sequences",
        "num_sequences",
        "owner",
        "requests",
        "reserved",
        "tokens",
        "untold_requests",
        "untold_tokens",
    )

    def __init__(self, owner: Owner, name: str, limits: Limits, now: float) -> None:
        self.owner = owner
        self.name = name
        self.limits = limits
        self.at = now
        self.requests = 0.0
        self.tokens = 0.0
        self.reserved = 0
        self.num_sequences = 0
        self.num_others_sequences = 0
        """At other routers."""
        self.untold_requests = 0
        self.untold_tokens = 0
        """Used here since other routers were told."""

    def is_idle(self, now: float) -> bool:
        """Whether it can be forgotten without loss."""
        self.pass_time(now)
        return not (
            self.requests or self.tokens or self.reserved or self.num_sequences or self.num_others_sequences
        )

    def pass_time(self, now: float) -> None:
        """Time never goes back here."""
        seconds = now - self.at
        if seconds > 0:
            self.at = now
            self.requests = _refilled(self.requests, self.limits.requests_per_minute, seconds)
            self.tokens = _refilled(self.tokens, self.limits.tokens_per_minute, seconds)

    def fits(self, ask: Ask) -> bool:
        """Whether there is no shortage."""
        limits = self.limits
        requests, tokens, sequences = (
            limits.requests_per_minute,
            limits.tokens_per_minute,
            limits.max_sequences,
        )
        if requests is not None and self.requests + 1 > requests + _ROUNDING:
            return False
        if tokens is not None and self.tokens + self.reserved + self._counted(ask) > tokens + _ROUNDING:
            return False
        num_used = self.num_sequences + self.num_others_sequences
        return sequences is None or num_used + ask.num_sequences <= sequences

    def shortages(self, ask: Ask) -> Iterator[Shortage]:
        """Yield the limits that keep the request from being served now."""
        limits = self.limits
        if (limit := limits.requests_per_minute) is not None:
            yield from _shortage(Limited.REQUESTS, limit, self.requests, 1, 1)
        if (limit := limits.tokens_per_minute) is not None:
            asked = self._counted(ask)
            used = self.tokens + self.reserved
            yield from _shortage(Limited.TOKENS, limit, used, asked, ask.num_prompt_tokens)
        if (limit := limits.max_sequences) is not None:
            num_used = self.num_sequences + self.num_others_sequences
            if ask.num_sequences > limit:
                yield Shortage(Limited.SEQUENCES, limit, num_used, ask.num_sequences, None)
            elif num_used + ask.num_sequences > limit:
                yield Shortage(Limited.SEQUENCES, limit, num_used, ask.num_sequences, SEQUENCE_WAIT_SECONDS)

    def take(self, ask: Ask) -> int:
        """Returns the tokens that are reserved for answers, to be handed back to `end`."""
        reserved = self._counted(ask) - ask.num_prompt_tokens
        self.reserved += reserved
        self.num_sequences += ask.num_sequences
        self.use(1, ask.num_prompt_tokens)
        return reserved

    def end(self, ask: Ask, reserved: int, num_output_tokens: int) -> None:
        """The answers have ended with this number of tokens."""
        self.reserved -= reserved
        self.num_sequences -= ask.num_sequences
        self.use(0, num_output_tokens)

    def give_back(self, ask: Ask, reserved: int) -> None:
        """Undo a reservation."""
        self.reserved -= reserved
        self.num_sequences -= ask.num_sequences
        self.use(-1, -ask.num_prompt_tokens)

    def use(self, num_requests: int, num_tokens: int) -> None:
        """Negative numbers give back."""
        self.use_elsewhere(num_requests, num_tokens)
        self.untold_requests += num_requests
        self.untold_tokens += num_tokens

    def use_elsewhere(self, num_requests: int, num_tokens: int) -> None:
        """Another router has said so."""
        if self.limits.requests_per_minute is not None:
            self.requests = max(0.0, self.requests + num_requests)
        if self.limits.tokens_per_minute is not None:
            self.tokens = max(0.0, self.tokens + num_tokens)

    def request_quota(self) -> Quota | None:
        return _quota(self.limits.requests_per_minute, self.requests)

    def token_quota(self) -> Quota | None:
        return _quota(self.limits.tokens_per_minute, self.tokens + self.reserved)

    def _counted(self, ask: Ask) -> int:
        """Return the counted tokens. A request whose prompt fits is not refused forever for its possible
        answer."""
        limit = self.limits.tokens_per_minute
        if limit is None:
            return ask.num_prompt_tokens
        return ask.num_prompt_tokens + max(0, min(ask.num_output_tokens, limit - ask.num_prompt_tokens))


def _refilled(missing: float, limit: int | None, seconds: float) -> float:
    return 0.0 if limit is None else max(0.0, missing - limit * seconds / SECONDS_PER_MINUTE)


def _shortage(what: Limited, limit: int, used: float, asked: int, least: int) -> Iterator[Shortage]:
    """Yield the shortage. At least `least` of what is asked has to fit into the whole bucket."""
    if least > limit:
        yield Shortage(what, limit, round(used), asked, None)
    elif used + asked > limit + _ROUNDING:
        wait_seconds = (used + asked - limit) * SECONDS_PER_MINUTE / limit
        yield Shortage(what, limit, round(used), asked, wait_seconds)


def _quota(limit: int | None, missing: float) -> Quota | None:
    if limit is None:
        return None
    reset_seconds = missing * SECONDS_PER_MINUTE / limit if limit else 0.0
    return Quota(limit, max(0, int(limit - missing + _ROUNDING)), reset_seconds)
