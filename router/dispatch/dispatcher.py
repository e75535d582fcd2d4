"""Dispatcher: makes runs, and reports their outcomes.

Knows no HTTP, no text, no gRPC, and not how a replica is chosen.
"""

import random
import time
from collections.abc import Callable, Iterator

from replicas.protocol.status import ReplicaId
from router.dispatch.dispatch_state import DispatchState
from router.dispatch.generation_run import GenerationRun
from router.dispatch.retries import RetryPolicy
from router.dispatch.waiting_room import WaitingRoom
from router.fleet.fleet_health import NOTHING_COMING, FleetHealth
from router.fleet.replica_client import ReplicaClient
from router.generation import Generation
from router.observation.trace_points import NO_TRACE, Trace
from router.queue.held import QueueRules
from router.queue.holding import Holding
from router.routing.decision import RoutingRequest
from router.routing.table import Preview, RoutingTable
from router.shared.instruments import Instrument

DEFAULT_RETRY = RetryPolicy()
MAX_WAITING = 2048
MAX_WAITING_BYTES = 256 << 20


class Dispatcher:
    """Makes runs. `clients` returns the open client of a replica, or None."""

    def __init__(
        self,
        table: RoutingTable,
        clients: Callable[[ReplicaId], ReplicaClient | None],
        *,
        rng: random.Random,
        retry: RetryPolicy = DEFAULT_RETRY,
        room: WaitingRoom | None = None,
        outlook: Callable[[str], FleetHealth] = lambda _: NOTHING_COMING,
        clock: Callable[[], float] = time.monotonic,
        holding: Holding | None = None,
    ) -> None:
        self.table = table
        self.state = DispatchState(
            table,
            clients,
            rng=rng,
            clock=clock,
            retry=retry,
            room=room or WaitingRoom(max_waiting=MAX_WAITING, max_bytes=MAX_WAITING_BYTES),
            outlook=outlook,
            holding=holding or Holding(table, QueueRules()),
        )

    def run(self, generation: Generation, trace: Trace = NO_TRACE) -> GenerationRun:
        """Return an async context manager; leaving it stops what still runs and returns everything."""
        return GenerationRun(self.state, generation, trace)

    def preview(self, generation: Generation) -> Preview:
        """Return where it would go now, without sending it. Raises UnknownModel or NoReplicaAvailable."""
        request = RoutingRequest(
            generation.bucket,
            len(generation.token_ids),
            self.table.block_size(generation.model),
            media=generation.submit.media,
        )
        return self.table.preview(
            generation.model, request, generation.block_hashes, adapter=generation.adapter
        )

    def retry_after_seconds(self, model: str) -> float:
        """Return the seconds until a refused client should retry."""
        return self.state.retry_after_seconds(model)

    def instruments(self) -> Iterator[Instrument]:
        return self.state.instruments()
