"""WriteQueues: which chunks wait for a file, and which is next.

A chunk is written after those before it in its chain: next is the first chunk without a file of the chain
whose turn it is. The path is remembered, so that a chain of n chunks is written in n steps.
"""

from collections import OrderedDict
from collections.abc import Mapping

from replicas.kvstore.chunk import Chunk, chain_before
from replicas.protocol.blocks import BlockHash


class WriteQueues:
    def __init__(self) -> None:
        self._leased: OrderedDict[BlockHash, None] = OrderedDict()
        self._reused: OrderedDict[BlockHash, None] = OrderedDict()
        self._once: OrderedDict[BlockHash, None] = OrderedDict()
        """Cold chunks without a file, by whether they were used again since they were made."""
        self._early: OrderedDict[BlockHash, None] = OrderedDict()
        """In host memory, in the order in which they came there; some of them have a file by now."""
        self._way: dict[BlockHash, Chunk] = {}
        """From the chunk whose turn it was to the first of its chain that could be written."""

    @property
    def num_waiting(self) -> int:
        """Cold and leased chunks."""
        return len(self._leased) + len(self._reused) + len(self._once)

    @property
    def has_early(self) -> bool:
        return bool(self._early)

    def add(self, chunk: Chunk, *, is_leased: bool) -> None:
        if is_leased:
            self._leased[chunk.name.key] = None
        else:
            waiting = self._reused if chunk.num_uses > 1 else self._once
            waiting[chunk.name.key] = None

    def add_early(self, key: BlockHash) -> None:
        self._early[key] = None

    def forget(self, key: BlockHash) -> None:
        """Stop waiting, except for an idle disk."""
        for waiting in (self._leased, self._reused, self._once):
            waiting.pop(key, None)
        while key in self._way:
            self._way.popitem()

    def forget_early(self, key: BlockHash) -> None:
        self._early.pop(key, None)

    def next_urgent(self) -> BlockHash | None:
        """Return the next chunk that is leased, or was used again."""
        return next(iter(self._leased), None) or next(iter(self._reused), None)

    def next_once(self) -> BlockHash | None:
        return next(iter(self._once), None)

    def next_early(self) -> BlockHash | None:
        return next(iter(self._early), None)

    def first_unwritten(self, chunk: Chunk, chunks: Mapping[BlockHash, Chunk]) -> Chunk:
        """Return the first chunk of its chain that has no file and can be written now, at latest itself.

        `chunks` are all present. One that came to be on the path is forgotten before it gets a file or leaves
        host memory.
        """
        if next(iter(self._way), None) != chunk.name.key:
            self._way = {chunk.name.key: chunk}
        first = next(reversed(self._way.values()))
        for before in chain_before(first, chunks):
            if not before.may_be_written:
                break
            self._way[before.name.key] = before
            first = before
        return first

    def clear(self) -> None:
        for waiting in (self._leased, self._reused, self._once, self._early):
            waiting.clear()
        self._way.clear()
