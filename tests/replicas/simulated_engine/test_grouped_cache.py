"""A cache of several groups: what vLLM's keeps, what can be resumed, and what its events say of that."""

import math
import random
from collections.abc import Sequence

import pytest

from replicas.kvcache.cache_groups import FULL, CacheGroup
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, ResumePointsChanged
from replicas.simulated_engine.grouped_cache import GroupedCache, Hit
from replicas.simulated_engine.groups import alignment_of, first_read, parse_groups, read_until
from tests.replicas.builders import ROOT

WINDOW = "window:32:128 full:32"
STATES = "3*state:64 full:64"
SHAPES = (WINDOW, STATES, "5*window:64:256 full:32", "3*chunked:32:96 full:32", "window:32:96", "state:64",
          "window:16:40 state:64 window:32:100 full:16", "full:32 full:64")  # fmt: skip


class Served:
    """One request at a time, and a mirror of what the events say."""

    def __init__(self, shape: str, retention: int = 0, num_blocks: int = 20_000, budget: int = 8192) -> None:
        self.cache = GroupedCache(
            num_blocks, parse_groups(shape), max_batched_tokens=budget, retention=retention
        )
        self.rng = random.Random(1)
        self.points: set[BlockHash] = set()
        self.reach: dict[BlockHash, int] = {}
        self._budget = budget

    def fresh(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(10**6) for _ in range(num_tokens)]

    def find(self, prompt: Sequence[int]) -> Hit:
        num_findable = (len(prompt) - 1) // self.cache.alignment
        return self.cache.find(hash_blocks(ROOT, prompt, self.cache.alignment)[:num_findable])

    def serve(self, prompt: Sequence[int], num_output_tokens: int = 120) -> tuple[Hit, list[int]]:
        """The hit, and prompt and answer."""
        answer = self.fresh(num_output_tokens)
        return self.answer(prompt, answer), [*prompt, *answer]

    def answer(self, prompt: Sequence[int], answer: Sequence[int]) -> Hit:
        cache, tokens = self.cache, [*prompt, *answer]
        hashes = hash_blocks(ROOT, tokens, cache.alignment)
        hit = self.find(prompt)
        assert cache.fits(hashes, len(prompt), hit)
        table = cache.begin(len(prompt), hit)
        cache.take(table, hashes, hit)
        at = hit.num_tokens
        while at < len(prompt):
            end = cache.chunk_end(table, at, min(len(prompt), at + self._budget), len(prompt))
            assert cache.allocate(table, at, end)
            cache.store(table, hashes, end)
            at = end
        for end in range(len(prompt) + 1, len(tokens)):
            assert cache.allocate(table, end - 1, end)
            cache.store(table, hashes, end)
        cache.free(table)
        self.follow()
        return hit

    def follow(self) -> None:
        for event in self.cache.take_events():
            match event:
                case BlockStored(block_hashes):
                    for each in block_hashes:
                        self.reach[each] = self.reach.get(each, 0) + 1
                case BlockRemoved(block_hashes):
                    for each in block_hashes:
                        self.reach[each] -= 1
                        if not self.reach[each]:
                            del self.reach[each]
                case ResumePointsChanged(added, removed):
                    assert self.points.isdisjoint(added) and self.points.issuperset(removed)
                    self.points |= set(added)
                    self.points -= set(removed)
                case AllBlocksCleared():
                    self.points.clear()
                    self.reach.clear()


def conversation(served: Served) -> list[int]:
    """Cached tokens of four turns: 1,300 tokens, then 160 more each time, of which 120 are the answer."""
    prompt, found = served.fresh(1300), []
    for _ in range(4):
        hit, tokens = served.serve(prompt)
        found.append(hit.num_tokens)
        prompt = tokens + served.fresh(40)
    return found


def shared_beginning(served: Served) -> list[int]:
    """Cached tokens of four prompts of 1,200 common tokens and 200 of their own."""
    common = served.fresh(1200)
    return [served.serve(common + served.fresh(200))[0].num_tokens for _ in range(4)]


@pytest.mark.parametrize(
    ("shape", "retention", "turns", "shared"),
    [
        ("full:32", 0, [0, 1408, 1568, 1728], [0, 1184, 1184, 1184]),
        (WINDOW, 0, [0, 1280, 1440, 1600], [0, 0, 1184, 1184]),
        (WINDOW, 32, [0, 1408, 1568, 1728], [0, 1184, 1184, 1184]),
        (STATES, 0, [0, 1280, 1408, 1600], [0, 0, 1152, 1152]),
        (STATES, 64, [0, 1408, 1536, 1728], [0, 0, 1152, 1152]),
        ("3*state:528 full:528", 0, [0, 1056, 1056, 1584], [0, 1056, 1056, 1056]),
    ],
)
def test_hits_are_what_vllm_measured(shape: str, retention: int, turns: list[int], shared: list[int]) -> None:
    assert conversation(Served(shape, retention)) == turns
    assert shared_beginning(Served(shape, retention)) == shared


def may_end(cache: GroupedCache, hashes: Sequence[BlockHash], position: int) -> bool:
    """The rule, group by group, from what the pool has."""
    return all(
        cache.pool.find(cache.name_of(number, hashes, block)) is not None
        for number, group in enumerate(cache.groups)
        for block in group.needed(position)
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_is_read_until_the_first_one_read_lies_behind_it(shape: str) -> None:
    for group in parse_groups(shape):
        for block in range(12):
            past = [num_tokens for num_tokens in range(2000) if first_read(group, num_tokens) > block]
            assert read_until(group, block) == min(past, default=math.inf)


def test_a_block_that_leaves_its_window_is_free_before_the_next_one_is_needed() -> None:
    cache = Served("window:32:100").cache
    table = cache.begin(130, Hit(0, 0))
    assert cache.allocate(table, 0, 130)
    num_free = cache.pool.num_free
    assert cache.allocate(table, 130, 131) and cache.pool.num_free == num_free
    assert cache.allocate(table, 131, 132) and cache.pool.num_free == num_free + 1
    assert cache.allocate(table, 132, 140) and cache.pool.num_free == num_free + 1


@pytest.mark.parametrize("retention_blocks", [0, 1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_points_and_hits_are_those_of_the_rule(shape: str, retention_blocks: int) -> None:
    alignment = alignment_of(parse_groups(shape))
    served = Served(shape, retention_blocks * alignment, num_blocks=260, budget=256)
    cache, rng = served.cache, random.Random(2)
    known = [served.fresh(300)]
    for _ in range(150):
        base = rng.choice(known[-12:])
        prompt = (base[: rng.randint(1, len(base))] + served.fresh(rng.randint(0, 200)))[:900]
        hashes = hash_blocks(ROOT, prompt, alignment)[: (len(prompt) - 1) // alignment]
        ends = [end for end in range(1, len(hashes) + 1) if may_end(cache, hashes, end * alignment)]
        assert [end for end in range(1, len(hashes) + 1) if hashes[end - 1] in served.points] == ends
        hit, tokens = served.serve(prompt, rng.choice([1, 2, 40]))
        assert hit.num_tokens == max(ends, default=0) * alignment
        known.append(tokens)
        cache.check()
        first = 0 if cache.groups[0].is_full else None
        if first is not None:
            assert all(cache.pool.find(each) is not None for each in served.reach)
    assert served.points
    assert cache.clear()
    served.follow()
    assert not served.points and not served.reach


def test_what_full_attention_has_and_none_can_resume_becomes_a_junction() -> None:
    served = Served(WINDOW)
    common = served.fresh(1200)
    assert served.serve(common + served.fresh(200))[0] == Hit(0, 0)
    assert served.serve(common + served.fresh(200))[0] == Hit(0, 1184)
    assert served.serve(common + served.fresh(200))[0] == Hit(1184, 0)


def test_a_window_gives_its_blocks_back_while_a_prompt_is_computed() -> None:
    served = Served("window:16:64 full:16", budget=128)
    cache, prompt = served.cache, served.fresh(1600)
    table = cache.begin(len(prompt), Hit(0, 0))
    for start in range(0, 1600, 128):
        end = min(1600, start + 128)
        assert cache.allocate(table, start, end)
        assert cache.pool.num_used <= end // 16 + (128 + 64) // 16 + 1
    cache.free(table)
    assert cache.pool.num_used == 0


def test_the_longest_prompt_that_fits_fits() -> None:
    for shape in SHAPES:
        served = Served(shape, num_blocks=100, budget=128)
        longest = min(served.cache.capacity_tokens, 5000)
        assert longest
        served.serve(served.fresh(longest), 1)


@pytest.mark.parametrize("text", ["state:64 full:32", "state:64 window:32:200 full:32", "state:64 full:48"])
def test_shapes_whose_hits_vllm_ends_within_a_state_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="states of 64 tokens"):
        parse_groups(text)


@pytest.mark.parametrize("text", ["", "full", "full:0", "window:16", "full:16:3", "state:64:2", "ful:16"])
def test_shapes_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"cache group|a (full|window|state) group"):
        parse_groups(text)


def test_retention_is_a_multiple_of_the_alignment() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        GroupedCache(10, [CacheGroup(FULL, 32)], max_batched_tokens=64, retention=33)
