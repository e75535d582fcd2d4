"""StandingDelay: whether a fleet is overloaded, or only sees a burst.

Owns when waits became long. A fleet that carries its load now and then has a replica that could begin at
once; so the least recent wait distinguishes an overload from a burst, as in CoDel (Nichols and Jacobson,
"Controlling Queue Delay", ACM Queue 2012). But a decision by cache loads replicas unevenly, and one may stand
idle while many requests wait at others. So what requests meet where they are sent counts as well.

    the idlest replica has had more than TARGET_SECONDS to do since `since`,
    for longer than it takes to do what it had then                             the fleet is overloaded
    a large share of the latest requests met more than TARGET_SECONDS           the fleet is overloaded
    no request was held back for CALM_SECONDS                                   it no longer is

A share is large if it exceeds what one busy replica explains: a single long prompt takes seconds there.
"""

import math

TARGET_SECONDS = 2.0
"""Seconds until a replica begins a prompt: for its prompts before it, and for room. Fleets that carry
recorded and generated traffic exceed it at their idlest replica only for fractions of a second
(`loadtests/log/2026-11.md`)."""

LEAST_SHARE, MOST_SHARE = 0.25, 0.5
"""Bounds of a large share; between them it is one replica's part of the fleet."""

LATEST_REQUESTS = 50
LATEST_SECONDS = 5.0
"""The latest requests are as many, or those of as many seconds if that is more: a burst is not all."""

MOMENT_SECONDS = 1.0
"""Time for which those that come at one moment may stand, if none came before."""

CALM_SECONDS = 10.0

STANDING_SECONDS = 5.0
"""After which an overload is no burst."""


class StandingDelay:
    """Replicas of one model, as one router sees them. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._since: float | None = None
        """First time that the idlest replica had too much to do; None while it has less."""
        self._interval_seconds = 0.0
        self._share = 0.0
        """Part of the latest requests that met a long wait: a moving average."""
        self._met_at = 0.0
        self._unused_seconds = 0.0
        """Time for which no request has stood yet."""
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

    def sees(self, wait_seconds: float, least_seconds: float, num_replicas: int, now: float) -> bool:
        """Record a request's wait at its replica, one of `num_replicas`, and that at the idlest one. Not
        called in an overload; True if this is one."""
        unused_seconds = min(MOMENT_SECONDS, self._unused_seconds + now - self._met_at)
        self._met_at = now
        weight = min(1.0 / LATEST_REQUESTS, -math.expm1(-unused_seconds / LATEST_SECONDS))
        self._unused_seconds = max(0.0, unused_seconds + LATEST_SECONDS * math.log1p(-weight))
        self._share += weight * ((wait_seconds > TARGET_SECONDS) - self._share)
        large = min(MOST_SHARE, max(LEAST_SHARE, 1.0 / max(1, num_replicas)))
        if least_seconds <= TARGET_SECONDS:
            self._since = None
        elif self._since is None:
            self._since = now
            self._interval_seconds = least_seconds
        if self._share > large or (self._since is not None and now - self._since > self._interval_seconds):
            self._share = 0.0
            self.holds(now)
            self._began_at = now
            return True
        return False

    def holds(self, now: float) -> None:
        """A request is held back, or still waits."""
        if not self.is_overload(now):  # another one begins
            self._since = self._began_at = None
        self._held_at = now
