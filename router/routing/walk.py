"""Walk: how deep each replica has a chain, by the thinned index.

The index has every `stride`-th block of a chain and the last full block of each prompt. Hashes are chained,
so a present hash stands for everything before it::

    block      0  1  2  3  4  5  6  7  8  9 10 11        stride = 4
    reported            x           x     x              prompt of 10 full blocks
                        └─ walk ────┘  └─ probe: up to one stride past the last hit, deepest first

A missing stride position ends the walk for that replica: nothing behind a hole counts.

Pure: bit masks in, bit masks out.
"""

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence

from replicas.protocol.blocks import BlockHash
from router.routing.holders import IN_HOST, ON_DISK, Shards, replicas_of
from router.routing.levels import Depth, View

_BELOW_DEVICE = IN_HOST | ON_DISK


class Look:
    """Further facts about a chain with known `levels`, some of which are `foretold`."""

    __slots__ = (
        "_block_hashes",
        "_by_tier",
        "_foretold",
        "_has_tiers",
        "_levels",
        "_predicted",
        "_shards",
        "_stride",
    )

    def __init__(
        self,
        shards: Shards,
        predicted: Mapping[BlockHash, int],
        block_hashes: Sequence[BlockHash],
        stride: int,
        levels: list[Depth],
        foretold: int,
        *,
        has_tiers: bool,
    ) -> None:
        self._shards = shards
        self._predicted = predicted
        self._stride = stride
        self._has_tiers = has_tiers
        self._block_hashes = block_hashes
        self._levels = levels
        self._foretold = foretold
        self._by_tier: tuple[list[Depth], list[Depth]] | None = None

    def __call__(self, view: View) -> Sequence[Depth]:
        if view is View.STORED:
            if not self._foretold:
                return self._levels
            return walk(self._shards, {}, self._block_hashes, mask_of(self._levels), self._stride)[0]
        if not self._has_tiers:
            return self._levels
        if self._by_tier is None:
            self._by_tier = _levels_by_tier(
                self._shards, self._predicted, self._block_hashes, self._levels, self._stride
            )
        on_device, in_host = self._by_tier
        return on_device if view is View.ON_DEVICE else in_host


def mask_of(levels: Iterable[Depth]) -> int:
    return functools.reduce(operator.or_, (mask for _, mask in levels), 0)


def walk(
    shards: Shards,
    predicted: Mapping[BlockHash, int],
    block_hashes: Sequence[BlockHash],
    among: int,
    stride: int,
) -> tuple[list[Depth], int]:
    """Return how deep the replicas in the mask have this chain, in any tier, deepest first, and of whom some
    block on the way is predicted and not stored."""
    levels: list[Depth] = []
    walking = among
    depth = foretold = 0
    for block_hash in block_hashes[stride - 1 :: stride]:
        missing = walking & ~shards[block_hash[0]].get(block_hash, 0)
        if missing:
            foretold_here = missing & predicted.get(block_hash, 0)
            foretold |= foretold_here
            missing ^= foretold_here
        if missing:
            end = depth + stride - 1
            foretold |= _probe(shards, block_hashes, depth, end, missing, predicted, levels)
            walking ^= missing
            if not walking:
                break
        depth += stride
    if walking:
        foretold |= _probe(shards, block_hashes, depth, len(block_hashes), walking, predicted, levels)
    levels.sort(reverse=True)
    return levels, foretold


def _probe(
    shards: Shards,
    block_hashes: Sequence[BlockHash],
    depth: int,
    end: int,
    mask: int,
    predicted: Mapping[BlockHash, int],
    levels: list[Depth],
) -> int:
    """Return the deepest block in [depth, end) that each replica of `mask` has off the stride, else `depth`.
    Of whom that block is predicted and not stored."""
    foretold = 0
    span = block_hashes[depth:end]
    held_by = [shards[block_hash[0]].get(block_hash, 0) for block_hash in span]
    if any(map(mask.__and__, held_by)) or not predicted.keys().isdisjoint(span):
        for block in range(end - depth - 1, -1, -1):
            held = mask & held_by[block]
            found = held | (mask & predicted.get(span[block], 0))
            if found:
                levels.append((depth + block + 1, found))
                foretold |= found ^ held
                mask ^= found
                if not mask:
                    return foretold
    if depth:
        levels.append((depth, mask))
    return foretold


def _levels_by_tier(
    shards: Shards,
    predicted: Mapping[BlockHash, int],
    block_hashes: Sequence[BlockHash],
    levels: Sequence[Depth],
    stride: int,
) -> tuple[list[Depth], list[Depth]]:
    """Return `levels` again, on the device alone, and in host memory or faster. A predicted block counts
    as on the device.

    No replica is deeper than in `levels`, and each has every stride position before its depth there. A
    replica with gaps ends at a stride position, though shorter prompts may have ended after it: KV moves
    by chunks.
    """

    def end(level: Depth, among: int, below: int, found: list[Depth]) -> None:
        """Split a level: which replicas with everything up to its last stride also have the rest."""
        depth, mask = level
        mask &= among
        off_stride = depth % stride
        if mask and off_stride:
            block_hash = block_hashes[depth - 1]
            holders = shards[block_hash[0]].get(block_hash, 0)
            lost = mask & replicas_of(holders & mask * below) & ~predicted.get(block_hash, 0)
            if lost:
                found.append((depth - off_stride, lost))
            mask ^= lost
        if mask:
            found.append((depth, mask))

    on_device: list[Depth] = []
    in_host: list[Depth] = []
    shallow = list(levels)
    with_device = with_host = mask_of(levels)
    marks = with_device * _BELOW_DEVICE
    depth = 0
    for block_hash in block_hashes[stride - 1 : levels[0][0] : stride]:
        holders = shards[block_hash[0]].get(block_hash, 0)
        if holders & marks:
            while shallow[-1][0] < depth + stride:
                level = shallow.pop()
                end(level, with_device, _BELOW_DEVICE, on_device)
                end(level, with_host, ON_DISK, in_host)
                with_device &= ~level[1]
                with_host &= ~level[1]
            sure = ~predicted.get(block_hash, 0)
            lost = with_device & sure & replicas_of(holders & with_device * _BELOW_DEVICE)
            if lost:
                on_device.append((depth, lost))
            with_device ^= lost
            lost = with_host & sure & replicas_of(holders & with_host * ON_DISK)
            if lost:
                in_host.append((depth, lost))
            with_host ^= lost
            if not with_host:
                break
            marks = with_device * _BELOW_DEVICE | with_host * ON_DISK
        depth += stride
    for level in shallow:
        end(level, with_device, _BELOW_DEVICE, on_device)
        end(level, with_host, ON_DISK, in_host)
    on_device.sort(reverse=True)
    in_host.sort(reverse=True)
    return on_device, in_host
