"""TransferSpeed: seconds per byte, measured over several threads' transfers at once.

Owns a decaying mean. Pure: the caller supplies the time. Time counts once for parallel transfers, so the
figure is the device's and not a thread's.
"""

SAMPLE_BYTES = 1 << 20
SAMPLE_SECONDS = 0.25
"""Transfers are gathered until they take this long."""

SHARE_OF_NEW = 0.25


class TransferSpeed:
    """`seconds_per_byte` is None until something was moved."""

    def __init__(self) -> None:
        self.seconds_per_byte: float | None = None
        self._num_moving = 0
        self._since = 0.0
        self._busy_seconds = 0.0
        self._num_bytes = 0

    def probed(self, seconds_per_byte: float) -> None:
        """Record a dedicated measurement, unless transfers have already told the speed."""
        if self.seconds_per_byte is None:
            self.seconds_per_byte = seconds_per_byte

    def begun(self, now: float) -> None:
        """Record a transfer that has begun, perhaps before others have ended."""
        if not self._num_moving:
            self._since = max(self._since, now)
        self._num_moving += 1

    def ended(self, now: float, num_bytes: int) -> None:
        """A transfer has ended; 0 bytes for one that failed, whose time counts all the same."""
        assert self._num_moving > 0, "what has ended had begun"
        self._busy_seconds += max(0.0, now - self._since)
        self._since = now
        self._num_moving -= 1
        self._num_bytes += num_bytes
        if self._num_bytes >= SAMPLE_BYTES or (self._num_bytes and self._busy_seconds >= SAMPLE_SECONDS):
            sample = self._busy_seconds / self._num_bytes
            before = sample if self.seconds_per_byte is None else self.seconds_per_byte
            self.seconds_per_byte = before + SHARE_OF_NEW * (sample - before)
            self._busy_seconds, self._num_bytes = 0.0, 0
