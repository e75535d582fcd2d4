"""A FleetSpec as a file: YAML with models and pools, parsed strictly, and settings changed by name.

Owns the format and its errors, one sentence each. Opens no file: text in, spec out.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import yaml

from cluster.config import (
    EACH_SERVER,
    MOST_ENGINES,
    AutoscaleSpec,
    EngineSource,
    FleetSpec,
    PoolSpec,
    base_name,
)
from replicas.config import ReplicaConfig
from replicas.process.settings import SettingsError, build, without_password
from replicas.protocol.status import Role

TOY_MODEL = "toy"
"""Stands for the model that ships with Kvasir."""

MOST_REPLICAS = 4096

ROLE_TARGETS: Mapping[Role, Mapping[str, float]] = {
    Role.PREFILL: {"target_pending_tokens": 8192.0},
    Role.DECODE: {"target_in_flight": 16.0},
}
"""Targets of a pool that scales and gives none. The tokens are half a second's at 16,000 tokens a second."""

FLEET_FIELDS = (
    *("pools", "redis_url", "secret_file", "drain_seconds", "ray_autoscaler"),
    *("log_format", "metrics_host", "metrics_port"),
)
POOL_FIELDS = (
    *("name", "replicas", "settings", "resources", "threads"),
    *("drain_seconds", "surge", "autoscaling", "engines", "role"),
)
RESOURCE_FIELDS = ("cpus", "gpus", "custom", "bundle")
ENGINES_FIELDS = (*("urls", "file", "dns", "service", "inference_pool", "namespace", "port"), "at_most")
AUTOSCALING_FIELDS = (
    *("min", "max", "target_in_flight", "target_pending_tokens"),
    *("up_seconds", "down_seconds", "tolerance"),
)
NOT_OF_A_POOL: Mapping[str, str] = {
    "replica_id": "replicas are named after their pool",
    "redis_url": "the whole fleet shares one",
    "secret": "Ray would keep it where it keeps the fleet; give secret_file, beside the pools",
    "secret_file": "the whole fleet shares one",
    "drain_seconds": "it stands beside the settings, not in them",
    "role": "it is a field of the pool, next to settings",
}
NOT_OF_A_LOCAL_CLUSTER: Mapping[str, str] = {
    "replica_id": "kvasir up names the replicas itself",
    "redis_url": "use the environment variable REDIS_URL",
    "secret": "kvasir up makes one for each cluster",
    "secret_file": "kvasir up makes one for each cluster",
    "host": "replicas of a local cluster listen on loopback",
    "port": "replicas of a local cluster take free ports",
    "host_kv_bytes": "use --ram",
    "disk_kv_bytes": "use --disk",
    "kv_folder": "kvasir up keeps KV in its run directory; use --disk, and --run-dir for another place",
    "engine": "use --engine",
    "model": "use --model",
    "model_name": "use --model-name",
    "role": "use --prefill",
}


def parse_fleet(text: str, redis_url: str | None = None) -> FleetSpec:
    """Parse a fleet file; `redis_url`, if given, overrides the file's. Raises SettingsError."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"the fleet file is not YAML: {' '.join(str(error).split())}") from error
    fields = _mapping(content, "the fleet file", FLEET_FIELDS)
    redis_url = redis_url or _text(fields, "redis_url", "the fleet file")
    if redis_url is None:
        raise SettingsError("the fleet has no redis_url: add it to the file, or set REDIS_URL")
    if not redis_url.startswith(("redis://", "rediss://", "unix://")):
        raise SettingsError(
            f"redis_url begins with redis:// or rediss://, not as {without_password(redis_url)}"
        )
    entries = fields.get("pools")
    if not isinstance(entries, list) or not entries:
        raise SettingsError("the fleet file needs pools: a list with at least one pool")
    drain_seconds = _number(fields, "drain_seconds", "the fleet file", default=30.0)
    port = fields.get("metrics_port")
    shared = {"redis_url": redis_url, "secret_file": _text(fields, "secret_file", "the fleet file")}
    spec = FleetSpec(
        tuple(_pool(entry, place, shared, drain_seconds) for place, entry in enumerate(entries, 1)),
        drain_seconds=drain_seconds,
        log_format=_choice(fields, "log_format", ("text", "json"), "the fleet file"),
        metrics_host=_text(fields, "metrics_host", "the fleet file") or "127.0.0.1",
        metrics_port=None if port is None else _whole(fields, "metrics_port", "the fleet file", 0, 65535),
        is_growing=_flag(fields, "ray_autoscaler", "the fleet file"),
    )
    _check_models(spec)
    return spec


def changed(pool: PoolSpec, values: Mapping[str, str]) -> PoolSpec:
    """Change settings of the pool's replicas by name; without any, restart them.

    Raises SettingsError.
    """
    if not values:
        return replace(pool, num_restarts=pool.num_restarts + 1)
    _refuse_foreign(pool.name, values)
    plain = {**asdict(pool.replica), **values}
    if plain["model"] == TOY_MODEL:
        plain["model"] = None
    is_on_node_address = pool.is_on_node_address and "host" not in values
    try:
        return replace(pool, replica=build(ReplicaConfig, plain), is_on_node_address=is_on_node_address)
    except SettingsError as error:
        raise SettingsError(f"pool {pool.name}: {error}") from error


def model_name(config: ReplicaConfig) -> str:
    """Return the name under which a replica registers."""
    if config.model_name is not None:
        return config.model_name
    return "toy_model" if config.model is None else config.model.rstrip("/").rpartition("/")[2]


def settings_from(pairs: Sequence[str], refused: Mapping[str, str] | None = None) -> dict[str, str]:
    """Parse NAME=VALUE pairs as `--set` takes them; `refused` maps names to reasons. Raises SettingsError."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise SettingsError(f"--set takes NAME=VALUE, not {pair}")
        name = name.strip().replace("-", "_")
        if refused is not None and name in refused:
            raise SettingsError(f"--set cannot change {name}: {refused[name]}")
        values[name] = value
    return values


def _check_models(spec: FleetSpec) -> None:
    """Check that replicas of one model agree on what they serve; routers turn later ones away otherwise."""
    seen: dict[str, PoolSpec] = {}
    for pool in spec.pools:
        if pool.replica.engine == "openai" and not (pool.replica.model or pool.replica.model_name):
            continue  # its server names the model
        name = model_name(pool.replica)
        other = seen.setdefault(name, pool)
        for what in ("model", "tokens_per_block", "index_stride"):
            if getattr(other.replica, what) != getattr(pool.replica, what):
                setting = "block_size" if what == "tokens_per_block" else what
                raise SettingsError(
                    f"pools {other.name} and {pool.name} both serve {name}, with another {setting} each: "
                    "give one of them another model_name, or both the same"
                )


def _pool(content: Any, place: int, shared: Mapping[str, str | None], fleet_drain_seconds: float) -> PoolSpec:
    name = content.get("name") if isinstance(content, dict) else None
    if not isinstance(name, str):
        raise SettingsError(f"pool number {place} of the fleet file has no name")
    what = f"pool {name}"
    fields = _mapping(content, what, POOL_FIELDS)
    drain_seconds = _number(fields, "drain_seconds", what, default=fleet_drain_seconds)
    if base_name(name) != name:
        raise SettingsError(
            f"{what} cannot be named so: _at_ stands between a pool and a server that it found"
        )
    engines = _engines(fields, what) if "engines" in fields else None
    role = Role(_choice(fields, "role", (Role.BOTH, Role.PREFILL, Role.DECODE), what))
    own = {**shared, "role": role.value, "drain_seconds": drain_seconds}
    config = _replica(fields.get("settings"), name, own, finds=engines is not None)
    autoscaling = _autoscaling(fields["autoscaling"], what, role) if "autoscaling" in fields else None
    default = 1 if autoscaling is None else autoscaling.min_replicas
    if engines is not None:
        default = 0
    resources = _mapping(fields.get("resources", {}), f"resources of {what}", RESOURCE_FIELDS)
    custom = resources.get("custom", {})
    if not isinstance(custom, dict):
        raise SettingsError(f"custom resources of {what} are a mapping of names to amounts")
    return PoolSpec(
        _whole(fields, "replicas", what, 0, MOST_REPLICAS, default=default),
        name=name,
        replica=config,
        num_cpus=_number(resources, "cpus", what, default=1.0 if engines is None else 0.1),
        num_gpus=_number(resources, "gpus", what, default=0.0),
        custom_resources={str(key): _number(custom, key, what) for key in custom},
        bundle=_choice(resources, "bundle", ("machine", "gpu"), what),
        num_threads=_whole(fields, "threads", what, 1, 4096, default=1),
        drain_seconds=drain_seconds,
        surge=_whole(fields, "surge", what, 0, MOST_REPLICAS, default=1),
        autoscaling=autoscaling,
        engines=engines,
        is_on_node_address="host" not in fields["settings"],
    )


def _engines(fields: Mapping[str, Any], what: str) -> EngineSource:
    for name in ("replicas", "autoscaling"):
        if name in fields:
            raise SettingsError(f"{what} cannot set {name}: it has a replica for each server that it finds")
    what = f"engines of {what}"
    content = _mapping(fields["engines"], what, ENGINES_FIELDS)
    urls = content.get("urls", [])
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise SettingsError(f"urls of {what} are a list of addresses")
    try:
        return EngineSource(
            tuple(urls),
            **{name: _text(content, name, what) for name in ENGINES_FIELDS[1:-2]},
            port=str(content["port"]) if "port" in content else None,
            at_most=_whole(content, "at_most", what, 1, MOST_REPLICAS, default=MOST_ENGINES),
        )
    except SettingsError as error:
        raise SettingsError(f"{what}: {error}") from error


def _replica(content: Any, pool_name: str, own: Mapping[str, Any], *, finds: bool) -> ReplicaConfig:
    """Build the configuration; `own` are settings that do not stand in `content`. `finds`: its pool finds
    servers, and the settings are those of the replica of each."""
    takes_bodies = isinstance(content, dict) and content.get("engine") == "openai"
    if takes_bodies:
        content = {"model": TOY_MODEL, **content}
    if not isinstance(content, dict) or not isinstance(content.get("model"), str) or not content["model"]:
        raise SettingsError(
            f"pool {pool_name} has no model: settings needs model, a checkpoint directory or {TOY_MODEL}"
        )
    _refuse_foreign(pool_name, content)
    model = None if content["model"] == TOY_MODEL else content["model"]
    values = {**content, "model": model, **own}
    if finds:
        for setting in ("engine", "engine_url", "engine_rank", "engine_endpoint"):
            if setting in content and not (setting == "engine" and takes_bodies):
                raise SettingsError(f"pool {pool_name} cannot set {setting}: it finds its servers")
        values |= {"engine": "openai" if takes_bodies else "remote", "engine_url": EACH_SERVER}
    try:
        return build(ReplicaConfig, values)
    except SettingsError as error:
        raise SettingsError(f"pool {pool_name}: {error}") from error


def _refuse_foreign(pool_name: str, values: Mapping[Any, Any]) -> None:
    for name, why in NOT_OF_A_POOL.items():
        if name in values:
            raise SettingsError(f"pool {pool_name} cannot set {name}: {why}")
    for name in values:
        if not isinstance(name, str):
            raise SettingsError(f"pool {pool_name} has a setting whose name is not text: {name!r}")


def _autoscaling(content: Any, what: str, role: Role) -> AutoscaleSpec:
    what = f"autoscaling of {what}"
    fields = _mapping(content, what, AUTOSCALING_FIELDS)
    for name in ("min", "max"):
        if name not in fields:
            raise SettingsError(f"{what} needs min and max")
    default = AutoscaleSpec(1, 1, 1.0)
    numbers = {
        name: _number(fields, name, what, default=getattr(default, name))
        for name in ("up_seconds", "down_seconds", "tolerance")
    }
    targets: Mapping[str, float] = {
        name: _number(fields, name, what)
        for name in ("target_in_flight", "target_pending_tokens")
        if name in fields
    }
    bounds = [_whole(fields, name, what, 1, MOST_REPLICAS) for name in ("min", "max")]
    try:
        return AutoscaleSpec(bounds[0], bounds[1], **(targets or ROLE_TARGETS.get(role, {})), **numbers)
    except SettingsError as error:
        raise SettingsError(f"{what}: {error}") from error


def _mapping(content: Any, what: str, known: Sequence[str]) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise SettingsError(f"{what} is not a mapping of names to values")
    for name in content:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
            raise SettingsError(f"{what} has an unknown field {name}{hint}")
    return content


def _number(fields: Mapping[Any, Any], name: Any, what: str, default: float | None = None) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingsError(f"{name} of {what} cannot be {value!r}; it takes a number")
    return float(value)


def _whole(
    fields: Mapping[str, Any], name: str, what: str, least: int, most: int, default: int | None = None
) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise SettingsError(
            f"{name} of {what} cannot be {value!r}; it takes a whole number from {least} to {most}"
        )
    return value


def _text(fields: Mapping[str, Any], name: str, what: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise SettingsError(f"{name} of {what} cannot be {value!r}; it takes text")
    return value


def _choice(fields: Mapping[str, Any], name: str, choices: Sequence[str], what: str) -> str:
    value = fields.get(name, choices[0])
    if value not in choices:
        raise SettingsError(f"{name} of {what} is {' or '.join(choices)}, not {value}")
    return str(value)


def _flag(fields: Mapping[str, Any], name: str, what: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise SettingsError(f"{name} of {what} cannot be {value!r}; it takes true or false")
    return value
