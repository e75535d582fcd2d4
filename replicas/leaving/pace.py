"""Pace: how much one peer is asked to take over at once, and when.

Pure: the caller reports the answers. A late peer is asked for half as much next time, and dropped if it is
late again; a busy one is asked again after pauses. All other failures are final.
"""

from collections.abc import Iterator

from replicas.protocol.hand_overs import HandOverOutcome

MAX_LATE = 2
"""In a row: so a peer that hangs is waited for twice."""

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 1.0
MAX_BUSY = 7
"""Pauses in a row, five seconds of them at most."""

PASSING = (HandOverOutcome.LATE, HandOverOutcome.BUSY)


class Pace:
    """`num_chunks` are asked for at once."""

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self.given_up: HandOverOutcome | None = None
        """Why it is not asked any more."""
        self.was_late = False
        """The call was late: it may have succeeded without an answer."""
        self._num_late = 0

    def recover(self) -> None:
        """Allow questions again after a pause, if the failure was temporary."""
        if self.given_up in PASSING:
            self.given_up = None
            self._num_late = 0

    def answered(self) -> None:
        self._num_late = 0

    def failed(self, outcome: HandOverOutcome, num_asked: int) -> None:
        """Record a failed call for that many chunks; a busy peer has been retried after all pauses."""
        if outcome is HandOverOutcome.LATE:
            self.was_late = True
            self._num_late += 1
            self.num_chunks = max(1, num_asked // 2)
        if outcome is not HandOverOutcome.LATE or self._num_late >= MAX_LATE:
            self.given_up = outcome


def busy_pauses() -> Iterator[float]:
    """Return the seconds to wait after each answer that the peer is busy, the longest last."""
    return (min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**number) for number in range(MAX_BUSY))
