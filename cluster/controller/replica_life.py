"""ReplicaLife: the state of one incarnation of a replica, and what to do next.

Owns the rules: what follows from each event, how long to wait after a death, when a drain is over. Events
come with their times, and the caller executes orders.

    asked for ──▶ STARTING ──▶ READY ──▶ DRAINING ──▶ STOPPED ──▶ replaced, or forgotten
                     └───────────┴───────────┴───────────▲  by itself, or because its end was asked for

The end is asked for once. A replica that Ray has not created yet is ended as soon as it exists.
"""

import enum
from dataclasses import dataclass, replace
from typing import TypeAlias

from cluster.config import BackoffSpec
from replicas.protocol.status import ReplicaId, ReplicaState, advance


class ActionKind(enum.StrEnum):
    """In the order of a plan: make room, add capacity, then remove."""

    STOP = "stop"
    REPLACE = "replace"
    START = "start"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class Action:
    kind: ActionKind
    replica_id: ReplicaId
    details: str


Advice: TypeAlias = Action | float | None
"""An action, seconds to wait, or None if nothing is needed."""


class Order(enum.StrEnum):
    """An order to Ray. Each ends with an event."""

    LAUNCH = "launch"
    """Create the actor: Launched or ReplicaEnded."""
    START = "start"
    """Let it serve: ReplicaStarted or ReplicaEnded."""
    WATCH = "watch"
    """Wait for its end and free its place: ReplicaEnded."""
    DRAIN = "drain"
    """Let it finish its work: Drained."""
    END = "end"
    """Ask it to stop, wait briefly, kill it. START or WATCH reports the end."""


@dataclass(frozen=True, slots=True)
class Launched:
    """Its actor exists."""


@dataclass(frozen=True, slots=True)
class ReplicaStarted:
    """It serves; `machine` is Ray's id of its machine."""

    revision: str
    machine: str


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """It should finish its work and leave."""


@dataclass(frozen=True, slots=True)
class Drained:
    """It has finished its work."""


@dataclass(frozen=True, slots=True)
class EndAsked:
    """It should end now."""


@dataclass(frozen=True, slots=True)
class ReplicaEnded:
    """It is gone and its place is free. `is_refusal`: it would not start, and `cause` quotes it."""

    cause: str
    is_refusal: bool = False


Event: TypeAlias = Launched | ReplicaStarted | DrainAsked | Drained | EndAsked | ReplicaEnded


@dataclass(frozen=True, slots=True)
class ReplicaLife:
    """`since` is when it entered `state`. Every end is STOPPED; `cause` says which.

    `num_early_deaths` includes its predecessors', and is 0 after a deliberate stop. `revision` is its pool's
    at creation; None if unknown, like `machine`.
    """

    replica_id: ReplicaId
    state: ReplicaState
    since: float
    num_early_deaths: int = 0
    cause: str | None = None
    revision: str | None = None
    machine: str | None = None
    is_launched: bool = True
    """Ray has created its actor."""
    is_dismissed: bool = False
    """Its end was asked for."""
    has_refused: bool = False
    """It would not start."""
    is_waiting_for_room: bool = False

    def after(self, event: Event, now: float, backoff: BackoffSpec) -> "LifeAndOrders":
        """Return the next life and the orders. An event that no longer matters changes nothing."""
        match event:
            case Launched():
                launched = replace(self, is_launched=True)
                return (launched, (Order.WATCH, Order.END) if self.is_dismissed else (Order.START,))
            case ReplicaStarted(revision, machine):
                if self.is_dismissed:
                    return self, (Order.WATCH,)
                ready = self._moved(ReplicaState.READY, now)
                return replace(ready, revision=revision, machine=machine), (Order.WATCH,)
            case DrainAsked():
                if self.is_dismissed or self.state is not ReplicaState.READY:
                    return self, ()
                return self._moved(ReplicaState.DRAINING, now), (Order.DRAIN,)
            case Drained() | EndAsked():
                if self.is_dismissed or self.state is ReplicaState.STOPPED:
                    return self, ()
                return replace(self, is_dismissed=True), (Order.END,) if self.is_launched else ()
            case ReplicaEnded(cause, is_refusal):
                return self._ended(cause, is_refusal, now, backoff), ()

    def _ended(self, cause: str, is_refusal: bool, now: float, backoff: BackoffSpec) -> "ReplicaLife":
        stopped = replace(self._moved(ReplicaState.STOPPED, now), has_refused=is_refusal)
        if self.is_expected_to_end:
            return replace(stopped, num_early_deaths=0, cause=None)
        served_seconds = now - self.since if self.state is ReplicaState.READY else None
        num_early_deaths = count_early_deaths(self.num_early_deaths, served_seconds, backoff)
        return replace(stopped, num_early_deaths=num_early_deaths, cause=cause)

    def _moved(self, state: ReplicaState, now: float) -> "ReplicaLife":
        return replace(self, state=advance(self.state, state), since=now, is_waiting_for_room=False)

    @property
    def is_expected_to_end(self) -> bool:
        return self.is_dismissed or self.state is ReplicaState.DRAINING

    def looked_for_room(self, is_pending: bool, now: float, patience_seconds: float) -> "ReplicaLife":
        """Record whether it has waited for room longer than `patience_seconds`."""
        is_late = self.state is ReplicaState.STARTING and now - self.since >= patience_seconds
        return replace(self, is_waiting_for_room=is_pending and is_late)

    def if_wanted(self, backoff: BackoffSpec, now: float) -> Advice:
        """Advise on a wanted replica. One that ended is restarted: at once after the first early death, later
        after more."""
        if self.state is not ReplicaState.STOPPED:
            return None
        wait = self.since + backoff.delay_seconds(self.num_early_deaths) - now
        return wait if wait > 0 else Action(ActionKind.REPLACE, self.replica_id, self._why_replaced())

    def if_unwanted(self, why: str) -> Advice:
        """Advise on an unwanted replica: drain if it serves, end if it does not, forget if it has ended."""
        name = self.replica_id
        match self.state:
            case ReplicaState.READY:
                return Action(ActionKind.DRAIN, name, f"{name} {why}")
            case ReplicaState.STARTING:
                return Action(ActionKind.STOP, name, f"{name} {why} and serves no request yet")
            case ReplicaState.STOPPED:
                return Action(ActionKind.STOP, name, f"{name} {why} and has ended")
            case ReplicaState.DRAINING:
                return None  # it goes already

    def if_draining(self, limit_seconds: float, now: float) -> Advice:
        """Advise on a draining replica: end it after `limit_seconds`."""
        if self.state is not ReplicaState.DRAINING:
            return None
        left = self.since + limit_seconds - now
        if left > 0:
            return left
        details = f"{self.replica_id} has drained for {limit_seconds:g} s, and that is enough"
        return Action(ActionKind.STOP, self.replica_id, details)

    def _why_replaced(self) -> str:
        cause = f" ({self.cause})" if self.cause else ""
        if self.num_early_deaths == 0:
            return f"{self.replica_id} was stopped{cause} and is wanted again"
        if self.num_early_deaths == 1:
            return f"{self.replica_id} died{cause}"
        return f"{self.replica_id} died{cause}, {self.num_early_deaths} times in a row"


LifeAndOrders: TypeAlias = tuple[ReplicaLife, tuple[Order, ...]]


def asked_for(
    replica_id: ReplicaId, revision: str, now: float, predecessor: ReplicaLife | None = None
) -> LifeAndOrders:
    """Create a new incarnation, which inherits its predecessor's early deaths."""
    assert predecessor is None or predecessor.state is ReplicaState.STOPPED, "a replica runs once"
    num_early_deaths = 0 if predecessor is None else predecessor.num_early_deaths
    life = ReplicaLife(
        replica_id=replica_id,
        state=ReplicaState.STARTING,
        since=now,
        num_early_deaths=num_early_deaths,
        revision=revision,
        is_launched=False,
    )
    return life, (Order.LAUNCH,)


def found(replica_id: ReplicaId, now: float) -> LifeAndOrders:
    """Adopt an incarnation of an earlier controller; a start makes it report itself, or end."""
    return ReplicaLife(replica_id=replica_id, state=ReplicaState.STARTING, since=now), (Order.START,)


def after_action(
    action: Action, life: ReplicaLife | None, revision: str | None, now: float, backoff: BackoffSpec
) -> tuple[ReplicaLife | None, tuple[Order, ...]]:
    """Apply a plan's action; returns None for a life that is forgotten. `revision` is its pool's."""
    if action.kind in (ActionKind.START, ActionKind.REPLACE):
        assert revision is not None, "only replicas of a pool are started"
        return asked_for(action.replica_id, revision, now, life)
    assert life is not None, "only what is there can leave"
    if action.kind is ActionKind.DRAIN:
        return life.after(DrainAsked(), now, backoff)
    if life.state is ReplicaState.STOPPED:
        return None, ()
    return life.after(EndAsked(), now, backoff)


def count_early_deaths(previous: int, served_seconds: float | None, backoff: BackoffSpec) -> int:
    """Return `num_early_deaths` after one more death; `served_seconds` is None if it was never ready."""
    if served_seconds is not None and served_seconds >= backoff.healthy_seconds:
        return 1
    return previous + 1
