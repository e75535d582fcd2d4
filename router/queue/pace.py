"""Pace: the time per token of work while requests wait, from one release to the next.

Owns two decaying sums. A full replica begins no faster than answers end, whatever its speed at prompts: so
the wait in a line is estimated by the line's own releases.
"""

from replicas.protocol.status import ReplicaId

KEPT = 0.95
"""Decay of the sums with each release."""

FEWEST_RELEASES = 8
"""Before, the pace counts as not known."""


class Pace:
    def __init__(self) -> None:
        self._work = 0.0
        self._seconds = 0.0
        self._num_releases = 0
        self._latest: dict[ReplicaId, tuple[float, float]] = {}
        """By line: when its latest release was while others waited, and of how much work."""

    def released(self, line: ReplicaId, work: float, now: float, *, others_wait: bool) -> None:
        before = self._latest.pop(line, None)
        if before is not None:
            since, its_work = before
            self._seconds = KEPT * self._seconds + now - since
            self._work = KEPT * self._work + its_work
            self._num_releases += 1
        if others_wait:
            self._latest[line] = now, work

    def emptied(self, line: ReplicaId) -> None:
        """Record that a line is empty."""
        self._latest.pop(line, None)

    @property
    def seconds_per_token(self) -> float | None:
        """None while it is not known."""
        if self._num_releases < FEWEST_RELEASES or not self._work:
            return None
        return self._seconds / self._work
