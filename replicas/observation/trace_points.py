"""The moments of a request in a replica, for tracing.

Owns the moments. These classes do nothing; `tracing.py` makes spans of the same moments. A step has the
number of its frame since the replica started.
"""

from replicas.protocol.frames import Submit, TokenDelta


class SubmitTrace:
    """One submit, from when it was taken to the end of its last choice."""

    __slots__ = ()

    def started(self, step: int, step_seconds: float) -> None:
        """Record the step, of this duration, that first computed anything of it."""

    def delta(self, delta: TokenDelta, step: int) -> None:
        """Record one step's tokens for one choice."""

    def end(self, step: int) -> None:
        """Every choice has ended, or was aborted. Called once, and last."""


NO_TRACE = SubmitTrace()


class Tracing:
    """Makes traces that do nothing."""

    def taken(self, submit: Submit, step: int) -> SubmitTrace:
        """`step` is the last one before it came."""
        return NO_TRACE

    def refused(self, submit: Submit, reason: str) -> None:
        """It was not taken."""

    @property
    def num_dropped(self) -> int:
        """Spans that no collector has seen, since the start."""
        return 0

    def close(self, timeout_seconds: float) -> None:
        """Send the rest; blocks for at most `timeout_seconds`."""
