"""ReplicaActor: one replica as a Ray actor; and how such an actor is placed, found again and removed.

Owns names in Ray, placement groups and the runtime environment of replicas. Decides nothing: what
should run is the controller's business, and what a replica does is `replicas.host`'s.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ray
from ray._private.state import state as ray_state
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import FleetSpec, PoolSpec
from replicas.config import ReplicaConfig
from replicas.process.logs import set_up_logs
from replicas.protocol.status import Epoch, ReplicaId
from replicas.vllm_engine.environment import VLLM_ENVIRONMENT

NAMESPACE = "kvasir"
CONTROLLER_NAME = "fleet-controller"
_REPLICA_PREFIX = "replica:"
_STATE_KEY = b"fleet-state"
_HEAD_RESOURCE = "node:__internal_head__"
"""Resource that only Ray's head has; a controller there survives the end of other machines."""

ReplicaHandle: TypeAlias = Any
"""Ray's handle to a ReplicaActor. Its methods exist at run time only, so there is no type to check."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A started replica's report."""

    pid: int
    address: str
    epoch: Epoch
    metrics_address: str | None
    revision: str
    machine: str
    """Ray's id of the machine."""


@dataclass(frozen=True, slots=True)
class StartFailure:
    """A replica's own reason for not starting. Another try may help, or may not."""

    sentence: str


class ReplicaActor:
    """Hosts one ReplicaHost. Plain values in and out, so that the caller needs none of its modules."""

    def __init__(
        self, config: ReplicaConfig, revision: str, *, is_on_node_address: bool, log_directory: str | None
    ) -> None:
        # Here, since the controller and `kvasir up` import this file too, and need none of all that.
        import replicas.process.lean_redis  # noqa: F401
        from replicas.host import ReplicaHost
        from replicas.process.standstill import STANDARD_ERROR, end_on_standstill

        file = None if log_directory is None else Path(log_directory) / f"{config.replica_id}.log"
        fields = {"service": "replica", "replica": config.replica_id}
        set_up_logs(config.log_format, config.log_level, file=file, fields=fields)
        if is_on_node_address:
            config = dataclasses.replace(config, host=_machine_address())
        self._host = ReplicaHost(config)
        self._until_the_end = contextlib.AsyncExitStack()
        self._standstill = end_on_standstill(
            config.standstill_seconds,
            STANDARD_ERROR if file is None else os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600),
        )
        self._revision = revision  # the controller's word for it, whatever version this machine has
        self._outcome: ReplicaReport | StartFailure | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> ReplicaReport | StartFailure:
        """Serve and report the address. A second call, by a restarted controller, only reports."""
        async with self._starting:
            if self._outcome is None:
                self._outcome = await self._start()
            return self._outcome

    async def _start(self) -> ReplicaReport | StartFailure:
        await self._until_the_end.enter_async_context(self._standstill)
        try:
            await self._host.start()
        except Exception as error:
            logger.exception("the replica did not start")
            return StartFailure(str(error) or repr(error))
        host = self._host
        return ReplicaReport(
            pid=os.getpid(),
            address=host.address,
            epoch=host.epoch,
            metrics_address=host.metrics_address,
            revision=self._revision,
            machine=ray.get_runtime_context().get_node_id(),
        )

    async def run_until_dead(self) -> str:
        """Wait until the replica dies and return the cause; the controller's sentinel."""
        try:
            await self._host.wait_dead()
        except Exception as error:
            logger.exception("the engine died")
            return str(error) or repr(error)
        return "its engine ended"

    async def drain(self) -> None:
        """Stop admitting; return when everything in flight has finished."""
        await self._host.drain()

    async def stop(self) -> None:
        await self._host.stop()


async def launch(pool: PoolSpec, replica_id: ReplicaId, log_directory: str | None) -> ReplicaHandle:
    """Create a replica's actor. It starts when Ray finds room, which may be never."""
    name = _REPLICA_PREFIX + replica_id
    await asyncio.to_thread(_remove_group, name)
    group = await asyncio.to_thread(_create_group, pool, name)
    environment = {
        **(VLLM_ENVIRONMENT if pool.replica.engine == "vllm" else {}),
        "OMP_NUM_THREADS": str(pool.num_threads),
        # The actor both forks and serves gRPC; nothing forked ever calls gRPC.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
    config = dataclasses.replace(
        pool.config_of(replica_id), num_threads=pool.replica.num_threads or pool.num_threads
    )
    resources = dict(pool.bundles()[0])
    actor_class: Any = ray.remote(ReplicaActor)
    options = actor_class.options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=0,  # with restarts of Ray's own a death is seen after 1.5 s instead of 10 ms
        max_concurrency=1000,
        num_cpus=resources.pop("CPU", 0),
        num_gpus=resources.pop("GPU", 0),
        resources=resources,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        runtime_env={"env_vars": environment},
    )
    return await asyncio.to_thread(
        options.remote,
        config,
        pool.revision,
        is_on_node_address=pool.is_on_node_address,
        log_directory=log_directory,
    )


def find() -> dict[ReplicaId, ReplicaHandle]:
    """Find the live replica actors in this Ray cluster, also those of an earlier controller."""
    found = {}
    for name in ray.util.list_named_actors():
        if name.startswith(_REPLICA_PREFIX):
            try:
                found[ReplicaId(name.removeprefix(_REPLICA_PREFIX))] = ray.get_actor(name, NAMESPACE)
            except ValueError:
                logger.info("%s ended while it was looked up", name)
    return found


def remove(replica_id: ReplicaId, actor: ReplicaHandle | None) -> None:
    """End the actor if it lives, and free its placement group."""
    if actor is not None:
        kill(actor)
    _remove_group(_REPLICA_PREFIX + replica_id)


def kill(actor: ReplicaHandle) -> None:
    """End the actor, if it lives."""
    ray.kill(actor, no_restart=True)


def waiting_for_room() -> frozenset[ReplicaId]:
    """Return the replicas for which Ray has no room, or has lost it."""
    return frozenset(
        ReplicaId(entry["name"].removeprefix(_REPLICA_PREFIX))
        for entry in placement_group_table().values()
        if entry["name"].startswith(_REPLICA_PREFIX) and entry["state"] in ("PENDING", "RESCHEDULING")
    )


def nodes() -> list[dict[str, Any]]:
    """Return the live machines as Ray describes them."""
    described: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in described if node["Alive"]]


def leaving_machines() -> frozenset[str]:
    """Return Ray's ids of machines that will go once their work has ended. Ray marks a machine so at SIGTERM,
    as from Kubernetes, and places nothing on it."""
    return frozenset(ray_state.get_draining_nodes())


def machines() -> list[dict[str, float]]:
    """Return the total resources of each live machine."""
    return [dict(node["Resources"]) for node in nodes()]


def find_or_create_controller(controller_class: type, spec: FleetSpec, *, runs_itself: bool) -> Any:
    """Return the handle of this Ray cluster's one controller; `spec` is for a new one."""
    controller: Any = ray.remote(controller_class)
    own_life = (
        {"max_restarts": -1, "resources": {_HEAD_RESOURCE: 0.001}} if runs_itself else {"max_restarts": 0}
    )
    return controller.options(
        name=CONTROLLER_NAME,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_concurrency=1000,
        num_cpus=0,
        **own_life,
    ).remote(spec, runs_itself=runs_itself)


def remember(state: bytes) -> None:
    """Store the state with Ray's control service, for a restarted controller."""
    _internal_kv_put(_STATE_KEY, state, overwrite=True, namespace=NAMESPACE.encode())


def recall() -> bytes | None:
    value: bytes | None = _internal_kv_get(_STATE_KEY, namespace=NAMESPACE.encode())
    return value


def forget() -> None:
    _internal_kv_del(_STATE_KEY, namespace=NAMESPACE.encode())


def _machine_address() -> str:
    """Return the address at which the Ray cluster reaches this machine."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def _create_group(pool: PoolSpec, name: str) -> Any:
    return placement_group(list(pool.bundles()), strategy="PACK", name=name, lifetime="detached")


def _remove_group(name: str) -> None:
    for entry in placement_group_table().values():
        if entry["name"] == name and entry["state"] != "REMOVED":
            remove_placement_group(ray.util.get_placement_group(name))
