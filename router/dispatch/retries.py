"""Retries of a generation whose replica was lost or has refused it, and the pauses before them.

Owns the bounds. Time and randomness are arguments.

    it was lost with its replica             again elsewhere, spread over a moment; see also `suspects.py`
    a living replica refused or failed it    again elsewhere, if the router's budget has a retry left
    a server refuses what we have checked    once elsewhere; see also `router/routing/doubts.py`
    all that are ready have refused it       all once more, after a wait that doubles each time
    the last of them has a busy server       given up, in the words of that server
    none is ready, but some are coming       wait in line, for `wait_seconds`
    none is ready, and none is coming        as if all had refused
"""

from dataclasses import dataclass

from replicas.protocol.frames import Refusal, RefusalCode
from replicas.protocol.status import ReplicaId


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`max_attempts` bounds the replicas in a row that one choice may try without progress, and `max_losses`
    those that it may lose in all: it may be the cause.

    `wait_seconds` is how long a request waits for a replica that is coming, `trial_seconds` how long a
    suspect waits for one that may try it.
    """

    max_attempts: int = 4
    max_losses: int = 12
    max_waits: int = 5
    first_wait_seconds: float = 0.05
    wait_seconds: float = 15.0
    trial_seconds: float = 60.0


class Tries:
    """How often one choice was tried. Attempts count anew once one of them has got somewhere."""

    __slots__ = ("num_attempts", "num_losses")

    def __init__(self) -> None:
        self.num_attempts = 0
        self.num_losses = 0

    def begin(self) -> None:
        self.num_attempts += 1

    def failed(self, *, is_death: bool, has_survived: bool) -> None:
        """Record a failed attempt. `has_survived`: it had made progress before."""
        self.num_losses += is_death
        if has_survived:
            self.num_attempts = 0

    def are_left(self, policy: RetryPolicy) -> bool:
        return self.num_attempts < policy.max_attempts and self.num_losses < policy.max_losses


class Patience:
    """One generation's failures, and when it may be tried again. `chance` is between 0 and 1."""

    __slots__ = (
        "_gives_up_at",
        "_num_failures",
        "_num_waits",
        "_policy",
        "excluded",
        "failure",
        "not_before",
        "refusal",
    )

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._num_failures = 0
        self._num_waits = 0
        self._gives_up_at: float | None = None
        self.excluded: set[ReplicaId] = set()
        """Not asked before the next wait."""
        self.failure: RefusalCode | None = None
        """The latest."""
        self.refusal: Refusal | None = None
        """The latest, if a server has said why."""
        self.not_before = 0.0

    def failed(
        self,
        replica_id: ReplicaId,
        code: RefusalCode,
        now: float,
        chance: float,
        refusal: Refusal | None = None,
    ) -> None:
        """Lost, or refused, there. The pause keeps many that were lost together from coming back together."""
        if code is not RefusalCode.MEDIA_MISSING:  # it is sent there again
            self.excluded.add(replica_id)
        self.failure = code
        self.refusal = None if refusal is None or refusal.error is None else refusal
        pause = self._policy.first_wait_seconds * chance * (1 << min(self._num_failures, 4))
        self.not_before = max(self.not_before, now + pause)
        self._num_failures += 1

    def placed(self) -> None:
        self._gives_up_at = None

    def wait_for_all(self, now: float, chance: float) -> bool:
        """All were asked in vain; once more after a wait. False when there have been enough of them, and
        where the last one's server says that it is busy: when to come back is for the client to know."""
        is_told = self.refusal is not None and self.failure is RefusalCode.OVERLOADED
        if is_told or self._num_waits >= self._policy.max_waits:
            return False
        seconds = self._policy.first_wait_seconds * (1 << self._num_waits) * (0.5 + chance)
        self._num_waits += 1
        self.not_before = now + seconds
        self.excluded.clear()  # by then a replica may be back, or less busy
        return True

    def wait_in_line(self, now: float, seconds: float) -> float:
        """Return the rest of the time since it first had to wait; 0 when that is over."""
        if self._gives_up_at is None:
            self._gives_up_at = now + seconds
        self.excluded.clear()
        return max(0.0, self._gives_up_at - now)


class RetryBudget:
    """Retries at living replicas are a share of the traffic: many at once would worsen an overload.

    Each request adds `share` of a retry and `per_second` are always added, up to `max_retries`.
    """

    def __init__(self, *, share: float = 0.2, per_second: float = 10.0, max_retries: float = 200.0) -> None:
        self._share = share
        self._per_second = per_second
        self._max_retries = max_retries
        self._left = max_retries
        self._updated: float | None = None
        self.num_refused = 0

    def left(self, now: float) -> float:
        elapsed = 0.0 if self._updated is None else max(0.0, now - self._updated)
        self._updated = now
        self._left = min(self._max_retries, self._left + elapsed * self._per_second)
        return self._left

    def add_request(self) -> None:
        self._left = min(self._max_retries, self._left + self._share)

    def take(self, now: float) -> bool:
        """Take one retry, if there is one."""
        if self.left(now) < 1.0:
            self.num_refused += 1
            return False
        self._left -= 1.0
        return True
