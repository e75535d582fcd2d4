"""WriteBudget: bytes that may be written to the disk, per second and per day.

Owns the two allowances. Pure: the caller supplies a monotonic time.

An SSD lasts for a number of bytes written, so the daily allowance determines its life, and the allowance per
second the bandwidth left for reads. Both refill steadily, up to what `BURST_SECONDS` and `BURST_OF_DAY`
bring.
"""

from dataclasses import dataclass

BURST_SECONDS = 10.0
"""The allowance by the second holds at most as much as it gains in this time."""

BURST_OF_DAY = 1 / 24
"""The allowance by the day holds at most this share of it."""

DAY_SECONDS = 86_400.0

SHORT_BELOW = 0.5
"""An allowance counts as short below this share of its maximum."""


@dataclass(slots=True)
class _WriteAllowance:
    """`gain` and `most` in bytes per second and in bytes."""

    gain: float
    most: float
    left: float = 0.0
    at: float | None = None

    def refill(self, now: float) -> None:
        if self.at is None:
            self.left = self.most
        else:
            self.left = min(self.most, self.left + max(0.0, now - self.at) * self.gain)
        self.at = now if self.at is None else max(self.at, now)


class WriteBudget:
    """None for a bound that is not wanted. Raises ValueError unless a bound is above 0."""

    def __init__(self, bytes_per_second: float | None = None, bytes_per_day: float | None = None) -> None:
        self._allowances: list[_WriteAllowance] = []
        if bytes_per_second is not None:
            self._allowances.append(_allowance(bytes_per_second, bytes_per_second * BURST_SECONDS))
        if bytes_per_day is not None:
            self._allowances.append(_allowance(bytes_per_day / DAY_SECONDS, bytes_per_day * BURST_OF_DAY))

    def is_short(self, now: float) -> bool:
        """Whether only the most valuable chunks should be written."""
        self._refill(now)
        return any(each.left < each.most * SHORT_BELOW for each in self._allowances)

    def left_ratio(self, now: float) -> float:
        """Return the rest of the scarcer allowance, as a share of its maximum; 1 without a bound."""
        self._refill(now)
        return max(0.0, min((each.left / each.most for each in self._allowances), default=1.0))

    def take(self, now: float, num_bytes: int) -> bool:
        """Take the bytes from every allowance; False, without effect, if one is empty.

        A write larger than an allowance's maximum is paid for by waiting afterwards.
        """
        self._refill(now)
        if any(each.left <= 0 for each in self._allowances):
            return False
        for each in self._allowances:
            each.left -= num_bytes
        return True

    def _refill(self, now: float) -> None:
        for each in self._allowances:
            each.refill(now)


def _allowance(gain: float, most: float) -> _WriteAllowance:
    if not gain > 0:
        raise ValueError(f"a write budget is above 0 bytes, not {gain:g} a second")
    return _WriteAllowance(gain, most)
