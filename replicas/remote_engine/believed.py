"""BelievedResidency: what a server without cache events holds, by its answers.

Pure. Owns the belief: a server holds the blocks of the prompts it has begun to answer and of the answers it
has finished, until later ones fill its cache. Other clients and other replicas at the same server are not
known of. A hit that is shorter than believed corrects it: what lay behind that point is gone, unless it was
computed again.
"""

from collections import OrderedDict
from collections.abc import Sequence

from replicas.kvcache.writers import BlockWriters, Shares
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from replicas.protocol.frames import UserTag

SHARE_BELIEVED = 0.9
"""The share of a server's blocks that is believed at most: running requests also hold blocks that are not
full."""


class BelievedResidency:
    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._most = max(1, int(SHARE_BELIEVED * num_blocks))
        self._writers = BlockWriters(num_blocks)
        self._parents: OrderedDict[BlockHash, BlockHash | None] = OrderedDict()
        """The longest ago used first, and each block before its parent: beginnings of chains stay longest."""
        self._following: dict[BlockHash, set[BlockHash]] = {}

    @property
    def num_copies(self) -> int:
        return len(self._parents)

    def num_leading(self, chain: Sequence[BlockHash]) -> int:
        """How many of a chain's first blocks are believed to be held."""
        return next((place for place, each in enumerate(chain) if each not in self._parents), len(chain))

    def shares(self, block_hashes: Sequence[BlockHash], user: UserTag, *, num_prompt_tokens: int) -> Shares:
        """Divide a hit of these blocks by the user who computed them."""
        return self._writers.token_shares(
            block_hashes, user, block_size=self._block_size, num_prompt_tokens=num_prompt_tokens
        )

    def computed(self, chain: Sequence[BlockHash], num_prompt_blocks: int, user: UserTag) -> list[CacheEvent]:
        """Believe in a chain, of which the first blocks are a prompt's."""
        chain = chain[: self._most]
        start = self.num_leading(chain)
        for place in range(start, len(chain)):
            parent = chain[place - 1] if place else None
            self._parents[chain[place]] = parent
            if parent is not None:
                self._following.setdefault(parent, set()).add(chain[place])
        for block_hash in reversed(chain):
            self._parents.move_to_end(block_hash)
        self._writers.wrote(chain[start:], user)
        gone: list[BlockHash] = []
        while len(self._parents) > self._most:
            gone.append(self._drop(next(iter(self._parents))))
        return [*_removed(gone), *_stored(chain, start, num_prompt_blocks)]

    def corrected(self, chain: Sequence[BlockHash], num_found: int, user: UserTag) -> list[CacheEvent]:
        """Take back what was wrong about a chain: only `num_found` blocks were there when it was computed.

        What follows those in other prompts is gone.
        """
        again = chain[num_found:]
        self._writers.forget(again)
        self._writers.wrote(again, user)
        if not again:
            return []
        kept, gone = set(again), list[BlockHash]()
        behind = [again[0]]
        while behind:
            block_hash = behind.pop()
            behind += self._following.get(block_hash, ())
            if block_hash not in kept:
                gone.append(block_hash)
        for block_hash in reversed(gone):  # a block after all that follow it
            self._drop(block_hash)
        return _removed(gone)

    def clear(self) -> AllBlocksCleared:
        """Believe in nothing."""
        self._parents.clear()
        self._following.clear()
        self._writers.clear()
        return AllBlocksCleared()

    def _drop(self, block_hash: BlockHash) -> BlockHash:
        """Forget a block that nothing follows any more."""
        parent = self._parents.pop(block_hash)
        self._writers.forget((block_hash,))
        if parent is not None:
            siblings = self._following[parent]
            siblings.discard(block_hash)
            if not siblings:
                del self._following[parent]
        return block_hash


def _removed(gone: Sequence[BlockHash]) -> list[CacheEvent]:
    return [BlockRemoved(tuple(gone))] if gone else []


def _stored(chain: Sequence[BlockHash], start: int, num_prompt_blocks: int) -> list[CacheEvent]:
    """Two events if the prompt's last full block is among the new ones."""
    events: list[CacheEvent] = []
    cut = min(num_prompt_blocks, len(chain))
    if start < cut:
        events.append(BlockStored(tuple(chain[start:cut]), start, ends_prompt=cut == num_prompt_blocks))
    first = max(start, cut)
    if first < len(chain):
        events.append(BlockStored(tuple(chain[first:]), first))
    return events
