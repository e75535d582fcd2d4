"""FleetController: the detached actor that keeps the fleet as specified: observe, plan, execute.

Owns what is known of each replica between its start and its end. Decides nothing (`plan.py` does) and
touches Ray through `actors.py`. Its memory is a convenience: after a restart it finds the replicas
again by their names, and nothing is started twice.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import ray
from prometheus_client import CollectorRegistry
from ray.exceptions import RayError

from cluster import actors
from cluster.actors import ReplicaHandle, ReplicaReport, StartFailure
from cluster.config import FleetSpec, PoolSpec, pool_of_id
from cluster.metrics import FleetMetrics
from cluster.plan import Action, ActionKind, ObservedReplica, count_early_deaths, plan
from replicas.metrics import metrics_endpoint
from replicas.protocol.logs import set_up_logs
from replicas.protocol.status import ReplicaId, ReplicaState, advance

NUM_NOTES_KEPT = 200
NODES_SECONDS = 15.0
"""Time between looks at the machines that Ray has."""
STOP_SECONDS = 3.0
"""How long a replica may take to say goodbye before it is killed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as shown to people. `report` is there once it has started; `cause` once it has ended."""

    replica_id: ReplicaId
    state: ReplicaState
    report: ReplicaReport | None
    cause: str | None
    num_early_deaths: int
    refused_to_start: bool


@dataclass(frozen=True, slots=True)
class FleetView:
    """The fleet at one moment. `version` grows with every change; `notes` are those since the last look."""

    version: int
    replicas: tuple[ReplicaView, ...]
    notes: tuple[str, ...]
    metrics_address: str | None


@dataclass(slots=True)
class Member:
    """One incarnation of a replica, as the controller knows it. `dismissed`: its end is wanted."""

    replica_id: ReplicaId
    num_early_deaths: int = 0
    actor: ReplicaHandle | None = None
    state: ReplicaState = ReplicaState.STARTING
    since: float = field(default_factory=time.monotonic)
    report: ReplicaReport | None = None
    cause: str | None = None
    dismissed: bool = False
    refused_to_start: bool = False

    def observed(self) -> ObservedReplica:
        return ObservedReplica(self.replica_id, self.state, self.since, self.num_early_deaths, self.cause)

    def view(self) -> ReplicaView:
        return ReplicaView(
            self.replica_id, self.state, self.report, self.cause, self.num_early_deaths, self.refused_to_start
        )

    def move(self, state: ReplicaState) -> None:
        self.state, self.since = advance(self.state, state), time.monotonic()


class FleetController:
    """A Ray actor. `run` is the controller's life: whoever called it hears when it ends."""

    def __init__(self, spec: FleetSpec) -> None:
        file = None if spec.log_directory is None else Path(spec.log_directory) / "controller.log"
        set_up_logs(spec.log_format, file=file, fields={"service": "controller"})
        self._spec = spec
        self._members: dict[ReplicaId, Member] = {}
        self._stopping = False
        self._wake = asyncio.Event()
        self._notes: deque[tuple[int, str]] = deque(maxlen=NUM_NOTES_KEPT)
        self._version = 0
        self._changed = asyncio.Condition()
        self._metrics = FleetMetrics(CollectorRegistry())
        self._metrics_address: str | None = None

    async def run(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await self._serve_metrics(stack)
            await self._run()

    async def _serve_metrics(self, stack: contextlib.AsyncExitStack) -> None:
        self._metrics.see(self._spec, ())
        host, port = self._spec.metrics_host, self._spec.metrics_port
        if port is not None:
            bound = await stack.enter_async_context(metrics_endpoint(self._metrics.registry, host, port))
            self._metrics_address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        counting = asyncio.create_task(self._count_nodes())
        stack.callback(counting.cancel)

    async def _count_nodes(self) -> None:
        while True:
            try:
                nodes = await asyncio.to_thread(ray.nodes)
            except RayError:
                logger.warning("Ray does not say which machines it has", exc_info=True)
            else:
                self._metrics.ray_nodes.set(sum(bool(node["Alive"]) for node in nodes))
            await asyncio.sleep(NODES_SECONDS)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for replica_id, actor in (await asyncio.to_thread(actors.find)).items():
                await self._note(f"found {replica_id}, which runs already")
                self._adopt(Member(replica_id, actor=actor), None, tasks)
            while not self._stopping:
                self._wake.clear()
                with self._metrics.reconcile_seconds.time():
                    observed = tuple(member.observed() for member in self._members.values())
                    decided = plan(self._spec, observed, time.monotonic())
                    for action in decided.actions:
                        await self._execute(action, tasks)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(decided.wake_in_seconds):
                        await self._wake.wait()

    async def spec(self) -> FleetSpec:
        return self._spec

    async def apply(self, spec: FleetSpec) -> None:
        """From now on, keep the fleet as `spec` says."""
        self._spec = spec
        self._wake.set()
        self._see()

    async def view(self, seen_version: int | None = None) -> FleetView:
        """The fleet, as soon as it is newer than `seen_version`; None takes it as it is."""
        seen = -1 if seen_version is None else seen_version
        async with self._changed:
            await self._changed.wait_for(lambda: self._version > seen)
            notes = tuple(note for version, note in self._notes if version > seen)
            replicas = tuple(self._members[name].view() for name in sorted(self._members))
            return FleetView(self._version, replicas, notes, self._metrics_address)

    async def stop_fleet(self) -> None:
        """End every replica, politely but soon, and start none again. `run` ends with the last."""
        self._stopping = True
        self._wake.set()
        async with asyncio.TaskGroup() as tasks:
            for member in self._members.values():
                if member.state is not ReplicaState.STOPPED:
                    tasks.create_task(self._end(member))

    def _adopt(self, member: Member, pool: PoolSpec | None, tasks: asyncio.TaskGroup) -> None:
        self._members[member.replica_id] = member
        tasks.create_task(self._live(member, pool))

    async def _execute(self, action: Action, tasks: asyncio.TaskGroup) -> None:
        member = self._members.get(action.replica_id)
        match action.kind:
            case ActionKind.START | ActionKind.REPLACE:
                fresh = Member(action.replica_id, member.num_early_deaths if member else 0)
                self._adopt(fresh, self._spec.pool_of(action.replica_id), tasks)
                pool = pool_of_id(action.replica_id)
                self._metrics.starts.labels(pool).inc()
                if action.kind is ActionKind.REPLACE:
                    self._metrics.restarts.labels(pool).inc()
            case ActionKind.DRAIN:
                assert member is not None
                member.move(ReplicaState.DRAINING)
                tasks.create_task(self._drain(member))
            case ActionKind.STOP:
                assert member is not None
                if member.state is ReplicaState.STOPPED:
                    del self._members[action.replica_id]
                elif member.dismissed:
                    return  # it is on its way out
                else:
                    tasks.create_task(self._end(member))
        await self._note(f"{action.kind}: {action.details}")

    async def _live(self, member: Member, pool: PoolSpec | None) -> None:
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
                member.report = outcome
                if is_new:
                    assert pool is not None
                    self._metrics.start_seconds.labels(pool.name).observe(time.monotonic() - member.since)
                member.move(ReplicaState.READY)
                await self._note(f"{member.replica_id} is ready at {outcome.address}, epoch {outcome.epoch}")
                cause = await actor.run_until_dead.remote()
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

    async def _bury(self, member: Member, cause: str) -> None:
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

    async def _drain(self, member: Member) -> None:
        assert member.actor is not None
        with contextlib.suppress(RayError):  # its end is _live's to notice
            await member.actor.drain.remote()
        await self._end(member)

    async def _end(self, member: Member) -> None:
        """Make `_live` come to its end: ask, wait a little, kill."""
        member.dismissed = True
        if member.actor is None:
            return
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await member.actor.stop.remote()
        await asyncio.to_thread(actors.remove, member.replica_id, member.actor)

    def _see(self) -> None:
        members = self._members.values()
        self._metrics.see(self._spec, ((member.replica_id, member.state) for member in members))

    async def _note(self, text: str) -> None:
        logger.info("%s", text)
        self._see()
        async with self._changed:
            self._version += 1
            self._notes.append((self._version, text))
            self._changed.notify_all()
