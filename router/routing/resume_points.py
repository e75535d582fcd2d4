"""Resume points: where a hit of a *sparse* model may end, and how the index has them.

Such a model's layers keep different KV (`replicas/protocol/hits.py`). Blocks in its index are how far full
attention reaches, thinned and walked as those of any model. Resume points are in the same tables under names
of their own, the reversed hashes. They are not thinned, and lie behind holes::

    reach    ████████████████████████████░░░░
    points             │          │                 a prompt is served from the deepest on its chain

Pure: bit masks in, bit masks out.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.status import ReplicaId
from router.routing.holders import Shards
from router.routing.levels import Depth


def as_points(block_hashes: Iterable[BlockHash]) -> list[BlockHash]:
    """Return the names of these resume points: a hash that is reversed is no other's, but by chance."""
    return [BlockHash(block_hash[::-1]) for block_hash in block_hashes]


def as_departed(block_hashes: Iterable[BlockHash], replica_id: ReplicaId) -> list[BlockHash]:
    """Return the names under which it is remembered that these resume points left this replica. Each has its
    own, since equal points leave another at another time."""
    tag = _tag(replica_id)
    return [BlockHash((int.from_bytes(each) ^ tag).to_bytes(HASH_BYTES)) for each in block_hashes]


@lru_cache(maxsize=4096)
def _tag(replica_id: ReplicaId) -> int:
    return int.from_bytes(hashlib.blake2b(replica_id.encode(), digest_size=HASH_BYTES).digest())


def point_levels(
    shards: Shards,
    predicted: Mapping[BlockHash, int],
    block_hashes: Sequence[BlockHash],
    among: int,
    reach: Sequence[Depth] | None,
    stride: int,
) -> tuple[list[Depth], int]:
    """Return the deepest resume point of each replica in the mask that has any, and of whom it is predicted.

    A point lies at most a stride behind what the thinned index knows of full attention's `reach`. None says
    that the model has no full attention, so that a point may be anywhere.
    """
    levels: list[Depth] = []
    foretold = left = seen = 0
    if reach is None:
        reach = [(len(block_hashes), among)]
    pending = list(reversed(reach))
    depth = min(len(block_hashes), reach[0][0] + stride - 1 if reach else stride - 1)
    while depth:
        while pending and pending[-1][0] + stride > depth:
            left |= pending[-1][1]
            seen |= pending.pop()[1]
        if depth < stride:
            left |= among & ~seen  # their reach is too short to be known
            seen = among
        if left:
            name = BlockHash(block_hashes[depth - 1][::-1])
            held = shards[name[0]].get(name, 0) & left
            found = held | (predicted.get(name, 0) & left)
            if found:
                levels.append((depth, found))
                foretold |= found ^ held
                left ^= found
        elif not pending:
            depth = min(depth, stride)
        depth -= 1
    return levels, foretold
