"""ReplicaKeeper: a fleet's replicas as actors of Ray, each with its life so far.

Owns the incarnations and the tasks that execute their orders. The plan says what is wanted, `replica_life.py`
what follows; the outcome of an order is the next event.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from ray.exceptions import RayError

from cluster.config import FleetSpec, base_name, pool_of_id
from cluster.controller import actors
from cluster.controller.actors import ReplicaHandle, StartFailure
from cluster.controller.incarnation import Incarnation, first_end
from cluster.controller.metrics import FleetMetrics
from cluster.controller.replica_life import (
    Action,
    ActionKind,
    Drained,
    EndAsked,
    Event,
    Launched,
    Order,
    ReplicaEnded,
    ReplicaLife,
    ReplicaStarted,
    after_action,
    found,
)
from cluster.controller.views import ReplicaView
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState

STOP_SECONDS = 3.0
"""Seconds that a replica may take to stop before it is killed, besides writing its disk."""

logger = logging.getLogger(__name__)


class ReplicaKeeper:
    """`spec` returns the current spec. `changed` is called when the plan may differ, `note` with news for
    people. Tasks belong to `tasks`; a failure there ends the controller."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        metrics: FleetMetrics,
        *,
        spec: Callable[[], FleetSpec],
        changed: Callable[[], None],
        note: Callable[[str], Awaitable[None]],
    ) -> None:
        self._tasks = tasks
        self._metrics = metrics
        self._spec = spec
        self._changed = changed
        self._note = note
        self._incarnations: dict[ReplicaId, Incarnation] = {}

    def lives(self) -> tuple[ReplicaLife, ...]:
        return tuple(one.life for one in self._incarnations.values())

    def views(self) -> tuple[ReplicaView, ...]:
        return tuple(self._incarnations[name].view() for name in sorted(self._incarnations))

    def ready(self) -> Mapping[ReplicaId, Epoch]:
        return {
            one.replica_id: one.report.epoch
            for one in self._incarnations.values()
            if one.life.state is ReplicaState.READY and one.report is not None
        }

    def have_ended(self) -> bool:
        return all(life.state is ReplicaState.STOPPED for life in self.lives())

    def take_found(self, replica_id: ReplicaId, actor: ReplicaHandle) -> None:
        """Adopt a replica that an earlier controller launched."""
        life, orders = found(replica_id, time.monotonic())
        self._adopt(Incarnation(life, actor=actor), orders)

    def give_up(self, replica_id: ReplicaId, cause: str) -> None:
        """Treat the replica as ended before Ray says so."""
        lost = self._incarnations[replica_id].lost
        if not lost.done():
            lost.set_result(cause)

    def end_all(self) -> None:
        for one in self._incarnations.values():
            self._hear(one, EndAsked())

    def look_for_room(self, pending: Collection[ReplicaId], patience_seconds: float) -> list[ReplicaId]:
        """Return the replicas of `pending` that have begun to wait for room."""
        begun = []
        for one in self._incarnations.values():
            was_waiting = one.life.is_waiting_for_room
            one.life = one.life.looked_for_room(one.replica_id in pending, time.monotonic(), patience_seconds)
            if one.life.is_waiting_for_room and not was_waiting:
                begun.append(one.replica_id)
        return begun

    async def execute(self, action: Action) -> None:
        replica_id, one = action.replica_id, self._incarnations.get(action.replica_id)
        pool, before = self._spec().pool_of(replica_id), None if one is None else one.life
        revision = None if pool is None else pool.revision
        life, orders = after_action(action, before, revision, time.monotonic(), self._spec().backoff)
        if life == before:
            return  # it is on its way out
        if life is None:
            del self._incarnations[replica_id]
        elif one is not None and action.kind in (ActionKind.DRAIN, ActionKind.STOP):
            one.life = life
            self._obey(one, orders)
        else:
            assert pool is not None, "only replicas of a pool are started"
            self._adopt(Incarnation(life, pool), orders)
            self._metrics.starts.labels(base_name(pool.name)).inc()
            if action.kind is ActionKind.REPLACE:
                self._metrics.restarts.labels(base_name(pool.name)).inc()
        await self._note(f"{action.kind}: {action.details}")

    def _adopt(self, one: Incarnation, orders: Iterable[Order]) -> None:
        self._incarnations[one.replica_id] = one
        self._obey(one, orders)

    def _hear(self, one: Incarnation, event: Event) -> None:
        one.life, orders = one.life.after(event, time.monotonic(), self._spec().backoff)
        self._obey(one, orders)

    def _obey(self, one: Incarnation, orders: Iterable[Order]) -> None:
        carry_out = {
            Order.LAUNCH: self._launch,
            Order.START: self._start,
            Order.WATCH: self._watch,
            Order.DRAIN: self._drain,
            Order.END: self._end,
        }
        for order in orders:
            self._tasks.create_task(carry_out[order](one))

    async def _launch(self, one: Incarnation) -> None:
        assert one.pool is not None, "only replicas of a pool are launched"
        try:
            one.actor = await actors.launch(one.pool, one.replica_id, self._spec().log_directory)
        except (RayError, ValueError) as error:
            self._metrics.reconcile_errors.inc()
            await self._bury(one, _end_by(one, error))
        else:
            self._hear(one, Launched())

    async def _start(self, one: Incarnation) -> None:
        try:
            outcome = await one.actor.start.remote()
        except (RayError, ValueError) as error:
            await self._bury(one, _end_by(one, error))
            return
        if isinstance(outcome, StartFailure):
            await self._bury(one, ReplicaEnded(outcome.sentence, is_refusal=True))
            return
        asked_at, one.report = one.life.since, outcome
        self._hear(one, ReplicaStarted(outcome.revision, outcome.machine))
        if one.life.state is ReplicaState.READY:
            if one.pool is not None:
                self._metrics.start_seconds.labels(base_name(one.pool.name)).observe(
                    one.life.since - asked_at
                )
            self._changed()
            await self._note(f"{one.replica_id} is ready at {outcome.address}, epoch {outcome.epoch}")

    async def _watch(self, one: Incarnation) -> None:
        try:
            end = ReplicaEnded(await first_end(one.actor.run_until_dead.remote(), one.lost))
        except (RayError, ValueError) as error:
            end = _end_by(one, error)
        await self._bury(one, end)

    async def _bury(self, one: Incarnation, end: ReplicaEnded) -> None:
        await asyncio.to_thread(actors.remove, one.replica_id, one.actor)
        if not one.life.is_expected_to_end:
            self._metrics.failures.labels(pool_of_id(one.replica_id)).inc()
        self._hear(one, end)
        self._changed()
        await self._note(f"{one.replica_id} has ended" + (f": {one.life.cause}" if one.life.cause else ""))

    async def _drain(self, one: Incarnation) -> None:
        with contextlib.suppress(RayError):  # its end is _watch's to notice
            await one.actor.drain.remote()
        self._hear(one, Drained())

    async def _end(self, one: Incarnation) -> None:
        pool = self._spec().pool_of(one.replica_id) or one.pool
        spill_seconds = 0.0 if pool is None else pool.replica.seconds_to_spill
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(STOP_SECONDS + spill_seconds):
                await one.actor.stop.remote()
        # Its place in Ray is given back in _bury: after that it may be its successor's.
        await asyncio.to_thread(actors.kill, one.actor)


def _end_by(one: Incarnation, error: Exception) -> ReplicaEnded:
    """Convert a failed launch; ValueError means that the name is still taken in Ray."""
    logger.info("%s: %s", one.replica_id, error, extra={"replica": one.replica_id})
    return ReplicaEnded("its process ended" if isinstance(error, RayError) else str(error))
