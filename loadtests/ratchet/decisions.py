"""`python -m loadtests.ratchet.decisions`: a router's decisions, to count instructions.

Owns what is decided. Prompts take turns; each asks the queue, as in a router, and gives back at once what it
got. Time passes by the number of decisions. The orders on standard input (`orders.py`) are `KIND COUNT`, with
KIND `plain` or `tiers`.
"""

import asyncio
import itertools
import random
from collections.abc import Sequence

from loadtests.benches.decision import MODEL, NUM_TOKENS, ROOT, filled_table, prompts
from loadtests.ratchet.orders import Action, follow_orders
from replicas.protocol.blocks import hash_blocks, pack_token_ids
from replicas.protocol.status import ReplicaId
from router.queue.held import Asking, Held, QueueRules
from router.queue.holding import Holding
from router.routing.bucket import BUCKET_TOKENS, bucket_of
from router.routing.decision import RoutingRequest

NUM_REPLICAS = 8
NUM_PROMPTS = 10
NUM_HASHES = 5000
"""In the index besides the prompts'."""
BLOCK_SIZE = 16
SECONDS = 0.01
"""Between two decisions."""


class _Decisions:
    """A router's table and queue, and the prompts to decide about."""

    def __init__(self, *, has_tiers: bool) -> None:
        replica_ids = [ReplicaId(f"replica-{number}") for number in range(NUM_REPLICAS)]
        asked = prompts("warm", replica_ids, NUM_PROMPTS, random.Random(7))
        self._now = 0.0
        table = filled_table(
            asked,
            "warm",
            NUM_REPLICAS,
            NUM_HASHES,
            BLOCK_SIZE,
            has_tiers=has_tiers,
            clock=lambda: self._now,
        )
        self._holding = Holding(table, QueueRules())
        self._askings = []
        for prompt in asked:
            bucket = bucket_of(ROOT, None, pack_token_ids(prompt.token_ids), None, BUCKET_TOKENS)
            request = RoutingRequest(bucket, NUM_TOKENS, BLOCK_SIZE)
            hashes = hash_blocks(ROOT, prompt.token_ids, BLOCK_SIZE)
            self._askings.append(Asking(MODEL, "", request, hashes))

    def decide(self, count: int) -> None:
        for asking in itertools.islice(itertools.cycle(self._askings), count):
            self._now += SECONDS
            routed = self._holding.ask(asking, self._now, lambda: None)
            if isinstance(routed, Held):
                self._holding.withdraw(routed)
            else:
                routed.close()


async def _prepare(words: Sequence[str]) -> Action:
    kind, count = words
    decisions = _Decisions(has_tiers=kind == "tiers")

    async def act() -> None:
        decisions.decide(int(count))

    return act


if __name__ == "__main__":
    asyncio.run(follow_orders(_prepare))
