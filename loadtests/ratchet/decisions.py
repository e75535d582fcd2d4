"""`python -m loadtests.ratchet.decisions COUNT`: a router's decisions, to count instructions of.

Owns what is decided. Prompts take turns; each asks the queue, as in a router, and gives back at once what it
got. Time passes by the number of decisions.
"""

import itertools
import random
import sys

from loadtests.benches.decision import MODEL, NUM_TOKENS, ROOT, filled_table, prompts
from replicas.protocol.blocks import hash_blocks
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


def decide(count: int, *, has_tiers: bool) -> None:
    replica_ids = [ReplicaId(f"replica-{number}") for number in range(NUM_REPLICAS)]
    asked = prompts("warm", replica_ids, NUM_PROMPTS, random.Random(7))
    now = 0.0
    table = filled_table(
        asked, "warm", NUM_REPLICAS, NUM_HASHES, BLOCK_SIZE, has_tiers=has_tiers, clock=lambda: now
    )
    holding = Holding(table, QueueRules())
    askings = []
    for prompt in asked:
        bucket = bucket_of(ROOT, None, prompt.token_ids, None, BUCKET_TOKENS)
        request = RoutingRequest(bucket, NUM_TOKENS, BLOCK_SIZE)
        askings.append(Asking(MODEL, "", request, hash_blocks(ROOT, prompt.token_ids, BLOCK_SIZE)))
    for asking in itertools.islice(itertools.cycle(askings), count):
        now += SECONDS
        routed = holding.ask(asking, now, lambda: None)
        if isinstance(routed, Held):
            holding.withdraw(routed)
        else:
            routed.close()


if __name__ == "__main__":
    decide(int(sys.argv[1]), has_tiers="tiers" in sys.argv)
