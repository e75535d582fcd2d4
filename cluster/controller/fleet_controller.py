"""FleetController: the detached actor that keeps the fleet as specified: observe, plan, execute.

Owns the carrying out. Decides nothing (`plan.py`, `changes.py` and `autoscale.py` do) and touches Ray
through `actors.py`. After a restart it finds the replicas again by their names, and nothing is started
twice; what should exist it has kept with Ray, if it runs by itself.
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
from ray.exceptions import RayError

from cluster.config import FleetSpec, PoolSpec, pool_of_id
from cluster.controller import actors
from cluster.controller.actors import ReplicaHandle, StartFailure
from cluster.controller.bulletin import Bulletin
from cluster.controller.capacity import Machine
from cluster.controller.changes import FleetState, applied, given_up, rolled, scaled, settled
from cluster.controller.endpoint import MetricsEndpoint
from cluster.controller.kept_state import from_kept, to_kept
from cluster.controller.leases import LeaseBook, LoadHistory
from cluster.controller.looks import repeat
from cluster.controller.members import FleetView, Incarnation, first_end, mark_waiting, pool_views
from cluster.controller.metrics import FleetMetrics
from cluster.controller.model_check import check_models
from cluster.controller.plan import Action, ActionKind, count_early_deaths, plan
from cluster.registry import read_signed_registry
from replicas.process.logs import set_up_logs
from replicas.process.settings import SettingsError
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.status import ReplicaId, ReplicaState

NODES_SECONDS = 15.0
"""Time between looks at the machines that Ray has."""
LEASE_SECONDS = 0.5
"""Time between looks at the leases of replicas."""
LEAVING_SECONDS = 1.0
"""Time between looks at machines that are about to go."""
ROOM_SECONDS = 2.0
"""Time between looks at the replicas that start: whether they wait for room."""
ENDPOINT_SECONDS = 15.0
"""Time until a port that was taken is tried again."""
STOP_SECONDS = 3.0
"""How long a replica may take to say goodbye before it is killed."""

logger = logging.getLogger(__name__)


class FleetController:
    """A Ray actor. `run` is the controller's life: its caller hears when it ends.

    With `runs_itself` no caller needs to call it: it begins with the actor, what is applied is kept with Ray,
    and an actor that Ray has started again goes on with that.
    """

    def __init__(self, spec: FleetSpec, *, runs_itself: bool = False) -> None:
        kept_state = actors.recall() if runs_itself else None
        self._state = FleetState(spec) if kept_state is None else from_kept(kept_state)
        _set_up_logs(self._spec)
        self._runs_itself = runs_itself
        self._members: dict[ReplicaId, Incarnation] = {}
        self._tasks = asyncio.TaskGroup()
        self._stopping = False
        self._wake = asyncio.Event()
        self._bulletin = Bulletin()
        self._changing = asyncio.Lock()
        self._leases = LeaseBook()
        self._loads = LoadHistory()
        self._metrics = FleetMetrics(CollectorRegistry())
        self._endpoint = MetricsEndpoint(self._metrics.registry)
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
        self._metrics.see(self._spec, ())
        await self._complain("metrics", await self._serve_metrics())
        try:
            async with self._tasks, self._looking():
                await self._run()
        finally:
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
        """Replicas may wait for a machine for as long as it takes: that is shown, and never an error."""
        is_starting = any(member.state is ReplicaState.STARTING for member in self._members.values())
        pending = await asyncio.to_thread(actors.waiting_for_room) if is_starting else frozenset()
        for member in mark_waiting(self._members.values(), pending, ROOM_SECONDS):
            await self._note(f"{member.replica_id} waits for room: no machine has enough to spare")
        return None

    async def _clear_leaving(self) -> str | None:
        """Replicas finish what they do on a machine that is about to go, and come back elsewhere."""
        leaving = await asyncio.to_thread(actors.leaving_machines)
        for member in list(self._members.values()):
            machine = None if member.report is None else member.report.machine
            if machine in leaving and member.state is ReplicaState.READY:
                why = f"the machine of {member.replica_id} is about to go"
                await self._execute(Action(ActionKind.DRAIN, member.replica_id, why))
        return None

    async def _complain(self, what: str, complaint: str | None) -> None:
        """What is wrong with the controller itself, shown until it is right again."""
        news = self._bulletin.news(what, complaint)
        if news is not None:
            await self._note(news)

    async def _run(self) -> None:
        for replica_id, actor in (await asyncio.to_thread(actors.find)).items():
            await self._note(f"found {replica_id}, which runs already")
            self._adopt(Incarnation(replica_id, actor=actor), None)
        while not self._stopping:
            self._wake.clear()
            with self._metrics.reconcile_seconds.time():
                wake_in_seconds = await self._reconcile()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wake_in_seconds):
                    await self._wake.wait()

    async def _reconcile(self) -> float | None:
        observed = tuple(member.observed() for member in self._members.values())
        decided = plan(self._spec, observed, time.monotonic())
        for action in decided.actions:
            await self._execute(action)
        for name, why in decided.failed_rollouts:
            if name not in self._state.failures:
                await self._keep(given_up(self._state, name, why))
                await self._note(f"the rollout of pool {name} is given up, the old replicas stay: {why}")
        for view in pool_views(self._state, self._members.values()):
            if view.is_settled and view.name in self._state.previous:
                await self._keep(settled(self._state, view.name))
                await self._note(f"pool {view.name} is rolled over to revision {view.revision}")
        return decided.wake_in_seconds

    async def version(self) -> str:
        return importlib.metadata.version("kvasir")

    async def apply(self, spec: FleetSpec, is_checked: bool = False, may_wait: bool = False) -> str | None:
        """From now on, keep the fleet as `spec` says; or say in one sentence why not. With `is_checked` the
        caller has checked already that its models load; with `may_wait`, replicas wait for room."""
        return await self._change(
            lambda machines: applied(self._state, spec, None if may_wait else machines), is_checked
        )

    async def scale(self, pool_name: str, num_replicas: int) -> str | None:
        """As `apply`, for one pool's size."""
        return await self._change(lambda machines: scaled(self._state, pool_name, num_replicas, machines))

    async def roll_out(self, pool_name: str, values: Mapping[str, str]) -> str | None:
        """As `apply`, for one pool's settings; without any its replicas are made anew."""
        return await self._change(lambda machines: rolled(self._state, pool_name, values, machines))

    async def drain(self, replica_id: ReplicaId) -> str | None:
        """Let one replica finish and leave. The plan then fills its place."""
        member = self._members.get(replica_id)
        if member is None:
            return f"there is no replica {replica_id}; there is {', '.join(sorted(self._members)) or 'none'}"
        if member.state is not ReplicaState.READY:
            return f"{replica_id} cannot drain: it is {member.state.value}"
        await self._execute(Action(ActionKind.DRAIN, replica_id, f"{replica_id} was asked to"))
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
        """Whether what is new of `wanted` can be loaded, asked of the machines: a sentence if not."""
        pools = [pool for pool in wanted.spec.pools if not self._spec.has_revision(pool)]
        found = await asyncio.to_thread(check_models, pools)
        for note in found.notes:
            await self._note(note)
        return found.refusal

    async def _keep(self, state: FleetState) -> None:
        """Before anything is done about it: a controller that starts again must not go back."""
        for pool in state.spec.pools:
            old = self._spec.pool(pool.name)
            if old is None or old.num_replicas != pool.num_replicas:
                self._loads.forget(pool.name)
        if self._runs_itself:
            await asyncio.to_thread(actors.remember, to_kept(state))
        if state.spec.log_format != self._spec.log_format:
            _set_up_logs(state.spec)
        self._state = state
        self._wake.set()

    async def view(self, seen_version: int | None = None) -> FleetView:
        """The fleet, as soon as it is newer than `seen_version`; None takes it as it is."""
        notes = await self._bulletin.newer_than(-1 if seen_version is None else seen_version)
        replicas = tuple(self._members[name].view() for name in sorted(self._members))
        return FleetView(
            *(self._bulletin.version, replicas, notes, self._endpoint.address),
            *(pool_views(self._state, self._members.values()), self._spec.redis_url),
            *(self._state.applied_revision, tuple(self._bulletin.complaints.values())),
        )

    async def stop_fleet(self) -> None:
        """End every replica, politely but soon, and start none again. `run` ends with the last."""
        self._stopping = True
        self._wake.set()
        if self._runs_itself:
            await asyncio.to_thread(actors.forget)
        async with asyncio.TaskGroup() as tasks:
            for member in self._members.values():
                if member.state is not ReplicaState.STOPPED:
                    tasks.create_task(self._end(member))
        await self._bulletin.until(self._has_ended)

    def _has_ended(self) -> bool:
        return all(member.state is ReplicaState.STOPPED for member in self._members.values())

    def _adopt(self, member: Incarnation, pool: PoolSpec | None) -> None:
        self._members[member.replica_id] = member
        self._tasks.create_task(self._live(member, pool))

    async def _execute(self, action: Action) -> None:
        member = self._members.get(action.replica_id)
        match action.kind:
            case ActionKind.START | ActionKind.REPLACE:
                pool = self._spec.pool_of(action.replica_id)
                assert pool is not None, "only replicas of a pool are started"
                deaths = member.num_early_deaths if member else 0
                self._adopt(Incarnation(action.replica_id, deaths, revision=pool.revision), pool)
                self._metrics.starts.labels(pool.name).inc()
                if action.kind is ActionKind.REPLACE:
                    self._metrics.restarts.labels(pool.name).inc()
            case ActionKind.DRAIN:
                assert member is not None
                member.move(ReplicaState.DRAINING)
                self._tasks.create_task(self._drain(member))
            case ActionKind.STOP:
                assert member is not None
                if member.state is ReplicaState.STOPPED:
                    del self._members[action.replica_id]
                elif member.dismissed:
                    return  # it is on its way out
                else:
                    self._tasks.create_task(self._end(member))
        await self._note(f"{action.kind}: {action.details}")

    async def _live(self, member: Incarnation, pool: PoolSpec | None) -> None:
        """From the creation of its actor, unless it has one already, to its end, whatever the end is."""
        actor = member.actor
        is_new = actor is None
        try:
            if actor is None:
                assert pool is not None, "only replicas of a pool are started"
                actor = member.actor = await self._launch(pool, member.replica_id)
            outcome = await actor.start.remote()
            if isinstance(outcome, StartFailure):
                member.refused_to_start, cause = True, outcome.sentence
            else:
                member.report, member.revision = outcome, outcome.revision
                if is_new:
                    assert pool is not None
                    self._metrics.start_seconds.labels(pool.name).observe(time.monotonic() - member.since)
                member.move(ReplicaState.READY)
                self._wake.set()
                await self._note(f"{member.replica_id} is ready at {outcome.address}, epoch {outcome.epoch}")
                cause = await first_end(actor.run_until_dead.remote(), member.lost)
        except (RayError, ValueError) as error:  # ValueError: its name in Ray is still taken
            logger.info("%s: %s", member.replica_id, error, extra={"replica": member.replica_id})
            cause = "its process ended" if isinstance(error, RayError) else str(error)
        await self._bury(member, cause)

    async def _launch(self, pool: PoolSpec, replica_id: ReplicaId) -> ReplicaHandle:
        try:
            return await actors.launch(pool, replica_id, self._spec.log_directory)
        except (RayError, ValueError):
            self._metrics.reconcile_errors.inc()
            raise

    async def _bury(self, member: Incarnation, cause: str) -> None:
        await asyncio.to_thread(actors.remove, member.replica_id, member.actor)
        if member.dismissed or member.state is ReplicaState.DRAINING:
            member.num_early_deaths, member.cause = 0, None
        else:
            served = time.monotonic() - member.since if member.state is ReplicaState.READY else None
            member.num_early_deaths = count_early_deaths(member.num_early_deaths, served, self._spec.backoff)
            member.cause = cause
            self._metrics.failures.labels(pool_of_id(member.replica_id)).inc()
        member.move(ReplicaState.STOPPED)
        self._wake.set()
        await self._note(f"{member.replica_id} has ended" + (f": {member.cause}" if member.cause else ""))

    async def _drain(self, member: Incarnation) -> None:
        assert member.actor is not None
        with contextlib.suppress(RayError):  # its end is _live's to notice
            await member.actor.drain.remote()
        await self._end(member)

    async def _end(self, member: Incarnation) -> None:
        """Make `_live` come to its end: ask, wait a little, kill."""
        member.dismissed = True
        if member.actor is None:
            return
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await member.actor.stop.remote()
        # Its place in Ray is given back in _bury: after that it may be its successor's.
        await asyncio.to_thread(actors.kill, member.actor)

    async def _look_at_leases(self) -> str | None:
        """Follow the registry: a machine that is cut off falls silent there long before Ray gives it up."""
        redis_url = self._spec.redis_url
        if redis_url is None:
            return None
        registry = await asyncio.to_thread(read_signed_registry, redis_url, self._spec.secret_file)
        if registry.complaint is not None:
            self._loads.forget_all()
            return f"Redis does not answer: {registry.complaint}"
        now = time.monotonic()
        ready = {
            member.replica_id: member.report.epoch
            for member in self._members.values()
            if member.state is ReplicaState.READY and member.report is not None
        }
        for replica_id in self._leases.look(registry.records, ready, now):
            if not self._members[replica_id].lost.done():
                self._members[replica_id].lost.set_result("its lease ran out")
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
        self._metrics.see(self._spec, ((each.replica_id, each.state) for each in self._members.values()))

    async def _note(self, text: str) -> None:
        logger.info("%s", text)
        self._see()
        await self._bulletin.note(text)


def _set_up_logs(spec: FleetSpec) -> None:
    file = None if spec.log_directory is None else Path(spec.log_directory) / "controller.log"
    set_up_logs(spec.log_format, file=file, fields={"service": "controller"})
