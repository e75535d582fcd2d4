"""Tally: counts moves between the tiers of a store, and names their failures.

Owns the counts. Pure: it moves nothing and reads no clock.
"""

from collections import Counter
from dataclasses import dataclass, field

from replicas.protocol.tier_figures import MoveFailure, Moves

_FAILURES = {
    "missing": MoveFailure.MISSING,
    "header": MoveFailure.DAMAGED,
    "late": MoveFailure.LATE,
    "ENOSPC": MoveFailure.NO_SPACE,
    "EDQUOT": MoveFailure.NO_SPACE,
    **dict.fromkeys(("off", "closed", "erased", "died"), MoveFailure.REFUSED),
}


def failure(reason: str) -> MoveFailure:
    """Return the word for a disk's reason: a file system error, or a defect of a file."""
    known = _FAILURES.get(reason)
    if known is not None:
        return known
    is_of_file_system = reason == "unknown" or (reason.isupper() and reason.startswith("E"))
    return MoveFailure.IO_ERROR if is_of_file_system else MoveFailure.DAMAGED


@dataclass(slots=True)
class MoveTally:
    """Counts of one way between two tiers."""

    num: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    num_failed: Counter[MoveFailure] = field(default_factory=Counter)

    def moved(self, num_tokens: int, seconds: float) -> None:
        self.num += 1
        self.num_tokens += num_tokens
        self.seconds += seconds

    def failed(self, cause: MoveFailure) -> None:
        self.num_failed[cause] += 1

    def figures(self) -> Moves:
        return Moves(self.num, self.num_tokens, self.seconds, dict(self.num_failed))


@dataclass(slots=True)
class Tally:
    """From host memory to the device, from disk to host memory, from there to the disk; and from peers."""

    loads: MoveTally = field(default_factory=MoveTally)
    reads: MoveTally = field(default_factory=MoveTally)
    writes: MoveTally = field(default_factory=MoveTally)
    pulls: MoveTally = field(default_factory=MoveTally)
