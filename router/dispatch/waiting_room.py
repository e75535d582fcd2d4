"""WaitingRoom: requests that wait for a replica, in order of arrival.

Owns the waiting requests, the events they wait for, and the bounds. A called request tries by itself, and
continues to wait if it was too early.

One is called at a time: when something has changed that may help, and when the one before has found a place.
So the first replica to return gets the requests one by one and in order, until it is full.
"""

from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from replicas.protocol.status import Adapter
from router.shared.instruments import Instrument, counter, gauge


class Lane(NamedTuple):
    """The event to wait for. In the lane of trials, a replica without another suspect."""

    model: str
    adapter: Adapter | None
    is_trial: bool = False


class Ticket:
    """A place in the room. `call` tells its holder to try again."""

    __slots__ = ("call", "is_called", "lane", "num_bytes", "order", "since")

    def __init__(
        self, lane: Lane, order: int, num_bytes: int, since: float, call: Callable[[], None]
    ) -> None:
        self.lane = lane
        self.order = order
        self.num_bytes = num_bytes
        self.since = since
        self.call = call
        self.is_called = False


class WaitingRoom:
    def __init__(self, *, max_waiting: int, max_bytes: int) -> None:
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self._lanes: dict[str, dict[Lane, list[Ticket]]] = {}
        self.num_waiting = 0
        self.num_bytes = 0
        self.num_refused = 0

    def enter(
        self, lane: Lane, *, order: int, num_bytes: int, now: float, call: Callable[[], None], must: bool
    ) -> Ticket | None:
        """Enter the room; None if it is full. A request that `must` wait, since it was admitted before,
        always finds a place."""
        if not must and (
            self.num_waiting >= self._max_waiting or self.num_bytes + num_bytes > self._max_bytes
        ):
            self.num_refused += 1
            return None
        ticket = Ticket(lane, order, num_bytes, now, call)
        insort(self._lanes.setdefault(lane.model, {}).setdefault(lane, []), ticket, key=_order)
        self.num_waiting += 1
        self.num_bytes += num_bytes
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Leave the room for any reason; the next is called."""
        lanes = self._lanes[ticket.lane.model]
        tickets = lanes[ticket.lane]
        tickets.remove(ticket)
        self.num_waiting -= 1
        self.num_bytes -= ticket.num_bytes
        if tickets:
            _call_first(tickets)
            return
        del lanes[ticket.lane]
        if not lanes:
            del self._lanes[ticket.lane.model]

    def is_before(self, lane: Lane, order: int) -> bool:
        """Whether an earlier request waits for the same."""
        tickets = self._lanes.get(lane.model, {}).get(lane)
        return tickets is not None and tickets[0].order < order

    def went_in_vain(self, ticket: Ticket, *, call_next: bool) -> None:
        """Record that its holder was called and found nothing; its obstacle need not stop the next."""
        ticket.is_called = False
        if call_next:
            tickets = self._lanes[ticket.lane.model][ticket.lane]
            _call_first(tickets[tickets.index(ticket) + 1 :])

    def call(self, model: str) -> None:
        """Something has changed with the model's replicas: the first of each lane may try."""
        for tickets in self._lanes.get(model, {}).values():
            _call_first(tickets)

    @property
    def waiting_by_model(self) -> Mapping[str, tuple[int, int]]:
        """How many wait for each model, and the memory of their prompts."""
        return {
            model: (
                sum(map(len, lanes.values())),
                sum(ticket.num_bytes for lane in lanes.values() for ticket in lane),
            )
            for model, lanes in self._lanes.items()
        }

    def oldest_seconds(self, now: float) -> float:
        since = [ticket.since for lanes in self._lanes.values() for lane in lanes.values() for ticket in lane]
        return now - min(since) if since else 0.0

    def instruments(self, clock: Callable[[], float]) -> Iterator[Instrument]:
        yield gauge("router_waiting", "Generations that wait for a replica", lambda: self.num_waiting)
        yield gauge(
            "router_waiting_bytes",
            "Memory of the prompts of waiting generations",
            lambda: self.num_bytes,
        )
        yield gauge(
            "router_waiting_oldest_seconds",
            "Wait of the generation that has waited longest",
            lambda: self.oldest_seconds(clock()),
        )
        yield counter(
            "router_waiting_refusals_total",
            "Generations refused because too many were waiting",
            lambda: self.num_refused,
        )


def _order(ticket: Ticket) -> int:
    return ticket.order


def _call_first(tickets: list[Ticket]) -> None:
    """The first that has not been called yet: one that was may be busy, and must not hold up the others."""
    for ticket in tickets:
        if not ticket.is_called:
            ticket.is_called = True
            ticket.call()
            return
