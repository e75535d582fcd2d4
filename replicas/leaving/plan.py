"""HandOverPlan: which leased chunks belong together, and which replica each group is offered to next.

Pure: the caller reports live peers, failures and answers.

A *chain* is a leased chunk that no other follows, with all before it: that is what a prompt needs, so it goes
whole to one replica, the first untried one in the affinity order of its bucket. Chains of one bucket meet
there and share their beginnings. What an earlier replica took of it is *spare* there: it would take room from
other leases, and must be returned.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from replicas.protocol.affinity import AffinityRanking
from replicas.protocol.blocks import BlockHash
from replicas.protocol.hand_overs import HandOverOutcome, LeasedChunk
from replicas.protocol.pulls import PullHint
from replicas.protocol.status import ReplicaId

MAX_TRIES = 3
"""Replicas that a chain is offered to, one after the other."""


class Offer(NamedTuple):
    """To this replica, in this order: each chunk comes after those before it in its prompt."""

    peer: PullHint
    chunks: Sequence[LeasedChunk]


@dataclass(slots=True, eq=False)
class _LeasedChain:
    last: LeasedChunk
    bucket: bytes
    tried: list[ReplicaId] = field(default_factory=list)


class HandOverPlan:
    """`chunks` are those to offer first first, `max_chunks` how many may be handed over at most. `taken` are
    kept by others since an earlier plan.
    """

    def __init__(
        self,
        chunks: Iterable[LeasedChunk],
        max_chunks: int | None = None,
        taken: Collection[BlockHash] = (),
    ) -> None:
        self.chunks = {chunk.key: chunk for chunk in chunks}
        self.outcomes: dict[BlockHash, HandOverOutcome] = dict.fromkeys(taken, HandOverOutcome.TAKEN)
        """The last outcome of each chunk, or TAKEN if it was taken before."""
        self._taken_before = frozenset(taken)
        self._held: dict[ReplicaId, dict[BlockHash, bool]] = {}
        """For each peer the chunks that it may hold after an offer, and whether it has confirmed."""
        self._peers: dict[ReplicaId, PullHint] = {}
        self._max_chunks = max_chunks
        self._roots: dict[BlockHash, BlockHash] = {}
        """The first chunk of the prompt of each, where none between them is missing."""
        self._chains = self._whole_chains()

    @property
    def left(self) -> list[LeasedChunk]:
        """Return the chunks that no peer has taken."""
        return [chunk for key, chunk in self.chunks.items() if not self._is_taken(key)]

    @property
    def num_taken(self) -> int:
        return sum(map(self._is_taken, self.chunks))

    def outcome(self, chunk: LeasedChunk) -> HandOverOutcome | None:
        return self.outcomes.get(chunk.key)

    def answered(self, chunk: LeasedChunk, outcome: HandOverOutcome, by: ReplicaId | None = None) -> None:
        held = None if by is None else self._held.get(by)
        if held is not None and outcome is HandOverOutcome.TAKEN:
            held[chunk.key] = True
        elif held is not None and outcome is not HandOverOutcome.LATE:
            held.pop(chunk.key, None)
        if not self._is_taken(chunk.key):
            self.outcomes[chunk.key] = outcome

    def offers(self, peers: Collection[PullHint]) -> list[Offer]:
        """Return one offer for each untried peer; none if nothing is left to try."""
        by_id = {peer.replica_id: peer for peer in peers}
        ranking = AffinityRanking(sorted(by_id))
        wanted: dict[ReplicaId, dict[BlockHash, LeasedChunk]] = {}
        num_offered = self.num_taken
        for chain in self._chains:
            if self._is_taken(chain.last.key) or len(chain.tried) >= MAX_TRIES:
                continue
            order = ranking.of(chain.bucket).first(MAX_TRIES) if by_id else []
            target = next((each for each in order if each not in chain.tried), None)
            if target is None:
                self._give_up(chain, HandOverOutcome.NO_PEER)
                continue
            chunks = wanted.setdefault(target, {})
            more = self._before(chain.last, chunks)
            num_offered += sum(not self._is_taken(chunk.key) for chunk in more)
            if self._max_chunks is not None and num_offered > self._max_chunks:
                num_offered -= sum(not self._is_taken(chunk.key) for chunk in more)
                self._give_up(chain, HandOverOutcome.TOO_MUCH)
                continue
            chain.tried.append(target)
            chunks.update((chunk.key, chunk) for chunk in more)
            held = self._held.setdefault(target, {})
            for chunk in more:
                held.setdefault(chunk.key, False)
        self._peers.update(by_id)
        return [Offer(by_id[target], [*chunks.values()]) for target, chunks in wanted.items() if chunks]

    def spare(self) -> list[Offer]:
        """Return chunks that a peer may hold and that are of use only elsewhere."""
        if all(len(chain.tried) < 2 for chain in self._chains):
            return []
        needed: dict[ReplicaId, set[BlockHash]] = {}
        for chain in self._chains:
            if chain.tried:
                keys = needed.setdefault(self._keeper(chain), set())
                keys.update(chunk.key for chunk in self._before(chain.last, keys))
        found: list[Offer] = []
        for replica_id, held in self._held.items():
            others = self._taken_before.union(needed.get(replica_id, ()))
            chunks = [self.chunks[key] for key in held if key not in others]
            if chunks:
                found.append(Offer(self._peers[replica_id], chunks))
        return found

    def homes(self, peers: Collection[PullHint]) -> list[Offer]:
        """Return whom to tell of what is left: the first in the affinity order of each chunk."""
        by_id = {peer.replica_id: peer for peer in peers}
        if not by_id:
            return []
        ranking = AffinityRanking(sorted(by_id))
        told: dict[ReplicaId, list[LeasedChunk]] = {}
        for chunk in self.left:
            bucket = chunk.bucket or self._roots.get(chunk.key, chunk.key)
            (home,) = ranking.of(bucket).first(1)
            told.setdefault(home, []).append(chunk)
        return [Offer(by_id[home], chunks) for home, chunks in told.items()]

    def _keeper(self, chain: _LeasedChain) -> ReplicaId:
        """Return the peer that has taken most of the chain, the first of several."""
        whole = self._before(chain.last, ())

        def num_taken(replica_id: ReplicaId) -> int:
            held = self._held[replica_id]
            return next((at for at, chunk in enumerate(whole) if not held.get(chunk.key)), len(whole))

        return chain.tried[0] if len(chain.tried) == 1 else max(chain.tried, key=num_taken)

    def _give_up(self, chain: _LeasedChain, outcome: HandOverOutcome) -> None:
        """Give this outcome to the chain and all before it, unless they have another."""
        for chunk in self._before(chain.last, self.outcomes):
            self.outcomes[chunk.key] = outcome

    def _is_taken(self, key: BlockHash) -> bool:
        return self.outcomes.get(key) is HandOverOutcome.TAKEN

    def _before(self, chunk: LeasedChunk, known: Collection[BlockHash]) -> list[LeasedChunk]:
        """It and those before it that are not known yet, in the order of the prompt."""
        chain: list[LeasedChunk] = []
        at: LeasedChunk | None = chunk
        while at is not None and at.key not in known:
            chain.append(at)
            at = None if at.parent is None else self.chunks[at.parent]
        return chain[::-1]

    def _whole_chains(self) -> list[_LeasedChain]:
        """Return whole chains, those without files first: they would be lost for good."""
        roots = self._roots
        has_next: set[BlockHash] = set()
        is_unsafe: dict[BlockHash, bool] = {}
        for chunk in sorted(self.chunks.values(), key=lambda chunk: chunk.last_block):
            root = chunk.key if chunk.parent is None else roots.get(chunk.parent)
            if root is None:
                self.outcomes[chunk.key] = HandOverOutcome.INCOMPLETE
                continue
            roots[chunk.key] = root
            is_unsafe[chunk.key] = not chunk.has_file
            if chunk.parent is not None:
                has_next.add(chunk.parent)
                is_unsafe[chunk.key] |= is_unsafe[chunk.parent]
        chains = [
            _LeasedChain(chunk, chunk.bucket or roots[key])
            for key, chunk in self.chunks.items()
            if key in roots and key not in has_next
        ]
        return sorted(chains, key=lambda chain: not is_unsafe[chain.last.key])
