"""Residency: which hashes the index should hold, counted from one engine's cache events.

Owns the counts and the thinning.

Events are a multiset, and only some hashes are *kept* in the index. A copy is in one tier, and that tier's
events alone remove it. A hash is kept while at least one copy is resident in any tier, and

* its chain position is on the index stride (equal for all copies: a hash names its whole prefix), or * any
copy was stored as the end of a prompt since the hash last became resident.

The second reason belongs to the hash, not to the copy that brought it. So copies of every hash are counted,
kept or not: otherwise removing the copy that ended a prompt would drop a hash with another copy stored
without that flag. The counts are bounded by the blocks of all tiers.

The index has the tier of a kept hash's fastest copy, since that decides the reading time; and for a dropped
hash, why its last copy went.

Resume points are kept beside that, all of them: a set of their own, since a hash may be a block and a point.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    Removal,
    ResumePointsChanged,
    Tier,
)
from replicas.protocol.keys import is_indexed


@dataclass(frozen=True, slots=True)
class NetChange:
    """The difference between two states of the kept hashes; each hash is in at most one part.

    `added`, `in_host` and `on_disk` name hashes whose fastest copy moved to the device, host memory or disk.
    `before` has the earlier tier of all hashes named here that were kept before. `reasons` has a byte, a
    `Removal`, per hash in `removed`; it is empty if all were evicted. `points` and `points_removed` are the
    difference between two sets of resume points, with `point_reasons` of the same form.
    """

    added: tuple[BlockHash, ...]
    in_host: tuple[BlockHash, ...]
    on_disk: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]
    before: Mapping[BlockHash, Tier]
    reasons: bytes = b""
    points: tuple[BlockHash, ...] = ()
    points_removed: tuple[BlockHash, ...] = ()
    point_reasons: bytes = b""


class Residency:
    def __init__(self, block_size: int, index_stride: int) -> None:
        self._block_size = block_size
        self._index_stride = index_stride
        self._copies: dict[Tier, dict[BlockHash, int]] = {tier: {} for tier in Tier}
        self._fastest: dict[BlockHash, Tier] = {}
        self._taken: dict[BlockHash, Tier] = {}
        """`_fastest` at the last take."""
        self._changed: set[BlockHash] = set()
        """Hashes in which the two differ."""
        self._reasons: dict[BlockHash, Removal] = {}
        """Why those went that were not just evicted, and have left some tier or all: see `_has_left`."""
        self._points: set[BlockHash] = set()
        self._changed_points: set[BlockHash] = set()
        """Points that came or went since the last take."""
        self._cleared_points: set[BlockHash] = set()
        """Points that last went since then because the device was cleared."""

    @property
    def kept(self) -> Set[BlockHash]:
        """The hashes that the index should hold now."""
        return self._fastest.keys()

    @property
    def fastest(self) -> Mapping[BlockHash, Tier]:
        """The tier of the fastest copy of each kept hash."""
        return self._fastest

    @property
    def points(self) -> Set[BlockHash]:
        """The resume points that the index should hold now."""
        return self._points

    def num_resident(self, tier: Tier) -> int:
        """Distinct hashes with at least one copy in this tier."""
        return len(self._copies[tier])

    @property
    def has_change(self) -> bool:
        return bool(self._changed or self._changed_points)

    def observe(self, events: Iterable[CacheEvent]) -> int:
        """Count events, in order. Returns how many removals named a hash that was not there."""
        num_unknown = 0
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved(block_hashes, tier, reason):
                    num_unknown += sum(not self._remove(each, tier, reason) for each in block_hashes)
                case AllBlocksCleared(tier):
                    cleared = self._copies[tier]
                    self._copies[tier] = {}
                    for block_hash in cleared:
                        self._has_left(block_hash, tier, Removal.CLEARED)
                    if tier is Tier.DEVICE:
                        self._cleared_points |= self._points
                        self._change_points((), tuple(self._points))
                case ResumePointsChanged(added, removed):
                    self._change_points(added, removed)
        return num_unknown

    def take_all(self) -> NetChange:
        """Every tracked hash as an addition, for a full resync."""
        self._changed = set(self._fastest)
        self._reasons = {each: reason for each, reason in self._reasons.items() if each in self._fastest}
        self._taken.clear()
        self._changed_points = set(self._points)
        return self.take_change()

    def take_change(self) -> NetChange:
        """Return the changes since the last call. A hash that came and went does not appear."""
        now: dict[Tier | None, list[BlockHash]] = {tier: [] for tier in (None, *Tier)}
        before: dict[BlockHash, Tier] = {}
        for block_hash in self._changed:
            taken = self._taken.pop(block_hash, None)
            if taken is not None:
                before[block_hash] = taken
            tier = self._fastest.get(block_hash)
            now[tier].append(block_hash)
            if tier is not None:
                self._taken[block_hash] = tier
        self._changed.clear()
        removed = tuple(now[None])
        reasons = (
            bytes(self._reasons.pop(each, Removal.EVICTED) for each in removed) if self._reasons else b""
        )
        points, points_removed = self._changed_points & self._points, self._changed_points - self._points
        self._changed_points.clear()
        point_reasons = b""
        if self._cleared_points:
            cleared = self._cleared_points
            point_reasons = bytes(
                Removal.CLEARED if each in cleared else Removal.EVICTED for each in points_removed
            )
            self._cleared_points = set()
        return NetChange(
            tuple(now[Tier.DEVICE]),
            tuple(now[Tier.HOST]),
            tuple(now[Tier.DISK]),
            removed,
            before,
            reasons if any(reasons) else b"",
            tuple(points),
            tuple(points_removed),
            point_reasons if any(point_reasons) else b"",
        )

    def _change_points(self, added: Iterable[BlockHash], removed: Iterable[BlockHash]) -> None:
        came, went = set(added) - self._points, self._points.intersection(removed)
        self._cleared_points -= came
        self._points |= came
        self._points -= went
        self._changed_points ^= came | went

    def _store(self, event: BlockStored) -> None:
        copies = self._copies[event.tier]
        last = len(event.block_hashes) - 1
        for offset, block_hash in enumerate(event.block_hashes):
            copies[block_hash] = copies.get(block_hash, 0) + 1
            self._reasons.pop(block_hash, None)
            position = event.first_block_index + offset
            ends_prompt = event.ends_prompt and offset == last
            if (
                ends_prompt
                or block_hash in self._fastest
                or is_indexed(position, self._block_size, self._index_stride)
            ):
                self._set_fastest(block_hash)

    def _remove(self, block_hash: BlockHash, tier: Tier, reason: Removal) -> bool:
        copies = self._copies[tier]
        num_copies = copies.get(block_hash)
        if num_copies is None:
            return False
        if num_copies > 1:
            copies[block_hash] = num_copies - 1
            return True
        del copies[block_hash]
        self._has_left(block_hash, tier, reason)
        return True

    def _has_left(self, block_hash: BlockHash, tier: Tier, reason: Removal) -> None:
        """The last copy in one tier is gone. If the device, which knows of no leases, evicts another copy
        later, it is still said why it is not below the device.
        """
        if block_hash not in self._fastest:
            return
        if reason is not Removal.EVICTED:
            self._reasons[block_hash] = reason
        elif tier is not Tier.DEVICE:
            self._reasons.pop(block_hash, None)
        self._set_fastest(block_hash)

    def _set_fastest(self, block_hash: BlockHash) -> None:
        tier = next((tier for tier, copies in self._copies.items() if block_hash in copies), None)
        if tier is None:
            del self._fastest[block_hash]
            if block_hash not in self._taken:
                self._reasons.pop(block_hash, None)
        else:
            self._fastest[block_hash] = tier
        if tier is self._taken.get(block_hash):
            self._changed.discard(block_hash)
        else:
            self._changed.add(block_hash)
