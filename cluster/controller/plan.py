"""plan(): the next actions, given the desired and the observed fleet.

Decides about the fleet; `replica_life.py` decides about one replica. Lives carry their times, so the outcome
of a plan is in the lives of the next.

A pool is settled when it has `num_replicas` replicas of its spec's revision. Replicas of another revision are
stale: up to `surge` fresh ones start beside them, and a stale one drains only while enough others are ready.
If a pool shrinks meanwhile, fresh replicas that do not serve yet go first. One that serves stays, and its
stale counterpart leaves as soon as routers have found it.
"""

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.config import FleetSpec, PoolSpec, base_name, member_of_id
from cluster.controller.replica_life import Action, ActionKind, Advice, ReplicaLife
from replicas.protocol.status import ReplicaId, ReplicaState

SETTLE_SECONDS = 2.0
"""Seconds that a fresh replica is ready before a stale one drains for it, so that routers have found it."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """`wake_in_seconds` is when the same observation would yield more; None means never.

    `failed_rollouts` are pools whose first fresh replica ended before it was ready while old ones serve, with
    the reason; nothing is done to them until the spec changes.
    """

    actions: tuple[Action, ...] = ()
    wake_in_seconds: float | None = None
    failed_rollouts: tuple[tuple[str, str], ...] = ()


_BEST_FIRST = (ReplicaState.READY, ReplicaState.STARTING, ReplicaState.STOPPED)
"""Order of preference; replicas on their way out come last."""


@dataclass(slots=True)
class _Draft:
    now: float
    spec: FleetSpec
    crowds: Mapping[str, int]
    """Replicas per machine."""
    actions: list[Action] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    def take(self, advice: Advice) -> None:
        if isinstance(advice, Action):
            self.actions.append(advice)
        elif advice is not None:
            self.waits.append(advice)


def plan(spec: FleetSpec, observed: tuple[ReplicaLife, ...], now: float) -> FleetPlan:
    """Return the actions that bring `observed` nearer to `spec`; empty if none or only time helps."""
    by_pool: dict[str, list[ReplicaLife]] = defaultdict(list)
    for replica in sorted(observed, key=lambda replica: _number(replica.replica_id)):
        by_pool[member_of_id(replica.replica_id)].append(replica)
    assert len({replica.replica_id for replica in observed}) == len(observed), "a replica was observed twice"
    crowds = Tally(replica.machine for replica in observed if replica.machine is not None)
    draft = _Draft(now, spec, crowds)
    for pool in spec.pools:
        _plan_pool(draft, pool, by_pool.pop(pool.name, []))
    for name, orphans in by_pool.items():
        if spec.pool(base_name(name)) is not None:
            continue  # its pool has not looked yet for the servers that are there
        for replica in orphans:
            draft.take(replica.if_unwanted("is surplus"))
    for replica in observed:
        draft.take(replica.if_draining(spec.drain_limit(replica.replica_id), now))
    order = list(ActionKind)
    draft.actions.sort(key=lambda action: order.index(action.kind))
    return FleetPlan(tuple(draft.actions), min(draft.waits, default=None), tuple(draft.failed))


def _plan_pool(draft: _Draft, pool: PoolSpec, replicas: Sequence[ReplicaLife]) -> None:
    if any(replica.revision is None and replica.state is not ReplicaState.STOPPED for replica in replicas):
        return  # a controller that has just started has found it; it will say what it is, or end
    fresh = [replica for replica in replicas if replica.revision == pool.revision]
    stale = [replica for replica in replicas if replica.revision != pool.revision]
    failure = _failure(fresh, stale)
    if failure is not None:
        draft.failed.append((pool.name, failure))
        return
    kept = _most_wanted(draft, fresh)[: pool.num_replicas]
    for replica in fresh:
        if replica not in kept:
            draft.take(replica.if_unwanted("is surplus"))
    num_staying = _retire(draft, pool, kept, stale)
    _keep(draft, kept, pool.num_replicas + (pool.surge - num_staying if stale else 0))
    living_stale = [
        replica for replica in stale if replica.state in (ReplicaState.STARTING, ReplicaState.READY)
    ]
    num_missing = pool.num_replicas - len(kept)
    if stale:
        num_missing = min(num_missing, pool.num_replicas + pool.surge - len(kept) - len(living_stale))
    taken = {replica.replica_id for replica in replicas}
    for replica_id in _free_ids(pool, taken, num_missing):
        draft.take(Action(ActionKind.START, replica_id, f"{replica_id} does not run yet"))


def _keep(draft: _Draft, kept: Sequence[ReplicaLife], num_places: int) -> None:
    """Plan for the replicas of the current revision, best first; serving ones keep their places."""
    for replica in kept:
        advice = replica.if_wanted(draft.spec.backoff, draft.now)
        is_staying = isinstance(advice, Action) or _is_living(replica)
        if not is_staying or num_places > 0 or replica.state is ReplicaState.READY:
            draft.take(advice)
        elif replica.state is ReplicaState.STARTING:
            draft.take(replica.if_unwanted("is more than the surge allows"))
        num_places -= is_staying


def _most_wanted(draft: _Draft, fresh: Sequence[ReplicaLife]) -> list[ReplicaLife]:
    """Order the replicas that a pool keeps: serving ones, then lower numbers.

    Where Ray's autoscaler removes idle machines, replicas on the fullest machines come first, so that the
    ones leaving free a machine.
    """

    def rank(replica: ReplicaLife) -> tuple[int, int, str]:
        is_leaving = replica.is_expected_to_end and replica.state is not ReplicaState.STOPPED
        place = len(_BEST_FIRST) if is_leaving else _BEST_FIRST.index(replica.state)
        if not draft.spec.is_growing or replica.machine is None:
            return (place, 0, "")
        return (place, -draft.crowds[replica.machine], replica.machine)

    return sorted(fresh, key=rank)


def _failure(fresh: Sequence[ReplicaLife], stale: Sequence[ReplicaLife]) -> str | None:
    """Say why a rollout cannot continue: stale replicas serve, no fresh one ever did, and one has ended."""
    if not any(replica.state is ReplicaState.READY for replica in stale):
        return None
    if any(replica.state in (ReplicaState.READY, ReplicaState.DRAINING) for replica in fresh):
        return None
    for replica in fresh:
        if replica.state is ReplicaState.STOPPED and replica.num_early_deaths > 0:
            return f"{replica.replica_id} did not start: {replica.cause or 'its process ended'}"
    return None


def _is_living(replica: ReplicaLife) -> bool:
    return replica.state in (ReplicaState.STARTING, ReplicaState.READY) and not replica.is_dismissed


def _retire(draft: _Draft, pool: PoolSpec, kept: Sequence[ReplicaLife], stale: Sequence[ReplicaLife]) -> int:
    """Retire as many stale replicas as the pool can spare now; returns how many stay."""
    num_ready = 0
    for replica in kept:
        if replica.state is ReplicaState.READY:
            settled_in = replica.since + SETTLE_SECONDS - draft.now
            num_ready += settled_in <= 0
            if settled_in > 0 and stale:
                draft.waits.append(settled_in)
    ready = [replica for replica in stale if replica.state is ReplicaState.READY]
    num_needed = pool.num_replicas - (1 if pool.surge == 0 else 0)
    num_spare = min(len(ready), max(0, num_ready + len(ready) - num_needed))
    serving_on = ready[num_spare:]
    for replica in stale:
        if replica not in serving_on:
            draft.take(replica.if_unwanted("is of an earlier revision"))
    return len(serving_on)


def _free_ids(pool: PoolSpec, taken: set[ReplicaId], count: int) -> list[ReplicaId]:
    free: list[ReplicaId] = []
    number = 0
    while len(free) < count:
        replica_id = pool.replica_id(number)
        if replica_id not in taken:
            free.append(replica_id)
        number += 1
    return free


def _number(replica_id: ReplicaId) -> tuple[str, int]:
    """Sort key for replicas: -10 after -9."""
    pool, _, number = replica_id.rpartition("-")
    return (pool, int(number) if number.isdecimal() else 0)
