"""Sightings: the prefixes of the prompts that this router has seen, as a radix tree with counts.

Owns the tree and its bounds. Knows hashes and counts, never tokens or text; nothing of who holds a prefix
now (`routing/overlap.py` does), of clocks or of readers.

A node is a run of blocks that every prompt so far has had as a whole. It is cut where prompts branch and
where one has ended, so that a node's counts are true for each of its blocks::

    root(namespace) ── blocks 0…90, seen 40 times ──┬── 91…95, once
                                                    └── 91…140, 3 times ── 141…150, twice

Memory is bounded by nodes and by blocks. The prefix that was seen the longest ago is forgotten first, from
its end: a prefix is seen whenever one that it begins is.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import overload

import msgspec

from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.frames import NO_USER, UserTag
from replicas.protocol.status import ReplicaId

MAX_NODES = 4096
MAX_BLOCKS = 2**19
"""Each takes the 16 bytes of its hash."""

MAX_USERS = 12
"""How many users are told apart at a node; requests of others are counted together."""

MAX_BEGINNINGS = 4096


class NamespaceName(msgspec.Struct, frozen=True):
    """A namespace, in words: what the chains of one root belong to."""

    model: str
    adapter: str | None
    tenant: str


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt that was served. `beginning` is a digest of its first tokens in no namespace, None for one
    that is too short; times are seconds of one clock, `decided_at` before `ended_at`."""

    root: BlockHash
    namespace: NamespaceName
    block_hashes: Sequence[BlockHash]
    block_size: int
    user: UserTag
    key: str | None
    replica_id: ReplicaId
    num_cached_tokens: int
    num_cross_user_tokens: int
    num_own_tokens: int
    decided_at: float
    ended_at: float
    beginning: bytes | None = None


class Known(msgspec.Struct, frozen=True):
    """What was known of a prompt when it was decided where to serve it, from prompts that had ended by then.

    `num_tokens` lead it. `replica_id` most recently served the first tokens that were known but not cached;
    None if there are none. `is_elsewhere` says that its beginning was seen in another namespace.
    """

    num_tokens: int
    replica_id: ReplicaId | None = None
    is_elsewhere: bool = False


@dataclass(slots=True)
class Uses:
    """Counts of the requests whose prompts had all of a node.

    A *hit* read all of it from cache. It is a *cross-user hit* if another user had certainly computed some of
    it, and an *own* one if the same user had.
    `key` is the prompt_cache_key that all of them had, if they had the same.
    """

    num_requests: int = 0
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
    last_ended_at: float = 0.0
    last_replica_id: ReplicaId | None = None

    def copy(self) -> "Uses":
        return Uses(
            self.num_requests,
            self.num_hits,
            self.num_cross_user_hits,
            self.num_own_hits,
            dict(self.users),
            self.num_requests_of_others,
            self.num_requests_without_user,
            self.key,
            self.num_keys,
            self.first_ended_at,
            self.last_ended_at,
            self.last_replica_id,
        )

    def add(self, sighting: Sighting, start: int, end: int) -> None:
        """A prompt with this node, which has its tokens from `start` to `end`."""
        if not self.num_requests:
            self.first_ended_at = sighting.ended_at
        self.num_requests += 1
        self.last_ended_at = sighting.ended_at
        self.last_replica_id = sighting.replica_id
        if sighting.num_cached_tokens >= end:
            self.num_hits += 1
            num_cached_outside = sighting.num_cached_tokens - (end - start)
            self.num_cross_user_hits += sighting.num_cross_user_tokens > num_cached_outside
            self.num_own_hits += sighting.num_own_tokens > num_cached_outside
        self._add_user(sighting.user)
        if sighting.key is not None and sighting.key != self.key:
            self.num_keys = min(2, self.num_keys + 1)
            self.key = sighting.key if self.num_keys == 1 else None

    def _add_user(self, user: UserTag) -> None:
        if user == NO_USER:
            self.num_requests_without_user += 1
        elif user in self.users or len(self.users) < MAX_USERS:
            self.users[user] = self.users.get(user, 0) + 1
        else:
            self.num_requests_of_others += 1


class Node:
    """`start` and `end` are blocks. Read it; only Sightings writes."""

    __slots__ = ("block_size", "children", "end", "hashes", "number", "parent", "root", "start", "uses")

    def __init__(
        self, number: int, parent: "Node | Root", start: int, hashes: bytes, block_size: int, uses: Uses
    ) -> None:
        self.number = number
        self.parent = parent
        self.root: Root = parent if isinstance(parent, Root) else parent.root
        self.start = start
        self.end = start + len(hashes) // HASH_BYTES
        self.hashes = hashes
        self.block_size = block_size
        self.children: dict[bytes, Node] = {}
        self.uses = uses

    def chain(self) -> "PackedHashes":
        """The block hashes of the whole prefix that ends here: always the same, wherever it is cut."""
        runs = []
        node: Node | Root = self
        while isinstance(node, Node):
            runs.append(node.hashes)
            node = node.parent
        return PackedHashes(b"".join(reversed(runs)))


@dataclass(slots=True, eq=False)
class Root:
    block_hash: BlockHash
    namespace: NamespaceName
    children: dict[bytes, Node] = field(default_factory=dict)


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


class Sightings:
    def __init__(self, *, max_nodes: int = MAX_NODES, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_nodes = max_nodes
        self._max_blocks = max_blocks
        self._roots: dict[BlockHash, Root] = {}
        self._nodes: OrderedDict[int, Node] = OrderedDict()
        """By number; the longest ago seen first. A parent comes after its children."""
        self._beginnings: OrderedDict[bytes, tuple[BlockHash, ...]] = OrderedDict()
        """The last two namespaces in which each was seen."""
        self._num_blocks = 0
        self._last_number = 0
        self.num_forgotten = 0

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def recent(self, count: int) -> list[Node]:
        """The last seen, newest first: with a node come all above it."""
        return list(islice(reversed(self._nodes.values()), count))

    def most_used(self, count: int) -> list[Node]:
        """By requests, then by recency: with a node come all above it."""
        newest_first = self.recent(len(self._nodes))
        return sorted(newest_first, key=lambda node: -node.uses.num_requests)[:count]

    def see(self, sighting: Sighting) -> Known:
        """Count a prompt. Returns what was known of it before."""
        packed = b"".join(islice(sighting.block_hashes, self._max_blocks))
        root = self._roots.get(sighting.root)
        if root is None:
            root = Root(sighting.root, sighting.namespace)
        path = list(self._walk(root, packed))
        known = self._known(path, sighting)
        end = path[-1].end if path else 0
        if end * HASH_BYTES < len(packed):
            path.append(self._grow(path[-1] if path else root, end, packed, sighting.block_size))
        for node in path:
            node.uses.add(sighting, node.start * node.block_size, node.end * node.block_size)
        for node in reversed(path):
            self._nodes.move_to_end(node.number)
        if root.children:
            self._roots[sighting.root] = root
        self._begin(sighting)
        while len(self._nodes) > self._max_nodes or self._num_blocks > self._max_blocks:
            self._forget_oldest()
        return known

    def _walk(self, root: Root, packed: bytes) -> Iterator[Node]:
        """The nodes that the chain has as a whole; the last is cut where the chain leaves it."""
        above: Node | Root = root
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

    def _cut(self, node: Node, num_blocks: int) -> Node:
        """The node's first blocks become a node of their own, above the rest. Returns it."""
        split = num_blocks * HASH_BYTES
        upper = self._new(node.parent, node.start, node.hashes[:split], node.block_size, node.uses.copy())
        node.parent.children[upper.hashes[:HASH_BYTES]] = upper
        node.parent, node.start, node.hashes = upper, upper.end, node.hashes[split:]
        upper.children[node.hashes[:HASH_BYTES]] = node
        return upper

    def _grow(self, above: Node | Root, start: int, packed: bytes, block_size: int) -> Node:
        node = self._new(above, start, packed[start * HASH_BYTES :], block_size, Uses())
        above.children[node.hashes[:HASH_BYTES]] = node
        self._num_blocks += node.end - node.start
        return node

    def _new(self, above: Node | Root, start: int, hashes: bytes, block_size: int, uses: Uses) -> Node:
        self._last_number += 1
        node = Node(self._last_number, above, start, hashes, block_size, uses)
        self._nodes[node.number] = node
        return node

    def _known(self, path: Sequence[Node], sighting: Sighting) -> Known:
        num_tokens = 0
        first_missed: Node | None = None
        for node in path:
            if node.uses.first_ended_at > sighting.decided_at:
                break
            num_tokens = node.end * node.block_size
            if first_missed is None and num_tokens > sighting.num_cached_tokens:
                first_missed = node
        before = self._beginnings.get(sighting.beginning, ()) if sighting.beginning is not None else ()
        is_elsewhere = any(root != sighting.root for root in before)
        if first_missed is None:
            return Known(num_tokens, is_elsewhere=is_elsewhere)
        uses = first_missed.uses
        return Known(num_tokens, uses.last_replica_id, is_elsewhere)

    def _begin(self, sighting: Sighting) -> None:
        if sighting.beginning is None:
            return
        others = [root for root in self._beginnings.get(sighting.beginning, ()) if root != sighting.root]
        self._beginnings[sighting.beginning] = (*others[-1:], sighting.root)
        self._beginnings.move_to_end(sighting.beginning)
        if len(self._beginnings) > MAX_BEGINNINGS:
            self._beginnings.popitem(last=False)

    def _forget_oldest(self) -> None:
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
