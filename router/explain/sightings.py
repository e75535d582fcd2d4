"""Sightings: the prefixes of the prompts that this router has seen, as a radix tree with counts.

Owns the counts and the bounds of the tree. Knows hashes and counts, never tokens or text; nothing of who
holds a prefix now (`routing/overlap.py` does), of clocks or of readers.

A node is a run of blocks that every prompt so far has had as a whole. It is cut where prompts branch and
where one has ended, so that a node's counts are true for each of its blocks::

    root(namespace) ── blocks 0…90, seen 40 times ──┬── 91…95, once
                                                    └── 91…140, 3 times ── 141…150, twice

Memory is bounded by nodes and by blocks. The prefix that was seen the longest ago is forgotten first, from
its end: a prefix is seen whenever one that it begins is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import NO_USER, UserTag
from replicas.protocol.status import Epoch, ReplicaId
from router.explain.chain_tree import ChainNode, ChainTree, NamespaceName
from router.shared.bounded_cache import BoundedCache

MAX_NODES = 4096
MAX_BLOCKS = 2**19
"""Each takes the 16 bytes of its hash."""

MAX_USERS = 12
"""How many users are told apart at a node; requests of others are counted together."""

MAX_BEGINNINGS = 4096

KEY_CHARACTERS = 24
"""How much of a prompt_cache_key is kept."""


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
    last_epoch: Epoch | None = None
    last_model: str | None = None

    def cut(self, num_blocks: int, num_all: int) -> "Uses":
        """True for each block, so for the first ones as well."""
        return self.copy()

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
            self.last_epoch,
            self.last_model,
        )

    def add(self, sighting: Sighting, start: int, end: int) -> None:
        """A prompt with this node, which has its tokens from `start` to `end`."""
        if not self.num_requests:
            self.first_ended_at = sighting.ended_at
        self.num_requests += 1
        self.last_ended_at = sighting.ended_at
        self.last_replica_id, self.last_epoch = sighting.replica_id, sighting.epoch
        self.last_model = sighting.namespace.model
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


Node = ChainNode[Uses]


class Sightings(ChainTree[Uses]):
    def __init__(self, *, max_nodes: int = MAX_NODES, max_blocks: int = MAX_BLOCKS) -> None:
        super().__init__(max_nodes=max_nodes, max_blocks=max_blocks)
        self._beginnings: BoundedCache[bytes, tuple[BlockHash, ...]] = BoundedCache(MAX_BEGINNINGS)
        """The last two namespaces in which each was seen."""

    def most_used(self, count: int) -> list[Node]:
        """By requests, then by recency: with a node come all above it."""
        newest_first = self.recent(len(self._nodes))
        return sorted(newest_first, key=lambda node: -node.uses.num_requests)[:count]

    def see(self, sighting: Sighting) -> None:
        """Count a prompt."""
        packed = b"".join(islice(sighting.block_hashes, self._max_blocks))
        block_size = sighting.block_size
        for node in self.use(sighting.root, sighting.namespace, packed, block_size, lambda start: Uses()):
            node.uses.add(sighting, node.start * block_size, node.end * block_size)
        self._begin(sighting)
        self._keep_bounds()

    def known(
        self,
        root: BlockHash,
        block_hashes: Sequence[BlockHash],
        *,
        num_cached_tokens: int,
        decided_at: float,
        beginning: bytes | None = None,
    ) -> Known:
        """Return the knowledge about a prompt at its decision, given the tokens read from cache."""
        num_tokens = 0
        first_missed: Node | None = None
        for node, end in self.look(root, b"".join(islice(block_hashes, self._max_blocks))):
            if node.uses.first_ended_at > decided_at:
                break
            num_tokens = end * node.block_size
            if first_missed is None and num_tokens > num_cached_tokens:
                first_missed = node
        before = (self._beginnings.peek(beginning) if beginning is not None else None) or ()
        is_elsewhere = any(other != root for other in before)
        if first_missed is None:
            return Known(num_tokens, is_elsewhere=is_elsewhere)
        uses = first_missed.uses
        return Known(num_tokens, uses.last_replica_id, is_elsewhere, uses.last_epoch, uses.last_model)

    def _begin(self, sighting: Sighting) -> None:
        if sighting.beginning is None:
            return
        others = [root for root in self._beginnings.peek(sighting.beginning) or () if root != sighting.root]
        self._beginnings.put(sighting.beginning, (*others[-1:], sighting.root))


def short_key(key: str | None) -> str | None:
    if key is None or len(key) <= KEY_CHARACTERS:
        return key
    return key[: KEY_CHARACTERS - 1] + "…"
