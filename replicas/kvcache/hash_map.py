"""HashMap: from vLLM's block hashes to ours, for as long as vLLM holds the block in any tier.

Owns the map and the count of copies, by tier, behind each entry. vLLM's hashes are bytes here:
engines read its events and pass what was stored, with which tokens, after which block.

vLLM chains its hashes from other inputs than ours, so neither follows from the other. A block that is stored
on the device comes with its tokens and its parent's hash; the parent is held by the same request, so it is in
the map, and gives the chain's root, our hash and the position. The map has an entry per distinct hash in
vLLM, so never more than its tiers have blocks.

A copy in another tier comes without a namespace, so the block is known by the device's earlier event: it was
computed there. Two cases are special. A block may leave the device before its copy elsewhere is reported: the
names of the last `num_remembered` departed blocks are kept for that. And a tier may hold blocks of an earlier
process: those copies are counted without a name, and reported when the device has read the block back and
names it.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from replicas.protocol.blocks import HASH_BYTES, BlockHash, ImageTokens, hash_blocks
from replicas.protocol.events import AllBlocksCleared, BlockStored, Tier


class PlacedMedia(NamedTuple):
    """A media item, and its start relative to a block that it overlaps."""

    content_hash: bytes
    offset: int


class UnknownBlock(Exception):
    """vLLM named a block that it never stored, or has removed."""


def root_in(extra_keys: Any) -> BlockHash | None:
    """Return the root that a block was hashed with: the last of its keys, and behind the adapter's name if it
    has one. None: it goes on under that of the block before it."""
    if not extra_keys:
        return None
    try:
        root = bytes.fromhex(extra_keys[-1])
    except (TypeError, ValueError):
        return None
    return BlockHash(root) if len(root) == HASH_BYTES else None


class _Name(NamedTuple):
    """`root` is the key of the chain: the same object in all names of one."""

    block_hash: BlockHash
    position: int
    root: BlockHash


@dataclass(slots=True)
class _HeldHash:
    name: _Name | None
    copies: Counter[Tier] = field(default_factory=Counter)


class HashMap:
    """`on_gone` is called with blocks that no tier holds any more, once they are forgotten."""

    def __init__(
        self,
        block_size: int,
        *,
        on_gone: Callable[[Iterable[BlockHash]], None] = lambda _: None,
        num_remembered: int = 0,
    ) -> None:
        self._block_size = block_size
        self._on_gone = on_gone
        self._num_remembered = num_remembered
        self._held: dict[bytes, _HeldHash] = {}
        self._remembered: OrderedDict[bytes, _Name] = OrderedDict()
        self._num_copies: Counter[Tier] = Counter()

    def __len__(self) -> int:
        """Distinct blocks."""
        return len(self._held)

    def num_copies(self, tier: Tier = Tier.DEVICE) -> int:
        """Blocks of a tier, every copy counted."""
        return self._num_copies[tier]

    def num_leading(self, hashes: Iterable[bytes]) -> int:
        """How many of a chain's blocks, from its first on, lie in some tier."""
        num_blocks = 0
        for theirs in hashes:
            if theirs not in self._held:
                break
            num_blocks += 1
        return num_blocks

    def names(self, hashes: Iterable[bytes]) -> list[BlockHash]:
        """Our hashes of a chain's blocks, up to the first that is not known."""
        found: list[BlockHash] = []
        for theirs in hashes:
            held = self._held.get(theirs)
            if held is None or held.name is None:
                break
            found.append(held.name.block_hash)
        return found

    def stored(
        self,
        hashes: Sequence[bytes],
        *,
        parent: bytes | None,
        roots: Sequence[BlockHash | None],
        token_ids: Sequence[int],
        num_prompt_tokens: int | None,
        media: Sequence[Sequence[PlacedMedia]] = (),
    ) -> list[BlockStored]:
        """Return the events of one run of blocks on the device: two if the prompt's last full block is
        inside.

        `roots` are those that blocks were hashed with: a run without a parent begins with one, and each other
        is one from which the chain continues under another root. `media` are the items that each block
        overlaps. `num_prompt_tokens` None means that the request is unknown. Copies elsewhere that now have a
        name follow. Raises UnknownBlock.
        """
        block_size = self._block_size
        if len(token_ids) != len(hashes) * block_size:
            raise UnknownBlock(f"{len(hashes)} blocks cannot hold {len(token_ids)} tokens")
        root, chain, start = self._chain_end(parent, roots[0] if roots else None)
        ours: list[BlockHash] = []
        named: list[BlockStored] = []
        cuts = [place for place in range(1, len(roots)) if roots[place] is not None]
        for first, last in pairwise([0, *cuts, len(hashes)]):
            root = roots[first] or root if first else root
            run = token_ids[first * block_size : last * block_size]
            spans = _spans(media[first:last], block_size)
            ours += hash_blocks(root, run, block_size, parent=ours[-1] if ours else chain, media=spans)
            for theirs, block_hash in zip(hashes[first:last], ours[first:], strict=True):
                named += self._store(theirs, _Name(block_hash, start + first, root))
                first += 1
        end = start + len(ours)
        prompt_end = None if num_prompt_tokens is None else num_prompt_tokens // block_size
        if prompt_end is None or not start < prompt_end <= end:
            return [BlockStored(tuple(ours), start), *named]
        cut = prompt_end - start
        events = [BlockStored(tuple(ours[:cut]), start, ends_prompt=True)]
        if cut < len(ours):
            events.append(BlockStored(tuple(ours[cut:]), prompt_end))
        return [*events, *named]

    def copied(self, theirs: bytes, tier: Tier) -> BlockStored | None:
        """One more copy of a block, in a tier that is not the device's. None while it has no name."""
        held = self._held.get(theirs)
        if held is None:
            held = self._held[theirs] = _HeldHash(self._remembered.pop(theirs, None))
        self._count(held, tier, 1)
        return _copy(held.name, tier) if held.name is not None else None

    def removed(self, theirs: bytes, tier: Tier = Tier.DEVICE) -> BlockHash | None:
        """One copy less. None if it was never announced, for want of a name. Raises UnknownBlock."""
        held = self._held.get(theirs)
        if held is None or not held.copies[tier]:
            raise UnknownBlock(f"the removed block {theirs.hex()} is not held ({tier})")
        self._count(held, tier, -1)
        if not held.copies.total():
            self._drop(theirs)
        return None if held.name is None else held.name.block_hash

    def cleared(self, tier: Tier = Tier.DEVICE) -> AllBlocksCleared:
        for theirs, held in list(self._held.items()):
            self._count(held, tier, -held.copies[tier])
            if not held.copies.total():
                self._drop(theirs)
        return AllBlocksCleared(tier)

    def _chain_end(
        self, parent: bytes | None, root: BlockHash | None
    ) -> tuple[BlockHash, BlockHash | None, int]:
        """Return the root of the run's chain, the hash that its first block is chained to, and that block's
        position."""
        if parent is not None:
            held = self._held.get(parent)
            if held is None or held.name is None:
                raise UnknownBlock(f"the parent {parent.hex()} of a stored block is not held")
            return root or held.name.root, held.name.block_hash, held.name.position + 1
        if root is None:
            raise UnknownBlock("a prompt's first block comes without a namespace")
        return root, None, 0

    def _store(self, theirs: bytes, name: _Name) -> list[BlockStored]:
        """Count a copy on the device; the block's copies elsewhere, if they had no name before."""
        held = self._held.get(theirs)
        if held is None:
            if self._remembered.pop(theirs, None) is not None:
                self._on_gone((name.block_hash,))  # it is computed anew
            held = self._held[theirs] = _HeldHash(name)
        named: list[BlockStored] = []
        if held.name is None:
            held.name = name
            named = [_copy(name, tier) for tier in held.copies.elements()]
        self._count(held, Tier.DEVICE, 1)
        return named

    def _count(self, held: _HeldHash, tier: Tier, change: int) -> None:
        held.copies[tier] += change
        self._num_copies[tier] += change

    def _drop(self, theirs: bytes) -> None:
        name = self._held.pop(theirs).name
        if name is None:
            return
        self._remembered[theirs] = name
        if len(self._remembered) > self._num_remembered:
            _, oldest = self._remembered.popitem(last=False)
            self._on_gone((oldest.block_hash,))


def _spans(media: Sequence[Sequence[PlacedMedia]], block_size: int) -> list[ImageTokens]:
    """Return the media in the blocks of a run, counted from its first token; an item may begin before it."""
    ends: dict[tuple[int, bytes], int] = {}
    for block, items in enumerate(media):
        for content_hash, offset in items:
            ends[block * block_size + offset, content_hash] = (block + 1) * block_size
    return [
        ImageTokens(content_hash, start, end - start) for (start, content_hash), end in sorted(ends.items())
    ]


def _copy(name: _Name, tier: Tier) -> BlockStored:
    return BlockStored((name.block_hash,), name.position, tier=tier)
