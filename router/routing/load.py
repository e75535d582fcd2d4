"""LoadBook: how busy each replica is, as far as this router can tell.

Owns the reservations of this router's requests and the latest snapshot of every replica. Knows
neither time nor prompts, and decides nothing.

A snapshot counts everything that the replica has admitted, from every router. A request of ours is
*on the way* until a snapshot can have counted it, and is added on top for so long:

* until its first token, which proves it admitted; or
* until `SNAPSHOTS_TO_ACKNOWLEDGE` snapshots have come since it was reserved. The first may have left
  the replica before the request got there; the one after that ended a step which began later; but
* a replica that claims fewer requests than we have there has not counted all of them yet, however
  many snapshots came: the newest ones that it cannot have counted stay on the way.

So a request is counted twice for one engine step at most, and never not at all by the router that
sent it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import TracebackType

from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import ReplicaId

SNAPSHOTS_TO_ACKNOWLEDGE = 2

LOOKS_OF_SILENCE = 3
"""A look at the registry finds what a replica said up to a second ago, and looks may be more frequent
than heartbeats: so many must have seen no frame in between before one is believed over the last frame."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """`num_requests` run or wait; `num_pending_tokens` of prompts are still to be computed.

    `num_context_tokens` are held by its requests. Rates are None until the replica has measured them.
    """

    num_requests: int = 0
    num_pending_tokens: int = 0
    num_context_tokens: int = 0
    prefill_seconds_per_token: float | None = None
    decode_step_seconds: float | None = None


class Reservation:
    """One request's share of a replica's load. Leaving it gives everything back, once.

    `first_token()` says that the prompt has been computed: the prefill part is over.
    """

    __slots__ = ("_book", "_released", "num_tokens", "num_uncached_tokens", "prefilling")

    def __init__(self, book: "_ReplicaBook", num_uncached_tokens: int, num_tokens: int) -> None:
        self._book = book
        self._released = False
        self.num_uncached_tokens = num_uncached_tokens
        self.num_tokens = num_tokens
        self.prefilling = True

    def first_token(self) -> None:
        if not self._released:
            self._book.first_token(self)

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._book.remove(self)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(slots=True)
class _Totals:
    num_requests: int = 0
    num_pending_tokens: int = 0
    num_context_tokens: int = 0

    def add(self, reservation: Reservation) -> None:
        self.num_requests += 1
        self.num_pending_tokens += reservation.num_uncached_tokens
        self.num_context_tokens += reservation.num_tokens

    def subtract(self, reservation: Reservation) -> None:
        self.num_requests -= 1
        self.num_pending_tokens -= reservation.num_uncached_tokens
        self.num_context_tokens -= reservation.num_tokens


@dataclass(slots=True)
class _ReplicaBook:
    snapshot: LoadSnapshot = field(default_factory=LoadSnapshot)
    num_snapshots: int = 0
    num_silent_looks: int = LOOKS_OF_SILENCE
    """Looks at the registry since the last frame; at the start there was none to wait for."""
    reservations: dict[Reservation, None] = field(default_factory=dict)
    """All of this router's, oldest first."""
    on_the_way: dict[Reservation, int] = field(default_factory=dict)
    """Those that no snapshot has counted, oldest first, with the number of snapshots before them."""
    totals: _Totals = field(default_factory=_Totals)
    """Of those on the way."""
    cached_view: ReplicaLoad | None = None

    def add(self, reservation: Reservation) -> None:
        self.reservations[reservation] = None
        self.on_the_way[reservation] = self.num_snapshots
        self.totals.add(reservation)
        self.cached_view = None

    def first_token(self, reservation: Reservation) -> None:
        reservation.prefilling = False
        self._acknowledge(reservation)

    def remove(self, reservation: Reservation) -> None:
        del self.reservations[reservation]
        self._acknowledge(reservation)

    def take(self, snapshot: LoadSnapshot) -> None:
        """A snapshot came over the replica's own stream."""
        self.snapshot = snapshot
        self.num_snapshots += 1
        self.num_silent_looks = 0
        self.cached_view = None
        counted_before = self.num_snapshots - SNAPSHOTS_TO_ACKNOWLEDGE
        while self.on_the_way:
            oldest = next(iter(self.on_the_way))
            if self.on_the_way[oldest] > counted_before:
                break
            self._acknowledge(oldest)

    def _acknowledge(self, reservation: Reservation) -> None:
        if self.on_the_way.pop(reservation, None) is not None:
            self.totals.subtract(reservation)
        self.cached_view = None

    def view(self) -> ReplicaLoad:
        if self.cached_view is None:
            self.cached_view = self._compute_view()
        return self.cached_view

    def _compute_view(self) -> ReplicaLoad:
        snapshot = self.snapshot
        num_requests = snapshot.num_running + snapshot.num_waiting + self.totals.num_requests
        num_pending_tokens = snapshot.num_pending_tokens + self.totals.num_pending_tokens
        num_context_tokens = snapshot.num_context_tokens + self.totals.num_context_tokens
        num_uncounted = len(self.reservations) - num_requests
        for reservation in islice(self._acknowledged_newest_first(), max(0, num_uncounted)):
            num_requests += 1
            num_pending_tokens += reservation.num_uncached_tokens
            num_context_tokens += reservation.num_tokens
        return ReplicaLoad(
            num_requests=num_requests,
            num_pending_tokens=num_pending_tokens,
            num_context_tokens=num_context_tokens,
            prefill_seconds_per_token=snapshot.prefill_seconds_per_token or None,
            decode_step_seconds=snapshot.decode_step_seconds or None,
        )

    def _acknowledged_newest_first(self) -> Iterator[Reservation]:
        """Acknowledged by the number of snapshots alone: no first token has proved them admitted."""
        return (
            reservation
            for reservation in reversed(self.reservations)
            if reservation.prefilling and reservation not in self.on_the_way
        )


class LoadBook:
    def __init__(self) -> None:
        self._books: dict[ReplicaId, _ReplicaBook] = {}

    @property
    def num_reserved(self) -> int:
        """Reservations that have not been given back, over all replicas in the book."""
        return sum(len(book.reservations) for book in self._books.values())

    def update(self, replica_id: ReplicaId, snapshot: LoadSnapshot) -> None:
        """A snapshot that came in a frame of the replica's stream."""
        self._book(replica_id).take(snapshot)

    def update_from_registry(self, replica_id: ReplicaId, snapshot: LoadSnapshot) -> None:
        """A snapshot from the replica's heartbeat, as found by one more look at the registry.

        It may be older than the latest frame, so it counts only where the stream has been silent for
        some looks. It acknowledges nothing.
        """
        book = self._book(replica_id)
        if book.num_silent_looks < LOOKS_OF_SILENCE:
            book.num_silent_looks += 1
        else:
            book.snapshot = snapshot
            book.cached_view = None

    def forget(self, replica_id: ReplicaId) -> None:
        """The replica is gone. Reservations on it may still be given back; they count no more."""
        self._books.pop(replica_id, None)

    def reserve(self, replica_id: ReplicaId, *, num_uncached_tokens: int, num_tokens: int) -> Reservation:
        book = self._book(replica_id)
        reservation = Reservation(book, num_uncached_tokens, num_tokens)
        book.add(reservation)
        return reservation

    def view(self, replica_id: ReplicaId) -> ReplicaLoad:
        book = self._books.get(replica_id)
        return ReplicaLoad() if book is None else book.view()

    def _book(self, replica_id: ReplicaId) -> _ReplicaBook:
        book = self._books.get(replica_id)
        if book is None:
            book = self._books[replica_id] = _ReplicaBook()
        return book
