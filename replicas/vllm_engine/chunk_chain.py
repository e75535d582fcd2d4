"""ChunkChain: one request's chunks in vLLM, under our names, and the users who computed them.

Owns the request's block hashes, computed on demand. Pure: knows nothing of vLLM, whose own hashes have no
meaning outside it.
"""

from collections.abc import Callable, Iterable, Sequence

from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.tenant_shares import NOBODYS, Tenancy
from replicas.protocol.blocks import BlockHash, ImageTokens, PublishedBeginning, hash_blocks
from replicas.protocol.frames import NO_USER, UserTag


class ChunkChain:
    """`token_ids` is read anew with every call: it grows while the request runs.

    The request is one of `user`. Its first `num_found_tokens` were found somewhere, the others it computes.
    """

    def __init__(
        self,
        root: BlockHash,
        token_ids: Sequence[int],
        *,
        block_size: int,
        blocks_per_chunk: int,
        published: PublishedBeginning | None = None,
        media: Sequence[ImageTokens] = (),
    ) -> None:
        self.user: UserTag = NO_USER
        self.tenancy: Tenancy = NOBODYS
        self.num_found_tokens = 0
        self.has_started = False
        self.waits_until = 0.0
        """Deadline of its wait for chunks on their way into host memory, by the caller's clock."""
        self.read: frozenset[BlockHash] = frozenset()
        """Chunks that are read from disk for it."""
        self.transfer: int | None = None
        """Transfer that pulls chunks from a peer for it."""
        self.num_planned_tokens = 0
        """To have on the device when it starts, where anything is read or pulled for it."""
        self.num_lost_tokens = 0
        """The part of these that did not come."""
        self.num_unmoved_tokens = 0
        """Below the device, and sooner computed than moved."""
        self._root = root
        self._published = published
        self.media = media
        self._token_ids = token_ids
        self._block_size = block_size
        self._blocks_per_chunk = blocks_per_chunk
        self._hashes: list[BlockHash] = []
        self._loaded: dict[BlockHash, UserTag] = {}
        self._loaded_from_disk: set[int] = set()
        """Last blocks of chunks that were read for it and then loaded."""
        self._loaded_from_peer: set[int] = set()

    def name(self, end: int) -> ChunkName:
        """Return the chunk that ends before the token at position `end`, a multiple of its size."""
        num_blocks = end // self._block_size
        num_before = num_blocks - self._blocks_per_chunk
        hashes = self._hashes_up_to(num_blocks)
        return ChunkName(
            hashes[num_blocks - 1], hashes[num_before - 1] if num_before else None, num_blocks - 1
        )

    def names(self, start: int = 0) -> list[ChunkName]:
        """All full chunks from the one on that begins at position `start`."""
        size = self._block_size * self._blocks_per_chunk
        return [self.name(end) for end in range(start + size, len(self._token_ids) + 1, size)]

    def load(self, name: ChunkName, writers: Sequence[UserTag], transfer: int | None = None) -> None:
        """Record that the transfer brought this chunk back to the device. Without `writers` its users are
        unknown."""
        self._loaded.update(zip(self._blocks(name), writers, strict=False))
        if transfer is not None and transfer == self.transfer:
            self._loaded_from_peer.add(name.last_block)
        elif name.key in self.read:
            self._loaded_from_disk.add(name.last_block)

    def num_disk_tokens(self, start: int, end: int) -> int:
        """Count the tokens at positions `[start, end)` that were read from disk and loaded for it."""
        return self._num_tokens(self._loaded_from_disk, start, end)

    def num_pulled_tokens(self, start: int, end: int) -> int:
        """And those that were pulled from a peer and loaded for it."""
        return self._num_tokens(self._loaded_from_peer, start, end)

    def _num_tokens(self, last_blocks: Iterable[int], start: int, end: int) -> int:
        num_tokens = 0
        for last_block in last_blocks:
            last = (last_block + 1) * self._block_size
            first = last - self._blocks_per_chunk * self._block_size
            num_tokens += max(0, min(last, end) - max(first, start))
        return num_tokens

    def loaded_from(self, block_hash: BlockHash) -> UserTag | None:
        """Return the user whose request computed a block loaded for this one; None for any other."""
        return self._loaded.get(block_hash)

    def writers(self, name: ChunkName, known: Callable[[BlockHash], UserTag | None]) -> tuple[UserTag, ...]:
        """Return the user of each block, if `known` or this request can tell."""
        first_block = name.last_block + 1 - self._blocks_per_chunk
        return tuple(
            self._writer(block_hash, block, known)
            for block, block_hash in enumerate(self._blocks(name), first_block)
        )

    def _writer(
        self, block_hash: BlockHash, block: int, known: Callable[[BlockHash], UserTag | None]
    ) -> UserTag:
        for writer in (known(block_hash), self._loaded.get(block_hash)):
            if writer is not None:
                return writer
        return self.user if block * self._block_size >= self.num_found_tokens else NO_USER

    def _blocks(self, name: ChunkName) -> list[BlockHash]:
        end = name.last_block + 1
        return self._hashes_up_to(end)[end - self._blocks_per_chunk : end]

    def _hashes_up_to(self, num_blocks: int) -> list[BlockHash]:
        """Return at least that many hashes, from the first."""
        num_known = len(self._hashes)
        if num_blocks > num_known:
            start = num_known * self._block_size
            self._hashes += hash_blocks(
                self._root,
                self._token_ids[start : num_blocks * self._block_size],
                self._block_size,
                parent=self._hashes[-1] if num_known else None,
                start=start,
                published=self._published,
                media=self.media,
            )
        assert len(self._hashes) >= num_blocks, "a chunk is named when all its tokens are known"
        return self._hashes
