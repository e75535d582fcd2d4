"""Autoscaler: how many replicas there should be, by the prompt tokens that wait.

Owns the rule, which is that of a HorizontalPodAutoscaler with the chart's values: the sum over the target,
nothing within `TOLERANCE` of it, more at once, fewer when fewer have been enough for `DOWN_SECONDS`, one a
minute. Knows no replica.
"""

import math
from collections import deque

from loadtests.simulation.options import Autoscale

LOOK_SECONDS = 15.0
"""Between two looks, as between two scrapes."""
TOLERANCE = 0.1
DOWN_SECONDS = 300.0
BETWEEN_DRAINS_SECONDS = 60.0


class Autoscaler:
    def __init__(self, rule: Autoscale) -> None:
        self._rule = rule
        self._recent: deque[tuple[float, int]] = deque()
        self._shrunk_at = -math.inf

    def wanted(self, now: float, waiting_tokens: int, num_replicas: int) -> int:
        """`num_replicas` counts those that are starting."""
        rule = self._rule
        wanted, target = num_replicas, rule.target_tokens * num_replicas
        if abs(waiting_tokens - target) > TOLERANCE * target:
            wanted = math.ceil(waiting_tokens / rule.target_tokens)
        wanted = min(rule.max_replicas, max(rule.min_replicas, wanted))
        self._recent.append((now, wanted))
        while self._recent[0][0] < now - DOWN_SECONDS:
            self._recent.popleft()
        if wanted >= num_replicas:
            return wanted
        has_been_enough = max(number for _, number in self._recent) < num_replicas
        if not has_been_enough or now - self._shrunk_at < BETWEEN_DRAINS_SECONDS:
            return num_replicas
        self._shrunk_at = now
        return num_replicas - 1
