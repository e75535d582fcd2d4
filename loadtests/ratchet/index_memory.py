"""Measures an index entry's memory in a router, by Python's own allocator.

A resident set would also count the allocator's reserve, and leftovers of others.
"""

import gc
import random
import tracemalloc
from collections.abc import Mapping

from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.keys import IndexChange
from replicas.protocol.status import Epoch, ReplicaId
from router.routing.overlap import PrefixIndex

ROW = "index"
NUM_REPLICAS = 8
NUM_HASHES = 40_000
HASHES_PER_CHANGE = 8
EPOCH = Epoch("e")


def index_figures() -> Mapping[str, float]:
    """An entry is a hash at a replica that holds it."""
    return {
        f"{what}, bytes": _bytes_of(num_holders) / NUM_HASHES / num_holders
        for what, num_holders in (("at one replica", 1), ("at four", 4))
    }


def _bytes_of(num_holders: int) -> int:
    rng = random.Random(5)
    index = PrefixIndex(16, 128)
    replica_ids = [ReplicaId(f"replica-{number}") for number in range(NUM_REPLICAS)]
    for replica_id in replica_ids:
        index.replace(replica_id, EPOCH, ())
    num_changes = dict.fromkeys(replica_ids, 0)
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(NUM_HASHES // HASHES_PER_CHANGE):
            hashes = tuple(BlockHash(rng.randbytes(HASH_BYTES)) for _ in range(HASHES_PER_CHANGE))
            for replica_id in rng.sample(replica_ids, num_holders):
                num_changes[replica_id] += 1
                index.apply(IndexChange(replica_id, EPOCH, num_changes[replica_id], added=hashes))
        del hashes
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
