"""Breaker: when to retry after a failure.

Owns a pause that doubles with each further failure, up to `MAX_PAUSE_SECONDS`, and ends with the first
success. Pure: the caller supplies the time.
"""

MIN_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 300.0


class Breaker:
    def __init__(self) -> None:
        self._pause = 0.0
        self._until = 0.0

    @property
    def is_tripped(self) -> bool:
        """It has failed, and not succeeded since."""
        return self._pause > 0

    def allows(self, now: float) -> bool:
        """Whether to try. After a pause all may, until the first of them fails."""
        return not self.is_tripped or now >= self._until

    def failed(self, now: float) -> float:
        """Return the seconds of pause. Failures of work that was under way when it tripped count once."""
        if self.allows(now):
            self._pause = min(MAX_PAUSE_SECONDS, max(MIN_PAUSE_SECONDS, 2 * self._pause))
            self._until = now + self._pause
        return self._until - now

    def succeeded(self) -> None:
        self._pause = 0.0
