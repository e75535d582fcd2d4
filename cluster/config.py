"""FleetSpec: which replicas should exist, and how patiently they are kept alive.

Owns names and limits. Knows neither Ray nor the machine: whoever builds a spec has looked at both.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from replicas.config import ReplicaConfig
from replicas.protocol.settings import SettingsError
from replicas.protocol.status import ReplicaId

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class BackoffSpec:
    """How long to wait before the next attempt with a replica that keeps dying.

    The first death is repaired at once; each further one that comes before `healthy_seconds` of
    service doubles the wait.
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
        """How long after the latest death to start again; `num_early_deaths` counts that one."""
        assert num_early_deaths >= 0
        if num_early_deaths <= 1:
            return 0.0
        doublings = min(num_early_deaths - 2, 63)
        return min(self.max_seconds, self.initial_seconds * 2.0**doublings)


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """`num_replicas` equal replicas, named `<name>-0`, `<name>-1`, ….

    `replica` is their common configuration; only `replica_id` differs. `num_cpus` and `num_gpus` are
    what one replica asks of Ray's scheduler; `num_threads` is what its numeric libraries may use.
    """

    num_replicas: int
    name: str = "replica"
    replica: ReplicaConfig = field(default_factory=ReplicaConfig)
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    num_threads: int = 1

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SettingsError(f"a pool cannot be named {self.name!r}; use letters, digits, '.', '_', '-'")
        if self.num_replicas < 0:
            raise SettingsError(f"pool {self.name} cannot have {self.num_replicas} replicas")
        if self.num_cpus < 0 or self.num_gpus < 0:
            raise SettingsError(f"pool {self.name} cannot ask for less than no CPU or GPU")
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise SettingsError(f"pool {self.name} asks for {self.num_gpus} GPUs: above one, only whole ones")
        if self.num_threads < 1:
            raise SettingsError(f"pool {self.name} needs at least one thread")

    def replica_ids(self) -> tuple[ReplicaId, ...]:
        return tuple(ReplicaId(f"{self.name}-{index}") for index in range(self.num_replicas))

    def config_of(self, replica_id: ReplicaId) -> ReplicaConfig:
        return replace(self.replica, replica_id=replica_id)

    def bundles(self) -> tuple[dict[str, float], ...]:
        """What the placement group of one replica asks for: one bundle per GPU, or one in all."""
        num_bundles = max(1, int(self.num_gpus))
        cpus, gpus = self.num_cpus / num_bundles, self.num_gpus / num_bundles
        bundle = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount > 0}
        return (bundle,) * num_bundles


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """All replicas that should exist. `log_directory` is for fleets on one machine; none means stderr.

    `log_format` is the controller's; replicas have their own. So are `metrics_host` and `metrics_port`, where
    it serves /metrics: port 0 takes a free one, None is no endpoint.
    """

    pools: tuple[PoolSpec, ...]
    backoff: BackoffSpec = BackoffSpec()
    drain_seconds: float = 60.0
    log_directory: str | None = None
    log_format: str = "text"
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise SettingsError(f"two pools have one name: {', '.join(names)}")
        ids = [replica_id for pool in self.pools for replica_id in pool.replica_ids()]
        if len(set(ids)) != len(ids):
            raise SettingsError(f"the replicas of two pools would share a name: {', '.join(names)}")
        if self.drain_seconds < 0:
            raise SettingsError("drain_seconds cannot be negative")

    def desired(self) -> Iterator[tuple[ReplicaId, PoolSpec]]:
        """Every replica that should exist, with its pool, in order."""
        for pool in self.pools:
            for replica_id in pool.replica_ids():
                yield replica_id, pool

    def pool_of(self, replica_id: ReplicaId) -> PoolSpec | None:
        return dict(self.desired()).get(replica_id)
