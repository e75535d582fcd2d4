"""ReplicaLife: what state one incarnation of a replica is in, and what to do next.

Owns the rules: what follows from each event, how long to wait after a death, when a drain has lasted long
enough. Events come with their times, and the caller carries orders out.

    asked for ──▶ STARTING ──▶ READY ──▶ DRAINING ──▶ STOPPED ──▶ replaced, or forgotten
                     └───────────┴───────────┴───────────▲  by itself, or because its end was asked for

The end is asked for once. One that Ray has not made yet is ended as soon as it is there.
"""

import enum
from dataclasses import dataclass, replace
from typing import TypeAlias

from cluster.config import BackoffSpec
from replicas.protocol.status import ReplicaId, ReplicaState, advance


class ActionKind(enum.StrEnum):
    """In the order in which a plan lists them: first make room, then capacity, then take some away."""

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
"""What a replica needs: an action, or nothing before so many seconds have passed, or nothing at all."""


class Order(enum.StrEnum):
    """What is to be done in Ray. Each ends with an event."""

    LAUNCH = "launch"
    """Create its actor: Launched, or ReplicaEnded."""
    START = "start"
    """Let it start to serve: ReplicaStarted, or ReplicaEnded."""
    WATCH = "watch"
    """Wait for its end, and give its place back: ReplicaEnded."""
    DRAIN = "drain"
    """Let it finish what it does: Drained."""
    END = "end"
    """Ask it to stop, wait a little, kill it. What starts or watches it hears of the end."""


@dataclass(frozen=True, slots=True)
class Launched:
    """Its actor exists."""


@dataclass(frozen=True, slots=True)
class ReplicaStarted:
    """It serves; `machine` is Ray's id of the one that it runs on."""

    revision: str
    machine: str


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """It is to finish what it does and leave."""


@dataclass(frozen=True, slots=True)
class Drained:
    """It has finished what it did."""


@dataclass(frozen=True, slots=True)
class EndAsked:
    """It is to end now."""


@dataclass(frozen=True, slots=True)
class ReplicaEnded:
    """It is gone, and its place in Ray is free. `is_refusal`: it would not start, and `cause` is its word."""

    cause: str
    is_refusal: bool = False


Event: TypeAlias = Launched | ReplicaStarted | DrainAsked | Drained | EndAsked | ReplicaEnded


@dataclass(frozen=True, slots=True)
class ReplicaLife:
    """`since` is when it entered `state`. STOPPED is how every end looks, `cause` says which.

    `num_early_deaths` counts those of its predecessors too, and is 0 for one that was stopped on purpose.
    `revision` is that of the pool that it was made for; None if that is not known, as is `machine`.
    """

    replica_id: ReplicaId
    state: ReplicaState
    since: float
    num_early_deaths: int = 0
    cause: str | None = None
    revision: str | None = None
    machine: str | None = None
    is_launched: bool = True
    """Ray has made its actor."""
    is_dismissed: bool = False
    """Its end was asked for."""
    has_refused: bool = False
    """It would not start."""
    is_waiting_for_room: bool = False

    def after(self, event: Event, now: float, backoff: BackoffSpec) -> "LifeAndOrders":
        """The life from now on, and what to do. An event that changes nothing any more is passed over."""
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
        """Whether it waits for room, for longer than it takes to be given some."""
        is_late = self.state is ReplicaState.STARTING and now - self.since >= patience_seconds
        return replace(self, is_waiting_for_room=is_pending and is_late)

    def if_wanted(self, backoff: BackoffSpec, now: float) -> Advice:
        """One that has ended is replaced: at once after the first early death, later after each one more."""
        if self.state is not ReplicaState.STOPPED:
            return None
        wait = self.since + backoff.delay_seconds(self.num_early_deaths) - now
        return wait if wait > 0 else Action(ActionKind.REPLACE, self.replica_id, self._why_replaced())

    def if_unwanted(self, why: str) -> Advice:
        """One that serves drains; one that does not is ended; one that has ended is forgotten."""
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
        """One that drains has so much time for it."""
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
    """A new incarnation. It takes the early deaths of the one before with it."""
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
    """One that an earlier controller has launched: asked to start, it says what it is, or ends."""
    return ReplicaLife(replica_id=replica_id, state=ReplicaState.STARTING, since=now), (Order.START,)


def after_action(
    action: Action, life: ReplicaLife | None, revision: str | None, now: float, backoff: BackoffSpec
) -> tuple[ReplicaLife | None, tuple[Order, ...]]:
    """What becomes of a replica by an action of the plan: None if it is forgotten. `revision`: its pool's."""
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
    """`num_early_deaths` after one more death; `served_seconds` is None if it never became ready."""
    if served_seconds is not None and served_seconds >= backoff.healthy_seconds:
        return 1
    return previous + 1
