"""The block pool alone: queue order, ref counts, copies, events."""

import pytest

from replicas.kvcache.block_pool import NULL_BLOCK, BlockPool
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored

A, B, C = (BlockHash(bytes([i]) * 16) for i in range(3))


def test_a_new_pool_hands_out_every_block_but_the_null_block_in_order_of_ids() -> None:
    pool = BlockPool(5)
    assert pool.num_free == pool.num_usable == 4
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 4)
    assert pool.ref_count(NULL_BLOCK) == 0
    pool.check()


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)


def test_blocks_without_a_hash_are_reused_first_and_cached_ones_last() -> None:
    pool = BlockPool(6)
    cached = pool.allocate(2)
    pool.store(cached, [A, B], first_block_index=0)
    [open_block] = pool.allocate(1)
    pool.release([open_block, *reversed(cached)])
    assert pool.free_order() == [3, 4, 5, 2, 1]
    pool.check()


def test_a_cached_block_stays_cached_while_free_and_is_forgotten_when_handed_out() -> None:
    pool = BlockPool(2)
    pool.store(pool.allocate(1), [A], first_block_index=0)
    pool.release([1])
    assert pool.find(A) == 1
    assert pool.take_events() == [BlockStored((A,), 0)]
    assert pool.allocate(1) == [1]
    assert pool.find(A) is None and pool.hash_of(1) is None
    assert pool.take_events() == [BlockRemoved((A,))]
    pool.check()


def test_acquiring_takes_a_block_out_of_the_middle_of_the_queue() -> None:
    pool = BlockPool(4)
    pool.store(pool.allocate(3), [A, B, C], first_block_index=0)
    pool.release([1, 2, 3])
    assert pool.num_free_among([2, 3]) == 2
    pool.acquire([2])
    assert pool.free_order() == [1, 3]
    assert pool.num_free_among([2, 3]) == 1
    pool.acquire([2])
    assert pool.ref_count(2) == 2
    pool.release([2])
    assert pool.free_order() == [1, 3]
    pool.release([2])
    assert pool.free_order() == [1, 3, 2]
    pool.check()


def test_a_prefix_ends_at_the_first_miss() -> None:
    pool = BlockPool(4)
    pool.store(pool.allocate(2), [A, C], first_block_index=0)
    assert pool.find_prefix([A, B, C]) == [1]
    assert pool.find_prefix([B]) == []


@pytest.mark.parametrize("first_to_go", [1, 2, 3])
def test_evicting_one_of_several_copies_leaves_the_others(first_to_go: int) -> None:
    pool = BlockPool(4)
    for _ in range(3):
        pool.store(pool.allocate(1), [A], first_block_index=0)
    assert pool.find(A) == 1 and pool.num_cached == 3
    pool.release([first_to_go])
    pool.allocate(1)
    left = [block_id for block_id in (1, 2, 3) if block_id != first_to_go]
    assert pool.find(A) == left[0] and pool.num_cached == 2
    pool.check()
    pool.release([left[0]])
    pool.allocate(1)
    assert pool.find(A) == left[1]
    pool.check()
    pool.release([left[1]])
    pool.allocate(1)
    assert pool.find(A) is None and pool.num_cached == 0
    assert [event for event in pool.take_events() if isinstance(event, BlockRemoved)] == [
        BlockRemoved((A,))
    ] * 3


def test_taking_events_leaves_none() -> None:
    pool = BlockPool(3)
    assert not pool.has_events
    pool.store(pool.allocate(1), [A], first_block_index=7, ends_prompt=True)
    assert pool.has_events
    assert pool.take_events() == [BlockStored((A,), 7, ends_prompt=True)]
    assert not pool.has_events and pool.take_events() == []


def test_clearing_is_refused_while_a_block_is_used_and_forgets_everything_when_none_is() -> None:
    pool = BlockPool(4)
    pool.store(pool.allocate(1), [A], first_block_index=0)
    pool.store(pool.allocate(1), [A], first_block_index=0)
    pool.release([1])
    assert not pool.clear()
    assert pool.find(A) == 1
    pool.release([2])
    pool.take_events()
    assert pool.clear()
    assert pool.find(A) is None and pool.num_cached == 0
    assert pool.take_events() == [AllBlocksCleared()]
    pool.allocate(3)
    assert pool.take_events() == []
    pool.check()


def test_misuse_by_its_owner_is_caught() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="wanted"):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="no request uses"):
        pool.release([1])
    with pytest.raises(AssertionError, match="no request uses"):
        pool.store([1], [A], first_block_index=0)
    pool.store(pool.allocate(1), [A], first_block_index=0)
    with pytest.raises(AssertionError, match="twice"):
        pool.store([1], [B], first_block_index=0)
    with pytest.raises(AssertionError, match="not cached"):
        pool.acquire([2])


def _hash(tenant: bytes, number: int) -> BlockHash:
    return BlockHash(tenant.ljust(12) + number.to_bytes(4, "big"))


def _fill(pool: BlockPool, tenant: bytes, numbers: range) -> None:
    """Prompts of one block each, one after the other."""
    for number in numbers:
        [block_id] = pool.allocate(1, tenant)
        pool.store([block_id], [_hash(tenant, number)], first_block_index=0)
        pool.release([block_id])


def _num_kept(pool: BlockPool, tenant: bytes, numbers: range) -> int:
    return sum(pool.find(_hash(tenant, number)) is not None for number in numbers)


def test_a_tenant_that_floods_evicts_itself_and_one_that_is_alone_fills_the_pool() -> None:
    pool = BlockPool(101)
    _fill(pool, b"flood", range(100))
    assert _num_kept(pool, b"flood", range(100)) == 100
    _fill(pool, b"calm", range(40))
    for burst in range(20):
        _fill(pool, b"flood", range(100 + 50 * burst, 150 + 50 * burst))
        _fill(pool, b"calm", range(40 + burst, 41 + burst))  # it is still about
    assert _num_kept(pool, b"calm", range(22, 60)) == 38  # the flood has 1.25 times its half
    pool.check()


def test_a_tenant_that_came_last_a_turnover_ago_keeps_nothing_for_later() -> None:
    pool = BlockPool(101)
    _fill(pool, b"gone", range(40))
    _fill(pool, b"stays", range(201))
    assert _num_kept(pool, b"gone", range(40)) == 0
    assert _num_kept(pool, b"stays", range(101, 201)) == 100
    pool.check()


def test_blocks_of_a_tenant_that_is_gone_go_before_all_others_however_few_they_are() -> None:
    pool = BlockPool(101)
    _fill(pool, b"gone", range(30))
    _fill(pool, b"calm", range(5))
    _fill(pool, b"flood", range(65))
    for burst in range(20):
        _fill(pool, b"flood", range(65 + 10 * burst, 75 + 10 * burst))
        for number in range(5):
            block_id = pool.find(_hash(b"calm", number))
            assert block_id is not None
            pool.acquire([block_id], b"calm")
            pool.release([block_id])
    assert _num_kept(pool, b"gone", range(30)) == 0
    assert _num_kept(pool, b"calm", range(5)) == 5
    pool.check()


def test_what_a_long_request_leaves_is_its_tenants_newest_and_not_that_of_one_that_is_gone() -> None:
    pool = BlockPool(101)
    _fill(pool, b"flood", range(10))
    blocks = pool.allocate(20, b"long")
    pool.store(blocks, [_hash(b"long", number) for number in range(20)], first_block_index=0)
    _fill(pool, b"flood", range(10, 310))
    pool.release(reversed(blocks))
    _fill(pool, b"flood", range(310, 340))
    assert _num_kept(pool, b"long", range(20)) == 20
    _fill(pool, b"flood", range(340, 500))
    assert _num_kept(pool, b"long", range(20)) == 0, "it has not come for a turnover"
    pool.check()


def test_what_several_share_belongs_to_the_one_that_used_it_last() -> None:
    pool = BlockPool(11)
    pool.store(pool.allocate(1, b"first"), [A], first_block_index=0)
    pool.release([1])
    for number in range(30):
        _fill(pool, b"other", range(number, number + 1))
        pool.acquire(pool.find_prefix([A]), b"other")
        pool.release(pool.find_prefix([A]))
    assert pool.find(A) is not None
    pool.check()
