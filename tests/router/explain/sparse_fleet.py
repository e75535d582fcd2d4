"""Replicas of a sparse model as a router hears of them: its real index, decisions and causes."""

import random
from collections.abc import Callable, Iterable, Sequence

from replicas.index.residency import Residency
from replicas.protocol.blocks import BlockHash, hash_blocks, pack_token_ids
from replicas.protocol.events import CacheEvent
from replicas.protocol.frames import NO_USER, PromptUsage
from replicas.protocol.hits import num_hit_tokens, num_searched
from replicas.protocol.keys import IndexChange
from replicas.protocol.status import Epoch, ModelCard, ReplicaId
from router.explain.miss_explainer import MissExplainer
from router.explain.nearest import Digests, PromptFacts
from router.explain.prefix_tree import NamespaceName, Seen
from router.explain.prompt_memory import PromptMemory
from router.misses import Misses
from router.routing.bucket import bucket_of
from router.routing.cost import CostParameters
from router.routing.decision import RoutingRequest
from router.routing.table import RoutingTable

EPOCH = Epoch("e")
STRIDE = 128

_DIGESTS = Digests(bytes(16))

Run = Callable[[ReplicaId, Callable[[PromptUsage], None]], None]


class SparseFleet:
    """Prompts go to a replica of the router's choice, and now and then to another."""

    def __init__(self, card: ModelCard, root: BlockHash, replica_ids: Sequence[ReplicaId], seed: int) -> None:
        self.card = card
        self._root = root
        self._rng = random.Random(seed)
        self._replica_ids = replica_ids
        self._table = RoutingTable("kvasir", CostParameters(), random.Random(seed))
        self._residencies = {each: Residency(card.block_size, STRIDE) for each in replica_ids}
        for each in replica_ids:
            self._table.add_replica(each, card, STRIDE)
            self._table.index("m").replace(each, EPOCH, ())
        self._memory = PromptMemory(2**24, bytes(16))
        self._explainer = MissExplainer(self._memory, self._table.index)
        self._now = 0.0

    def serve(self, tokens: Sequence[int], run: Run) -> Misses:
        """Have the prompt served by `run`, which calls `hear`, and the given function at the first token."""
        self._now += 1.0
        size, index = self.card.block_size, self._table.index("m")
        index.departures.now = self._now
        packed, hashes = pack_token_ids(tokens), hash_blocks(self._root, tokens, size)
        request = RoutingRequest(bucket_of(self._root, None, packed, None, size), len(tokens), size)
        exclude = [self._rng.choice(self._replica_ids)] if self._rng.random() < 0.4 else []
        exclude = exclude if len(self._replica_ids) > 1 else []
        namespace = NamespaceName("m", None, "default")
        facts = PromptFacts(
            *(_DIGESTS, "default", self._root, namespace, size, b"".join(hashes), packed),
            num_reusable_tokens=num_hit_tokens(self.card, num_searched(self.card, len(tokens))),
            peek_tokens=self.card.peek_tokens,
        )
        found: list[tuple[PromptUsage, Misses]] = []
        with self._table.route("m", request, hashes, exclude=exclude) as routed:
            decision = routed.decision

            def explain(usage: PromptUsage) -> None:
                misses = self._explainer.misses(facts, decision, usage, decided_at=self._now)
                found.append((usage, misses))

            run(decision.replica_id, explain)
        [(usage, misses)] = found
        seen = Seen(
            usage=usage,
            model="m",
            user=NO_USER,
            key=None,
            replica_id=decision.replica_id,
            ended_at=self._now,
            epoch=EPOCH,
        )
        self._memory.add(facts, seen)
        return misses

    def hear(self, replica_id: ReplicaId, events: Iterable[CacheEvent]) -> None:
        residency, index = self._residencies[replica_id], self._table.index("m")
        residency.observe(events)
        if residency.has_change:
            net = residency.take_change()
            index.apply(
                IndexChange(
                    *(replica_id, EPOCH, index.last_change(replica_id) + 1, net.added, net.removed),
                    reasons=net.reasons,
                    points=net.points,
                    points_removed=net.points_removed,
                    point_reasons=net.point_reasons,
                )
            )


def expected_halves(cached: int, held: int, points_ever: Iterable[int]) -> list[tuple[str, int]]:
    """Return what is to be said of the tokens from `cached` to `held`, which full attention had: up to the
    deepest position there that was a point once they were evicted, and behind it never kept."""
    if held <= cached:
        return []
    evicted = max((point for point in points_ever if cached < point <= held), default=cached)
    halves = [("evicted", evicted)] if evicted > cached else []
    return [*halves, ("not_resumable", held)] if held > evicted else halves


def said_halves(misses: Misses, held: int) -> list[tuple[str, int]]:
    """Return what was said up to `held`."""
    return [(span.cause.value, min(span.end, held)) for span in misses.spans if span.start < held]
