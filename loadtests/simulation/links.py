"""Link: something that moves bytes one after the other, in virtual time.

Owns when it will be free. Does not know what is moved.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Link:
    """Each move takes the link for its bytes, and `fixed_seconds` more, during which others may begin."""

    bytes_per_second: float
    fixed_seconds: float = 0.0
    free_at: float = 0.0

    def take(self, now: float, num_bytes: float) -> float:
        """Return the end of a move that is requested now."""
        self.free_at = max(now, self.free_at) + num_bytes / self.bytes_per_second
        return self.free_at + self.fixed_seconds

    def backlog_seconds(self, now: float) -> float:
        return max(0.0, self.free_at - now)
