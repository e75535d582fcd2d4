"""Pick: the decision for one generation that somebody else sends, as a gateway does.

Owns its reservation and its charge, from its routing decision to its end. It waits, is held and is refused as
a `GenerationRun` is. Nothing is submitted: the sender says what becomes of it.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from replicas.protocol.status import ModelCard, ReplicaId
from router.dispatch.placement import Obstacle, Placement
from router.errors import NoReplicaAvailable
from router.generation import Generation
from router.observation.trace_points import Trace
from router.queue.room import DEFAULT_TOKEN_SECONDS
from router.routing.decision import Decision
from router.routing.table import RoutedRequest

if TYPE_CHECKING:
    from router.dispatch.dispatcher import Dispatcher

SEEN_SECONDS = 1.0
"""Seconds until a replica's load counts a request that its server got from somebody else."""


class Pick:
    """Leaving it returns everything. `admits` says which replicas may be chosen, by their cards."""

    decision: Decision
    decision_seconds: float
    """How long the table took for it."""

    def __init__(
        self,
        dispatcher: "Dispatcher",
        generation: Generation,
        trace: Trace,
        admits: Callable[[ModelCard], bool],
    ) -> None:
        self._dispatcher = dispatcher
        self._generation = generation
        self._admits = admits
        self._called = asyncio.Event()
        self._placement = Placement(dispatcher, generation, trace, self._called.set)
        self._trace = self._attempt = trace
        self._routed: RoutedRequest | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def replica_id(self) -> ReplicaId:
        return self.decision.replica_id

    def __enter__(self) -> "Pick":
        self._dispatcher.num_running += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._routed is not None:
            self._routed.close()
            self._attempt.end()
        self._placement.close()
        self._trace.end()
        self._dispatcher.num_running -= 1

    async def place(self) -> ModelCard:
        """Wait for a decision; returns the chosen replica's card. Raises a RouterError."""
        while True:
            self._called.clear()
            seconds = self._try()
            if seconds is None:
                card = self._dispatcher.table.card(self.replica_id)
                assert card is not None, "a routed replica is in the table"
                return card
            left = self._placement.seconds_left()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds if left is None else min(seconds, left)):
                    await self._called.wait()

    def _try(self) -> float | None:
        """Return None once it is placed, else the seconds until the next try, unless it is called before."""
        placement = self._placement
        seconds = placement.seconds_to_wait()
        if seconds > 0:
            return seconds
        placement.patience.excluded |= self._not_admitted()
        routed = placement.route(
            len(self._generation.token_ids), num_choices=self._generation.num_choices, may_split=False
        )
        if isinstance(routed, RoutedRequest) and not self._may_go(routed.decision.replica_id):
            routed.close()  # it joined while this was held
            routed = Obstacle.ALL_REFUSED
        if isinstance(routed, Obstacle):
            seconds = placement.wait(routed)
            if seconds <= 0:
                raise placement.give_up(is_visible=False)
            return seconds
        self._take(routed)
        return None

    def _not_admitted(self) -> set[ReplicaId]:
        """Raises NoReplicaAvailable if some replicas are ready, and none of these is admitted."""
        table, model, adapter = self._dispatcher.table, self._generation.model, self._generation.adapter
        if not table.has_ready(model, adapter=adapter):
            return set()
        others = {each for each in table.replica_ids(model) if not self._may_go(each)}
        if others and not table.has_ready(model, adapter=adapter, exclude=others):
            cards = map(table.card, table.replica_ids(model))
            if any(card is not None and card.endpoint for card in cards):
                lacks = "is among those that the gateway may ask"
            else:
                lacks = "has an address for gateways; the router's log says why"
            raise NoReplicaAvailable(f"No server of model {model} {lacks}.")
        return others

    def _may_go(self, replica_id: ReplicaId) -> bool:
        card = self._dispatcher.table.card(replica_id)
        return card is not None and self._admits(card)

    def _take(self, routed: RoutedRequest) -> None:
        placement, table = self._placement, self._dispatcher.table
        self._routed, self.decision = routed, routed.decision
        self.decision_seconds = placement.routing_seconds
        self._attempt = self._trace.attempt(routed.decision, is_resumed=False)
        placement.submitted(is_visible=False)
        placement.done()
        load = table.load(self.replica_id)
        per_token = load.prefill_seconds_per_token or DEFAULT_TOKEN_SECONDS
        expected = load.num_pending_tokens * per_token + SEEN_SECONDS
        self._timer = asyncio.get_running_loop().call_later(expected, routed.counted)

    # What becomes of it.

    def first_token(self) -> None:
        """The first piece of its answer has come: the prompt is computed."""
        assert self._routed is not None
        self._routed.counted()
        self._routed.first_token()
        self._attempt.first_token()

    def used(self, num_cached_tokens: int | None, num_output_tokens: int) -> None:
        """The answer has ended; None: it does not say what was cached."""
        charge = self._placement.charge
        if charge is not None:
            charge.begins(self.decision.overlap_tokens if num_cached_tokens is None else num_cached_tokens)
            charge.produces(num_output_tokens)

    def failed(self, reason: str) -> None:
        """The server has not answered it."""
        self._attempt.failed(reason)
