"""VirtualHandOver: a simulated replica that drains, and what becomes of what it has leased.

Owns which batch each peer has been offered. Who takes what is decided by the plan of a real replica that
leaves, and by the take-overs of a real store; here they only wait for each other in virtual time.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from loadtests.simulation.host import VirtualHost
from loadtests.simulation.store import VirtualStore
from replicas.leaving.plan import HandOverPlan, Offer
from replicas.protocol.hand_overs import MAX_HANDED_CHUNKS, LeasedChunk, TakeOver
from replicas.protocol.pulls import PullHint
from replicas.protocol.status import Epoch, ReplicaId

MAX_CALL_BYTES = 128 << 20
"""Size of a real replica's calls."""

NO_LAYOUT = bytes(16)
NO_ADDRESS = "127.0.0.1:1"


class VirtualHandOver:
    """From this replica, which has a store, to the others; `moved` is called with who has begun to pull."""

    def __init__(
        self,
        here: VirtualHost,
        hosts: Sequence[VirtualHost],
        moved: Callable[[ReplicaId], None],
    ) -> None:
        source = _store(here)
        assert source is not None, "what is handed over lies below a device"
        self._here = _hint(here)
        self._source = source
        self._hosts = hosts
        self._moved = moved
        self._plan = HandOverPlan(source.leased())
        self._batch = max(1, min(MAX_HANDED_CHUNKS, MAX_CALL_BYTES // source.chunk_bytes))
        self._left: dict[ReplicaId, deque[LeasedChunk]] = {}
        self._asked: dict[ReplicaId, tuple[LeasedChunk, ...]] = {}

    def go_on(self, now: float) -> None:
        """Take the answers, and ask peers without a question."""
        peers = _staying(self._hosts)
        for replica_id in [*self._asked]:
            self._hear(replica_id, peers)
        if not self._left and not self._asked:
            for offer in self._plan.offers([hint for hint, _ in peers.values()]):
                self._begin(offer)
        for replica_id in [*self._left]:
            if replica_id not in self._asked:
                self._ask(replica_id, peers, now)

    def _begin(self, offer: Offer) -> None:
        self._left[offer.peer.replica_id] = deque(offer.chunks)

    def _hear(self, replica_id: ReplicaId, peers: Mapping[ReplicaId, tuple[PullHint, VirtualStore]]) -> None:
        if replica_id not in peers:
            del self._asked[replica_id]
            return
        outcomes = peers[replica_id][1].take_outcomes(self._here.epoch)
        if outcomes is not None:
            for chunk, outcome in zip(self._asked.pop(replica_id), outcomes, strict=True):
                self._plan.answered(chunk, outcome, replica_id)

    def _ask(
        self, replica_id: ReplicaId, peers: Mapping[ReplicaId, tuple[PullHint, VirtualStore]], now: float
    ) -> None:
        left = self._left[replica_id]
        if not left or replica_id not in peers:
            del self._left[replica_id]
            return
        chunks = tuple(left.popleft() for _ in range(min(self._batch, len(left))))
        self._asked[replica_id] = chunks
        peers[replica_id][1].take_over(TakeOver(self._here, NO_LAYOUT, chunks), self._source, now)
        self._moved(replica_id)


def _store(host: VirtualHost) -> VirtualStore | None:
    return None if host.replica is None else host.replica.store


def _hint(host: VirtualHost) -> PullHint:
    return PullHint(host.replica_id, Epoch(f"{host.replica_id}-{host.epoch}"), NO_ADDRESS, 0)


def _staying(hosts: Sequence[VirtualHost]) -> dict[ReplicaId, tuple[PullHint, VirtualStore]]:
    return {
        host.replica_id: (_hint(host), store)
        for host in hosts
        if (store := _store(host)) is not None and not host.is_draining
    }
