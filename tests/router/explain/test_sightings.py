"""The prefixes that a router has seen: a radix tree against a list of prefixes, and its bounds."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import NO_USER, UserTag
from replicas.protocol.status import ReplicaId
from router.explain.chain_tree import ChainNode, NamespaceName, PackedHashes
from router.explain.sightings import (
    MAX_USERS,
    Known,
    Node,
    Sighting,
    Sightings,
    Uses,
)
from tests.examples import examples

BLOCK_SIZE = 16
ROOTS = (BlockHash(b"a" * 16), BlockHash(b"b" * 16))
USERS = (NO_USER, UserTag(b"ada"), UserTag(b"grace"))

Prefix = tuple[BlockHash, ...]
"""The root, and the block hashes from there on."""


def chain(root: BlockHash, symbols: str) -> list[BlockHash]:
    """Chained, as block hashes are: equal ones name equal prefixes."""
    hashes, parent = [], root
    for symbol in symbols:
        parent = BlockHash(hashlib.sha256(parent + symbol.encode()).digest()[:16])
        hashes.append(parent)
    return hashes


def sighting(symbols: str, now: float, **fields: Any) -> Sighting:
    """A prompt with a block for each symbol, of which `cached` are cached."""
    root = ROOTS[fields.pop("root", 0)]
    num_cached, num_cross = fields.pop("cached", 0), fields.pop("cross", 0)
    values: dict[str, Any] = {
        "namespace": NamespaceName("toy", None, "default"),
        "user": NO_USER,
        "key": None,
        "replica_id": ReplicaId("r0"),
        "num_own_tokens": 0,
        "decided_at": now,
        "ended_at": now,
    }
    return Sighting(
        root=root,
        block_hashes=chain(root, symbols),
        block_size=BLOCK_SIZE,
        num_cached_tokens=num_cached * BLOCK_SIZE,
        num_cross_user_tokens=num_cross * BLOCK_SIZE,
        **(values | fields),
    )


@dataclass
class ListedPrefix:
    uses: Uses = field(default_factory=Uses)
    last_touch: tuple[int, int] = (0, 0)


class Twin:
    """Every prefix at which a node ends, whole. A node begins where the longest shorter one ends."""

    def __init__(self, max_nodes: int, max_blocks: int) -> None:
        self.max_nodes, self.max_blocks = max_nodes, max_blocks
        self.listed: dict[Prefix, ListedPrefix] = {}
        self.num_seen = 0

    def start(self, prefix: Prefix) -> int:
        shorter = (len(other) - 1 for other in self.listed if other == prefix[: len(other)] != prefix)
        return max(shorter, default=0)

    def cut(self, seen: Sighting) -> Prefix:
        """Where the prompt leaves a longer prefix, that is listed too. Returns all that is listed of it."""
        whole = (seen.root, *seen.block_hashes[: self.max_blocks])
        for length in range(len(whole), 1, -1):
            beyond = [prefix for prefix in self.listed if prefix[:length] == whole[:length]]
            if beyond:
                if whole[:length] not in self.listed:
                    shortest = min(beyond, key=len)
                    self.listed[whole[:length]] = ListedPrefix(self.listed[shortest].uses.copy())
                break
        return whole

    def see(self, seen: Sighting) -> None:
        whole = self.cut(seen)
        if len(whole) > 1:
            self.listed.setdefault(whole, ListedPrefix())
        self.num_seen += 1
        for prefix in self.path(whole):
            start, end = self.start(prefix) * BLOCK_SIZE, (len(prefix) - 1) * BLOCK_SIZE
            self.listed[prefix].uses.add(seen, start, end)
            self.listed[prefix].last_touch = (self.num_seen, -len(prefix))
        while len(self.listed) > self.max_nodes or self.num_blocks() > self.max_blocks:
            del self.listed[min(self.listed, key=lambda prefix: self.listed[prefix].last_touch)]

    def path(self, whole: Prefix) -> list[Prefix]:
        return sorted((prefix for prefix in self.listed if prefix == whole[: len(prefix)]), key=len)

    def known(self, whole: Prefix, seen: Sighting) -> Known:
        before = []
        for prefix in self.path(whole):
            if self.listed[prefix].uses.first_ended_at > seen.decided_at:
                break
            before.append(prefix)
        num_tokens = (len(before[-1]) - 1) * BLOCK_SIZE if before else 0
        missed = [prefix for prefix in before if (len(prefix) - 1) * BLOCK_SIZE > seen.num_cached_tokens]
        if not missed:
            return Known(num_tokens)
        uses = self.listed[missed[0]].uses
        return Known(num_tokens, uses.last_replica_id, model=uses.last_model)

    def num_blocks(self) -> int:
        return sum(len(prefix) - 1 - self.start(prefix) for prefix in self.listed)

    def rows(self) -> list[tuple[Prefix, int, Uses]]:
        """Newest first."""
        newest_first = sorted(self.listed, key=lambda prefix: self.listed[prefix].last_touch, reverse=True)
        return [(prefix, self.start(prefix), self.listed[prefix].uses) for prefix in newest_first]


def knew(sightings: Sightings, seen: Sighting) -> Known:
    """What was known of it before it was seen."""
    known = sightings.known(
        seen.root,
        seen.block_hashes,
        num_cached_tokens=seen.num_cached_tokens,
        decided_at=seen.decided_at,
        beginning=seen.beginning,
    )
    sightings.see(seen)
    return known


def row(node: Node) -> tuple[Prefix, int, Uses]:
    return (node.root.block_hash, *node.chain()), node.start, node.uses


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    symbols = draw(st.text(alphabet="xy", max_size=6))
    num_cached = draw(st.integers(0, len(symbols)))
    return {
        "symbols": symbols,
        "root": draw(st.integers(0, 1)),
        "cached": num_cached,
        "cross": draw(st.integers(0, num_cached)),
        "user": draw(st.sampled_from(USERS)),
        "key": draw(st.sampled_from((None, "k", "l"))),
        "replica_id": ReplicaId(draw(st.sampled_from(("r0", "r1")))),
        "seconds": draw(st.integers(0, 3)),
    }


@given(
    st.lists(requests(), max_size=25),
    st.integers(1, 12),
    st.integers(1, 30),
)
@settings(deadline=None, max_examples=examples(300))
def test_the_tree_is_the_list_of_prefixes(
    asked: list[dict[str, Any]], max_nodes: int, max_blocks: int
) -> None:
    sightings, twin = Sightings(max_nodes=max_nodes, max_blocks=max_blocks), Twin(max_nodes, max_blocks)
    for now, fields in enumerate(asked):
        seen = sighting(fields.pop("symbols"), now, decided_at=now - fields.pop("seconds") + 0.5, **fields)
        twin_knew = twin.known(twin.cut(seen), seen)
        twin.see(seen)
        assert knew(sightings, seen) == twin_knew
        nodes = sightings.recent(1000)
        assert [row(node) for node in nodes] == twin.rows()
        assert sightings.num_nodes == len(nodes) <= max_nodes
        assert sightings.num_blocks == twin.num_blocks() <= max_blocks
        check_selections(sightings, nodes)


def check_selections(sightings: Sightings, nodes: list[Node]) -> None:
    """Whatever is left out, what is above a node that is not left out is there."""
    for count in range(len(nodes)):
        for chosen in (sightings.recent(count), sightings.most_used(count)):
            numbers = {node.number for node in chosen}
            assert len(numbers) == count
            assert all(
                not isinstance(node.parent, ChainNode) or node.parent.number in numbers for node in chosen
            )


def test_prompts_with_a_common_beginning_share_a_node_that_counts_both() -> None:
    sightings = Sightings()
    ada, grace = USERS[1:]
    sightings.see(sighting("xxxyy", 1, user=ada, key="k"))
    sightings.see(sighting("xxxz", 2, user=grace, key="l", cached=3, cross=3))
    sightings.see(sighting("xxxz", 3, user=grace, key="l", cached=3, num_own_tokens=3 * BLOCK_SIZE))
    shared, tail, old = sightings.most_used(10)
    assert (shared.start, shared.end, tail.end, old.end) == (0, 3, 4, 5)
    uses = shared.uses
    assert (uses.num_requests, uses.num_hits, uses.num_cross_user_hits, uses.num_own_hits) == (3, 2, 1, 1)
    assert uses.users == {ada: 1, grace: 2}
    assert (uses.key, uses.num_keys) == (None, 2)
    assert (tail.uses.num_requests, tail.uses.num_hits, tail.uses.key) == (2, 0, "l")


def test_a_hit_is_of_another_user_only_where_that_is_certain() -> None:
    sightings = Sightings()
    sightings.see(sighting("xxy", 1))
    sightings.see(sighting("xxz", 2))
    # Of three cached blocks one was another user's: it may lie in the first two or behind them.
    sightings.see(sighting("xxz", 3, cached=3, cross=1))
    sightings.see(sighting("xxz", 4, cached=3, cross=2))
    shared, tail, _ = sightings.most_used(3)
    assert (shared.uses.num_hits, shared.uses.num_cross_user_hits) == (2, 1)
    assert (tail.uses.num_hits, tail.uses.num_cross_user_hits) == (2, 0)


def test_what_a_prompt_missed_was_last_seen_at_some_replica_or_never() -> None:
    sightings = Sightings()
    assert knew(sightings, sighting("xxxx", 10, replica_id=ReplicaId("r1"))) == Known(0)
    known = knew(sightings, sighting("xxxxyy", 20, cached=2))
    assert known == Known(4 * BLOCK_SIZE, ReplicaId("r1"), model="toy")
    assert knew(sightings, sighting("xxxxyy", 30, cached=6)) == Known(6 * BLOCK_SIZE)
    # A request that had not ended when this one was decided tells nothing about what was there then.
    assert knew(sightings, sighting("xxxxyy", 40, decided_at=15, cached=0)).num_tokens == 4 * BLOCK_SIZE


def test_a_beginning_that_was_seen_in_another_namespace_is_known_to_have_been() -> None:
    sightings = Sightings()
    assert not knew(sightings, sighting("xx", 1, root=0, beginning=b"same")).is_elsewhere
    assert not knew(sightings, sighting("xx", 2, root=0, beginning=b"same")).is_elsewhere
    assert knew(sightings, sighting("xx", 3, root=1, beginning=b"same")).is_elsewhere
    assert knew(sightings, sighting("xx", 4, root=0, beginning=b"same")).is_elsewhere
    assert not knew(sightings, sighting("xx", 5, root=1, beginning=None)).is_elsewhere


def test_users_beyond_a_number_are_counted_together() -> None:
    sightings = Sightings()
    for number in range(MAX_USERS + 5):
        sightings.see(sighting("x", number, user=UserTag(b"user-%d" % number)))
    sightings.see(sighting("x", 99, user=NO_USER))
    (node,) = sightings.recent(9)
    assert len(node.uses.users) == MAX_USERS
    assert (node.uses.num_requests_of_others, node.uses.num_requests_without_user) == (5, 1)


def test_a_nodes_chain_stays_what_it_is_while_it_is_cut_and_forgotten() -> None:
    sightings = Sightings(max_nodes=4)
    sightings.see(sighting("xxxxyyyy", 1))
    (node,) = sightings.recent(1)
    for number, symbols in enumerate(("xxz", "xxxxyyz", "zz", "zy", "yx")):
        sightings.see(sighting(symbols, 2 + number))
        assert list(node.chain()) == chain(ROOTS[0], "xxxxyyyy")
        assert node.root.namespace == NamespaceName("toy", None, "default")
    assert node.start == 6
    assert node not in sightings.recent(99)


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


@pytest.mark.parametrize("symbols", ["", "x"])
def test_a_prompt_of_no_full_block_leaves_no_node(symbols: str) -> None:
    sightings = Sightings()
    sightings.see(sighting(symbols, 1))
    assert sightings.num_nodes == len(symbols)
