"""FleetController: the detached actor that keeps the fleet as specified: observe, plan, execute.

Owns the execution. `plan.py`, `changes.py` and `autoscale.py` decide; `actors.py` touches Ray. After a
restart it finds replicas by name and starts nothing twice. If it runs by itself, Ray keeps its desired state.
"""

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from cluster.config import FleetSpec, FoundServer, PoolSpec, base_name
from cluster.controller import actors
from cluster.controller.bulletin import Bulletin
from cluster.controller.capacity import Machine
from cluster.controller.changes import FleetState, applied, given_up, rolled, scaled, settled, with_found
from cluster.controller.endpoint import MetricsEndpoint
from cluster.controller.kept_state import from_kept, to_kept
from cluster.controller.leases import LeaseBook, LoadHistory
from cluster.controller.looks import repeat
from cluster.controller.metrics import FleetMetrics
from cluster.controller.model_check import check_models
from cluster.controller.plan import plan
from cluster.controller.replica_keeper import ReplicaKeeper
from cluster.controller.replica_life import Action, ActionKind
from cluster.controller.views import FleetView, pool_views
from cluster.engines.watch import ServerWatch
from cluster.registry import read_signed_registry
from replicas.process.logs import set_up_logs
from replicas.process.settings import SettingsError
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.status import ReplicaId, ReplicaState

NODES_SECONDS = 15.0
"""Seconds between looks at Ray's machines."""
LEASE_SECONDS = 0.5
"""Seconds between looks at the replicas' leases."""
LEAVING_SECONDS = 1.0
"""Seconds between looks at machines that are about to go."""
ROOM_SECONDS = 2.0
"""Seconds between looks at starting replicas, for ones that wait for room."""
ENDPOINT_SECONDS = 15.0
"""Seconds until a taken port is tried again."""

logger = logging.getLogger(__name__)


class FleetController:
    """A Ray actor. `run` is the controller's life, and returns when it ends.

    With `runs_itself` it starts with the actor, applied specs are kept with Ray, and an actor that Ray
    restarts continues from them.
    """

    def __init__(self, spec: FleetSpec, *, runs_itself: bool = False) -> None:
        kept_state = actors.recall() if runs_itself else None
        self._state = FleetState(spec) if kept_state is None else from_kept(kept_state)
        self._wanted = self._state.wanted()
        _set_up_logs(self._spec)
        self._runs_itself = runs_itself
        self._tasks = asyncio.TaskGroup()
        self._stopping = False
        self._wake = asyncio.Event()
        self._bulletin = Bulletin()
        self._changing = asyncio.Lock()
        self._leases = LeaseBook()
        self._loads = LoadHistory()
        self._metrics = FleetMetrics(CollectorRegistry())
        self._endpoint = MetricsEndpoint(self._metrics.registry)
        self._replicas = ReplicaKeeper(
            self._tasks,
            self._metrics,
            spec=lambda: self._wanted,
            changed=self._wake.set,
            note=self._note,
        )
        self._servers = ServerWatch(self._take_servers, self._complain)
        if runs_itself:
            self._life = asyncio.get_running_loop().create_task(self._run_or_die())

    @property
    def _spec(self) -> FleetSpec:
        return self._state.spec

    async def _run_or_die(self) -> None:
        try:
            await self.run()
        except BaseException:  # the actor's outermost frame: Ray starts it again only if its process ends
            logger.critical("the controller has failed", exc_info=True)
            os._exit(1)

    async def run(self) -> None:
        self._metrics.see(self._wanted, ())
        await self._complain("metrics", await self._serve_metrics())
        try:
            async with self._tasks, self._looking():
                self._servers.follow(self._spec.pools, self._state.found)
                await self._run()
        finally:
            await self._servers.close()
            await self._endpoint.close()

    @contextlib.asynccontextmanager
    async def _looking(self) -> AsyncIterator[None]:
        looks = [
            repeat("metrics", self._serve_metrics, ENDPOINT_SECONDS, self._complain),
            repeat("machines", self._count_nodes, NODES_SECONDS, self._complain),
            repeat("room", self._look_for_room, ROOM_SECONDS, self._complain),
        ]
        if self._runs_itself:
            looks.append(repeat("leases", self._look_at_leases, LEASE_SECONDS, self._complain))
            looks.append(repeat("leaving machines", self._clear_leaving, LEAVING_SECONDS, self._complain))
        # Tasks of the group: should one end in spite of all, so does the controller, and Ray starts it again.
        tasks = [self._tasks.create_task(look) for look in looks]
        yield
        for task in tasks:
            task.cancel()

    async def _serve_metrics(self) -> str | None:
        await self._endpoint.serve(self._spec.metrics_host, self._spec.metrics_port)
        return self._endpoint.complaint

    async def _count_nodes(self) -> str | None:
        self._metrics.ray_nodes.set(len(await asyncio.to_thread(actors.machines)))
        return None

    async def _look_for_room(self) -> str | None:
        """Show replicas that wait for a machine. Waiting is never an error."""
        is_starting = any(life.state is ReplicaState.STARTING for life in self._replicas.lives())
        pending = await asyncio.to_thread(actors.waiting_for_room) if is_starting else frozenset()
        for replica_id in self._replicas.look_for_room(pending, ROOM_SECONDS):
            await self._note(f"{replica_id} waits for room: no machine has enough to spare")
        return None

    async def _clear_leaving(self) -> str | None:
        """Drain replicas on machines that are about to go; they come back elsewhere."""
        leaving = await asyncio.to_thread(actors.leaving_machines)
        for life in self._replicas.lives():
            if life.machine in leaving and life.state is ReplicaState.READY:
                why = f"the machine of {life.replica_id} is about to go"
                await self._replicas.execute(Action(ActionKind.DRAIN, life.replica_id, why))
        return None

    async def _complain(self, what: str, complaint: str | None) -> None:
        """Show a problem of the controller itself until it is solved."""
        news = self._bulletin.news(what, complaint)
        if news is not None:
            await self._note(news)

    async def _run(self) -> None:
        for replica_id, actor in (await asyncio.to_thread(actors.find)).items():
            await self._note(f"found {replica_id}, which runs already")
            self._replicas.take_found(replica_id, actor)
        while not self._stopping:
            self._wake.clear()
            with self._metrics.reconcile_seconds.time():
                wake_in_seconds = await self._reconcile()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wake_in_seconds):
                    await self._wake.wait()

    async def _reconcile(self) -> float | None:
        decided = plan(self._wanted, self._replicas.lives(), time.monotonic())
        for action in decided.actions:
            await self._replicas.execute(action)
        for member, why in decided.failed_rollouts:
            name = base_name(member)
            if name not in self._state.failures:
                await self._keep(given_up(self._state, name, why))
                await self._note(f"the rollout of pool {name} is given up, the old replicas stay: {why}")
        for view in pool_views(self._state, self._wanted, self._replicas.lives()):
            if view.is_settled and view.name in self._state.previous:
                await self._keep(settled(self._state, view.name))
                await self._note(f"pool {view.name} is rolled over to revision {view.revision}")
        return decided.wake_in_seconds

    async def version(self) -> str:
        return importlib.metadata.version("kvasir")

    async def apply(self, spec: FleetSpec, is_checked: bool = False, may_wait: bool = False) -> str | None:
        """Keep the fleet as `spec` says from now on, or return one sentence why not. `is_checked`: the caller
        has checked that models load. `may_wait`: replicas may wait for room."""
        return await self._change(
            lambda machines: applied(self._state, spec, None if may_wait else machines), is_checked
        )

    async def scale(self, pool_name: str, num_replicas: int) -> str | None:
        """Apply a pool's size."""
        return await self._change(lambda machines: scaled(self._state, pool_name, num_replicas, machines))

    async def roll_out(self, pool_name: str, values: Mapping[str, str]) -> str | None:
        """Apply a pool's settings; without any, restart its replicas."""
        return await self._change(lambda machines: rolled(self._state, pool_name, values, machines))

    async def drain(self, replica_id: ReplicaId) -> str | None:
        """Let one replica finish and leave. The plan then fills its place."""
        states = {life.replica_id: life.state for life in self._replicas.lives()}
        state = states.get(replica_id)
        if state is None:
            return f"there is no replica {replica_id}; there is {', '.join(sorted(states)) or 'none'}"
        if state is not ReplicaState.READY:
            return f"{replica_id} cannot drain: it is {state.value}"
        await self._replicas.execute(Action(ActionKind.DRAIN, replica_id, f"{replica_id} was asked to"))
        return None

    async def _change(
        self, change: Callable[[Sequence[Machine]], FleetState], is_checked: bool = False
    ) -> str | None:
        try:
            if not is_checked:  # which takes seconds that others need not wait for
                refusal = await self._check_models(change(await asyncio.to_thread(actors.machines)))
                if refusal is not None:
                    return refusal
            async with self._changing:
                await self._keep(change(await asyncio.to_thread(actors.machines)))
        except SettingsError as error:
            return str(error)
        self._see()
        await self._complain("metrics", await self._serve_metrics())
        return None

    async def _check_models(self, wanted: FleetState) -> str | None:
        """Ask the machines whether new models in `wanted` load; returns a sentence if not."""
        pools = [pool for pool in wanted.spec.pools if not self._spec.has_revision(pool)]
        found = await asyncio.to_thread(check_models, pools)
        for note in found.notes:
            await self._note(note)
        return found.refusal

    async def _keep(self, state: FleetState) -> None:
        """Store the state before acting on it, so that a restarted controller does not go back."""
        for pool in state.spec.pools:
            old = self._spec.pool(pool.name)
            if old is None or old.num_replicas != pool.num_replicas:
                self._loads.forget(pool.name)
        if self._runs_itself:
            await asyncio.to_thread(actors.remember, to_kept(state))
        if state.spec.log_format != self._spec.log_format:
            _set_up_logs(state.spec)
        self._state, self._wanted = state, state.wanted()
        if not self._stopping:
            self._servers.follow(state.spec.pools, state.found)
        self._wake.set()

    async def _take_servers(self, pool_name: str, servers: Sequence[FoundServer]) -> None:
        async with self._changing:
            await self._keep(with_found(self._state, pool_name, servers))
        there = ", ".join(server.name for server in servers) or "none"
        await self._note(f"servers of pool {pool_name}: {there}")

    async def view(self, seen_version: int | None = None) -> FleetView:
        """Return the fleet once it is newer than `seen_version`; at once for None."""
        notes = await self._bulletin.newer_than(-1 if seen_version is None else seen_version)
        return FleetView(
            version=self._bulletin.version,
            replicas=self._replicas.views(),
            notes=notes,
            metrics_address=self._endpoint.address,
            pools=pool_views(self._state, self._wanted, self._replicas.lives()),
            redis_url=self._spec.redis_url,
            applied_revision=self._state.applied_revision,
            complaints=tuple(self._bulletin.complaints.values()),
        )

    async def stop_fleet(self) -> None:
        """End every replica soon but orderly, and start none. `run` ends with the last."""
        self._stopping = True
        self._wake.set()
        await self._servers.close()
        if self._runs_itself:
            await asyncio.to_thread(actors.forget)
        self._replicas.end_all()
        await self._bulletin.until(self._replicas.have_ended)

    async def _look_at_leases(self) -> str | None:
        """Watch the registry: there a machine that is cut off falls silent long before Ray notices."""
        redis_url = self._spec.redis_url
        if redis_url is None:
            return None
        registry = await asyncio.to_thread(read_signed_registry, redis_url, self._spec.secret_file)
        if registry.complaint is not None:
            self._loads.forget_all()
            return f"Redis does not answer: {registry.complaint}"
        now = time.monotonic()
        for replica_id in self._leases.look(registry.records, self._replicas.ready(), now):
            self._replicas.give_up(replica_id, "its lease ran out")
        for pool in self._spec.pools:
            if pool.autoscaling is not None:
                await self._follow_load(pool, registry.records, now)
        return None

    async def _follow_load(
        self, pool: PoolSpec, records: Mapping[ReplicaId, ReplicaRecord], now: float
    ) -> None:
        wanted, why = self._loads.look(pool, records.values(), now)
        if wanted != pool.num_replicas:
            refusal = await self.scale(pool.name, wanted)
            self._loads.forget(pool.name)
            await self._note(why + (f", but {refusal}" if refusal else ""))

    def _see(self) -> None:
        self._metrics.see(self._wanted, ((life.replica_id, life.state) for life in self._replicas.lives()))

    async def _note(self, text: str) -> None:
        logger.info("%s", text)
        self._see()
        await self._bulletin.note(text)


def _set_up_logs(spec: FleetSpec) -> None:
    file = None if spec.log_directory is None else Path(spec.log_directory) / "controller.log"
    set_up_logs(spec.log_format, file=file, fields={"service": "controller"})
