"""TakeOvers: leased chunks that move from one replica's store to another's, on both sides.

Owns the open requests to a store, and how much one peer may fill. The leaving replica decides who takes what.
Called by the engine's thread alone; nothing waits, and each call is bounded.

A chunk to take over is leased first, so that nothing is pulled without budget, and then pulled unless it is
here. If it does not arrive, its lease ends.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.directory import ChunkPlace, Directory
from replicas.kvstore.leasing.lease_list import LeaseList
from replicas.kvstore.leasing.leases import LeaseRecord, TenantTag
from replicas.kvstore.tenant_shares import Tenancy
from replicas.protocol.blocks import BlockHash
from replicas.protocol.hand_overs import (
    HandOverOutcome,
    KeepChunks,
    LeasedChunk,
    ListLeases,
    StoreAnswer,
    StoreQuestion,
    TakeOver,
)
from replicas.protocol.prefix_leases import LeaseRefusal
from replicas.protocol.pulls import PullHint
from replicas.protocol.status import Epoch

MAX_HOST_SHARE = 0.25
"""Share of the slots that one incarnation of a replica may hand over, so that its chunks do not evict those
used here."""

MAX_ASKED = 16
"""Questions of peers that wait for chunks. One that has been given up counts until its chunks have come, or
will not."""

MAX_SOURCES = 64
"""Sources whose handed-over amounts are remembered."""

_OUTCOMES = {
    LeaseRefusal.BUDGET: HandOverOutcome.BUDGET,
    LeaseRefusal.TENANT_SHARE: HandOverOutcome.TENANT_SHARE,
    LeaseRefusal.NO_TIER: HandOverOutcome.NO_TIER,
}
"""All others are about time."""


class LeaseClock(Protocol):
    """The part of the lease granter that is used here."""

    def look(self) -> None: ...


class Pulls(Protocol):
    """The part of the puller that is used here."""

    def may_pull(self, peer: PullHint) -> bool: ...

    def begin(self, peer: PullHint, wanted: Sequence[tuple[ChunkName, Tenancy]]) -> object: ...


@dataclass(slots=True, eq=False)
class _AskedPeer:
    """`outcomes` lack those of chunks that are `coming`, each of which is leased."""

    number: int
    source: Epoch
    chunks: Sequence[LeasedChunk]
    outcomes: dict[BlockHash, HandOverOutcome] = field(default_factory=dict)
    coming: set[BlockHash] = field(default_factory=set)
    pulled: set[BlockHash] = field(default_factory=set)
    """The part of these that counts for their source."""


class TakeOvers:
    """Without `pulls` only chunks that are here can be taken over."""

    def __init__(self, directory: Directory, leases: LeaseClock, pulls: Pulls | None) -> None:
        self._directory = directory
        self._leases = leases
        self._pulls = pulls
        self._asked: list[_AskedPeer] = []
        self._list: LeaseList | None = None
        """The list being made. Only the last requested one is awaited."""
        self._answers: list[StoreAnswer] = []
        self._num_pulled: OrderedDict[Epoch, int] = OrderedDict()

    @property
    def is_busy(self) -> bool:
        return bool(self._asked)

    @property
    def is_listing(self) -> bool:
        """Whether there is more to do at once."""
        return self._list is not None

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    def take_answers(self) -> list[StoreAnswer]:
        answers, self._answers = self._answers, []
        return answers

    def ask(self, question: StoreQuestion) -> None:
        self._leases.look()
        match question:
            case ListLeases(number):
                self._list = LeaseList(self._directory, number)
                self._list_on()
            case KeepChunks(number, take_over) if take_over.are_lost or take_over.are_elsewhere:
                self._note(take_over)
                noted = (HandOverOutcome.NOTED,) * len(take_over.chunks)
                self._answers.append(StoreAnswer(number, outcomes=noted))
            case KeepChunks(number, take_over):
                self._keep(number, take_over)

    def poll(self) -> None:
        """Process arrived chunks, and answer peers whose requests are complete."""
        self._list_on()
        for asked in [*self._asked]:
            for key in [*asked.coming]:
                place = self._directory.place(key)
                if place is ChunkPlace.COMING:
                    continue
                asked.coming.remove(key)
                if place is None:
                    self._directory.leases.withdraw(key, asked.source)
                    if key in asked.pulled and asked.source in self._num_pulled:
                        self._num_pulled[asked.source] -= 1
                asked.outcomes[key] = HandOverOutcome.NOT_SENT if place is None else HandOverOutcome.TAKEN
            self._answer_if_done(asked)

    def _note(self, take_over: TakeOver) -> None:
        if take_over.are_elsewhere:
            keys = [chunk.key for chunk in take_over.chunks]
            self._directory.withdraw(keys, take_over.source.epoch)
            return
        for chunk in take_over.chunks:
            self._directory.leases.lost_elsewhere(_record(chunk), is_broken=not chunk.has_file)

    def _list_on(self) -> None:
        leased = None if self._list is None else self._list.go_on()
        if self._list is not None and leased is not None:
            self._answers.append(StoreAnswer(self._list.number, leased=leased))
            self._list = None

    def _keep(self, number: int, take_over: TakeOver) -> None:
        if len(self._asked) >= MAX_ASKED:
            busy = (HandOverOutcome.BUSY,) * len(take_over.chunks)
            self._answers.append(StoreAnswer(number, outcomes=busy))
            return
        source = take_over.source.epoch
        asked = _AskedPeer(number, source, take_over.chunks)
        self._asked.append(asked)
        chunks = self._within_room(asked)
        refusals = self._directory.take_leases([*map(_record, chunks)], source)
        to_pull: list[LeasedChunk] = []
        for chunk, refusal in zip(chunks, refusals, strict=True):
            place = self._directory.place(chunk.key)
            if refusal is not None:
                asked.outcomes[chunk.key] = _OUTCOMES.get(refusal, HandOverOutcome.OVER)
            elif place in (ChunkPlace.HOST, ChunkPlace.DISK):
                asked.outcomes[chunk.key] = HandOverOutcome.TAKEN
            elif place is None and not self._has_before(asked, chunk):
                self._directory.leases.withdraw(chunk.key, source)
                asked.outcomes[chunk.key] = HandOverOutcome.INCOMPLETE
            else:
                asked.coming.add(chunk.key)
                if place is None:
                    to_pull.append(chunk)
        asked.pulled = self._pull(take_over, to_pull)
        self.poll()

    def _has_before(self, asked: _AskedPeer, chunk: LeasedChunk) -> bool:
        """Whether the chunk before it is here or on its way, by this request or another."""
        before = chunk.parent
        return before is None or before in asked.coming or self._directory.place(before) is not None

    def _within_room(self, asked: _AskedPeer) -> list[LeasedChunk]:
        """Return the chunks that may be pulled and must be; the others get an outcome."""
        room = int(self._directory.num_host_slots * MAX_HOST_SHARE) - self._num_pulled.get(asked.source, 0)
        chunks: list[LeasedChunk] = []
        for chunk in asked.chunks:
            is_here = self._directory.place(chunk.key) is not None
            if is_here or room > 0:
                chunks.append(chunk)
                room -= not is_here
            else:
                asked.outcomes[chunk.key] = HandOverOutcome.NO_ROOM
        return chunks

    def _pull(self, take_over: TakeOver, chunks: Sequence[LeasedChunk]) -> set[BlockHash]:
        """Pull in one transfer for all tenants: a peer sends few at a time. Returns the chunks that will
        come."""
        source = take_over.source
        if not chunks or self._pulls is None or not self._pulls.may_pull(source):
            return set()
        names = [ChunkName(chunk.key, chunk.parent, chunk.last_block) for chunk in chunks]
        known = self._directory.known
        self._pulls.begin(
            source, [(name, known(_tenancy(chunk))) for name, chunk in zip(names, chunks, strict=True)]
        )
        coming = {name.key for name in names if self._directory.place(name.key) is ChunkPlace.COMING}
        self._num_pulled[source.epoch] = self._num_pulled.get(source.epoch, 0) + len(coming)
        self._num_pulled.move_to_end(source.epoch)
        if len(self._num_pulled) > MAX_SOURCES:
            self._num_pulled.popitem(last=False)
        return coming

    def _answer_if_done(self, asked: _AskedPeer) -> None:
        if not asked.coming:
            self._asked.remove(asked)
            outcomes = tuple(asked.outcomes[chunk.key] for chunk in asked.chunks)
            self._answers.append(StoreAnswer(asked.number, outcomes=outcomes))


def _record(chunk: LeasedChunk) -> LeaseRecord:
    return LeaseRecord(
        chunk.key,
        chunk.seconds,
        chunk.seconds_left,
        TenantTag(chunk.tenant),
        chunk.lease_share,
        chunk.bucket,
    )


def _tenancy(chunk: LeasedChunk) -> Tenancy:
    return Tenancy(TenantTag(chunk.tenant), chunk.lease_share, chunk.store_share)
