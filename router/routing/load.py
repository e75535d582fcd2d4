"""LoadBook: how busy each replica is, by this router's knowledge.

Owns this router's reservations and the latest snapshot of every replica. Knows neither time nor prompts, and
decides nothing.

A snapshot counts everything that the replica has admitted, from every router, and says up to which of our
requests. Later requests are *on the way* and counted on top, so the sender counts each exactly once.
"""

from dataclasses import dataclass, field
from types import TracebackType

import msgspec

from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import ReplicaId
from replicas.protocol.ways import NO_MOVES, MoveSpeeds

LOOKS_OF_SILENCE = 3
"""Looks at the registry without a new frame before one is believed over the last frame. A look is up to a
second old, and looks may be more frequent than heartbeats."""


LEAST_MOVE_SECONDS = 1e-8
"""Lower bound on a replica's claimed time per token moved: 1.2 TB/s for the 12 KB of a model of half a
billion parameters, and more for larger ones; no host memory and no network is as fast. A replica that claimed
almost nothing would attract every prompt."""


class ReplicaLoad(msgspec.Struct, frozen=True):
    """`num_requests` run or wait; `num_pending_tokens` of prompts are still to be computed, and
    `num_pending_image_tokens` of their images to be encoded.

    `num_context_tokens` are held by its requests. `cache_fill` is the share of its KV blocks in use; a
    replica that has not reported counts as new, and empty. Rates are None until the replica has measured
    them; `speeds` are those of moving KV. `is_predicted`: what it holds is not reported by its engine.

    Where `num_places` are known, requests beyond them wait, and each has its place for `place_seconds`.

    `num_room_tokens` of KV are free beyond what its requests need; below 0, that many are lacking, and None
    is unknown. Those that end give room for a token back every `room_seconds_per_token`.
    """

    num_requests: int = 0
    num_pending_tokens: int = 0
    num_context_tokens: int = 0
    cache_fill: float = 0.0
    prefill_seconds_per_token: float | None = None
    decode_step_seconds: float | None = None
    speeds: MoveSpeeds = NO_MOVES
    num_pending_image_tokens: int = 0
    encode_seconds_per_token: float | None = None
    is_predicted: bool = False
    num_places: int = 0
    place_seconds: float = 0.0
    num_room_tokens: int | None = None
    room_seconds_per_token: float = 0.0

    def room_seconds(self, num_tokens: int) -> float:
        """Return the seconds until requests that end have given back what `num_tokens` lack of room."""
        if self.num_room_tokens is None or num_tokens <= self.num_room_tokens or not self.num_requests:
            return 0.0
        return (num_tokens - self.num_room_tokens) * self.room_seconds_per_token


class Reservation:
    """One request's share of a replica's load. Leaving it gives everything back, once."""

    __slots__ = (
        "_book",
        "_released",
        "has_arrived",
        "num_choices",
        "num_image_tokens",
        "num_tokens",
        "num_uncached_tokens",
        "ordinal",
    )

    def __init__(
        self,
        book: "_ReplicaBook",
        num_uncached_tokens: int,
        num_tokens: int,
        num_image_tokens: int,
        num_choices: int,
    ) -> None:
        self._book = book
        self._released = False
        self.num_uncached_tokens = num_uncached_tokens
        self.num_image_tokens = num_image_tokens
        self.num_tokens = num_tokens
        self.num_choices = num_choices
        self.ordinal: int | None = None
        self.has_arrived = False
        """It is counted by a snapshot, or given back."""

    def sent(self, ordinal: int) -> None:
        """It is the replica's `ordinal`-th request from us. Never called, it is never counted."""
        assert self.ordinal is None, "a request is sent once"
        self.ordinal = ordinal
        self._book.sent_reservations[ordinal] = self

    def counted(self) -> None:
        """The replica's own load counts it from now on, though it was not sent from here."""
        self._book.arrived(self)

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
class _ReplicaBook:
    snapshot: LoadSnapshot = field(default_factory=LoadSnapshot)
    speeds: MoveSpeeds = NO_MOVES
    """Speeds in the snapshot."""
    num_silent_looks: int = LOOKS_OF_SILENCE
    """Looks at the registry since the last frame; initially there was none to wait for."""
    num_reserved: int = 0
    num_places: int = 0
    """Taken by their choices."""
    num_on_the_way: int = 0
    num_pending_tokens: int = 0
    num_context_tokens: int = 0
    num_pending_image_tokens: int = 0
    """For the reservations on the way."""
    sent_reservations: dict[int, Reservation] = field(default_factory=dict)
    """The sent ones among them, by ordinal, ascending."""
    cached_view: ReplicaLoad | None = None

    def add(self, reservation: Reservation) -> None:
        self.num_reserved += 1
        self.num_places += reservation.num_choices
        self.num_on_the_way += reservation.num_choices
        self.num_pending_tokens += reservation.num_uncached_tokens
        self.num_context_tokens += reservation.num_tokens
        self.num_pending_image_tokens += reservation.num_image_tokens
        self.cached_view = None

    def remove(self, reservation: Reservation) -> None:
        self.num_reserved -= 1
        self.num_places -= reservation.num_choices
        self.arrived(reservation)

    def take(self, snapshot: LoadSnapshot, num_counted: int) -> None:
        """A snapshot came over the replica's own stream."""
        self.believe(snapshot)
        self.num_silent_looks = 0
        while self.sent_reservations:
            oldest = next(iter(self.sent_reservations))
            if oldest > num_counted:
                break
            self.arrived(self.sent_reservations[oldest])

    def believe(self, snapshot: LoadSnapshot) -> None:
        self.snapshot = snapshot
        self.speeds = MoveSpeeds(
            _move_seconds(snapshot.host_seconds_per_token),
            _move_seconds(snapshot.disk_seconds_per_token),
            _move_seconds(snapshot.pull_seconds_per_token),
            snapshot.move_backlog_seconds,
        )
        self.cached_view = None

    def arrived(self, reservation: Reservation) -> None:
        """It is on the way no longer: counted, or given back."""
        if reservation.has_arrived:
            return
        reservation.has_arrived = True
        if reservation.ordinal is not None:
            del self.sent_reservations[reservation.ordinal]
        self.num_on_the_way -= reservation.num_choices
        self.num_pending_tokens -= reservation.num_uncached_tokens
        self.num_context_tokens -= reservation.num_tokens
        self.num_pending_image_tokens -= reservation.num_image_tokens
        self.cached_view = None

    def view(self) -> ReplicaLoad:
        if self.cached_view is None:
            snapshot = self.snapshot
            self.cached_view = ReplicaLoad(
                num_requests=snapshot.num_running + snapshot.num_waiting + self.num_on_the_way,
                num_pending_tokens=snapshot.num_pending_tokens + self.num_pending_tokens,
                num_context_tokens=snapshot.num_context_tokens + self.num_context_tokens,
                cache_fill=_cache_fill(snapshot),
                prefill_seconds_per_token=snapshot.prefill_seconds_per_token or None,
                decode_step_seconds=snapshot.decode_step_seconds or None,
                speeds=self.speeds,
                num_pending_image_tokens=snapshot.num_pending_image_tokens + self.num_pending_image_tokens,
                encode_seconds_per_token=snapshot.encode_seconds_per_token or None,
                is_predicted=snapshot.is_predicted,
                num_places=snapshot.num_places,
                place_seconds=snapshot.place_seconds,
                num_room_tokens=None
                if snapshot.num_room_tokens is None
                else snapshot.num_room_tokens - self.num_context_tokens,
                room_seconds_per_token=snapshot.room_seconds_per_token,
            )
        return self.cached_view


def _move_seconds(claimed: float) -> float | None:
    return max(claimed, LEAST_MOVE_SECONDS) if claimed else None


def _cache_fill(snapshot: LoadSnapshot) -> float:
    """A little low: of the blocks in use, those that are not yet full cannot be found by hash."""
    if not snapshot.num_total_blocks:
        return 0.0
    num_filled = max(snapshot.num_used_blocks, snapshot.num_cached_blocks)
    return min(1.0, num_filled / snapshot.num_total_blocks)


class LoadBook:
    def __init__(self) -> None:
        self._books: dict[ReplicaId, _ReplicaBook] = {}

    @property
    def num_reserved(self) -> int:
        """Reservations that have not been given back, over all replicas in the book."""
        return sum(book.num_reserved for book in self._books.values())

    def num_places_at(self, replica_id: ReplicaId) -> int:
        """Choices of this router's requests that are at the replica or on their way."""
        book = self._books.get(replica_id)
        return 0 if book is None else book.num_places

    def update(self, replica_id: ReplicaId, snapshot: LoadSnapshot, num_counted_submits: int) -> None:
        """A snapshot in a frame of the replica's stream, and how many of the submits it counts."""
        self._book(replica_id).take(snapshot, num_counted_submits)

    def update_from_registry(self, replica_id: ReplicaId, snapshot: LoadSnapshot) -> None:
        """Record a snapshot from the replica's heartbeat, found by one more look at the registry.

        It may be older than the latest frame, so it counts only after some looks of silence on the stream. It
        acknowledges nothing.
        """
        book = self._book(replica_id)
        if book.num_silent_looks < LOOKS_OF_SILENCE:
            book.num_silent_looks += 1
        else:
            book.believe(snapshot)

    def forget(self, replica_id: ReplicaId) -> None:
        """Forget a replica. Reservations on it may still be returned, without effect."""
        self._books.pop(replica_id, None)

    def reserve(
        self,
        replica_id: ReplicaId,
        *,
        num_uncached_tokens: int,
        num_tokens: int,
        num_image_tokens: int = 0,
        num_choices: int = 1,
    ) -> Reservation:
        book = self._book(replica_id)
        reservation = Reservation(book, num_uncached_tokens, num_tokens, num_image_tokens, num_choices)
        book.add(reservation)
        return reservation

    def view(self, replica_id: ReplicaId) -> ReplicaLoad:
        book = self._books.get(replica_id)
        if book is None:
            return ReplicaLoad()
        return book.cached_view or book.view()

    def latest(self, replica_id: ReplicaId) -> tuple[LoadSnapshot, int] | None:
        """Return the replica's last snapshot, and how many of this router's requests it does not count
        yet."""
        book = self._books.get(replica_id)
        return None if book is None else (book.snapshot, book.num_on_the_way)

    def _book(self, replica_id: ReplicaId) -> _ReplicaBook:
        book = self._books.get(replica_id)
        if book is None:
            book = self._books[replica_id] = _ReplicaBook()
        return book
