"""Recent: the last minutes of a router's requests, by slots of a few seconds, and its last decisions.

Owns these counts and their bounds: numbers, never tokens or text. Knows no clock and not who looks.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from replicas.protocol.frames import PromptUsage, UserTag
from replicas.protocol.status import ReplicaId
from router.explain.findings import Finding, findings
from router.explain.prefix_tree import short_key
from router.misses import Misses
from router.routing.decision import Decision
from router.served import CLIENT_GONE, ServedRequest

SLOT_SECONDS = 5
NUM_SLOTS = 60
MAX_DECISIONS = 50

_STEP = math.log(1.08)
"""Durations are counted in classes that are 8 % apart: a percentile is within 4 % of the truth."""


@dataclass(slots=True)
class Slot:
    num_requests: int = 0
    num_errors: int = 0
    num_computed: int = 0
    num_own: int = 0
    num_cross_user: int = 0
    num_unattributed: int = 0
    """Cached, but their reader or writer is unknown."""
    ttft: dict[int, int] = field(default_factory=dict)
    """Requests by the class of the time to their first token."""
    replicas: dict[ReplicaId, tuple[int, int, int]] = field(default_factory=dict)
    """Prompts at each replica, their tokens, and the cached of these."""

    def add_ttft(self, seconds: float) -> None:
        place = math.ceil(math.log(max(seconds, 1e-6)) / _STEP)
        self.ttft[place] = self.ttft.get(place, 0) + 1

    def add_usage(self, replica_id: ReplicaId, usage: PromptUsage) -> None:
        """Add no tokens if it is not known where they came from."""
        num_prompts, num_tokens, num_cached = self.replicas.get(replica_id, (0, 0, 0))
        cached = usage.num_cached_tokens
        if cached is not None:
            num_tokens, num_cached = num_tokens + usage.num_prompt_tokens, num_cached + cached
            own, cross_user = usage.num_own_tokens, usage.num_cross_user_tokens
            self.num_computed += usage.num_prompt_tokens - cached
            self.num_own += own
            self.num_cross_user += cross_user
            self.num_unattributed += cached - own - cross_user
        self.replicas[replica_id] = num_prompts + 1, num_tokens, num_cached

    def percentile(self, share: float) -> float | None:
        """Return the time to the first token that this share of requests did not exceed."""
        num_left = share * sum(self.ttft.values())
        for place in sorted(self.ttft):
            num_left -= self.ttft[place]
            if num_left <= 0:
                return math.exp((place - 0.5) * _STEP)
        return None


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
    """`observe` is called with every request; `block_size_of` is for a model that has been served."""

    def __init__(self, block_size_of: Callable[[str], int]) -> None:
        self._block_size_of = block_size_of
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

    def observe(self, served: ServedRequest) -> None:
        slot = self.slot(served.arrived_at + served.ended_seconds)
        slot.num_requests += 1
        # A client that leaves is no error of ours; whatever else is not answered well is one.
        slot.num_errors += served.error is not None and served.status != CLIENT_GONE
        if served.first_token_seconds is not None:
            slot.add_ttft(served.first_token_seconds)
        for prompt in served.prompts:
            generation, usage, decision = prompt.generation, prompt.usage, prompt.decision
            if usage is not None and decision is not None:
                slot.add_usage(decision.replica_id, usage)
            num_cached = (usage and usage.num_cached_tokens) or 0
            num_image_tokens = num_cached_image_tokens = 0
            for span in generation.submit.media:
                num_image_tokens += span.length
                num_cached_image_tokens += min(span.length, max(0, num_cached - span.start))
            self._num_decisions += 1
            self._decisions.append(
                RecentDecision(
                    number=self._num_decisions,
                    request_id=served.request_id,
                    route=served.route,
                    model=served.model,
                    adapter=None if generation.adapter is None else generation.adapter.name,
                    tenant=generation.tenant,
                    user=generation.submit.user,
                    key=short_key(generation.prompt_cache_key),
                    status=served.status,
                    error=served.error,
                    arrived_at=served.arrived_at,
                    first_token_seconds=served.first_token_seconds,
                    ended_seconds=served.ended_seconds,
                    num_output_tokens=prompt.num_output_tokens,
                    num_prompt_tokens=len(generation.token_ids),
                    usage=usage,
                    decision=decision,
                    misses=prompt.misses,
                    block_size=self._block_size_of(generation.model),
                    num_images=len(generation.submit.media),
                    num_image_tokens=num_image_tokens,
                    num_cached_image_tokens=num_cached_image_tokens,
                    difference=prompt.difference,
                )
            )

    def decisions(self, after: int) -> Iterable[RecentDecision]:
        """Return kept decisions with greater numbers, newest first."""
        for decision in reversed(self._decisions):
            if decision.number <= after:
                return
            yield decision

    def decision(self, number: int) -> RecentDecision | None:
        place = number - (self._num_decisions - len(self._decisions)) - 1
        return self._decisions[place] if 0 <= place < len(self._decisions) else None
