"""FleetState: the current spec and the pools it is rolling from; and its changes.

Owns the effect of apply, scale, rollout and a failed rollout. Each change yields a new state, or is refused
whole with a SettingsError of one sentence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cluster.config import FleetSpec, FoundServer, PoolSpec
from cluster.controller.capacity import Machine, misfit
from cluster.fleet_file import changed
from replicas.process.settings import SettingsError


@dataclass(frozen=True, slots=True)
class FleetState:
    """The fleet's desired state. `previous` holds pools as they were before a running rollout. `failures`
    says why a pool's last rollout was given up. `applied_revision` is the last applied spec's, whatever was
    scaled or rolled since. `found` has the servers of each pool that has looked for them."""

    spec: FleetSpec
    previous: Mapping[str, PoolSpec] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    applied_revision: str | None = None
    found: Mapping[str, tuple[FoundServer, ...]] = field(default_factory=dict)

    def wanted(self) -> FleetSpec:
        """Return the spec with a pool of one replica for each server that was found."""
        return self.spec.with_servers(self.found)


def applied(state: FleetState, spec: FleetSpec, machines: Sequence[Machine] | None) -> FleetState:
    """Apply `spec`. An autoscaled pool keeps its size within its new bounds. Without `machines`, room is not
    checked."""
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
    if pool.engines is not None:
        raise SettingsError(f"pool {name} has a replica for each server that it finds")
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
    """Roll the pool back to its previous replicas; its size stays."""
    old, pool = state.previous.get(name), state.spec.pool(name)
    spec = state.spec
    if old is not None and pool is not None:
        spec = spec.with_pool(replace(old, num_replicas=pool.num_replicas, autoscaling=pool.autoscaling))
    previous = {other: kept for other, kept in state.previous.items() if other != name}
    return replace(state, spec=spec, previous=previous, failures={**state.failures, name: why})


def with_found(state: FleetState, name: str, servers: Sequence[FoundServer]) -> FleetState:
    """Replace the servers of one pool, and forget those of pools that are gone."""
    found = {**state.found, name: tuple(servers)}
    return replace(
        state, found={pool.name: found[pool.name] for pool in state.spec.pools if pool.name in found}
    )


def settled(state: FleetState, name: str) -> FleetState:
    """Finish a rollout: the way back is dropped."""
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
