"""FleetState: the spec that holds now, and the pools that it is on its way from; and what may change it.

Owns what apply, scale, rollout and a rollout that failed make of it. Each change is refused as a whole,
with a SettingsError of one sentence, or gives a new state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cluster.config import FleetSpec, PoolSpec
from cluster.controller.capacity import Machine, misfit
from cluster.fleet_file import changed
from replicas.process.settings import SettingsError


@dataclass(frozen=True, slots=True)
class FleetState:
    """`previous` are pools whose replicas are being made anew, as they were before. `failures` says of
    pools why the last attempt at that was given up. `applied_revision` is that of the spec that was applied
    last, whatever has been scaled or rolled since."""

    spec: FleetSpec
    previous: Mapping[str, PoolSpec] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    applied_revision: str | None = None


def applied(state: FleetState, spec: FleetSpec, machines: Sequence[Machine] | None) -> FleetState:
    """`spec` from now on. A pool that scales itself keeps its size, as far as its new bounds allow. Without
    `machines`, room is not checked."""
    pools = []
    for pool in spec.pools:
        old, scale = state.spec.pool(pool.name), pool.autoscaling
        if old is not None:
            # Else a rollout that changed no setting would be undone, by another one.
            pool = replace(pool, num_restarts=old.num_restarts)
            if scale is not None and old.autoscaling is not None:
                size = min(scale.max_replicas, max(scale.min_replicas, old.num_replicas))
                pool = replace(pool, num_replicas=size)
        pools.append(pool)
    moved = _moved(replace(state, failures={}), replace(spec, pools=tuple(pools)), machines)
    return replace(moved, applied_revision=spec.revision)


def scaled(state: FleetState, name: str, num_replicas: int, machines: Sequence[Machine]) -> FleetState:
    pool = _pool(state, name)
    spec = state.spec.with_pool(replace(pool, num_replicas=num_replicas))
    # Fewer are never refused, even if a machine has gone and they do not all fit.
    return _moved(state, spec, machines if num_replicas > pool.num_replicas else None)


def rolled(
    state: FleetState, name: str, values: Mapping[str, str], machines: Sequence[Machine]
) -> FleetState:
    pool = changed(_pool(state, name), values)
    if pool.revision == _pool(state, name).revision:
        raise SettingsError(
            f"pool {name} has these settings already; without --set its replicas are made anew"
        )
    return _moved(state, state.spec.with_pool(pool), machines)


def given_up(state: FleetState, name: str, why: str) -> FleetState:
    """The pool's replicas are to be what they were; its size stays."""
    old, pool = state.previous.get(name), state.spec.pool(name)
    spec = state.spec
    if old is not None and pool is not None:
        spec = spec.with_pool(replace(old, num_replicas=pool.num_replicas, autoscaling=pool.autoscaling))
    previous = {other: kept for other, kept in state.previous.items() if other != name}
    return replace(state, spec=spec, previous=previous, failures={**state.failures, name: why})


def settled(state: FleetState, name: str) -> FleetState:
    """The pool has become what its spec says: there is no way back any more."""
    return replace(state, previous={other: kept for other, kept in state.previous.items() if other != name})


def _moved(state: FleetState, spec: FleetSpec, machines: Sequence[Machine] | None) -> FleetState:
    previous, rolling, grown = {}, [], []
    for pool in spec.pools:
        old = state.spec.pool(pool.name)
        if old is None or old.num_replicas < pool.num_replicas:
            grown.append(pool.name)
        if old is not None and old.revision != pool.revision:
            rolling.append(pool.name)
            # What is still on its way from an earlier revision has its replicas of that one.
            previous[pool.name] = state.previous.get(pool.name, old)
        elif pool.name in state.previous:
            previous[pool.name] = state.previous[pool.name]
    sentence = None if machines is None else misfit(spec, machines, rolling=rolling, grown=grown)
    if sentence is not None:
        raise SettingsError(sentence)
    failures = {
        name: why
        for name, why in state.failures.items()
        if spec.pool(name) is not None and name not in rolling
    }
    return replace(state, spec=spec, previous=previous, failures=failures)


def _pool(state: FleetState, name: str) -> PoolSpec:
    pool = state.spec.pool(name)
    if pool is None:
        names = ", ".join(pool.name for pool in state.spec.pools)
        raise SettingsError(f"there is no pool {name}; there is {names or 'none'}")
    return pool
