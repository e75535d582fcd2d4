"""StorePulls: a store's pulls from peers, between its directory and a puller.

Owns how much of host memory pulls may fill at once, and the binding pulls that lack room for it. Called by
the engine's thread alone; nothing waits.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replicas.kvstore.arena import Arena
from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.directory import ChunkPlace, Directory
from replicas.kvstore.pulling.incoming import Ending, Wanted
from replicas.kvstore.slot_books import SlotBooks
from replicas.kvstore.tally import MoveTally
from replicas.kvstore.tenant_shares import Tenancy
from replicas.protocol.pulls import MAX_PULLED_CHUNKS, PullHint

if TYPE_CHECKING:
    from replicas.kvstore.pulling.pull import Pulled, Puller

MAX_HOST_SHARE = 0.5
"""Share of the slots that pulls may fill, or hang in, at once."""

MAX_BINDING_SHARE = 0.375
"""The part of it for binding pulls: what a peer has yet to compute leaves room for the others."""

MAX_WAITING_SHARE = 0.75
"""Share of the slots for chunks of requests that wait for the rest of theirs: beyond it they would evict each
other's. One may always begin."""

CLOSE_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _Binding:
    """A binding pull, until its request waits no more. Its next transfer begins when the one before has
    ended."""

    peer: PullHint
    number: int
    ends_at: float
    wanted: deque[tuple[ChunkName, Tenancy]]
    """Chunks that have no slots yet."""
    num_chunks: int = 0
    """All that it brings, once it has begun."""


class StorePulls:
    def __init__(
        self,
        directory: Directory,
        arena: Arena,
        books: SlotBooks,
        puller: "Puller",
        *,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._directory = directory
        self._arena = arena
        self._books = books
        self._puller = puller
        self._num_slots = 0
        """Slots being filled, or held by a hanging thread."""
        self._binding_slots: Counter[int] = Counter()
        """The part of these that binding pulls have, by number."""
        self._bindings: dict[int, _Binding] = {}
        self.num_changes = 0
        """Grows whenever a binding pull has all the slots that it will get."""

    @property
    def is_busy(self) -> bool:
        return self._puller.is_busy or any(each.wanted for each in self._bindings.values())

    @property
    def seconds_per_token(self) -> float:
        kind = self._puller.kind
        return self._puller.seconds_per_byte * kind.image_bytes / kind.num_tokens

    @property
    def backlog_seconds(self) -> float:
        return self._puller.backlog_seconds

    def num_at(self, peer: PullHint) -> int:
        """Leading chunks of a prompt that the peer has and that may be pulled now."""
        may_pull = self._puller.trusts(peer) if peer.binds else self._puller.may_pull(peer)
        return peer.num_tokens // self._puller.kind.num_tokens if may_pull else 0

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

    def bind(self, peer: PullHint, wanted: Sequence[tuple[ChunkName, Tenancy]]) -> int:
        """Pull all of them within the hint's time, as there is room for them. Returns the number of the
        transfers, as one."""
        number = self._puller.new_number()
        ends_at = self._clock() + peer.wait_seconds
        self._bindings[number] = _Binding(peer, number, ends_at, deque(wanted))
        self._begin_bindings()
        return number

    def awaits_room(self, number: int | None) -> bool:
        """Whether chunks without a slot will still come by a binding pull."""
        binding = None if number is None else self._bindings.get(number)
        return binding is not None and bool(binding.wanted)

    def unbind(self, number: int) -> None:
        """End a binding pull, since no request waits for it."""
        if self._bindings.pop(number, None) is not None:
            self._puller.cancel(number)

    def poll(self, tally: MoveTally) -> None:
        """Process finished and failed chunks."""
        for pulled in self._puller.take_finished():
            self._end(pulled, tally)
        for failure in self._puller.take_failures():
            tally.failed(failure)
        if self._bindings:
            self._begin_bindings()

    def wait(self, seconds: float) -> None:
        self._puller.wait(seconds)

    def close(self) -> bool:
        """False if a thread hangs, in a slot perhaps."""
        return self._puller.close(CLOSE_SECONDS)

    def _begin_bindings(self) -> None:
        """Begin what there is room for, the oldest first."""
        for each in self._bindings.values():
            if not each.wanted or self._has_part(each.number):
                continue
            if self._clock() >= each.ends_at or not self._puller.trusts(each.peer):
                self._drop(each)
                continue
            if not self._puller.may_bind or not self._may_wait(each):
                return
            chunks = self._take_slots(each.wanted)
            if not each.wanted:
                self._drop(each)
            if chunks:
                self._binding_slots[each.number] = len(chunks)
                self._puller.bind(each.peer, chunks, number=each.number, ends_at=each.ends_at)

    def _has_part(self, number: int) -> bool:
        """Whether a transfer of the pull is under way, or some of its chunks have to be taken."""
        return number in self._binding_slots or self._puller.is_under_way(number)

    def _may_wait(self, binding: _Binding) -> bool:
        """Whether its request may wait in host memory, with those that do already."""
        if not binding.num_chunks:
            lacking = [each for each in binding.wanted if not self._is_present(each[0])]
            num_waiting = sum(each.num_chunks for each in self._bindings.values())
            if num_waiting and num_waiting + len(lacking) > self._arena.num_slots * MAX_WAITING_SHARE:
                return False
            binding.num_chunks = len(lacking)
        return True

    def _is_present(self, name: ChunkName) -> bool:
        return self._directory.place(name.key) in (ChunkPlace.HOST, ChunkPlace.COMING)

    def _take_slots(self, wanted: deque[tuple[ChunkName, Tenancy]]) -> list[Wanted]:
        """Take a slot for each chunk that has none and has room, and all that have one off the list."""
        num_slots = self._arena.num_slots
        room = min(
            int(num_slots * MAX_HOST_SHARE) - self._num_slots,
            max(1, int(num_slots * MAX_BINDING_SHARE)) - self._binding_slots.total(),
            MAX_PULLED_CHUNKS,
        )
        chunks: list[Wanted] = []
        while wanted:
            name, tenancy = wanted[0]
            if not self._is_present(name):
                slot = self._directory.offer(name, tenancy) if len(chunks) < room else None
                if slot is None:
                    break
                self._books.taken(slot)
                chunks.append(Wanted(name, slot, self._arena.slot(slot)))
            wanted.popleft()
        self._num_slots += len(chunks)
        return chunks

    def _drop(self, binding: _Binding) -> None:
        """Begin no more transfers of it."""
        binding.wanted.clear()
        self.num_changes += 1

    def _end(self, pulled: "Pulled", tally: MoveTally) -> None:
        if pulled.ending is not Ending.FILLED and pulled.transfer in self._bindings:
            self._drop(self._bindings[pulled.transfer])
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
        if pulled.transfer in self._binding_slots:
            self._binding_slots[pulled.transfer] -= 1
            self._binding_slots += Counter()  # without those that have none
