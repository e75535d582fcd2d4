"""ToolGaps: how long tools take between two turns of a conversation, measured for each tenant.

Owns the measurements, and how long to keep a prompt whose answer is likely to end in tool calls: the next
turn is then nearly certain, and reads everything before it again.
"""

import math
from collections import deque

from router.history.canonical import ConversationKey
from router.shared.bounded_cache import BoundedCache

MOST_AWAITED = 4096
"""Turns that ended in calls and whose next turn has not come."""

MOST_TENANTS = 1024
MOST_GAPS = 64
LEAST_GAPS = 4
"""Gaps that are measured before anything is concluded."""

LIKELY = 0.5
"""The next turn is expected to end in calls if this share of the tenant's turns with tools did."""

SHARE_DECAY = 0.9
QUANTILE = 0.9
MARGIN = 1.5
LEAST_SECONDS = 5


class _TenantGaps:
    __slots__ = ("call_share", "gaps")

    def __init__(self) -> None:
        self.gaps: deque[float] = deque(maxlen=MOST_GAPS)
        self.call_share = 0.0


class ToolGaps:
    """For one router. With `most_seconds` of 0 it measures nothing. All times are of one clock, in
    seconds."""

    def __init__(self, most_seconds: int) -> None:
        self._most_seconds = most_seconds
        self._awaited: BoundedCache[ConversationKey, tuple[str, float]] = BoundedCache(MOST_AWAITED)
        self._tenants: BoundedCache[str, _TenantGaps] = BoundedCache(MOST_TENANTS)

    @property
    def is_on(self) -> bool:
        return self._most_seconds > 0

    def ended(self, tenant: str, key: ConversationKey, now: float, *, in_calls: bool) -> None:
        """A turn that was offered tools has ended; `key` is that of the conversation with its answer."""
        if not self.is_on:
            return
        known = self._tenant(tenant)
        known.call_share = SHARE_DECAY * known.call_share + (1 - SHARE_DECAY) * in_calls
        if not in_calls:
            return
        self._awaited.put(key, (tenant, now))

    def came(self, key: ConversationKey, now: float) -> None:
        """Record that the next turn has come; `key` is its conversation's through the answer before. Gaps
        longer than the longest lease are ignored."""
        awaited = self._awaited.pop(key)
        if awaited is not None and now - awaited[1] <= self._most_seconds:
            self._tenant(awaited[0]).gaps.append(now - awaited[1])

    def seconds(self, tenant: str) -> int | None:
        """For how long to keep the prompt of a turn that is offered tools. None while not enough is known, or
        where its answer is not likely to end in calls."""
        known = self._tenants.peek(tenant)
        if known is None or known.call_share < LIKELY or len(known.gaps) < LEAST_GAPS:
            return None
        gaps = sorted(known.gaps)
        gap = gaps[min(len(gaps) - 1, math.floor(QUANTILE * len(gaps)))]
        return max(LEAST_SECONDS, min(self._most_seconds, math.ceil(MARGIN * gap)))

    def _tenant(self, name: str) -> _TenantGaps:
        known = self._tenants.get(name)
        if known is None:
            known = _TenantGaps()
            self._tenants.put(name, known)
        return known
