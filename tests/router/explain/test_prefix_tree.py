"""Prefixes that a router has seen: a radix tree against a list of prefixes."""

import hashlib
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import NO_USER, PromptUsage, UserTag
from replicas.protocol.status import ReplicaId
from router.explain.prefix_tree import (
    MAX_USERS,
    NODE_BYTES,
    Counts,
    Known,
    NamespaceName,
    PackedHashes,
    PrefixNode,
    PrefixTree,
    Seen,
)
from tests.examples import examples

BLOCK_SIZE = 16
ROOTS = (BlockHash(b"a" * 16), BlockHash(b"b" * 16))
USERS = (NO_USER, UserTag(b"ada"), UserTag(b"grace"))
R0 = ReplicaId("r0")
NAMESPACE = NamespaceName("toy", None, "default")

Prefix = tuple[BlockHash, ...]
"""The root, and the block hashes from there on."""


def chain(root: BlockHash, symbols: str) -> list[BlockHash]:
    """Chained, as block hashes are: equal ones name equal prefixes."""
    hashes, parent = [], root
    for symbol in symbols:
        parent = BlockHash(hashlib.sha256(parent + symbol.encode()).digest()[:16])
        hashes.append(parent)
    return hashes


@dataclass
class Asked:
    """A prompt with a block for each symbol."""

    symbols: str
    ended_at: float
    root: int = 0
    cached: int = 0
    cross: int = 0
    own: int = 0
    user: UserTag = NO_USER
    key: str | None = None
    replica_id: ReplicaId = R0

    @property
    def whole(self) -> Prefix:
        return (ROOTS[self.root], *chain(ROOTS[self.root], self.symbols))

    @property
    def packed(self) -> bytes:
        return b"".join(self.whole[1:])

    @property
    def num_cached_tokens(self) -> int:
        return self.cached * BLOCK_SIZE

    def seen(self) -> Seen:
        counts = [each * BLOCK_SIZE for each in (len(self.symbols), self.cached, 0, self.cross, self.own)]
        num_prompt, num_cached, _, num_cross, num_own = counts
        usage = PromptUsage(
            num_prompt,
            num_cached,
            num_prompt - num_cached,
            num_cross_user_tokens=num_cross,
            num_own_tokens=num_own,
        )
        return Seen(
            usage=usage,
            model="toy",
            user=self.user,
            key=self.key,
            replica_id=self.replica_id,
            ended_at=self.ended_at,
        )


class Tree(PrefixTree):
    """Whose prompts are numbered, and whose tokens' marks are their blocks' numbers."""

    def __init__(self) -> None:
        super().__init__(count(1))
        self.num_seen = 0

    def see(self, asked: Asked) -> None:
        self.num_seen += 1
        root, num_blocks = ROOTS[asked.root], len(asked.symbols)
        self.add(
            root,
            NAMESPACE,
            asked.packed,
            BLOCK_SIZE,
            asked.seen(),
            self.num_seen,
            lambda start: marks(start, num_blocks),
        )

    def knew(self, asked: Asked, decided_at: float) -> Known:
        """What was known of it before it was seen."""
        known = self.known(ROOTS[asked.root], asked.packed, asked.num_cached_tokens, decided_at)
        self.see(asked)
        return known


def marks(start: int, end: int) -> bytes:
    return b"".join(bytes([number]) * 4 for number in range(start, end))


@dataclass
class ListedPrefix:
    counts: Counts = field(default_factory=Counts)
    last_touch: tuple[int, int] = (0, 0)


class Twin:
    """Every prefix at which a node ends, whole. A node begins where the longest shorter one ends."""

    def __init__(self) -> None:
        self.listed: dict[Prefix, ListedPrefix] = {}
        self.num_seen = 0

    def start(self, prefix: Prefix) -> int:
        shorter = (len(other) - 1 for other in self.listed if other == prefix[: len(other)] != prefix)
        return max(shorter, default=0)

    def cut(self, whole: Prefix) -> None:
        """Where the prompt leaves a longer prefix, that is listed too."""
        for length in range(len(whole), 1, -1):
            beyond = [prefix for prefix in self.listed if prefix[:length] == whole[:length]]
            if beyond:
                if whole[:length] not in self.listed:
                    shortest = self.listed[min(beyond, key=len)]
                    self.listed[whole[:length]] = ListedPrefix(shortest.counts.copy(), shortest.last_touch)
                break

    def see(self, asked: Asked) -> None:
        whole = asked.whole
        self.cut(whole)
        if len(whole) > 1:
            self.listed.setdefault(whole, ListedPrefix())
        self.num_seen += 1
        for prefix in self.path(whole):
            start, end = self.start(prefix) * BLOCK_SIZE, (len(prefix) - 1) * BLOCK_SIZE
            self.listed[prefix].counts.add(asked.seen(), start, end)
            self.listed[prefix].last_touch = (self.num_seen, -len(prefix))

    def forget_oldest(self) -> None:
        del self.listed[min(self.listed, key=lambda prefix: self.listed[prefix].last_touch)]

    def path(self, whole: Prefix) -> list[Prefix]:
        return sorted((prefix for prefix in self.listed if prefix == whole[: len(prefix)]), key=len)

    def known(self, asked: Asked, decided_at: float) -> Known:
        before = []
        for prefix in self.path(asked.whole):
            if self.listed[prefix].counts.first_ended_at > decided_at:
                break
            before.append(prefix)
        num_tokens = (len(before[-1]) - 1) * BLOCK_SIZE if before else 0
        missed = [prefix for prefix in before if (len(prefix) - 1) * BLOCK_SIZE > asked.num_cached_tokens]
        last = self.listed[missed[0]].counts.last if missed else None
        return Known(num_tokens) if last is None else Known(num_tokens, last.replica_id, model=last.model)

    def rows(self) -> list[tuple[Prefix, int, Counts, int, bytes]]:
        """Newest first."""
        newest_first = sorted(self.listed.items(), key=lambda item: item[1].last_touch, reverse=True)
        starts = [self.start(prefix) for prefix, _ in newest_first]
        return [
            (prefix, start, listed.counts, listed.last_touch[0], marks(start, len(prefix) - 1))
            for start, (prefix, listed) in zip(starts, newest_first, strict=True)
        ]


def row(node: PrefixNode) -> tuple[Prefix, int, Counts, int, bytes]:
    return (node.root.block_hash, *node.chain()), node.start, node.counts, node.latest, node.marks


@st.composite
def requests(draw: st.DrawFn) -> tuple[dict[str, Any], int, int]:
    """A request, how long before its end it was decided, and how many nodes are forgotten after it."""
    symbols = draw(st.text(alphabet="xy", max_size=6))
    num_cached = draw(st.integers(0, len(symbols)))
    fields = {
        "symbols": symbols,
        "root": draw(st.integers(0, 1)),
        "cached": num_cached,
        "cross": draw(st.integers(0, num_cached)),
        "user": draw(st.sampled_from(USERS)),
        "key": draw(st.sampled_from((None, "k", "l"))),
        "replica_id": ReplicaId(draw(st.sampled_from(("r0", "r1")))),
    }
    return fields, draw(st.integers(0, 3)), draw(st.sampled_from((0, 0, 0, 1, 3)))


@given(st.lists(requests(), max_size=25))
@settings(deadline=None, max_examples=examples(300))
def test_the_tree_is_the_list_of_prefixes(several: list[tuple[dict[str, Any], int, int]]) -> None:
    tree, twin = Tree(), Twin()
    for now, (fields, seconds, num_forgotten) in enumerate(several):
        asked = Asked(ended_at=now, **fields)
        decided_at = now - seconds + 0.5
        twin.cut(asked.whole)
        twin_knew = twin.known(asked, decided_at)
        twin.see(asked)
        assert tree.knew(asked, decided_at) == twin_knew
        for _ in range(min(num_forgotten, len(tree))):
            tree.forget_oldest()
            twin.forget_oldest()
        nodes = list(tree.newest_first())
        assert [row(node) for node in nodes] == twin.rows()
        assert len(tree) == len(nodes)
        assert tree.num_bytes == sum(NODE_BYTES + len(node.hashes) + len(node.marks) for node in nodes)
        assert set(tree.roots) == {node.root.block_hash for node in nodes}
        for place, node in enumerate(nodes):  # what is above a node comes before it
            assert set(node.upwards()) <= set(nodes[: place + 1])


def test_prompts_with_a_common_beginning_share_a_node_that_counts_both() -> None:
    tree = Tree()
    ada, grace = USERS[1:]
    tree.see(Asked("xxxyy", 1, user=ada, key="k"))
    tree.see(Asked("xxxz", 2, user=grace, key="l", cached=3, cross=3))
    tree.see(Asked("xxxz", 3, user=grace, key="l", cached=3, own=3))
    shared, tail, old = tree.newest_first()
    assert (shared.start, shared.end, tail.end, old.end) == (0, 3, 4, 5)
    counts = shared.counts
    assert (counts.num_requests, counts.num_hits) == (3, 2)
    assert (counts.num_cross_user_hits, counts.num_own_hits) == (1, 1)
    assert counts.users == {ada: 1, grace: 2}
    assert (counts.key, counts.num_keys) == (None, 2)
    assert (tail.counts.num_requests, tail.counts.num_hits, tail.counts.key) == (2, 0, "l")


def test_a_hit_is_of_another_user_only_where_that_is_certain() -> None:
    tree = Tree()
    tree.see(Asked("xxy", 1))
    tree.see(Asked("xxz", 2))
    # Of three cached blocks one was another user's: it may lie in the first two or behind them.
    tree.see(Asked("xxz", 3, cached=3, cross=1))
    tree.see(Asked("xxz", 4, cached=3, cross=2))
    shared, tail, _ = tree.newest_first()
    assert (shared.counts.num_hits, shared.counts.num_cross_user_hits) == (2, 1)
    assert (tail.counts.num_hits, tail.counts.num_cross_user_hits) == (2, 0)


def test_users_beyond_a_number_are_counted_together() -> None:
    tree = Tree()
    for number in range(MAX_USERS + 5):
        tree.see(Asked("x", number, user=UserTag(b"user-%d" % number)))
    tree.see(Asked("x", 99))
    (node,) = tree.newest_first()
    assert len(node.counts.users) == MAX_USERS
    assert (node.counts.num_requests_of_others, node.counts.num_requests_without_user) == (5, 1)


def test_a_nodes_chain_stays_what_it_is_while_it_is_cut_and_forgotten() -> None:
    tree = Tree()
    tree.see(Asked("xxxxyyyy", 1))
    (node,) = tree.newest_first()
    for number, symbols in enumerate(("xxz", "xxxxyyz", "zz", "zy", "yx")):
        tree.see(Asked(symbols, 2 + number))
        while len(tree) > 4:
            tree.forget_oldest()
        assert list(node.chain()) == chain(ROOTS[0], "xxxxyyyy")
        assert node.root.namespace == NAMESPACE
    assert node.start == 6
    assert node not in tree.newest_first()


@given(st.text(alphabet="xy", max_size=9), st.slices(9), st.integers(-10, 10))
def test_the_hashes_of_a_node_read_like_a_list_of_them(symbols: str, part: slice, place: int) -> None:
    listed = chain(ROOTS[0], symbols)
    packed = PackedHashes(b"".join(listed))
    assert (list(packed), len(packed), packed[part]) == (listed, len(listed), listed[part])
    if -len(listed) <= place < len(listed):
        assert packed[place] == listed[place]
    else:
        with pytest.raises(IndexError):
            packed[place]
