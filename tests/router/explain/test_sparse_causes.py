"""Why a sparse model's tokens were not read, by the router's real parts and against the rule."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pytest

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
from tests.examples import examples
from tests.replicas.builders import ROOT
from tests.replicas.simulated_engine.test_grouped_cache import SHAPES, Served, may_end

EPOCH = Epoch("e")
STRIDE = 128

_DIGESTS = Digests(bytes(16))

RunPrompt = Callable[[ReplicaId, Callable[[PromptUsage], None]], None]


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

    def serve(self, tokens: Sequence[int], run: RunPrompt) -> Misses:
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


REPLICAS = [ReplicaId("a"), ReplicaId("b")]
NUM_PROMPTS = examples(960)


class Replica:
    """A simulated cache, and all prefixes that were ever a point there."""

    def __init__(self, replica_id: ReplicaId, shape: str, hear: Callable[..., None]) -> None:
        self.served = Served(shape, num_blocks=120, budget=256)
        self.size = self.served.cache.alignment
        self.ever: set[BlockHash] = set()
        self.computed: set[BlockHash] = set()
        """All blocks of its prompts."""
        take = self.served.cache.take_events

        def observed() -> list[CacheEvent]:
            events = take()
            hear(replica_id, events)
            return events

        self.served.cache.take_events = observed  # type: ignore[method-assign]

    def run(self, prompt: Sequence[int], num_output_tokens: int) -> list[int]:
        """Serve the prompt; returns it with its answer."""
        _, tokens = self.served.serve(prompt, num_output_tokens)
        chain = hash_blocks(ROOT, tokens, self.size)
        ends = range(1, len(chain) + 1)
        self.ever.update(chain[end - 1] for end in ends if may_end(self.served.cache, chain, end * self.size))
        return tokens

    def reach(self, hashes: Sequence[BlockHash]) -> int:
        """Leading tokens that full attention has, by the pool; without it, those computed for any prompt."""
        cache = self.served.cache
        if not cache.groups[0].is_full:
            return self.size * sum(name in self.computed for name in hashes)
        [(number, full)] = [each for each in enumerate(cache.groups) if each[1].is_full]
        for end in range(self.size, len(hashes) * self.size + 1, self.size):
            names = [cache.name_of(number, hashes, block) for block in full.needed(end)]
            if any(cache.pool.find(name) is None for name in names):
                return end - self.size
        return len(hashes) * self.size


class Run:
    """One prompt at a replica, and what is to be said of it."""

    def __init__(self, replicas: dict[ReplicaId, Replica], prompt: Sequence[int], num_output: int) -> None:
        self.replicas = replicas
        self.prompt = prompt
        self.num_output = num_output
        self.tokens: list[int] = []
        self.held = 0
        self.expected: list[tuple[str, int]] = []

    def __call__(self, replica_id: ReplicaId, explain: Callable[[PromptUsage], None]) -> None:
        replica = self.replicas[replica_id]
        num_findable = (len(self.prompt) - 1) // replica.size
        hashes = hash_blocks(ROOT, self.prompt, replica.size)[:num_findable]
        points = [end * replica.size for end, name in enumerate(hashes, 1) if name in replica.ever]
        hit = replica.served.find(self.prompt)
        self.held = replica.reach(hashes)
        self.expected = expected_halves(hit.num_tokens, self.held, points)
        num_unresumable = max(0, hit.junction - hit.num_tokens)
        explain(PromptUsage(len(self.prompt), hit.num_tokens, 0, num_unresumable_tokens=num_unresumable))
        self.tokens = replica.run(self.prompt, self.num_output)
        replica.computed.update(hashes)


@pytest.mark.parametrize(
    ("shape", "replica_ids"),
    [
        *((each, REPLICAS) for each in SHAPES if each.count("full") == 1 and " " in each),
        *((each, REPLICAS[:1]) for each in SHAPES if "full" not in each),
    ],
)
def test_of_what_was_computed_it_is_said_whether_a_point_was_ever_kept(
    shape: str, replica_ids: Sequence[ReplicaId]
) -> None:
    """With full attention, as far as that still has it."""
    rng = random.Random(6)
    size = Replica(REPLICAS[0], shape, lambda *_: None).size
    card = ModelCard("m", "f", "simulated", size, 1000, 10_000, 1000, is_sparse=True)
    fleet = SparseFleet(card, ROOT, replica_ids, 5)
    replicas = {each: Replica(each, shape, fleet.hear) for each in replica_ids}
    fresh = replicas[REPLICAS[0]].served.fresh
    known = [fresh(300)]
    halves: Counter[str] = Counter()
    for _ in range(NUM_PROMPTS):
        base = rng.choice(known[-12:])
        prompt = (base[: rng.randint(1, len(base))] + fresh(rng.randint(0, 200)))[:900]
        run = Run(replicas, prompt, rng.choice([1, 2, 40]))
        misses = fleet.serve(prompt, run)
        assert said_halves(misses, run.held) == run.expected
        halves.update(cause for cause, _ in run.expected)
        known.append(run.tokens)
    assert halves.total() > 5, halves


@pytest.mark.parametrize("shape", [each for each in SHAPES if each.count("full") < 2])
def test_what_a_cleared_cache_had_was_not_evicted(shape: str) -> None:
    replica_id = REPLICAS[0]
    size = Replica(replica_id, shape, lambda *_: None).size
    card = ModelCard("m", "f", "simulated", size, 1000, 10_000, 1000, is_sparse=True)
    fleet = SparseFleet(card, ROOT, [replica_id], 5)
    replica = Replica(replica_id, shape, fleet.hear)
    prompt = replica.served.fresh(300)
    for _ in range(2):
        fleet.serve(prompt, Run({replica_id: replica}, prompt, 2))
    assert replica.served.cache.clear()
    replica.served.follow()
    misses = fleet.serve(prompt, Run({replica_id: replica}, prompt, 2))
    assert (misses.spans[0].cause, misses.spans[0].end) == ("cleared", 299 // size * size)
