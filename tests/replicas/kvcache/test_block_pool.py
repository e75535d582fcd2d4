"""The block pool alone: queue order, ref counts, copies, events."""

import pytest

from replicas.kvcache.block_pool import NULL_BLOCK, BlockPool
from replicas.protocol.blocks import BlockHash

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
