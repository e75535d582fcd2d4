"""plan(): what to do next, given what should exist and what does.

Owns the decisions about the fleet. Knows no Ray and no clock: observations come with their times, and
whoever carries a plan out reports back through the next observation.
"""

import enum
from dataclasses import dataclass

from cluster.config import BackoffSpec, FleetSpec
from replicas.protocol.status import ReplicaId, ReplicaState


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


@dataclass(frozen=True, slots=True)
class Plan:
    """`wake_in_seconds` is when the same observation would yield more; None means never."""

    actions: tuple[Action, ...] = ()
    wake_in_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ObservedReplica:
    """One replica as the controller knows it. `since` is when it entered `state`.

    STOPPED is how every end looks, `cause` says which. `num_early_deaths` is 0 for one that was
    stopped on purpose.
    """

    replica_id: ReplicaId
    state: ReplicaState
    since: float
    num_early_deaths: int = 0
    cause: str | None = None


def plan(spec: FleetSpec, observed: tuple[ObservedReplica, ...], now: float) -> Plan:
    """The actions that bring `observed` nearer to `spec`. Empty when all is well or only time helps."""
    by_id = {replica.replica_id: replica for replica in observed}
    assert len(by_id) == len(observed), "a replica was observed twice"
    desired = [replica_id for replica_id, _ in spec.desired()]

    actions: list[Action] = []
    waits: list[float] = []
    for replica_id in desired:
        replica = by_id.get(replica_id)
        if replica is None:
            actions.append(Action(ActionKind.START, replica_id, f"{replica_id} does not run yet"))
        elif replica.state is ReplicaState.STOPPED:
            wait = replica.since + spec.backoff.delay_seconds(replica.num_early_deaths) - now
            if wait > 0:
                waits.append(wait)
            else:
                actions.append(Action(ActionKind.REPLACE, replica_id, _why_replaced(replica)))
    for replica in sorted(observed, key=lambda replica: replica.replica_id):
        overdue = replica.since + spec.drain_seconds - now
        if replica.state is ReplicaState.DRAINING and overdue <= 0:
            details = f"{replica.replica_id} has drained for {spec.drain_seconds:g} s, and that is enough"
            actions.append(Action(ActionKind.STOP, replica.replica_id, details))
        elif replica.state is ReplicaState.DRAINING:
            waits.append(overdue)
        elif replica.replica_id not in desired:
            actions.append(_remove(replica))
    order = list(ActionKind)
    actions.sort(key=lambda action: order.index(action.kind))
    return Plan(tuple(actions), min(waits, default=None))


def _remove(replica: ObservedReplica) -> Action:
    name = replica.replica_id
    match replica.state:
        case ReplicaState.READY:
            return Action(ActionKind.DRAIN, name, f"{name} is surplus")
        case ReplicaState.STARTING:
            return Action(ActionKind.STOP, name, f"{name} is surplus and serves nobody yet")
        case _:
            return Action(ActionKind.STOP, name, f"{name} is surplus and has ended")


def _why_replaced(replica: ObservedReplica) -> str:
    cause = f" ({replica.cause})" if replica.cause else ""
    if replica.num_early_deaths == 0:
        return f"{replica.replica_id} was stopped{cause} and is wanted again"
    if replica.num_early_deaths == 1:
        return f"{replica.replica_id} died{cause}"
    return f"{replica.replica_id} died{cause}, {replica.num_early_deaths} times in a row"


def count_early_deaths(previous: int, served_seconds: float | None, backoff: BackoffSpec) -> int:
    """`num_early_deaths` after one more death; `served_seconds` is None if it never became ready."""
    if served_seconds is not None and served_seconds >= backoff.healthy_seconds:
        return 1
    return previous + 1
