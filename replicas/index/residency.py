"""Residency: which hashes the index should hold, counted from the cache events of one engine.

Owns the counts and the thinning.

Events are a multiset, and only some hashes are *kept* in the index. A copy lies in one tier, and goes by
that tier's events alone. A hash is kept while at least one copy is resident, whatever the tier, and

* its chain position lies on the index stride (the same for every copy: a hash names its whole prefix), or
* any copy was stored as the end of a prompt since the hash last became resident.

The second reason belongs to the hash, not to the copy that brought it. So copies are counted for every
hash, kept or not: else the removal of the copy that ended a prompt would make the index forget a hash
of which a copy, stored without that flag, is still there. The counts are bounded by the blocks of all tiers.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass

from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, Tier
from replicas.protocol.keys import is_indexed


@dataclass(frozen=True, slots=True)
class NetChange:
    """What turned one set of kept hashes into another: `added` and `removed` are disjoint."""

    added: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]


class Residency:
    def __init__(self, block_size: int, index_stride: int) -> None:
        self._block_size = block_size
        self._index_stride = index_stride
        self._copies: dict[Tier, dict[BlockHash, int]] = {tier: {} for tier in Tier}
        self._kept: set[BlockHash] = set()
        self._added: set[BlockHash] = set()
        self._removed: set[BlockHash] = set()

    @property
    def kept(self) -> Set[BlockHash]:
        """The hashes that the index should hold now."""
        return self._kept

    def num_resident(self, tier: Tier) -> int:
        """Distinct hashes with at least one copy in this tier."""
        return len(self._copies[tier])

    @property
    def has_change(self) -> bool:
        return bool(self._added or self._removed)

    def observe(self, events: Iterable[CacheEvent]) -> int:
        """Count events, in order. Returns how many removals named a hash that was not there."""
        num_unknown = 0
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved(block_hashes, tier):
                    num_unknown += sum(not self._remove(block_hash, tier) for block_hash in block_hashes)
                case AllBlocksCleared(tier):
                    cleared = self._copies[tier]
                    self._copies[tier] = {}
                    for block_hash in cleared:
                        self._forget_unless_resident(block_hash)
        return num_unknown

    def take_change(self) -> NetChange:
        """What became of `kept` since the last take: a hash that came and went is in neither part."""
        change = NetChange(tuple(self._added), tuple(self._removed))
        self._added.clear()
        self._removed.clear()
        return change

    def _store(self, event: BlockStored) -> None:
        copies = self._copies[event.tier]
        last = len(event.block_hashes) - 1
        for offset, block_hash in enumerate(event.block_hashes):
            copies[block_hash] = copies.get(block_hash, 0) + 1
            position = event.first_block_index + offset
            ends_prompt = event.ends_prompt and offset == last
            if ends_prompt or is_indexed(position, self._block_size, self._index_stride):
                self._keep(block_hash)

    def _remove(self, block_hash: BlockHash, tier: Tier) -> bool:
        copies = self._copies[tier]
        num_copies = copies.get(block_hash)
        if num_copies is None:
            return False
        if num_copies > 1:
            copies[block_hash] = num_copies - 1
            return True
        del copies[block_hash]
        self._forget_unless_resident(block_hash)
        return True

    def _keep(self, block_hash: BlockHash) -> None:
        if block_hash in self._kept:
            return
        self._kept.add(block_hash)
        if block_hash in self._removed:
            self._removed.discard(block_hash)
        else:
            self._added.add(block_hash)

    def _forget_unless_resident(self, block_hash: BlockHash) -> None:
        if block_hash not in self._kept or any(block_hash in copies for copies in self._copies.values()):
            return
        self._kept.discard(block_hash)
        if block_hash in self._added:
            self._added.discard(block_hash)
        else:
            self._removed.add(block_hash)
