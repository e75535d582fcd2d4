"""ChainTree: prefixes of prompts as a radix tree of block hashes, with something kept for each run.

Owns the tree, its order of use and its bounds. What is kept for a node (`Kept`) is told when the node is
cut. Knows hashes, never tokens or text.

A node is a run of blocks that every prompt so far has had as a whole. It is cut where prompts branch and
where one has ended. The node that was used the longest ago is forgotten first, from its end: a prefix is used
whenever one that it begins is.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, Protocol, Self, TypeVar, overload

import msgspec

from replicas.protocol.blocks import HASH_BYTES, BlockHash


class NamespaceName(msgspec.Struct, frozen=True):
    """A namespace, in words: what the chains of one root belong to."""

    model: str
    adapter: str | None
    tenant: str


class Kept(Protocol):
    def cut(self, num_blocks: int, num_all: int, /) -> Self:
        """Return the value for a node's first blocks; the rest keeps this one."""


K = TypeVar("K", bound=Kept)
K_co = TypeVar("K_co", bound=Kept, covariant=True)


class NewKept(Protocol[K_co]):
    def __call__(self, start: int, /) -> K_co: ...


class ChainNode(Generic[K]):
    """`start` and `end` are blocks. Read it; only its tree writes."""

    __slots__ = ("block_size", "children", "end", "hashes", "number", "parent", "root", "start", "uses")

    def __init__(
        self, number: int, parent: "ChainNode[K] | Root", start: int, hashes: bytes, block_size: int, uses: K
    ) -> None:
        self.number = number
        self.parent = parent
        self.root: Root = parent if isinstance(parent, Root) else parent.root
        self.start = start
        self.end = start + len(hashes) // HASH_BYTES
        self.hashes = hashes
        self.block_size = block_size
        self.children: dict[bytes, ChainNode[K]] = {}
        self.uses = uses

    def chain(self) -> "PackedHashes":
        """The block hashes of the whole prefix that ends here: always the same, wherever it is cut."""
        runs = []
        node: ChainNode[K] | Root = self
        while isinstance(node, ChainNode):
            runs.append(node.hashes)
            node = node.parent
        return PackedHashes(b"".join(reversed(runs)))


@dataclass(slots=True, eq=False)
class Root:
    block_hash: BlockHash
    namespace: NamespaceName
    children: dict[bytes, ChainNode[Any]] = field(default_factory=dict)


class PackedHashes(Sequence[BlockHash]):
    """Block hashes in one string of bytes; each is cut out when it is asked for."""

    __slots__ = ("_packed",)

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    def __len__(self) -> int:
        return len(self._packed) // HASH_BYTES

    @overload
    def __getitem__(self, position: int, /) -> BlockHash: ...
    @overload
    def __getitem__(self, position: slice, /) -> Sequence[BlockHash]: ...
    def __getitem__(self, position: int | slice, /) -> BlockHash | Sequence[BlockHash]:
        if isinstance(position, slice):
            return [self[one] for one in range(*position.indices(len(self)))]
        start = range(len(self))[position] * HASH_BYTES
        return BlockHash(self._packed[start : start + HASH_BYTES])


class ChainTree(Generic[K]):
    def __init__(self, *, max_nodes: int | None = None, max_blocks: int | None = None) -> None:
        self._max_nodes = max_nodes
        self._max_blocks = max_blocks
        self._roots: dict[BlockHash, Root] = {}
        self._nodes: OrderedDict[int, ChainNode[K]] = OrderedDict()
        """By number; the longest ago used first. A parent comes after its children."""
        self._num_blocks = 0
        self._last_number = 0
        self.num_forgotten = 0

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def node(self, number: int) -> ChainNode[K] | None:
        return self._nodes.get(number)

    def recent(self, count: int) -> list[ChainNode[K]]:
        """The last used, newest first: with a node come all above it."""
        return list(islice(reversed(self._nodes.values()), count))

    def first_nodes(self, root: BlockHash) -> Iterator[ChainNode[K]]:
        """Yield the nodes that chains of this root begin with, newest first."""
        top = self._roots.get(root)
        return iter(()) if top is None else reversed(top.children.values())

    def oldest(self) -> ChainNode[K] | None:
        return next(iter(self._nodes.values()), None)

    def use(
        self, root: BlockHash, namespace: NamespaceName, packed: bytes, block_size: int, new: "NewKept[K]"
    ) -> list[ChainNode[K]]:
        """The nodes that make up the chain, the last of which ends with it. `new` makes what is kept for one
        that begins with a block."""
        top = self._roots.get(root)
        if top is None:
            top = Root(root, namespace)
        path = list(self._walk(top, packed))
        end = path[-1].end if path else 0
        if end * HASH_BYTES < len(packed):
            path.append(self._grow(path[-1] if path else top, end, packed, block_size, new(end)))
        for node in reversed(path):
            self._nodes.move_to_end(node.number)
        if top.children:
            self._roots[root] = top
        return path

    def _keep_bounds(self) -> None:
        while (self._max_nodes is not None and len(self._nodes) > self._max_nodes) or (
            self._max_blocks is not None and self._num_blocks > self._max_blocks
        ):
            self.forget_oldest()

    def look(self, root: BlockHash, packed: bytes) -> Iterator[tuple[ChainNode[K], int]]:
        """The nodes of which the chain has any, and how far it has each."""
        above: ChainNode[K] | Root | None = self._roots.get(root)
        depth = 0
        while above is not None and depth < len(packed):
            node = above.children.get(packed[depth : depth + HASH_BYTES])
            if node is None:
                return
            is_whole = packed.startswith(node.hashes, depth)
            num_blocks = node.end - node.start if is_whole else _num_common(node.hashes, packed, depth)
            yield node, node.start + num_blocks
            above, depth = node if is_whole else None, depth + len(node.hashes)

    def _walk(self, root: Root, packed: bytes) -> Iterator[ChainNode[K]]:
        """The nodes that the chain has as a whole; the last is cut where the chain leaves it."""
        above: ChainNode[K] | Root = root
        depth = 0
        while depth < len(packed):
            node = above.children.get(packed[depth : depth + HASH_BYTES])
            if node is None:
                return
            if not packed.startswith(node.hashes, depth):
                yield self._cut(node, _num_common(node.hashes, packed, depth))
                return
            yield node
            above, depth = node, depth + len(node.hashes)

    def _cut(self, node: ChainNode[K], num_blocks: int) -> ChainNode[K]:
        """The node's first blocks become a node of their own, above the rest. Returns it."""
        split = num_blocks * HASH_BYTES
        kept = node.uses.cut(num_blocks, node.end - node.start)
        upper = self._new(node.parent, node.start, node.hashes[:split], node.block_size, kept)
        node.parent.children[upper.hashes[:HASH_BYTES]] = upper
        node.parent, node.start, node.hashes = upper, upper.end, node.hashes[split:]
        upper.children[node.hashes[:HASH_BYTES]] = node
        return upper

    def _grow(
        self, above: ChainNode[K] | Root, start: int, packed: bytes, block_size: int, uses: K
    ) -> ChainNode[K]:
        node = self._new(above, start, packed[start * HASH_BYTES :], block_size, uses)
        above.children[node.hashes[:HASH_BYTES]] = node
        self._num_blocks += node.end - node.start
        return node

    def _new(
        self, above: ChainNode[K] | Root, start: int, hashes: bytes, block_size: int, uses: K
    ) -> ChainNode[K]:
        self._last_number += 1
        node = ChainNode(self._last_number, above, start, hashes, block_size, uses)
        self._nodes[node.number] = node
        return node

    def forget_oldest(self) -> None:
        _, node = self._nodes.popitem(last=False)
        assert not node.children, "a prefix is forgotten after all that it begins"
        del node.parent.children[node.hashes[:HASH_BYTES]]
        self._num_blocks -= node.end - node.start
        self.num_forgotten += 1
        if isinstance(node.parent, Root) and not node.parent.children:
            del self._roots[node.parent.block_hash]


def _num_common(run: bytes, packed: bytes, depth: int) -> int:
    """Blocks with which the run and the chain from `depth` on begin alike: hashes are chained, so a search
    in halves finds where they part."""
    low, high = 0, min(len(run), len(packed) - depth) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        start = (middle - 1) * HASH_BYTES
        if run[start : start + HASH_BYTES] == packed[depth + start : depth + start + HASH_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
