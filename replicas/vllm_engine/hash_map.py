"""HashMap: from vLLM's block hashes to ours, for as long as vLLM holds the block.

Owns the map and the count of copies behind each entry. Knows nothing of vLLM but that its hashes are
bytes: whoever reads its events says what was stored, with which tokens, after which block.

vLLM chains its own hashes from other inputs than ours, so one cannot be had from the other. A stored
block comes with its tokens and its parent's hash; the parent is held by the same request, so it is in
the map, and our hash and the chain position follow from it. The map holds an entry for each distinct
hash that vLLM holds, hence never more than it has blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored


class UnknownBlock(Exception):
    """vLLM named a block that it never stored, or has removed."""


@dataclass(slots=True)
class _Held:
    block_hash: BlockHash
    position: int
    num_copies: int


class HashMap:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._held: dict[bytes, _Held] = {}
        self._num_copies = 0

    def __len__(self) -> int:
        """Distinct blocks."""
        return len(self._held)

    @property
    def num_copies(self) -> int:
        """Blocks, every copy counted."""
        return self._num_copies

    def stored(
        self,
        hashes: Sequence[bytes],
        *,
        parent: bytes | None,
        root: BlockHash | None,
        token_ids: Sequence[int],
        num_prompt_tokens: int | None,
    ) -> list[BlockStored]:
        """One run of blocks, in two events if the prompt's last full block lies inside.

        `root` is needed for a run without a parent. `num_prompt_tokens` None means that the request
        is not known. Raises UnknownBlock.
        """
        block_size = self._block_size
        if len(token_ids) != len(hashes) * block_size:
            raise UnknownBlock(f"{len(hashes)} blocks cannot hold {len(token_ids)} tokens")
        chain, start = self._chain_end(parent, root)
        ours = hash_blocks(chain, token_ids, block_size, start=start * block_size)
        for position, (theirs, block_hash) in enumerate(zip(hashes, ours, strict=True), start):
            held = self._held.setdefault(theirs, _Held(block_hash, position, 0))
            held.num_copies += 1
        self._num_copies += len(ours)
        end = start + len(ours)
        prompt_end = None if num_prompt_tokens is None else num_prompt_tokens // block_size
        if prompt_end is None or not start < prompt_end <= end:
            return [BlockStored(tuple(ours), start)]
        cut = prompt_end - start
        events = [BlockStored(tuple(ours[:cut]), start, ends_prompt=True)]
        if cut < len(ours):
            events.append(BlockStored(tuple(ours[cut:]), prompt_end))
        return events

    def removed(self, hashes: Sequence[bytes]) -> BlockRemoved:
        """One copy of each. Raises UnknownBlock."""
        return BlockRemoved(tuple(self._remove(theirs) for theirs in hashes))

    def cleared(self) -> AllBlocksCleared:
        self._held.clear()
        self._num_copies = 0
        return AllBlocksCleared()

    def _chain_end(self, parent: bytes | None, root: BlockHash | None) -> tuple[BlockHash, int]:
        """What the run's first block is chained to, and its position."""
        if parent is not None:
            held = self._held.get(parent)
            if held is None:
                raise UnknownBlock(f"the parent {parent.hex()} of a stored block is not held")
            return held.block_hash, held.position + 1
        if root is None:
            raise UnknownBlock("a prompt's first block comes without a namespace")
        return root, 0

    def _remove(self, theirs: bytes) -> BlockHash:
        held = self._held.get(theirs)
        if held is None:
            raise UnknownBlock(f"the removed block {theirs.hex()} is not held")
        held.num_copies -= 1
        self._num_copies -= 1
        if held.num_copies == 0:
            del self._held[theirs]
        return held.block_hash
