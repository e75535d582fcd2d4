"""Rate: seconds per unit of a repeated work, from its last times.

Owns two decaying sums, so that large amounts count by size and the fixed cost of small ones does not look
like slowness.
"""

DECAY = 0.9


class Rate:
    """`seconds_per_unit` is None until something has been observed."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._units = 0.0

    def observe(self, units: float, seconds: float) -> None:
        self._seconds = DECAY * self._seconds + seconds
        self._units = DECAY * self._units + units

    @property
    def seconds_per_unit(self) -> float | None:
        return self._seconds / self._units if self._units else None
