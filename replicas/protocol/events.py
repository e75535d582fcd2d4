"""Cache events: what a replica's cache gained and lost, in order.

Owns the vocabulary. Knows nothing of Redis or of who listens.

Events are a *multiset*: an engine may hold two copies of one block and removes them one by one, so
whoever keeps score counts. They leave the engine inside the StepFrame, after the KV exists.
"""

from dataclasses import dataclass

from replicas.protocol.blocks import BlockHash


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one chain now hold KV.

    `first_block_index` is the chain position of `block_hashes[0]` (0 for a prompt's first block), so
    a reader knows which hashes lie on the index stride. `ends_prompt` says that the last hash is the
    last full block of some request's prompt.
    """

    block_hashes: tuple[BlockHash, ...]
    first_block_index: int
    ends_prompt: bool = False


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One copy of each of these blocks is gone."""

    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The replica holds nothing any more."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
