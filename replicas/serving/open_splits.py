"""OpenSplits: the prompts that this replica computes for others, as pulls see them.

Owns their ids, from a submit to the request's end, and how long a pull waits for a chunk of one. An ended
split is remembered, so that pulls do not wait for it as for one whose submit has yet to come.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import NamedTuple

GRACE_SECONDS = 0.25
"""How long after a split's end its last chunks may come to host memory, if the engine has nothing to do."""

GRACE_STEPS = 3
MAX_GRACE_SECONDS = 5.0
"""An engine that goes on copies its chunks between these steps, however long they take up to this time."""

UNKNOWN_SECONDS = 1.0
"""How much earlier than its split's submit a pull may come."""

MAX_ENDED = 4096
"""Ended splits that are remembered."""


class _End(NamedTuple):
    time: float
    num_steps: int


class OpenSplits:
    """`num_steps` returns how many steps of the engine have ended, `is_idle` whether it has no request."""

    def __init__(
        self,
        *,
        num_steps: Callable[[], int] = lambda: 0,
        is_idle: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps = num_steps
        self._is_idle = is_idle
        self._clock = clock
        self._open: Counter[int] = Counter()
        """By id, requests: routers promise that there is only one."""
        self._ended: OrderedDict[int, _End] = OrderedDict()

    @property
    def num_open(self) -> int:
        return self._open.total()

    def begin(self, split_id: int) -> None:
        self._open[split_id] += 1

    def end(self, split_id: int) -> None:
        """End a split that has begun."""
        self._open[split_id] -= 1
        if not self._open[split_id]:
            del self._open[split_id]
            self._ended[split_id] = _End(self._clock(), self._num_steps())
            self._ended.move_to_end(split_id)
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def refused(self, split_id: int) -> None:
        """Record a split that will not be computed here."""
        self.begin(split_id)
        self.end(split_id)

    def may_come(self, split_id: int, since: float) -> bool:
        """Whether a chunk of the split that has been waited for `since` then may still come."""
        if split_id in self._open:
            return True
        now, ended = self._clock(), self._ended.get(split_id)
        if ended is None:
            return now < since + UNKNOWN_SECONDS
        is_copied = self._is_idle() or self._num_steps() >= ended.num_steps + GRACE_STEPS
        return now < ended.time + (GRACE_SECONDS if is_copied else MAX_GRACE_SECONDS)
