"""Recent: the last minutes of a router's requests, by slots of a few seconds, and its last decisions.

Owns these counts and their bounds. Knows no clock (times are handed in) and not who looks.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from replicas.protocol.frames import PromptUsage, UserTag
from replicas.protocol.status import ReplicaId
from router.explain.findings import Finding, findings
from router.misses import Misses
from router.routing.decision import Decision

SLOT_SECONDS = 5
NUM_SLOTS = 60
MAX_DECISIONS = 200

_STEP = math.log(1.08)
"""Durations are counted in classes that are 8 % apart: a percentile is within 4 % of the truth."""


class Origins(msgspec.Struct, frozen=True):
    """Origins of prompts' tokens; they add up to all.

    `num_unattributed` are cached, but their reader or writer is unknown.
    """

    num_computed: int = 0
    num_own: int = 0
    num_cross_user: int = 0
    num_unattributed: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_computed + self.num_cached

    @property
    def num_cached(self) -> int:
        return self.num_own + self.num_cross_user + self.num_unattributed

    def __add__(self, other: "Origins") -> "Origins":
        return Origins(
            self.num_computed + other.num_computed,
            self.num_own + other.num_own,
            self.num_cross_user + other.num_cross_user,
            self.num_unattributed + other.num_unattributed,
        )


@dataclass(slots=True)
class Durations:
    """A histogram with classes so narrow that percentiles can be told."""

    counts: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float) -> None:
        place = math.ceil(math.log(max(seconds, 1e-6)) / _STEP)
        self.counts[place] = self.counts.get(place, 0) + 1

    def percentile(self, share: float) -> float | None:
        num_left = share * sum(self.counts.values())
        for place in sorted(self.counts):
            num_left -= self.counts[place]
            if num_left <= 0:
                return math.exp((place - 0.5) * _STEP)
        return None


@dataclass(slots=True)
class Slot:
    num_requests: int = 0
    num_errors: int = 0
    origins: Origins = field(default_factory=Origins)
    ttft: Durations = field(default_factory=Durations)
    replicas: dict[ReplicaId, tuple[int, Origins]] = field(default_factory=dict)
    """Prompts and their tokens at each replica."""


class RecentDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a request that has ended; `number` counts from 1."""

    number: int
    request_id: str
    route: str
    model: str | None
    adapter: str | None
    tenant: str
    user: UserTag
    key: str | None
    status: int
    error: str | None
    arrived_at: float
    first_token_seconds: float | None
    ended_seconds: float
    num_output_tokens: int
    num_prompt_tokens: int
    usage: PromptUsage | None
    decision: Decision | None
    misses: Misses | None
    """None where nothing was served."""
    block_size: int
    num_images: int = 0
    num_image_tokens: int = 0
    num_cached_image_tokens: int = 0
    difference: str | None = None
    """The image that differs from the nearest earlier prompt, if they part at one."""

    def findings(self) -> tuple[Finding, ...]:
        """Sentences, made when they are asked for."""
        if self.usage is None or self.misses is None:
            return ()
        return findings(self.usage, self.decision, self.misses, self.block_size)


class Recent:
    def __init__(self) -> None:
        self._slots: deque[Slot] = deque(maxlen=NUM_SLOTS)
        self._newest: int | None = None
        """The number of the last slot, in slots since 1970."""
        self._decisions: deque[RecentDecision] = deque(maxlen=MAX_DECISIONS)
        self._num_decisions = 0

    @property
    def num_decisions(self) -> int:
        """Ever."""
        return self._num_decisions

    def slot(self, now: float) -> Slot:
        """Return the slot of `now`. Time that goes backwards counts in the latest one."""
        number = int(now // SLOT_SECONDS)
        if self._newest is None:
            self._newest = number - 1
        for _ in range(min(number - self._newest, NUM_SLOTS)):
            self._slots.append(Slot())
        self._newest = max(number, self._newest)
        return self._slots[-1]

    def slots(self, now: float) -> tuple[int, list[Slot]]:
        """Return the start of the first slot, and all slots up to that of `now`, which is not over."""
        self.slot(now)
        assert self._newest is not None
        return (self._newest - len(self._slots) + 1) * SLOT_SECONDS, list(self._slots)

    def next_number(self) -> int:
        return self._num_decisions + 1

    def add(self, decision: RecentDecision) -> None:
        assert decision.number == self.next_number(), "decisions are numbered without gaps"
        self._num_decisions = decision.number
        self._decisions.append(decision)

    def decisions(self, after: int) -> Iterable[RecentDecision]:
        """Return kept decisions with greater numbers, newest first."""
        for decision in reversed(self._decisions):
            if decision.number <= after:
                return
            yield decision

    def decision(self, number: int) -> RecentDecision | None:
        place = number - (self._num_decisions - len(self._decisions)) - 1
        return self._decisions[place] if 0 <= place < len(self._decisions) else None
