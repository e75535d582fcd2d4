"""Holders: which replicas have stored which block hash, three bits each in one table for all.

Owns the table and its slots. Knows no chains, no predictions and no replicas: the caller assigns slots.

Each hash is written once for all replicas that hold it, and there is no list per replica. So a slot is
returned at once, with its bits still in the table, and reused only when `sweep`, a slice at a time, has
cleared them all: until then they mean no replica, and readers mask the table with living slots. Likewise a
set that takes long to read is staged under a slot that is not read yet.

The lowest of a replica's bits says that it has the hash, in any tier, and represents the replica elsewhere.
The next two say that its fastest copy is in host memory, or on disk. One lookup gives all, and a look at the
tiers of a chain that was just walked finds everything in the processor's cache.

The table is split by the hashes' first byte, so that neither its growth nor a slice takes long.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TypeAlias

from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import Tier
from router.routing.departures import Departure

NUM_SHARDS = 256
HASHES_PER_SLICE = 256


Shards: TypeAlias = list[dict[BlockHash, int]]
"""The table: `shards[block_hash[0]][block_hash]` has bits."""

IN_HOST = 0b010
ON_DISK = 0b100
"""Multiplier of replicas' bits: their fastest copies are there."""

_BITS_PER_SLOT = 3
_ALL = 0b111
_OWN = {Tier.DEVICE: 0b001, Tier.HOST: 0b001 | IN_HOST, Tier.DISK: 0b001 | ON_DISK}
"""Multiplier of a replica's bit: its entry in the table."""


def replicas_of(marks: int) -> int:
    """Extract the replicas' bits from `IN_HOST` or `ON_DISK` bits and others between them."""
    return marks >> 1 | marks >> 2


class Holders:
    """`shards` have the bits of replicas that hold a hash, and of returned slots.

    `has_tiers` is False until anything lay below a device. A returned slot may be kept as *departed*:
    `on_departed` is told which hashes had it, when they lose it.
    """

    def __init__(self, on_departed: Callable[[Departure, Sequence[BlockHash]], None] | None = None) -> None:
        self._on_departed = on_departed
        self._retired: dict[int, Departure] = {}
        """By the bit, which may still be in the table."""
        self._all_retired = 0
        self.shards: Shards = [{} for _ in range(NUM_SHARDS)]
        self.has_tiers = False
        self._num_slots = 0
        self._free = 0
        """Bits that are nowhere in the table."""
        self._dead = 0
        """Given back since the sweep began."""
        self._sweep: Iterator[None] | None = None

    def take(self) -> int:
        """Return a replica's bit, which is nowhere in the table, and neither are those that go with it."""
        if self._free:
            bit = self._free & -self._free
            self._free ^= bit
        else:
            bit = 1 << _BITS_PER_SLOT * self._num_slots
            self._num_slots += 1
        return bit

    def give_back(self, bit: int, *, is_clean: bool, retired: Departure | None = None) -> None:
        """No replica has this bit any more; `is_clean` if it is nowhere in the table."""
        if is_clean:
            self._free |= bit
            return
        self._dead |= bit
        if retired is not None:
            self._retired[bit] = retired
            self._all_retired |= bit

    @property
    def has_retired(self) -> bool:
        return self._all_retired != 0

    def retired_at(self, block_hash: BlockHash) -> Departure | None:
        """Return the departed slot that the hash still has."""
        retired = self.shards[block_hash[0]].get(block_hash, 0) & self._all_retired
        return self._retired[retired & -retired] if retired else None

    def stage(self) -> "StagedHashes":
        return StagedHashes(self)

    def add(self, bit: int, block_hashes: Collection[BlockHash], tier: Tier = Tier.DEVICE) -> int:
        """These have their fastest copy in this tier from now on. How many of them are new."""
        if tier is not Tier.DEVICE and block_hashes:
            self.has_tiers = True
        return _set(self.shards, bit, bit * _OWN[tier], block_hashes)

    def remove(self, bit: int, block_hashes: Collection[BlockHash]) -> int:
        """How many of them were there."""
        return _unset(self.shards, bit, block_hashes)

    def holds(self, bit: int, block_hash: BlockHash) -> bool:
        return self.shards[block_hash[0]].get(block_hash, 0) & bit != 0

    def of(self, bit: int) -> frozenset[BlockHash]:
        """All that has this bit. Looks at the whole table."""
        return frozenset(
            block_hash for shard in self.shards for block_hash, holders in shard.items() if holders & bit
        )

    def tier(self, bit: int, block_hash: BlockHash) -> Tier | None:
        """Return the tier of the fastest copy of the replica with this bit."""
        holders = self.shards[block_hash[0]].get(block_hash, 0)
        if not holders & bit:
            return None
        if holders & bit * ON_DISK:
            return Tier.DISK
        return Tier.HOST if holders & bit * IN_HOST else Tier.DEVICE

    def sweep(self) -> bool:
        """Clear a slice of returned slots. False if there is nothing left to clear."""
        if self._sweep is None:
            if not self._dead:
                return False
            self._sweep = self._sweep_all()
        if next(self._sweep, self) is self:
            self._sweep = None
        return True

    def _sweep_all(self) -> Iterator[None]:
        dead, self._dead = self._dead, 0
        for shard in self.shards:
            block_hashes = list(shard)
            for start in range(0, len(block_hashes), HASHES_PER_SLICE):
                some = block_hashes[start : start + HASHES_PER_SLICE]
                if dead & self._all_retired:
                    self._retire(shard, some, dead & self._all_retired)
                _clear(shard, some, dead * _ALL)
                yield
        self._free |= dead
        for bit in [bit for bit in self._retired if bit & dead]:
            del self._retired[bit]
        self._all_retired &= ~dead

    def _retire(self, shard: dict[BlockHash, int], block_hashes: Sequence[BlockHash], dead: int) -> None:
        """Report what is about to be cleared. Of several slots of a hash, one."""
        of_bit: dict[int, list[BlockHash]] = {}
        for block_hash in block_hashes:
            held = shard.get(block_hash, 0) & dead
            if held:
                of_bit.setdefault(held & -held, []).append(block_hash)
        if self._on_departed is not None:
            for bit, had in of_bit.items():
                self._on_departed(self._retired[bit], had)


class StagedHashes:
    """A replica's hashes while they are being read: lookups do not see them before they are taken.

    Leaving it drops what was not taken.
    """

    def __init__(self, holders: Holders) -> None:
        self._holders = holders
        self._bit = holders.take()
        self._is_taken = False
        self._num_hashes = 0
        self.has_blocks = False
        """Whether any of them is a block, and no resume point."""

    def add(self, block_hashes: Iterable[BlockHash], tier: Tier = Tier.DEVICE) -> None:
        """Hashes whose fastest copy lies in this tier."""
        assert not self._is_taken, "it is a replica's already"
        num_new = self._holders.add(self._bit, tuple(block_hashes), tier)
        self._num_hashes += num_new
        self.has_blocks = self.has_blocks or num_new > 0

    def add_points(self, names: Collection[BlockHash]) -> None:
        """Resume points, by the names that `resume_points.py` gives them."""
        assert not self._is_taken, "it is a replica's already"
        self._num_hashes += self._holders.add(self._bit, names)

    def take(self) -> tuple[int, int]:
        """Return the bit, which is the caller's from now on, and how many hashes have it."""
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


def _set(shards: Shards, bit: int, own_bits: int, block_hashes: Iterable[BlockHash]) -> int:
    """Set just `own_bits` of the replica's bits; returns how many hashes lacked its bit."""
    num_new = 0
    # The blocks of a prompt mostly have equal holders. They share one number: of a fleet of 1,000 it
    # takes 430 bytes.
    others = ~(bit * _ALL)
    before, after = 0, own_bits
    for block_hash in block_hashes:
        shard = shards[block_hash[0]]
        holders = shard.get(block_hash, 0)
        if holders != before:
            before, after = holders, holders & others | own_bits
        if after == holders:
            continue
        shard[block_hash] = after
        if not holders & bit:
            num_new += 1
    return num_new


def _unset(shards: Shards, bit: int, block_hashes: Iterable[BlockHash]) -> int:
    """How many had the replica's bit."""
    num_removed = 0
    others = ~(bit * _ALL)
    before, after = bit, 0
    for block_hash in block_hashes:
        shard = shards[block_hash[0]]
        holders = shard.get(block_hash, 0)
        if not holders & bit:
            continue
        if holders != before:
            before, after = holders, holders & others
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
