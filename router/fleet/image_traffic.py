"""ImageTraffic: what has become of the images that this router had to bring to replicas.

Owns the counts, for as long as the router lives: clients come and go with their connections.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from replicas.protocol.frames import RefusalCode

UPLOAD_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds, up to the limit of one upload."""


FAILURES = (RefusalCode.INVALID_REQUEST, RefusalCode.OVERLOADED, RefusalCode.INTERNAL)
"""Errors of uploads. They start at 0, so that the first failure is an increase."""


@dataclass(slots=True)
class ImageTraffic:
    """`num_known` are images that should have been there already, `num_shared` those that another prompt was
    sending just then, `num_again` those of `num_sent` whose prompt was refused for want of an image.
    One upload that fails is one failure, however many wait for it."""

    num_sent: int = 0
    num_shared: int = 0
    num_known: int = 0
    num_again: int = 0
    num_bytes: int = 0
    num_failed: Counter[RefusalCode] = field(default_factory=lambda: Counter(dict.fromkeys(FAILURES, 0)))
    seconds: float = 0.0
    """Total of all sent."""
    counts: list[int] = field(default_factory=lambda: [0] * (len(UPLOAD_BOUNDS) + 1))
    """Counts by `UPLOAD_BOUNDS`."""

    def sent(self, num_bytes: int, seconds: float, *, is_again: bool) -> None:
        self.num_sent += 1
        self.num_again += is_again
        self.num_bytes += num_bytes
        self.seconds += seconds
        self.counts[bisect_left(UPLOAD_BOUNDS, seconds)] += 1
