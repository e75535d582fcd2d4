"""StandingDelay: whether a fleet is overloaded, or only sees a burst.

Owns when waits became long. A fleet that carries its load now and then has a replica that could begin at
once; so the least recent wait distinguishes an overload from a burst, as in CoDel (Nichols and Jacobson,
"Controlling Queue Delay", ACM Queue 2012).

    the idlest replica has had more than TARGET_SECONDS to do since `since`,
    for longer than it takes to do what it had then                             the fleet is overloaded
    no request was held back for CALM_SECONDS                                   it no longer is
"""

TARGET_SECONDS = 2.0
"""Seconds of prompts at the idlest replica. Fleets that carry recorded and generated traffic exceed it only
for fractions of a second (`loadtests/log/2026-11.md`)."""

CALM_SECONDS = 10.0

STANDING_SECONDS = 5.0
"""After which an overload is no burst."""


class StandingDelay:
    """Replicas of one model, as one router sees them. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._since: float | None = None
        """First time that the idlest replica had too much to do; None while it has less."""
        self._interval_seconds = 0.0
        self._began_at: float | None = None
        """Time when the overload was seen at the replicas; None if requests are held for another reason."""
        self._held_at: float | None = None

    def is_overload(self, now: float) -> bool:
        return self._held_at is not None and now - self._held_at <= CALM_SECONDS

    def is_standing(self, now: float) -> bool:
        """Whether replicas have had too much to do for a while: those that wait will not all be served."""
        return (
            self.is_overload(now) and self._began_at is not None and now - self._began_at > STANDING_SECONDS
        )

    def sees(self, least_wait_seconds: float, now: float) -> bool:
        """Record the idlest replica's work before it could begin another prompt. Not called in an overload;
        True if this is one."""
        if least_wait_seconds <= TARGET_SECONDS:
            self._since = None
        elif self._since is None:
            self._since = now
            self._interval_seconds = least_wait_seconds
        elif now - self._since > self._interval_seconds:
            self.holds(now)
            self._began_at = now
            return True
        return False

    def holds(self, now: float) -> None:
        """A request is held back, or still waits."""
        if not self.is_overload(now):  # another one begins
            self._since = self._began_at = None
        self._held_at = now
