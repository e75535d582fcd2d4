"""BlockWriters: which user's request first computed each cached block.

Owns that memory, bounded. Knows nothing of requests, pools or engines: every engine tells it what it
stores and loses, and asks it whose blocks a request has hit.

The writer belongs to the hash, not to a copy: a second copy changes nothing, and the entry goes when
the last copy has gone, so that whoever computes the block anew is its writer then.
"""

from collections import OrderedDict
from collections.abc import Iterable

from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import NO_USER, UserTag


class BlockWriters:
    """Beyond `max_blocks` entries the oldest are forgotten, and count as nobody's."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._writers: OrderedDict[BlockHash, UserTag] = OrderedDict()

    def __len__(self) -> int:
        return len(self._writers)

    def wrote(self, block_hashes: Iterable[BlockHash], user: UserTag) -> None:
        """`user` computed these blocks; those that have a writer keep it."""
        writers = self._writers
        for block_hash in block_hashes:
            writers.setdefault(block_hash, user)
        while len(writers) > self._max_blocks:
            writers.popitem(last=False)

    def forget(self, block_hashes: Iterable[BlockHash]) -> None:
        """No copy of these blocks is left. Unknown ones are ignored."""
        for block_hash in block_hashes:
            self._writers.pop(block_hash, None)

    def clear(self) -> None:
        self._writers.clear()

    def num_cross_user(self, block_hashes: Iterable[BlockHash], user: UserTag) -> int:
        """How many of these blocks another user wrote; who is nobody in particular is not another."""
        if user == NO_USER:
            return 0
        writer_of = self._writers.get
        return sum(1 for block_hash in block_hashes if writer_of(block_hash, user) not in (user, NO_USER))
