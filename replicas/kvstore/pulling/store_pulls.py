"""StorePulls: a store's pulls from peers, between its directory and a puller.

Owns how much of host memory pulls may fill at once. Called by the engine's thread alone; nothing waits.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from replicas.kvstore.arena import Arena
from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.directory import Directory
from replicas.kvstore.pulling.incoming import Ending, Wanted
from replicas.kvstore.slot_books import SlotBooks
from replicas.kvstore.tally import MoveTally
from replicas.kvstore.tenant_shares import Tenancy
from replicas.protocol.pulls import MAX_PULLED_CHUNKS, PullHint

if TYPE_CHECKING:
    from replicas.kvstore.pulling.pull import Pulled, Puller

MAX_HOST_SHARE = 0.5
"""Share of the slots that pulls may fill, or hang in, at once."""

CLOSE_SECONDS = 1.0


class StorePulls:
    def __init__(self, directory: Directory, arena: Arena, books: SlotBooks, puller: "Puller") -> None:
        self._directory = directory
        self._arena = arena
        self._books = books
        self._puller = puller
        self._num_slots = 0
        """Slots being filled, or held by a hanging thread."""

    @property
    def is_busy(self) -> bool:
        return self._puller.is_busy

    @property
    def seconds_per_token(self) -> float:
        kind = self._puller.kind
        return self._puller.seconds_per_byte * kind.image_bytes / kind.num_tokens

    @property
    def backlog_seconds(self) -> float:
        return self._puller.backlog_seconds

    def num_at(self, peer: PullHint) -> int:
        """Leading chunks of a prompt that the peer has and that may be pulled now."""
        return peer.num_tokens // self._puller.kind.num_tokens if self._puller.may_pull(peer) else 0

    def may_pull(self, peer: PullHint) -> bool:
        """Whether another transfer from this peer may begin now."""
        return self._puller.may_pull(peer)

    def begin(self, peer: PullHint, wanted: Sequence[tuple[ChunkName, Tenancy]]) -> int | None:
        """Pull as many as there is room for, each for its tenant. Returns the transfer's number; None if none
        fits."""
        most = int(self._arena.num_slots * MAX_HOST_SHARE) - self._num_slots
        chunks: list[Wanted] = []
        for name, tenancy in wanted[: max(0, min(most, MAX_PULLED_CHUNKS))]:
            slot = self._directory.offer(name, tenancy)
            if slot is None:
                break
            self._books.taken(slot)
            chunks.append(Wanted(name, slot, self._arena.slot(slot)))
        if not chunks:
            return None
        self._num_slots += len(chunks)
        return self._puller.pull(peer, chunks)

    def poll(self, tally: MoveTally) -> None:
        """Process finished and failed chunks."""
        for pulled in self._puller.take_finished():
            self._end(pulled, tally)
        for failure in self._puller.take_failures():
            tally.failed(failure)

    def wait(self, seconds: float) -> None:
        self._puller.wait(seconds)

    def close(self) -> bool:
        """False if a thread hangs, in a slot perhaps."""
        return self._puller.close(CLOSE_SECONDS)

    def _end(self, pulled: "Pulled", tally: MoveTally) -> None:
        if pulled.ending is Ending.RETURNED:
            self._directory.give_back(pulled.slot)
        elif pulled.header is not None:
            tally.moved(pulled.header.num_tokens, pulled.seconds)
            self._books.came(pulled.slot, pulled.header, pulled.transfer)
            self._directory.filled(pulled.key)
            self._books.filled(pulled.slot)
        else:
            is_overdue = pulled.ending is Ending.OVERDUE
            self._directory.given_up(pulled.key, may_still_be_written=is_overdue)
            if is_overdue:
                return
        self._num_slots -= 1
