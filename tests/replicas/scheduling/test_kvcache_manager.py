"""Prefix caching over one pool: what hits, what is stored when, what an allocation takes and leaves."""

import pytest

from replicas.protocol.blocks import ImageTokens, hash_blocks
from replicas.protocol.events import BlockRemoved, BlockStored
from replicas.scheduling.kvcache_manager import KVCacheManager
from tests.replicas.builders import ROOT, EventBalance, admit, decode, request

COMMON = list(range(48))


def refs(manager: KVCacheManager, block_ids: list[int]) -> list[int]:
    return [manager.pool.ref_count(block_id) for block_id in block_ids]


def test_shared_prefix_blocks_and_the_exact_order_of_the_free_queue() -> None:
    manager = KVCacheManager(11, 16)
    first = request(COMMON + [100] * 7)
    assert admit(manager, first) == 0
    assert first.block_ids == [1, 2, 3, 4]

    second = request(COMMON + [200] * 5)
    assert manager.find_cached(second) == [1, 2, 3]
    assert admit(manager, second) == 48
    assert second.block_ids == [1, 2, 3, 5]
    assert refs(manager, [1, 2, 3, 4, 5]) == [2, 2, 2, 1, 1]
    assert manager.pool.num_free == 5

    manager.free(first)
    manager.free(second)
    assert manager.pool.free_order() == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]

    third = request(COMMON + [300] * 6)
    assert admit(manager, third) == 48
    assert third.block_ids == [1, 2, 3, 5]
    assert manager.pool.num_free == 6
    manager.free(third)

    stranger = request(range(1000, 1160))
    manager.take_events()
    assert admit(manager, stranger) == 0
    assert stranger.block_ids == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    assert manager.pool.num_free == 0
    removed, stored = manager.take_events()
    assert removed == BlockRemoved(tuple(reversed(first.block_hashes)))
    assert stored == BlockStored(tuple(stranger.block_hashes), 0, ends_prompt=True)
    manager.pool.check()


def test_eviction_takes_unhashed_blocks_first_then_the_oldest_request_tail_first() -> None:
    manager = KVCacheManager(11, 16)
    first, second = request(range(87)), request(range(500, 548))
    admit(manager, first)
    admit(manager, second)
    assert (first.block_ids, second.block_ids) == ([1, 2, 3, 4, 5, 6], [7, 8, 9])
    manager.free(first)
    assert manager.pool.free_order() == [6, 10, 5, 4, 3, 2, 1]
    manager.free(second)
    assert manager.pool.free_order() == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]

    third = request(range(35))
    assert admit(manager, third) == 32
    assert third.block_ids == [1, 2, 6]
    assert manager.pool.free_order() == [10, 5, 4, 3, 9, 8, 7]
    manager.pool.check()


def test_a_repeated_prompt_of_whole_blocks_stores_its_last_block_a_second_time() -> None:
    manager = KVCacheManager(33, 16)
    first, second = request(range(48)), request(range(48))
    admit(manager, first)
    manager.take_events()
    admit(manager, second)
    assert first.block_ids == [1, 2, 3] and second.block_ids == [1, 2, 4]
    assert manager.take_events() == [BlockStored((first.block_hashes[2],), 2, ends_prompt=True)]
    assert manager.pool.num_cached == 4


def test_a_failed_allocation_touches_nothing() -> None:
    manager = KVCacheManager(11, 16)
    first = request(COMMON)
    admit(manager, first)
    admit(manager, request(range(500, 548)))
    manager.free(first)
    manager.take_events()
    before = (manager.pool.free_order(), refs(manager, list(range(11))), manager.pool.num_cached)

    too_long = request(COMMON + list(range(100, 180)))
    assert manager.find_cached(too_long) == [1, 2, 3]
    assert not manager.fits(too_long, [1, 2, 3])
    assert admit(manager, too_long) is None
    assert too_long.block_ids == []
    assert (manager.pool.free_order(), refs(manager, list(range(11))), manager.pool.num_cached) == before
    assert manager.take_events() == []

    one_less = request(COMMON + list(range(100, 164)))
    assert manager.fits(one_less, [1, 2, 3])
    assert admit(manager, one_less) == 48
    assert manager.pool.num_free == 0


def test_decoding_fills_the_open_block_and_shares_it_only_when_full() -> None:
    manager = KVCacheManager(11, 16)
    first = request(range(55))
    admit(manager, first)
    assert first.block_ids == [1, 2, 3, 4]
    manager.take_events()
    for token_id in range(55, 63):
        assert decode(manager, first, token_id)
    assert first.block_ids == [1, 2, 3, 4] and manager.take_events() == []
    assert decode(manager, first, 63)
    assert manager.take_events() == [BlockStored((first.block_hashes[3],), 3)]
    assert decode(manager, first, 64)
    assert first.block_ids == [1, 2, 3, 4, 5] and manager.take_events() == []
    assert first.block_hashes == hash_blocks(ROOT, range(65), 16)


def test_a_prompt_computed_in_pieces_stores_what_each_piece_filled() -> None:
    manager = KVCacheManager(11, 4)
    pieces = request(range(18))
    stored = []
    for num_tokens in (3, 6, 7, 2):
        assert manager.allocate(pieces, num_tokens)
        pieces.num_computed_tokens += num_tokens
        stored.append(manager.take_events())
    hashes = pieces.block_hashes
    assert stored == [
        [],
        [BlockStored(tuple(hashes[:2]), 0)],
        [BlockStored(tuple(hashes[2:4]), 2, ends_prompt=True)],
        [],
    ]


def test_blocks_on_both_sides_of_the_prompts_end_are_two_events() -> None:
    manager = KVCacheManager(11, 4)
    resumed = request(range(17), num_output_tokens=7)
    admit(manager, resumed)
    hashes = resumed.block_hashes
    assert manager.take_events() == [
        BlockStored(tuple(hashes[:2]), 0, ends_prompt=True),
        BlockStored(tuple(hashes[2:4]), 2),
    ]


def test_no_block_is_hashed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counting(*args: object, **kwargs: object) -> object:
        hashes = hash_blocks(*args, **kwargs)  # type: ignore[arg-type]
        hashed.append(len(hashes))
        return hashes

    monkeypatch.setattr("replicas.scheduling.kvcache_manager.hash_blocks", counting)
    manager = KVCacheManager(40, 4)
    one = request(range(50))
    for _ in range(3):
        manager.find_cached(one)
    admit(manager, one)
    for token_id in range(50, 80):
        decode(manager, one, token_id)
    manager.free(one)
    one.num_computed_tokens = 0
    assert admit(manager, one) == 76
    assert sum(hashed) == len(one.block_hashes) == 20


def test_worked_example_of_six_times() -> None:
    """The well-known one with ten blocks of four tokens; ids are one higher, since 0 is the null block.

    One thing is newer than the example: a released block without a hash is reused first, so block 4 and
    block 6 (its ids) lead the queue instead of lying between the cached ones.
    """
    manager = KVCacheManager(11, 4)
    request_0 = request(range(15))
    assert admit(manager, request_0) == 0
    assert request_0.block_ids == [1, 2, 3, 4] and manager.pool.num_cached == 3

    decode(manager, request_0, 15)
    decode(manager, request_0, 16)
    assert request_0.block_ids == [1, 2, 3, 4, 5] and manager.pool.num_cached == 4

    request_1 = request([*range(10), 100, 101, 102, 103])
    assert admit(manager, request_1) == 8
    assert request_1.block_ids == [1, 2, 6, 7]

    manager.free(request_0)
    assert manager.pool.free_order() == [5, 8, 9, 10, 4, 3]
    manager.free(request_1)
    assert manager.pool.free_order() == [7, 5, 8, 9, 10, 4, 3, 6, 2, 1]

    request_2 = request([*range(12), *range(200, 217)])
    assert manager.find_cached(request_2) == [1, 2, 3]
    assert admit(manager, request_2) == 12
    assert request_2.block_ids == [1, 2, 3, 7, 5, 8, 9, 10]
    assert manager.pool.free_order() == [4, 6]
    manager.pool.check()


def test_worked_example_of_duplicated_blocks() -> None:
    """Equal prompts ABCDEF that continue equally: the second holds a copy of EFGH, and both are cached."""
    manager = KVCacheManager(11, 4)
    first, second = request(b"ABCDEF"), request(b"ABCDEF")
    admit(manager, first)
    for token_id in b"GH":
        decode(manager, first, token_id)
    assert first.block_ids == [1, 2] and manager.pool.num_cached == 2
    decode(manager, first, ord("I"))
    assert first.block_ids == [1, 2, 3]

    assert admit(manager, second) == 4
    assert second.block_ids == [1, 4] and manager.pool.num_cached == 2
    for token_id in b"GH":
        decode(manager, second, token_id)
    assert second.block_ids == [1, 4] and manager.pool.num_cached == 3
    assert manager.pool.hash_of(2) == manager.pool.hash_of(4) == first.block_hashes[1]
    assert manager.pool.find(first.block_hashes[1]) == 2

    balance = EventBalance()
    manager.free(first)
    manager.free(second)
    admit(manager, request(range(500, 540)))
    balance.apply(manager.take_events())
    assert balance.removed[first.block_hashes[1]] == balance.stored[first.block_hashes[1]] == 2


def test_worked_example_of_an_image() -> None:
    """Eight tokens of text, 41 placeholders and one more token, in blocks of 16."""
    placeholder = 10
    prompt = [1, 3, 7493, 1681, 1294, 1593, 3937, 9551, *[placeholder] * 41, 4, 5]

    def with_image(content: bytes) -> list[int]:
        image = request(prompt, media=(ImageTokens(content, 8, 41),))
        admit(manager, image)
        return image.block_ids

    manager = KVCacheManager(101, 16)
    first = with_image(b"a cat")
    again = with_image(b"a cat")
    other = with_image(b"a dog")
    assert first == [1, 2, 3, 4]
    assert again == [1, 2, 3, 5]
    assert set(other) & set(first + again) == set()


def test_blocks_that_fill_after_an_image_are_hashed_as_if_at_once() -> None:
    manager = KVCacheManager(21, 4)
    image = ImageTokens(b"a cat", 2, 8)
    one = request(range(10), media=(image,))
    admit(manager, one)
    for token_id in range(10, 20):
        decode(manager, one, token_id)
    assert one.block_hashes == hash_blocks(ROOT, range(20), 4, media=[image])


def test_a_block_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        KVCacheManager(11, 0)
