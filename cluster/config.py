"""FleetSpec: which replicas should exist, and how they are kept alive.

Owns names and limits. Knows neither Ray nor the machine; its caller has checked those.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from replicas.config import SERVERS, ReplicaConfig, server_address
from replicas.process.settings import SettingsError
from replicas.protocol.status import ReplicaId

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_KUBERNETES_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_OF_A_SERVER = "_at_"
"""Stands between a pool's name and that of a server that it found."""

EACH_SERVER = "http://each-server.invalid"
"""Stands for the address in the settings of a pool that finds its servers."""
_RAY_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory", "bundle")

BUNDLES = ("machine", "gpu")

MOST_ENGINES = 64
"""Servers that a pool takes at most, if it says nothing else."""

MOST_NAME = 40
"""Longest part of a server's address in a replica's name."""

_OF_ITS_REPLICAS = frozenset({"replica", "num_cpus", "num_gpus", "num_threads", "custom_resources"}) | {
    *("bundle", "is_on_node_address", "num_restarts"),
}
"""Fields of a pool that its revision covers."""


@dataclass(frozen=True, slots=True)
class BackoffSpec:
    """Backoff before the next start of a replica that keeps dying.

    The first death is repaired at once; each further one within `healthy_seconds` of service doubles the
    wait.
    """

    initial_seconds: float = 0.5
    max_seconds: float = 30.0
    healthy_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.initial_seconds <= self.max_seconds:
            raise SettingsError("backoff needs 0 < initial_seconds <= max_seconds")
        if self.healthy_seconds < 0:
            raise SettingsError("backoff healthy_seconds cannot be negative")

    def delay_seconds(self, num_early_deaths: int) -> float:
        """Return the seconds to wait after the latest death; `num_early_deaths` includes it."""
        assert num_early_deaths >= 0
        if num_early_deaths <= 1:
            return 0.0
        doublings = min(num_early_deaths - 2, 63)
        return min(self.max_seconds, self.initial_seconds * 2.0**doublings)


@dataclass(frozen=True, slots=True)
class AutoscaleSpec:
    """Bounds and targets for a pool that follows its load.

    Targets are per replica: requests that run or wait, prompt tokens still to compute. The pool grows once
    the load has asked for more during all of `up_seconds`, and shrinks after `down_seconds` of less; each
    change restarts both windows. A load within `tolerance` of the target changes nothing.
    """

    min_replicas: int
    max_replicas: int
    target_in_flight: float | None = None
    target_pending_tokens: float | None = None
    up_seconds: float = 5.0
    down_seconds: float = 120.0
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise SettingsError("autoscaling needs 1 <= min <= max")
        targets = [
            target for target in (self.target_in_flight, self.target_pending_tokens) if target is not None
        ]
        if not targets:
            raise SettingsError("autoscaling needs target_in_flight or target_pending_tokens")
        if not all(0 < target < math.inf for target in targets):
            raise SettingsError("the targets of autoscaling must be above 0")
        if not (0 <= self.up_seconds < math.inf and 0 <= self.down_seconds < math.inf):
            raise SettingsError("up_seconds and down_seconds of autoscaling cannot be negative")
        if not 0 <= self.tolerance < 1:
            raise SettingsError("the tolerance of autoscaling must be at least 0 and below 1")


@dataclass(frozen=True, slots=True)
class EngineSource:
    """A way in which a pool finds servers that run already: exactly one of the fields says it."""

    urls: tuple[str, ...] = ()
    file: str | None = None
    """Path of a file with an address a line."""
    dns: str | None = None
    """Address with a name whose every IP address is a server's."""
    service: str | None = None
    """Kubernetes Service whose ready pods are servers."""
    inference_pool: str | None = None
    """InferencePool whose ready pods are servers, one for each target port."""
    namespace: str | None = None
    """Namespace of Service or InferencePool; None is that of the pod that looks."""
    port: str | None = None
    """Name or number of the Service's port; None if it has one only."""
    at_most: int = MOST_ENGINES

    def __post_init__(self) -> None:
        ways = ("urls", "file", "dns", "service", "inference_pool")
        if len([way for way in ways if getattr(self, way)]) != 1:
            raise SettingsError(f"engines are found by one of {', '.join(ways)}")
        for url in (*self.urls, *([self.dns] if self.dns else [])):
            server_address(url)
        if self.dns and (not self.dns.startswith("http://") or urlsplit(self.dns).path not in ("", "/")):
            raise SettingsError(f"dns is an address such as http://vllm.default.svc:8000, not {self.dns!r}")
        for name in (self.service, self.inference_pool, self.namespace):
            if name is not None and not _KUBERNETES_NAME.fullmatch(name):
                raise SettingsError(f"{name!r} cannot be the name of anything in Kubernetes")
        if self.port and not self.service:
            raise SettingsError("port goes with service")
        if self.namespace and not (self.service or self.inference_pool):
            raise SettingsError("namespace goes with service or inference_pool")


@dataclass(frozen=True, slots=True)
class FoundServer:
    """One data-parallel rank of a server; `rank` None if it has no others."""

    url: str
    rank: int | None = None

    @property
    def name(self) -> str:
        """A part of replica ids: host, port and path, and a digest where others could have the same."""
        parts = urlsplit(self.url)
        whole = parts.netloc + parts.path
        name = re.sub(r"[^A-Za-z0-9.]+", "-", whole).strip("-.")
        is_plain = parts.scheme == "http" and re.sub(r"[:/]", "-", whole).strip("-") == name
        if len(name) > MOST_NAME or not is_plain:
            name = f"{name[:MOST_NAME]}-{hashlib.sha256(self.url.encode()).hexdigest()[:6]}"
        return name if self.rank is None else f"{name}-rank{self.rank}"


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """`num_replicas` equal replicas, named `<name>-<number>`.

    With `engines` it finds servers that run already, and has a replica for each instead.

    `replica` is their configuration; only `replica_id`, and the subfolder of `kv_folder`, differ. `num_cpus`,
    `num_gpus` and `custom_resources` are one replica's request to Ray's scheduler; `num_threads` bounds its
    numeric libraries. `bundle` places its GPUs: all on one machine, seen by one process ("machine"), or
    anywhere ("gpu"). With `surge` 0 a rollout removes an old replica before it starts a new one. With
    `is_on_node_address` replicas listen where Ray reaches their machine. `num_restarts` only enters the
    revision: one more restarts all replicas.
    """

    num_replicas: int
    name: str = "replica"
    replica: ReplicaConfig = field(default_factory=ReplicaConfig)
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    num_threads: int = 1
    custom_resources: Mapping[str, float] = field(default_factory=dict)
    bundle: str = "machine"
    drain_seconds: float | None = None
    surge: int = 1
    autoscaling: AutoscaleSpec | None = None
    is_on_node_address: bool = False
    num_restarts: int = 0
    engines: EngineSource | None = None

    def __post_init__(self) -> None:
        if not all(map(_NAME.fullmatch, self.name.split(_OF_A_SERVER, 1))):
            raise SettingsError(f"a pool cannot be named {self.name!r}; use letters, digits, '.', '_', '-'")
        if self.num_replicas < 0:
            raise SettingsError(f"pool {self.name} cannot have {self.num_replicas} replicas")
        if self.engines is not None and self.replica.engine not in SERVERS:
            raise SettingsError(f"pool {self.name} finds servers, so its engine is remote or openai")
        self._check_resources()
        if self.num_threads < 1:
            raise SettingsError(f"pool {self.name} needs at least one thread")
        if self.surge < 0:
            raise SettingsError(f"pool {self.name} cannot have a surge of {self.surge}")
        if self.drain_seconds is not None and not 0 <= self.drain_seconds < math.inf:
            raise SettingsError(f"drain_seconds of pool {self.name} cannot be negative")
        scale = self.autoscaling
        if scale is not None and not scale.min_replicas <= self.num_replicas <= scale.max_replicas:
            bounds = f"{scale.min_replicas} to {scale.max_replicas}"
            raise SettingsError(
                f"pool {self.name} has {self.num_replicas} replicas, and its autoscaling keeps {bounds}"
            )

    def _check_resources(self) -> None:
        amounts = (self.num_cpus, self.num_gpus, *self.custom_resources.values())
        if not all(math.isfinite(amount) for amount in amounts):
            raise SettingsError(f"pool {self.name} asks for an amount that is not a number")
        if self.num_cpus < 0 or self.num_gpus < 0:
            raise SettingsError(f"pool {self.name} cannot ask for a negative number of CPUs or GPUs")
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise SettingsError(f"pool {self.name} asks for {self.num_gpus} GPUs: above one, only whole ones")
        for name, amount in self.custom_resources.items():
            if name in _RAY_RESOURCES or not name:
                raise SettingsError(f"pool {self.name} cannot have a custom resource named {name!r}")
            if amount <= 0 or (amount > 1 and amount != int(amount)):
                raise SettingsError(
                    f"pool {self.name} asks for {amount:g} of {name}: more than 0, above one only whole ones"
                )
        if self.bundle not in BUNDLES:
            raise SettingsError(f"the bundle of pool {self.name} is machine or gpu, not {self.bundle}")
        if not self.bundles()[0]:
            raise SettingsError(f"a replica of pool {self.name} must ask for some CPU, GPU or other resource")

    @property
    def revision(self) -> str:
        """Identify configurations whose replicas need not be restarted. The number of replicas is not in
        it."""
        chosen = [(name, value) for name, value in _chosen(self) if name in _OF_ITS_REPLICAS]
        return hashlib.sha256(repr(chosen).encode()).hexdigest()[:8]

    def replica_id(self, number: int) -> ReplicaId:
        return ReplicaId(f"{self.name}-{number}")

    def config_of(self, replica_id: ReplicaId) -> ReplicaConfig:
        parent = self.replica.kv_folder
        folder = None if parent is None else str(PurePath(parent) / replica_id)
        return replace(self.replica, replica_id=replica_id, kv_folder=folder)

    def bundles(self) -> tuple[dict[str, float], ...]:
        """Return the bundles of one replica's placement group: one in all, or one per GPU."""
        num_bundles = max(1, int(self.num_gpus)) if self.bundle == "gpu" else 1
        cpus, gpus = self.num_cpus / num_bundles, self.num_gpus / num_bundles
        bundle = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount > 0}
        return ({**bundle, **self.custom_resources}, *(dict(bundle) for _ in range(num_bundles - 1)))


def pool_of_id(replica_id: ReplicaId) -> str:
    """Return the pool's name: the replica id without its number and its server."""
    return base_name(member_of_id(replica_id))


def member_of_id(replica_id: ReplicaId) -> str:
    """Return the replica id without its number: the name of a pool, and of its server if it found that."""
    return replica_id.rpartition("-")[0]


def base_name(member: str) -> str:
    return member.partition(_OF_A_SERVER)[0]


def member_of(pool: PoolSpec, server: FoundServer) -> PoolSpec:
    """Return the pool of one replica for one server that `pool` found."""
    config = replace(pool.replica, engine_url=server.url, engine_rank=server.rank)
    name = f"{pool.name}{_OF_A_SERVER}{server.name}"
    return replace(pool, name=name, num_replicas=1, replica=config, engines=None)


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """All replicas that should exist.

    `log_directory` is for fleets on one machine; None means stderr. `is_growing` says that Ray's autoscaler
    may add machines, so that what does not fit now may fit later. `log_format`, `metrics_host` and
    `metrics_port` are the controller's; port 0 takes a free one, None serves no metrics.
    """

    pools: tuple[PoolSpec, ...]
    backoff: BackoffSpec = BackoffSpec()
    drain_seconds: float = 60.0
    log_directory: str | None = None
    log_format: str = "text"
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    is_growing: bool = False

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SettingsError(f"two pools have the same name: {', '.join(twice)}")
        if not 0 <= self.drain_seconds < math.inf:
            raise SettingsError("drain_seconds cannot be negative")

    @property
    def revision(self) -> str:
        """Identify specs that ask for the same, in any order."""
        pools = tuple(sorted(self.pools, key=lambda pool: pool.name))
        return hashlib.sha256(repr(_chosen(replace(self, pools=pools))).encode()).hexdigest()[:16]

    def pool(self, name: str) -> PoolSpec | None:
        return next((pool for pool in self.pools if pool.name == name), None)

    def has_revision(self, pool: PoolSpec) -> bool:
        """Whether the pool of that name already has this revision."""
        old = self.pool(pool.name)
        return old is not None and old.revision == pool.revision

    @property
    def redis_url(self) -> str | None:
        """Return the Redis of all pools; None without pools."""
        return next((pool.replica.redis_url for pool in self.pools), None)

    @property
    def secret_file(self) -> str | None:
        """Return the path of the cluster secret on every machine; None if calls and leases are unsigned."""
        return next((pool.replica.secret_file for pool in self.pools), None)

    def pool_of(self, replica_id: ReplicaId) -> PoolSpec | None:
        return self.pool(member_of_id(replica_id))

    def with_servers(self, found: Mapping[str, Sequence[FoundServer]]) -> "FleetSpec":
        """Replace each pool that finds servers by pools of one, for each server of its own. One that has not
        looked yet stays, without replicas."""
        pools: list[PoolSpec] = []
        for pool in self.pools:
            if pool.engines is None or pool.name not in found:
                pools.append(pool)
                continue
            members = {member.name: member for member in (member_of(pool, each) for each in found[pool.name])}
            pools += members.values()
        return replace(self, pools=tuple(pools))

    def with_pool(self, pool: PoolSpec) -> "FleetSpec":
        """Replace the pool of the same name."""
        return replace(self, pools=tuple(pool if old.name == pool.name else old for old in self.pools))

    def drain_limit(self, replica_id: ReplicaId) -> float:
        pool = self.pool_of(replica_id)
        return self.drain_seconds if pool is None or pool.drain_seconds is None else pool.drain_seconds


def _chosen(part: Any) -> Any:
    """Drop default values and sort mappings, so that a version with more settings yields the same value."""
    if is_dataclass(part):
        values = ((each.name, getattr(part, each.name), _default(each)) for each in fields(part))
        return sorted((name, _chosen(value)) for name, value, default in values if value != default)
    if isinstance(part, Mapping):
        return sorted((repr(key), _chosen(value)) for key, value in part.items())
    if isinstance(part, list | tuple):
        return [_chosen(each) for each in part]
    return part


def _default(of: Field[Any]) -> Any:
    return of.default if of.default_factory is MISSING else of.default_factory()
