"""Hashing with reuse: the same hashes as without, whatever came before, in bounded memory."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from replicas.protocol.blocks import (
    HASH_BYTES,
    BlockHash,
    ImageTokens,
    hash_blocks,
    pack_token_ids,
)
from router.prompt import chains
from router.prompt.chains import BLOCKS_PER_RUN, BYTES_PER_RUN, ChainHasher

ROOTS = [BlockHash(bytes([number]) * HASH_BYTES) for number in range(3)]
ROOT = ROOTS[0]
BLOCK_SIZE = 2
RUN_TOKENS = BLOCKS_PER_RUN * BLOCK_SIZE

runs = st.lists(st.integers(0, 1), max_size=6)
prompts = st.tuples(
    st.sampled_from(ROOTS), runs, st.integers(0, 2 * RUN_TOKENS), st.sampled_from([1, BLOCK_SIZE, 5])
)
"""Root, runs of equal tokens each (so that prompts begin alike), a tail's length and the block size."""


def tokens(numbers: list[int], num_more: int = 0) -> list[int]:
    return [number for number in numbers for _ in range(RUN_TOKENS)] + [7] * num_more


def random_tokens(num_runs: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(2**32), k=num_runs * RUN_TOKENS)


@given(asked=st.lists(prompts, max_size=12), max_runs=st.integers(0, 6))
def test_the_hashes_are_those_of_hashing_it_all_whatever_is_remembered_or_forgotten(
    asked: list[tuple[BlockHash, list[int], int, int]], max_runs: int
) -> None:
    hasher = ChainHasher(max_runs * BYTES_PER_RUN)
    for root, numbers, num_more, block_size in asked:
        token_ids = tokens(numbers, num_more)
        assert hasher.hash_packed(root, pack_token_ids(token_ids), block_size) == hash_blocks(
            root, token_ids, block_size
        )
        assert hasher.num_bytes <= max_runs * BYTES_PER_RUN


spans = st.builds(
    ImageTokens,
    st.sampled_from([b"an image", b"another one"]),
    st.integers(0, 4 * RUN_TOKENS),
    st.integers(0, RUN_TOKENS + 3),
)


@given(
    asked=st.lists(st.tuples(runs, st.lists(spans, max_size=2), st.integers(0, 2)), max_size=12),
    max_runs=st.integers(0, 20),
)
def test_prompts_of_equal_tokens_with_media_in_them_are_told_apart(
    asked: list[tuple[list[int], Sequence[ImageTokens], int]], max_runs: int
) -> None:
    hasher = ChainHasher(max_runs * BYTES_PER_RUN)
    for numbers, media, num_before in asked:
        token_ids, cut = tokens(numbers, 3), num_before * BLOCK_SIZE
        whole = hash_blocks(ROOT, token_ids, BLOCK_SIZE, media=media)
        parent = whole[num_before - 1] if num_before and len(whole) >= num_before else None
        start = cut if parent else 0
        behind = hasher.hash_packed(
            ROOT, pack_token_ids(token_ids[start:]), BLOCK_SIZE, parent=parent, start=start, media=media
        )
        assert behind == whole[start // BLOCK_SIZE :]


@pytest.fixture
def num_hashed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many blocks were hashed since the last call."""
    counted = [0]
    hash_packed = chains.hash_packed

    def counting(root: BlockHash, packed: bytes, block_size: int, **more: Any) -> list[BlockHash]:
        hashes = hash_packed(root, packed, block_size, **more)
        counted[0] += len(hashes)
        return hashes

    def count() -> int:
        so_far, counted[0] = counted[0], 0
        return so_far

    monkeypatch.setattr(chains, "hash_packed", counting)
    return count


def test_each_time_a_prefix_comes_as_much_again_of_it_is_known_and_one_run_more(
    num_hashed: Callable[[], int],
) -> None:
    hasher, prompt = ChainHasher(), random_tokens(10)
    num_unknown = []
    for _ in range(6):
        hasher.hash_packed(ROOT, pack_token_ids(prompt), BLOCK_SIZE)
        num_unknown.append(num_hashed() // BLOCKS_PER_RUN)
    assert num_unknown == [10, 9, 7, 3, 0, 0]


def test_only_what_follows_the_common_beginning_is_hashed(num_hashed: Callable[[], int]) -> None:
    hasher, common = ChainHasher(), random_tokens(3)
    for _ in range(3):
        hasher.hash_packed(ROOT, pack_token_ids(common), BLOCK_SIZE)
    num_hashed()
    longer = common + [1] * (RUN_TOKENS + 5)
    assert hasher.hash_packed(ROOT, pack_token_ids(longer), BLOCK_SIZE) == hash_blocks(
        ROOT, longer, BLOCK_SIZE
    )
    assert num_hashed() == BLOCKS_PER_RUN + 2
    other_end = [*common[:-1], common[-1] ^ 1]
    assert hasher.hash_packed(ROOT, pack_token_ids(other_end), BLOCK_SIZE) == hash_blocks(
        ROOT, other_end, BLOCK_SIZE
    )
    assert num_hashed() == BLOCKS_PER_RUN


def test_what_is_in_use_outlives_what_is_not_and_a_chain_is_forgotten_from_its_end(
    num_hashed: Callable[[], int],
) -> None:
    hasher = ChainHasher(5 * BYTES_PER_RUN)
    shared = random_tokens(3)
    for number in range(50):
        if number % 2 == 0:
            hasher.hash_packed(ROOT, pack_token_ids(shared), BLOCK_SIZE)
        hasher.hash_packed(ROOT, pack_token_ids(random_tokens(5, seed=100 + number)), BLOCK_SIZE)
    num_hashed()
    hasher.hash_packed(ROOT, pack_token_ids(shared), BLOCK_SIZE)
    assert num_hashed() == 0
    for number in range(3):  # one more than there is room for beside the shared ones
        hasher.hash_packed(ROOT, pack_token_ids(random_tokens(1, seed=200 + number)), BLOCK_SIZE)
    num_hashed()
    hasher.hash_packed(ROOT, pack_token_ids(shared), BLOCK_SIZE)
    assert num_hashed() == BLOCKS_PER_RUN
