"""PrefixLease: a request to keep a prompt's beginning for a while, and its outcome.

Owns the vocabulary that routers, replicas and the store of KV share. Unrelated to the lease by which a
replica shows that it is alive.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from replicas.protocol.bounds import MAX_TOKENS, Uint32

MAX_LEASES = 16
"""Per request."""

MAX_LEASE_SECONDS = 86_400
"""A day: no longer lease is granted."""

HOUR_SECONDS = 3600
"""Longest lease in host memory; leases of this length or more are written to disk at once, if there is
one."""


class PrefixLease(NamedTuple):
    """Keep the leading `end_block` blocks for `seconds` after each use. A hint: a refusal is reported."""

    end_block: Annotated[int, Meta(ge=1, le=2**32 - 1)]
    seconds: Annotated[int, Meta(ge=1, le=2**32 - 1)]


class LeaseRefusal(enum.StrEnum):
    """Why a lease was not granted."""

    BUDGET = "budget"
    """All of the bytes that may be leased are."""
    TENANT_SHARE = "tenant_share"
    """This tenant has leased all that one tenant may."""
    TOO_LONG = "too_long"
    NO_TIME = "no_time"
    NO_TIER = "no_tier"
    """No memory below the device, or none for that long: disk, beyond an hour."""
    NO_WHOLE_CHUNK = "no_whole_chunk"
    """The range is shorter than the unit in which KV moves."""


class LeaseBreak(enum.StrEnum):
    """Why KV that was leased went before its time."""

    HOST_FULL = "host_full"
    """Its only copy was in host memory, where nothing else could be evicted."""
    DISK_FULL = "disk_full"
    """The disk became smaller than its leased chunks."""
    LOST = "lost"
    """Its only copy was a file that is gone or not to be believed."""
    NOT_STORED = "not_stored"
    """It was never stored: its request ended before, or there was no room."""
    CLEARED = "cleared"
    """The cache was cleared."""
    LEFT = "left"
    """Its replica has left, and no other could take it over in time."""


class LeaseAnswer(Struct, frozen=True, array_like=True):
    """The outcome of one lease: its leading `num_tokens` are kept for `seconds`, or it was refused.

    Both numbers are 0 for a refusal.
    """

    seconds: Uint32 = 0
    num_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    refusal: LeaseRefusal | None = None


class LeaseTotals(Struct, frozen=True):
    """An engine's lease counters since its start, and the amounts leased now.

    Granted and refused count requests, all else tokens.
    """

    num_granted: int = 0
    num_refused: Mapping[LeaseRefusal, int] = {}
    num_leased_tokens: int = 0
    num_kept_tokens: int = 0
    num_broken_tokens: Mapping[LeaseBreak, int] = {}


def nothing_kept(leases: Sequence[PrefixLease]) -> tuple[LeaseAnswer, ...]:
    """Return the answers of a replica without memory below the device."""
    return tuple(LeaseAnswer(refusal=LeaseRefusal.NO_TIER) for _ in leases)
