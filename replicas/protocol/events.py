"""Cache events: additions to and removals from a replica's cache, in order.

Owns the vocabulary.

Events are a *multiset*: an engine may hold two copies of one block and removes them one by one, so readers
must count copies. They leave the engine inside the StepFrame, after the KV exists. Blocks that a request is
*about* to store are no event: the server announces them (`keys.Announcement`), since the router that sent the
request knows the hashes.

They are tagged structs, unlike other values here: each encodes its type in the union.
"""

import enum

import msgspec

from replicas.protocol.blocks import BlockHash


class Tier(enum.StrEnum):
    """The memory that a copy lies in, fastest first: what attention reads, the host's, and beyond."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Removal(enum.IntEnum):
    """Reason for a copy's removal. The numbers are those of `IndexChange.reasons`, and are never reused.

    An unknown number, from a newer replica, counts as EVICTED.
    """

    EVICTED = 0
    """It had to make room."""
    EXPIRED = 1
    """It had to make room, after its lease had run out."""
    BROKEN = 2
    """It was leased, and went before its time."""
    LOST = 3
    """It was a file that is gone or not to be believed."""
    CLEARED = 4
    """The tier was cleared."""

    @classmethod
    def _missing_(cls, value: object) -> "Removal | None":
        return cls.EVICTED if isinstance(value, int) else None


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Consecutive blocks of one chain now hold KV.

    `first_block_index` is the chain position of `block_hashes[0]` (0 for a prompt's first block), so
    a reader knows which hashes lie on the index stride. `ends_prompt` says that the last hash is the
    last full block of some request's prompt.
    """

    block_hashes: tuple[BlockHash, ...]
    first_block_index: int
    ends_prompt: bool = False
    tier: Tier = Tier.DEVICE


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """One copy of each of these blocks is gone from a tier."""

    block_hashes: tuple[BlockHash, ...]
    tier: Tier = Tier.DEVICE
    reason: Removal = Removal.EVICTED


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """A tier was emptied."""

    tier: Tier = Tier.DEVICE


class ResumePointsChanged(msgspec.Struct, frozen=True, tag=True):
    """Hashes at which a hit may end from now on, and those at which it no longer may.

    Only for a model whose card says `is_sparse`: there the blocks of the other events are those of full
    attention alone, and a prompt is served from the deepest point of its chain, whatever lies before it.
    Points are a set, in no order: `added` were none before, `removed` were. They come after the other events
    of their step. A cleared device has none left.
    """

    added: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared | ResumePointsChanged
