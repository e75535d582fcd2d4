"""A FleetState as it is kept with Ray: plain YAML, which the controller of another version can read as well.

Owns the format. What a version does not know is left out, and settings that it misses have their defaults.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

import yaml

from cluster.config import AutoscaleSpec, BackoffSpec, FleetSpec, PoolSpec
from cluster.controller.changes import FleetState
from replicas.config import ReplicaConfig

Spec = TypeVar("Spec", FleetState, FleetSpec, PoolSpec, AutoscaleSpec, BackoffSpec, ReplicaConfig)


def to_kept(state: FleetState) -> bytes:
    return yaml.safe_dump(asdict(state), sort_keys=False).encode()


def from_kept(kept: bytes) -> FleetState:
    """Raises ValueError if it is no such state."""
    try:
        state = yaml.safe_load(kept)
        pools = {name: _pool(pool) for name, pool in state["previous"].items()}
        return _made(FleetState, state, spec=_fleet(state["spec"]), previous=pools)
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the kept state is not that of a fleet: {error!r}") from error


def _fleet(fleet: Mapping[str, Any]) -> FleetSpec:
    pools = tuple(_pool(pool) for pool in fleet["pools"])
    return _made(FleetSpec, fleet, pools=pools, backoff=_made(BackoffSpec, fleet["backoff"]))


def _pool(pool: Mapping[str, Any]) -> PoolSpec:
    scale = pool["autoscaling"]
    return _made(
        PoolSpec,
        pool,
        replica=_made(ReplicaConfig, pool["replica"]),
        autoscaling=None if scale is None else _made(AutoscaleSpec, scale),
    )


def _made(kind: type[Spec], plain: Mapping[str, Any], **parts: Any) -> Spec:
    known = {field.name: plain[field.name] for field in fields(kind) if field.name in plain}
    return kind(**{**known, **parts})
