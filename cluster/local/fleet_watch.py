"""FleetWatch: starts the fleet controller for `kvasir up`, watches it, and restarts it.

Owns the handle to the controller.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.config import BackoffSpec, FleetSpec
from cluster.controller.actors import find_or_create_controller
from cluster.controller.fleet_controller import FleetController
from cluster.controller.views import FleetView, ReplicaView
from cluster.errors import StartFailed
from replicas.protocol.status import ReplicaState

MOST_EARLY_DEATHS = 3
"""Deaths of a replica before it is first ready after which `kvasir up` gives up."""

CALL_SECONDS = 5.0
"""Seconds that a call to Ray may delay the end of the cluster."""


class FleetWatch:
    def __init__(self, spec: FleetSpec, on_view: Callable[[FleetView], None]) -> None:
        self._spec = spec
        self._on_view = on_view
        self._num_ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._controller: Any = None

    async def keep(self, say: Callable[[str], None]) -> None:
        """Keep a controller alive and report every change of the fleet, until cancelled.

        Raises StartFailed if the fleet was never ready and cannot become so.
        """
        backoff = BackoffSpec()
        num_deaths = 0
        while True:
            self._controller = await _call_ray(_find_or_create, self._spec)
            cause = await self._follow()
            # One whose `run` has failed still lives, and holds the name.
            await _call_ray(ray.kill, self._controller)
            num_deaths += 1
            say(f"the fleet controller ended ({cause}); starting it again")
            await asyncio.sleep(backoff.delay_seconds(num_deaths))

    async def wait_ready(self) -> int:
        """Wait until every replica of the spec has been ready at once; of servers that were found, every
        one that can be. Return their number."""
        return await asyncio.shield(self._num_ready)

    async def stop(self, seconds: float) -> None:
        """End all replicas in order, within `seconds`."""
        if self._controller is None:
            return
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(seconds):
                await self._controller.stop_fleet.remote()

    async def _follow(self) -> str:
        run = asyncio.ensure_future(_result(self._controller.run.remote()))
        views = asyncio.ensure_future(self._read_views())
        try:
            await asyncio.wait((run, views), return_when=asyncio.FIRST_COMPLETED)
            for task in (run, views):
                if task.done():
                    await task
            return "it returned"
        except RayError as error:
            return type(error).__name__
        finally:
            run.cancel()
            views.cancel()
            await asyncio.gather(run, views, return_exceptions=True)

    async def _read_views(self) -> None:
        version: int | None = None
        while True:
            view: FleetView = await self._controller.view.remote(version)
            version = view.version
            self._on_view(view)
            if not self._num_ready.done():
                self._judge(view)

    def _judge(self, view: FleetView) -> None:
        num_ready = sum(replica.state is ReplicaState.READY for replica in view.replicas)
        num_failed = 0
        if any(pool.engines is not None for pool in self._spec.pools):
            # A server that cannot be joined is told and tried again; it holds up no others.
            num_failed = sum(
                replica.num_early_deaths > 0 and replica.state is not ReplicaState.READY
                for replica in view.replicas
            )
        if num_failed in (0, len(view.replicas)):
            self._refuse_hopeless(view)
        if num_ready and num_ready + num_failed >= sum(pool.num_replicas for pool in view.pools):
            self._num_ready.set_result(num_ready)

    def _refuse_hopeless(self, view: FleetView) -> None:
        """Raises StartFailed."""
        for replica in view.replicas:
            if replica.refused_to_start and replica.cause:
                raise StartFailed(replica.cause)
            if replica.num_early_deaths >= MOST_EARLY_DEATHS:
                raise StartFailed(_deaths(replica, self._spec))


def _deaths(replica: ReplicaView, spec: FleetSpec) -> str:
    log = f"; see {spec.log_directory}/{replica.replica_id}.log" if spec.log_directory else ""
    times = replica.num_early_deaths
    return f"{replica.replica_id} died {times} times before it was ready ({replica.cause}){log}"


async def _result(reference: Awaitable[None]) -> None:
    await reference


async def _call_ray(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call in a thread. A cancellation waits for the call: next comes Ray's shutdown, and a thread still in
    Ray would end this process or hang the shutdown."""
    call = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait((call,), timeout=CALL_SECONDS)
        raise


def _find_or_create(spec: FleetSpec) -> Any:
    return find_or_create_controller(FleetController, spec, runs_itself=False)
