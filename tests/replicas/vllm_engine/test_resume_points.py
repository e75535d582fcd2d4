"""Where a hit may end, against the slow rule, on random stores and removals."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.kvcache.cache_groups import MAMBA, CacheGroup
from replicas.kvcache.hash_map import UnknownBlock
from replicas.protocol.blocks import BlockHash
from replicas.vllm_engine.resume_points import ResumePoints, problem_of
from tests.replicas.vllm_engine.hit_rule import HitRule

HASH_BLOCK = 4
NUM_HASHES = 12


def full(block_size: int, *, has_draft: bool = False) -> CacheGroup:
    return CacheGroup("full_attention", block_size, has_draft=has_draft)


def sliding(block_size: int, window: int, *, has_draft: bool = False) -> CacheGroup:
    return CacheGroup("sliding_window", block_size, window, has_draft=has_draft)


def chunked(block_size: int, chunk: int) -> CacheGroup:
    return CacheGroup("chunked_local_attention", block_size, chunk)


def mamba(block_size: int) -> CacheGroup:
    return CacheGroup(MAMBA, block_size)


SHAPES: dict[str, tuple[list[CacheGroup], int]] = {
    "one window": ([sliding(4, 13), full(4)], 4),
    "the smallest windows": ([sliding(4, 2), sliding(4, 3), full(4)], 4),
    "two windows": ([sliding(4, 6), sliding(4, 15), full(4)], 4),
    "two groups of full attention": ([full(4), sliding(4, 6), full(4)], 4),
    "a group that is not cached": ([CacheGroup("sliding_window", 4, 9, is_cacheable=False), full(4)], 4),
    "full attention in smaller blocks": ([sliding(8, 20), full(4)], 8),
    "chunks": ([chunked(4, 12), full(4)], 4),
    "chunks of no whole blocks": ([chunked(8, 20), full(8)], 8),
    "states": ([mamba(8), mamba(8), full(8)], 8),
    "states at every hash": ([mamba(16), full(4)], 4),
    "states and full attention in part": ([mamba(16), full(16)], 4),
    "states and a window": ([mamba(8), sliding(4, 10), full(4)], 8),
    "four block sizes": ([full(16), sliding(8, 12), sliding(4, 6), sliding(4, 9)], 16),
    "all slide": ([sliding(4, 11)], 4),
    "states alone": ([mamba(4)], 4),
    "windows alone": ([sliding(4, 11), sliding(4, 5)], 4),
    "drafts": ([sliding(4, 10, has_draft=True), full(4, has_draft=True)], 4),
    "drafts that read full attention": ([sliding(4, 10), full(4, has_draft=True)], 4),
    "drafts that read a window": ([sliding(4, 10, has_draft=True), full(4)], 4),
    "drafts and smaller blocks": ([sliding(8, 20, has_draft=True), full(4, has_draft=True)], 8),
    "drafts and states": ([mamba(8), full(8, has_draft=True)], 8),
    "drafts and states at every hash": ([mamba(16), full(4, has_draft=True)], 4),
}
IN_PART = {"states and full attention in part"}
"""Here a hit may be longer than the points tell: inside a whole block of which no part has a hash."""

CHAINS = [
    tuple(bytes(path[: end + 1]) for end in range(NUM_HASHES))
    for path in (
        [0] * NUM_HASHES,
        [0] * 5 + [1] * 7,
        [0] * 8 + [2] * 4,
        [3] * NUM_HASHES,
    )
]
"""Prompts that share beginnings: a hash is the path to it."""


def names_of(chain: Sequence[bytes], alignment: int) -> list[BlockHash]:
    step = alignment // HASH_BLOCK
    return [BlockHash(b"ours" + each) for each in chain[step - 1 :: step]]


def ends_of(group: CacheGroup, alignment: int) -> list[int]:
    """The places in a chain where this group's blocks may end."""
    step = group.block_size if group.block_size <= alignment else HASH_BLOCK
    return [end // HASH_BLOCK - 1 for end in range(step, NUM_HASHES * HASH_BLOCK + 1, step)]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["store"] * 8 + ["run"] * 4 + ["remove"] * 9 + ["take"] * 4 + ["clear"]),
        st.integers(0, 63),
        st.integers(0, 63),
        st.integers(0, 63),
    ),
    max_size=60,
)


class Twins:
    """Readers of the differences, and of the slow rule's whole answer."""

    def __init__(self, name: str) -> None:
        self.groups, self.alignment = SHAPES[name]
        self.fast = ResumePoints(self.groups, HASH_BLOCK, self.alignment)
        self.rule = HitRule(self.groups, HASH_BLOCK, self.alignment)
        self.has_parts = name in IN_PART
        self.points: set[BlockHash] = set()
        self.reached: list[BlockHash] = []

    def store(self, group: int, chain: Sequence[bytes], index: int) -> None:
        self.fast.stored(group, chain, index, names_of(chain, self.alignment))
        self.rule.copies[group][chain[index]] += 1

    def remove(self, group: int, theirs: bytes) -> None:
        self.fast.removed(group, theirs)
        self.rule.copies[group][theirs] -= 1

    def clear(self) -> None:
        self.fast.cleared()
        for copies in self.rule.copies:
            copies.clear()
        self.points.clear()
        self.reached.clear()

    def held(self, group: int) -> list[bytes]:
        return sorted(self.rule.copies[group].elements())

    def compare(self) -> None:
        change = self.fast.take()
        assert self.points.isdisjoint(change.added) and self.points.issuperset(change.removed)
        self.points = (self.points | set(change.added)) - set(change.removed)
        for block_hash in change.lost:
            self.reached.remove(block_hash)
        for run in change.reached:
            self.reached += run.names
        aligned = self.alignment // HASH_BLOCK
        expected, reachable = set(), set()
        for chain in CHAINS:
            names = names_of(chain, self.alignment)
            for number, name in enumerate(names, 1):
                if self.rule.is_point(chain[: number * aligned]):
                    expected.add(name)
            if any(group.is_full for group in self.groups):
                reachable |= set(names[: self.rule.reach(chain) // self.alignment])
            self.compare_hits(chain)
        assert self.points == expected
        assert set(self.reached) == reachable
        assert self.fast.num_copies == sum(copies.total() for copies in self.rule.copies)

    def compare_hits(self, chain: Sequence[bytes]) -> None:
        for num_tokens in range(1, NUM_HASHES * HASH_BLOCK + 1, 3):
            prompt = chain[: num_tokens // HASH_BLOCK]
            told, right = self.fast.num_leading(prompt, num_tokens), self.rule.hit(prompt, num_tokens)
            assert told <= right if self.has_parts else told == right


@pytest.mark.parametrize("name", SHAPES)
@given(operations=OPERATIONS)
def test_points_and_reach_are_those_of_the_rule_whatever_comes_and_goes(
    name: str, operations: list[tuple[str, int, int, int]]
) -> None:
    twins = Twins(name)
    for operation, first, second, third in operations:
        group, chain = first % len(twins.groups), CHAINS[second % len(CHAINS)]
        ends = ends_of(twins.groups[group], twins.alignment)
        held = twins.held(group)
        match operation:
            case "store":
                twins.store(group, chain, ends[third % len(ends)])
            case "run":
                for number in range(len(twins.groups)):
                    for index in ends_of(twins.groups[number], twins.alignment)[: 1 + third % len(ends)]:
                        twins.store(number, chain, index)
            case "remove" if held:
                twins.remove(group, held[third % len(held)])
            case "clear":
                twins.clear()
            case "take":
                twins.compare()
    twins.compare()


def test_a_block_that_is_not_held_cannot_be_removed() -> None:
    points = ResumePoints([sliding(4, 10), full(4)], 4, 4)
    points.stored(1, CHAINS[0], 0, names_of(CHAINS[0], 4))
    with pytest.raises(UnknownBlock, match="not held in group 0"):
        points.removed(0, CHAINS[0][0])


def test_blocks_that_follow_one_another_are_told_in_one_run() -> None:
    points = ResumePoints([sliding(4, 10), full(4)], 4, 4)
    names = names_of(CHAINS[0], 4)
    for index in range(5):
        points.stored(1, CHAINS[0], index, names)
    (run,) = points.take().reached
    assert (run.names, run.first_index) == (names[:5], 0)
    for index in range(5, 7):
        points.stored(1, CHAINS[0], index, names)
    (run,) = points.take().reached
    assert (run.names, run.first_index) == (names[5:7], 5)


@pytest.mark.parametrize(
    ("groups", "alignment", "problem"),
    [
        ([CacheGroup("unknown", 4), full(4)], 4, "a cache of kind unknown"),
        ([CacheGroup("sliding_window", 4), full(4)], 4, "a window of None tokens"),
        ([chunked(4, 8)], 4, "chunks in all layers"),
        ([sliding(8, 20), full(4)], 4, "blocks of 8 tokens where hits are multiples of 4"),
        ([sliding(4, 9, has_draft=True)], 4, "a draft model"),
        ([sliding(4, 9, has_draft=True), full(8)], 8, "a draft model"),
        ([mamba(16), full(16, has_draft=True)], 4, "a draft model"),
        ([chunked(4, 8), full(4, has_draft=True)], 4, None),
        ([mamba(16), full(16)], 4, None),
    ],
)
def test_what_cannot_be_told_is_named(groups: list[CacheGroup], alignment: int, problem: str | None) -> None:
    found = problem_of(groups, alignment)
    assert found is None if problem is None else found is not None and problem in found
