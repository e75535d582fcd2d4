"""Rate: seconds per unit of something that is done again and again, from the last times that it was.

Owns two decaying sums, so that what was large counts by its size and the fixed cost of small things does
not pass for slowness.
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
