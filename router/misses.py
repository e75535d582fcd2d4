"""Misses: why tokens of a prompt were computed and not read from cache, as a closed list of causes.

Owns the words. `router/explain/causes.py` finds which of them holds.
"""

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from replicas.protocol.status import ReplicaId


class Cause(enum.StrEnum):
    """Why tokens were not read from cache. The first three say that nothing was lost: by all others tokens
    were that an earlier prompt had computed."""

    HIT = "hit"
    """All that could be read was."""
    NEVER_CACHED = "never_cached"
    """No request before had it."""
    BELOW_A_BLOCK = "below_a_block"
    """Behind the last full block that could be read."""
    PREFIX_CHANGED = "prefix_changed"
    """It follows a change in the prompt that this one is compared with, which has it as well."""
    OTHER_NAMESPACE = "other_namespace"
    """It was seen under another model, adapter, salt, template or tenant."""
    NOT_YET_WRITTEN = "not_yet_written"
    """Another request was computing it just then."""
    HELD_ELSEWHERE = "held_elsewhere"
    """Another replica had it."""
    NOT_WORTH_MOVING = "not_worth_moving"
    """The replica had it below its device, and computing it was expected to be sooner."""
    LOST_IN_TRANSFER = "lost_in_transfer"
    """It was to be loaded or pulled, and that failed."""
    NOT_RESUMABLE = "not_resumable"
    """A sparse model had computed it, and no request had left a point there that all layers can resume at."""
    EVICTED = "evicted"
    """It had to make room."""
    EXPIRED = "expired"
    """Its lease ran out, and then it went."""
    LEASE_BROKEN = "lease_broken"
    """It was leased, and went before its time."""
    FILE_LOST = "file_lost"
    """Its file was gone or not to be believed."""
    CLEARED = "cleared"
    """Somebody had the cache emptied."""
    REPLICA_RESTARTED = "replica_restarted"
    """The incarnation that held it is gone."""
    UNKNOWN = "unknown"
    NOT_REPORTED = "not_reported"
    """The engine does not say what it read from its cache."""


NOTHING_LOST = frozenset({Cause.HIT, Cause.NEVER_CACHED, Cause.BELOW_A_BLOCK, Cause.NOT_REPORTED})

OF_NO_SPAN = frozenset({Cause.HIT, Cause.NOT_REPORTED})
"""Said of whole prompts only."""


class MissedSpan(NamedTuple):
    """Tokens `start` to `end` (from 0, without the last) were computed, for one reason.

    `replica_id` is the one that held them, holds them or was computing them, where one is known; `at` is
    when they left it, in seconds since 1970, where that is known.
    """

    cause: Cause
    start: int
    end: int
    replica_id: ReplicaId | None = None
    at: float | None = None

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def is_lost(self) -> bool:
        return self.cause not in NOTHING_LOST


class Misses(NamedTuple):
    """`cause` is the one by which most was lost; if nothing was, NEVER_CACHED or BELOW_A_BLOCK, or HIT if all
    that could be read was. There are no spans with NOT_REPORTED."""

    cause: Cause
    spans: tuple[MissedSpan, ...]

    @property
    def num_tokens(self) -> int:
        """All that was not read."""
        return sum(span.num_tokens for span in self.spans)


def losses(spans: Iterable[MissedSpan]) -> Mapping[Cause, int]:
    """How many tokens were lost by each cause, the most first."""
    lost: dict[Cause, int] = {}
    for span in spans:
        if span.is_lost:
            lost[span.cause] = lost.get(span.cause, 0) + span.num_tokens
    return dict(sorted(lost.items(), key=lambda each: -each[1])) if len(lost) > 1 else lost
