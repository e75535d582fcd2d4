"""Work: what a request counts for in its tenant's share, in tokens of a prompt that must be computed.

Owns the prices. A token that is read from cache costs its owner little, one that is decoded more than one
of a prompt, since it takes a place in every step.
"""

from router.queue.counters import VirtualCounters

CACHED_TOKEN = 0.05
OUTPUT_TOKEN = 2.0


def prompt_work(num_tokens: int, num_cached_tokens: int) -> float:
    return num_tokens - num_cached_tokens + CACHED_TOKEN * num_cached_tokens


class Charge:
    """What one request has been charged for its prompt; what is decoded is charged as it comes.

    A request that nothing was computed for gets it back.
    """

    __slots__ = ("_counters", "_has_begun", "_num_tokens", "_tenant", "_work")

    def __init__(self, counters: VirtualCounters, tenant: str, *, num_tokens: int, work: float) -> None:
        self._counters = counters
        self._tenant = tenant
        self._num_tokens = num_tokens
        self._work = work
        self._has_begun = False

    def begins(self, num_cached_tokens: int) -> None:
        """Its prompt has been computed, and so much of it was found in cache."""
        if self._has_begun:
            return
        self._has_begun = True
        difference = prompt_work(self._num_tokens, num_cached_tokens) - self._work
        if difference >= 0:
            self._counters.charge(self._tenant, difference)
        else:
            self._counters.give_back(self._tenant, -difference)

    def produces(self, num_tokens: int) -> None:
        self._counters.charge(self._tenant, OUTPUT_TOKEN * num_tokens)

    def close(self) -> None:
        """It has ended, whatever the reason. Closing it twice gives nothing back twice."""
        if not self._has_begun:
            self._has_begun = True
            self._counters.give_back(self._tenant, self._work)
