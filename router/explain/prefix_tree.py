"""PrefixTree: the prompts of one tenant as a radix tree of block hashes, with counts for each run of blocks.

Owns the tree, its order of use and its size in bytes. Knows hashes and counts, never tokens or text; nothing
of who holds a prefix now (`routing/overlap.py` does), of clocks or of readers.

A node is a run of blocks that every prompt so far has had as a whole. It is cut where prompts branch and
where one has ended, so that a node's counts are true for each of its blocks::

    root(namespace) ── blocks 0…90, seen 40 times ──┬── 91…95, once
                                                    └── 91…140, 3 times ── 141…150, twice

The prefix that was used the longest ago is forgotten first, from its end: a prefix is used whenever one that
it begins is.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import msgspec

from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.frames import NO_USER, PromptUsage, UserTag
from replicas.protocol.status import Epoch, ReplicaId

MARK_BYTES = 2
"""A token's mark: a digest by which two prompts are compared token by token."""
NODE_BYTES = 900
"""Measured bytes of a node, without its hashes and marks."""
MAX_USERS = 12
"""How many users are told apart at a node; requests of others are counted together."""
KEY_CHARACTERS = 24
"""How much of a prompt_cache_key is kept."""


class NamespaceName(msgspec.Struct, frozen=True):
    """A namespace, in words: what the chains of one root belong to."""

    model: str
    adapter: str | None
    tenant: str


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """How a prompt was served; `ended_at` is in seconds since 1970."""

    usage: PromptUsage
    model: str
    user: UserTag
    key: str | None
    replica_id: ReplicaId
    ended_at: float
    epoch: Epoch | None = None


class Known(msgspec.Struct, frozen=True):
    """Knowledge about a prompt at its decision, from prompts that had ended by then.

    Its first `num_tokens` were known. `replica_id` most recently served the first tokens that were known but
    not cached, in its incarnation `epoch`, under the name `model`; None if there are none. `is_elsewhere`:
    its beginning was seen in another namespace.
    """

    num_tokens: int
    replica_id: ReplicaId | None = None
    is_elsewhere: bool = False
    epoch: Epoch | None = None
    model: str | None = None


@dataclass(slots=True)
class Counts:
    """Counts of the requests whose prompts had all of a node.

    A *hit* read all of it from cache. It is a *cross-user hit* if another user had certainly computed some of
    it, and an *own* one if the same user had. `key` is the prompt_cache_key that all of them had, if they had
    the same.
    """

    num_requests: int = 0
    num_unreported: int = 0
    """Requests of which the engine did not say what was cached."""
    num_hits: int = 0
    num_cross_user_hits: int = 0
    num_own_hits: int = 0
    users: dict[UserTag, int] = field(default_factory=dict)
    num_requests_of_others: int = 0
    num_requests_without_user: int = 0
    key: str | None = None
    num_keys: int = 0
    """0, 1, or 2 for more than one."""
    first_ended_at: float = 0.0
    last: Seen | None = None

    def copy(self) -> "Counts":
        return replace(self, users=dict(self.users))

    def add(self, seen: Seen, start: int, end: int) -> None:
        """Count a prompt with this node, which has its tokens from `start` to `end`."""
        if not self.num_requests:
            self.first_ended_at = seen.ended_at
        self.num_requests += 1
        self.last = seen
        usage = seen.usage
        num_cached = usage.num_cached_tokens
        if num_cached is None:
            self.num_unreported += 1
        elif num_cached >= end:
            self.num_hits += 1
            num_cached_outside = num_cached - (end - start)
            self.num_cross_user_hits += usage.num_cross_user_tokens > num_cached_outside
            self.num_own_hits += usage.num_own_tokens > num_cached_outside
        user = seen.user
        if user == NO_USER:
            self.num_requests_without_user += 1
        elif user in self.users or len(self.users) < MAX_USERS:
            self.users[user] = self.users.get(user, 0) + 1
        else:
            self.num_requests_of_others += 1
        if seen.key is not None and seen.key != self.key:
            self.num_keys = min(2, self.num_keys + 1)
            self.key = seen.key if self.num_keys == 1 else None


class PrefixNode:
    """`start` and `end` are blocks, `latest` is the number of the last prompt that had it, `marks` are its
    tokens', if they are kept. Read it; only its tree writes."""

    __slots__ = (
        *("block_size", "children", "counts", "end", "hashes"),
        *("latest", "marks", "number", "parent", "root", "start"),
    )

    def __init__(
        self,
        number: int,
        parent: "PrefixNode | Root",
        start: int,
        hashes: bytes,
        marks: bytes,
        block_size: int,
        counts: Counts,
    ) -> None:
        self.number = number
        self.parent = parent
        self.root: Root = parent if isinstance(parent, Root) else parent.root
        self.start = start
        self.end = start + len(hashes) // HASH_BYTES
        self.hashes = hashes
        self.marks = marks
        self.block_size = block_size
        self.children: dict[bytes, PrefixNode] = {}
        self.counts = counts
        self.latest = 0

    def upwards(self) -> "Iterator[PrefixNode]":
        """Yield this node and those above it."""
        node: PrefixNode | Root = self
        while isinstance(node, PrefixNode):
            yield node
            node = node.parent

    def chain(self) -> "PackedHashes":
        """Return the block hashes of the whole prefix that ends here: always the same, wherever it is cut."""
        return PackedHashes(b"".join(reversed([node.hashes for node in self.upwards()])))


@dataclass(slots=True, eq=False)
class Root:
    block_hash: BlockHash
    namespace: NamespaceName
    children: dict[bytes, PrefixNode] = field(default_factory=dict)


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
        start = (position if position >= 0 else len(self) + position) * HASH_BYTES
        if not 0 <= start < len(self._packed):
            raise IndexError(position)
        return BlockHash(self._packed[start : start + HASH_BYTES])


class PrefixTree:
    """Its nodes' numbers come from `numbers`, which several trees may share."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._roots: dict[BlockHash, Root] = {}
        self._nodes: OrderedDict[int, PrefixNode] = OrderedDict()
        """By number; the longest ago used first. A parent comes after its children."""
        self.num_bytes = 0

    @property
    def roots(self) -> Mapping[BlockHash, Root]:
        return self._roots

    def __len__(self) -> int:
        return len(self._nodes)

    def node(self, number: int) -> PrefixNode:
        return self._nodes[number]

    def newest_first(self) -> Iterator[PrefixNode]:
        """Yield all nodes: with a node come all above it."""
        return reversed(self._nodes.values())

    def oldest(self) -> PrefixNode | None:
        return next(iter(self._nodes.values()), None)

    def add(
        self,
        root: BlockHash,
        namespace: NamespaceName,
        packed: bytes,
        block_size: int,
        seen: Seen,
        latest: int,
        marks_from: Callable[[int], bytes],
    ) -> PrefixNode | None:
        """Count a prompt with the number `latest`. Returns the node that ends with it, None without a full
        block. `marks_from` makes the marks of the tokens from a block on."""
        top = self._roots.get(root)
        if top is None:
            top = Root(root, namespace)
        path = list(self._walk(top, packed))
        end = path[-1].end if path else 0
        if end * HASH_BYTES < len(packed):
            above = path[-1] if path else top
            hashes = packed[end * HASH_BYTES :]
            path.append(self._new(above, end, hashes, marks_from(end), block_size, Counts()))
            self.num_bytes += len(path[-1].hashes) + len(path[-1].marks)
        if top.children:
            self._roots[root] = top
        for node in reversed(path):
            node.latest = latest
            node.counts.add(seen, node.start * block_size, node.end * block_size)
            self._nodes.move_to_end(node.number)
        return path[-1] if path else None

    def look(self, root: BlockHash, packed: bytes) -> Iterator[tuple[PrefixNode, int]]:
        """Yield the nodes of which the chain has any, and how far it has each."""
        above: PrefixNode | Root | None = self._roots.get(root)
        depth = 0
        while above is not None and depth < len(packed):
            node = above.children.get(packed[depth : depth + HASH_BYTES])
            if node is None:
                return
            is_whole = packed.startswith(node.hashes, depth)
            num_blocks = node.end - node.start if is_whole else _num_common(node.hashes, packed, depth)
            yield node, node.start + num_blocks
            above, depth = node if is_whole else None, depth + len(node.hashes)

    def known(self, root: BlockHash, packed: bytes, num_cached_tokens: int, decided_at: float) -> Known:
        """Return the knowledge about a prompt at its decision, given the tokens read from cache."""
        num_tokens = 0
        last: Seen | None = None
        for node, end in self.look(root, packed):
            if node.counts.first_ended_at > decided_at:
                break
            num_tokens = end * node.block_size
            if last is None and num_tokens > num_cached_tokens:
                last = node.counts.last
        if last is None:
            return Known(num_tokens)
        return Known(num_tokens, last.replica_id, epoch=last.epoch, model=last.model)

    def forget_oldest(self) -> PrefixNode:
        _, node = self._nodes.popitem(last=False)
        assert not node.children, "a prefix is forgotten after all that it begins"
        del node.parent.children[node.hashes[:HASH_BYTES]]
        self.num_bytes -= NODE_BYTES + len(node.hashes) + len(node.marks)
        if isinstance(node.parent, Root) and not node.parent.children:
            del self._roots[node.parent.block_hash]
        return node

    def _walk(self, root: Root, packed: bytes) -> Iterator[PrefixNode]:
        """Yield the nodes that the chain has as a whole; the last is cut where the chain leaves it."""
        above: PrefixNode | Root = root
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

    def _cut(self, node: PrefixNode, num_blocks: int) -> PrefixNode:
        """The node's first blocks become a node of their own, above the rest. Returns it."""
        split = num_blocks * HASH_BYTES
        marks = len(node.marks) // (node.end - node.start) * num_blocks
        hashes, counts = node.hashes[:split], node.counts.copy()
        upper = self._new(node.parent, node.start, hashes, node.marks[:marks], node.block_size, counts)
        node.parent, node.start, node.hashes = upper, upper.end, node.hashes[split:]
        node.marks = node.marks[marks:]
        upper.children[node.hashes[:HASH_BYTES]] = node
        return upper

    def _new(
        self,
        above: PrefixNode | Root,
        start: int,
        hashes: bytes,
        marks: bytes,
        block_size: int,
        counts: Counts,
    ) -> PrefixNode:
        node = PrefixNode(next(self._numbers), above, start, hashes, marks, block_size, counts)
        above.children[hashes[:HASH_BYTES]] = node
        self._nodes[node.number] = node
        self.num_bytes += NODE_BYTES
        return node


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


def short_key(key: str | None) -> str | None:
    if key is None or len(key) <= KEY_CHARACTERS:
        return key
    return key[: KEY_CHARACTERS - 1] + "…"
