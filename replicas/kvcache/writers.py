"""BlockWriters: which user's request first computed each cached block.

Owns that bounded memory. Engines report here what they store and evict, and ask whose blocks a request has
hit.

The writer belongs to the hash, not to a copy: a second copy changes nothing. The entry goes with the last
copy, so the next request to compute the block becomes its writer.
"""

from collections.abc import Iterable, Sequence
from itertools import islice, repeat
from typing import NamedTuple

from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import NO_USER, UserTag


class Shares(NamedTuple):
    """A request's hit, divided into tokens that its own user computed and tokens of other users."""

    own: int
    cross_user: int


NO_SHARES = Shares(0, 0)


class BlockWriters:
    """Beyond `max_blocks` entries the oldest sixteenth is forgotten, and counts as no user's."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._writers: dict[BlockHash, UserTag] = {}  # in the order in which they were written

    def __len__(self) -> int:
        return len(self._writers)

    def wrote(self, block_hashes: Iterable[BlockHash], user: UserTag) -> None:
        """`user` computed these blocks; those that have a writer keep it."""
        writers = self._writers
        for block_hash in block_hashes:
            writers.setdefault(block_hash, user)
        num_too_many = len(writers) - self._max_blocks
        if num_too_many > 0:
            # Many at once: the first entry of a dict lies behind the gaps of all that were deleted there.
            self.forget(list(islice(writers, max(num_too_many, self._max_blocks // 16))))

    def forget(self, block_hashes: Iterable[BlockHash]) -> None:
        """No copy of these blocks is left. Unknown ones are ignored."""
        for block_hash in block_hashes:
            self._writers.pop(block_hash, None)

    def clear(self) -> None:
        self._writers.clear()

    def tags(self, block_hashes: Iterable[BlockHash]) -> tuple[UserTag, ...]:
        """Return the user who wrote each block."""
        return tuple(map(self._writers.get, block_hashes, repeat(NO_USER)))

    def writer(self, block_hash: BlockHash) -> UserTag | None:
        """None for a block that is not known here. NO_USER for one whose writer is not."""
        return self._writers.get(block_hash)

    def shares(self, block_hashes: Iterable[BlockHash], user: UserTag) -> Shares:
        """How many of these blocks the user wrote, and how many another. One without a writer is neither."""
        if user == NO_USER:
            return NO_SHARES
        writers = [*map(self._writers.get, block_hashes, repeat(NO_USER))]
        num_own = writers.count(user)
        return Shares(num_own, len(writers) - num_own - writers.count(NO_USER))

    def token_shares(
        self, block_hashes: Sequence[BlockHash], user: UserTag, *, block_size: int, num_prompt_tokens: int
    ) -> Shares:
        """Divide the tokens of a prompt with these leading blocks by user.

        A resumed request hits blocks beyond its prompt, and one in which the prompt ends.
        """
        num_whole, num_left = divmod(num_prompt_tokens, block_size)
        own, cross_user = self.shares(block_hashes[:num_whole], user)
        own, cross_user = own * block_size, cross_user * block_size
        if num_left:
            last = self.shares(block_hashes[num_whole : num_whole + 1], user)
            own, cross_user = own + num_left * last.own, cross_user + num_left * last.cross_user
        return Shares(own, cross_user)
