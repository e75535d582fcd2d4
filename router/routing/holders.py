"""Holders: which replicas have stored which block hash, one bit each in one table for all of them.

Owns the table and its slots. Knows no chains, no predictions and no replicas: who has which slot is the
caller's business.

Each hash is written once for all replicas that hold it, and nothing lists what one replica has. So a slot is
given back at once, with its bits still in the table, and taken again only when `sweep`, a slice at a time,
has cleared them all: until then they mean no replica, and readers of the table look at the bits of living
slots alone. In the same way a set that takes long to read is staged under a slot that is not read yet.

A second and a third table say of which replicas the fastest copy lies below the device. They are empty
where no replica has memory below its device, and then nothing looks at them.

The tables are split by the hashes' first byte, so that neither their growth nor a slice takes long.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TypeAlias

from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import Tier

NUM_SHARDS = 256
HASHES_PER_SLICE = 256


Shards: TypeAlias = list[dict[BlockHash, int]]
"""A table: `shards[block_hash[0]][block_hash]` has bits."""


class Holders:
    """`shards` have the bits of those that hold a hash, and of slots given back.

    `below` has for host memory and disk the bits of those whose fastest copy lies there; `has_tiers` is
    False until there was one.
    """

    def __init__(self) -> None:
        self.shards: Shards = [{} for _ in range(NUM_SHARDS)]
        self.below: dict[Tier, Shards] = {
            tier: [{} for _ in range(NUM_SHARDS)] for tier in (Tier.HOST, Tier.DISK)
        }
        self.has_tiers = False
        self._num_slots = 0
        self._free = 0
        """Bits that are nowhere in the table."""
        self._dead = 0
        """Given back since the sweep began."""
        self._sweep: Iterator[None] | None = None

    def take(self) -> int:
        """A bit that is nowhere in the table."""
        if self._free:
            bit = self._free & -self._free
            self._free ^= bit
        else:
            bit = 1 << self._num_slots
            self._num_slots += 1
        return bit

    def give_back(self, bit: int, *, is_clean: bool) -> None:
        """No replica has this bit any more; `is_clean` if it is nowhere in the table."""
        if is_clean:
            self._free |= bit
        else:
            self._dead |= bit

    def stage(self) -> "StagedHashes":
        return StagedHashes(self)

    def add(self, bit: int, block_hashes: Collection[BlockHash], tier: Tier = Tier.DEVICE) -> int:
        """These have their fastest copy in this tier from now on. How many of them are new."""
        if tier is not Tier.DEVICE and block_hashes:
            self.has_tiers = True
        if self.has_tiers:
            for other, shards in self.below.items():
                if other is tier:
                    _set(shards, bit, block_hashes)
                else:
                    _clear_bit(shards, bit, block_hashes)
        return _set(self.shards, bit, block_hashes)

    def remove(self, bit: int, block_hashes: Collection[BlockHash]) -> int:
        """How many of them were there."""
        if self.has_tiers:
            for shards in self.below.values():
                _clear_bit(shards, bit, block_hashes)
        return _clear_bit(self.shards, bit, block_hashes)

    def holds(self, bit: int, block_hash: BlockHash) -> bool:
        return self.shards[block_hash[0]].get(block_hash, 0) & bit != 0

    def of(self, bit: int) -> frozenset[BlockHash]:
        """All that has this bit. Looks at the whole table."""
        return frozenset(
            block_hash for shard in self.shards for block_hash, holders in shard.items() if holders & bit
        )

    def tier(self, bit: int, block_hash: BlockHash) -> Tier | None:
        """Where the fastest copy of the one with this bit lies."""
        if not self.holds(bit, block_hash):
            return None
        for tier, shards in self.below.items():
            if shards[block_hash[0]].get(block_hash, 0) & bit:
                return tier
        return Tier.DEVICE

    def sweep(self) -> bool:
        """Clear a slice of what was given back. False: there is nothing left to clear."""
        if self._sweep is None:
            if not self._dead:
                return False
            self._sweep = self._sweep_all()
        if next(self._sweep, self) is self:
            self._sweep = None
        return True

    def _sweep_all(self) -> Iterator[None]:
        dead, self._dead = self._dead, 0
        for shard in itertools.chain(self.shards, *self.below.values()):
            block_hashes = list(shard)
            for start in range(0, len(block_hashes), HASHES_PER_SLICE):
                _clear(shard, block_hashes[start : start + HASHES_PER_SLICE], dead)
                yield
        self._free |= dead


class StagedHashes:
    """What a replica holds, while it is being read: lookups do not see it before it is taken.

    Leaving it forgets what was not taken.
    """

    def __init__(self, holders: Holders) -> None:
        self._holders = holders
        self._bit = holders.take()
        self._is_taken = False
        self._num_hashes = 0

    def add(self, block_hashes: Iterable[BlockHash], tier: Tier = Tier.DEVICE) -> None:
        """Hashes whose fastest copy lies in this tier."""
        assert not self._is_taken, "it is a replica's already"
        self._num_hashes += self._holders.add(self._bit, tuple(block_hashes), tier)

    def take(self) -> tuple[int, int]:
        """The bit, which is the caller's from now on, and how many hashes have it."""
        assert not self._is_taken, "it is a replica's already"
        self._is_taken = True
        return self._bit, self._num_hashes

    def __enter__(self) -> "StagedHashes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_taken:
            bit, num_hashes = self.take()
            self._holders.give_back(bit, is_clean=num_hashes == 0)


def _set(shards: Shards, bit: int, block_hashes: Iterable[BlockHash]) -> int:
    """How many did not have the bit."""
    num_new = 0
    # The blocks of a prompt mostly have equal holders. They share one number: of a fleet of 1,000 it
    # takes 160 bytes.
    before, after = 0, bit
    for block_hash in block_hashes:
        shard = shards[block_hash[0]]
        holders = shard.get(block_hash, 0)
        if holders & bit:
            continue
        if holders != before:
            before, after = holders, holders | bit
        shard[block_hash] = after
        num_new += 1
    return num_new


def _clear_bit(shards: Shards, bit: int, block_hashes: Iterable[BlockHash]) -> int:
    """How many had the bit."""
    num_removed = 0
    before, after = bit, 0
    for block_hash in block_hashes:
        shard = shards[block_hash[0]]
        holders = shard.get(block_hash, 0)
        if not holders & bit:
            continue
        if holders != before:
            before, after = holders, holders ^ bit
        if after:
            shard[block_hash] = after
        else:
            del shard[block_hash]
        num_removed += 1
    return num_removed


def _clear(shard: dict[BlockHash, int], block_hashes: Sequence[BlockHash], dead: int) -> None:
    """Some of the hashes may have gone meanwhile."""
    living: dict[int, int] = {}
    for block_hash in block_hashes:
        holders = shard.get(block_hash, 0)
        if not holders & dead:
            continue
        left = living.get(holders)
        if left is None:
            left = living[holders] = holders & ~dead
        if left:
            shard[block_hash] = left
        else:
            del shard[block_hash]
