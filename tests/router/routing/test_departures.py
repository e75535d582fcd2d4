"""What has left which replica is remembered, the latest of each hash, and how it went."""

import random

import pytest

from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import Removal
from replicas.protocol.keys import IndexChange
from replicas.protocol.status import Epoch, ReplicaId
from router.routing.departures import MAX_INCARNATIONS, Departure, Departures
from router.routing.overlap import PrefixIndex

A, B = ReplicaId("a"), ReplicaId("b")
E1, E2 = Epoch("e1"), Epoch("e2")


def hashes(count: int, seed: int = 0) -> list[BlockHash]:
    rng = random.Random(seed)
    return [BlockHash(rng.randbytes(16)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_of_each_hash_the_latest_departure_is_known(seed: int) -> None:
    rng = random.Random(seed)
    departures, truth = Departures(1 << 16), dict[BlockHash, Departure]()
    known = [BlockHash(place.to_bytes(8, "little") + rng.randbytes(8)) for place in range(300)]
    for step in range(400):
        departures.now = float(step)
        some = rng.sample(known, rng.randrange(40))
        is_gone = rng.random() < 0.2
        reason = Removal.EVICTED if is_gone else rng.choice([*Removal])
        left = Departure(rng.choice((A, B)), rng.choice((E1, E2)), is_gone, float(step), reason)
        departures.left(left.replica_id, left.epoch, some, reason=reason, is_replica_gone=is_gone)
        truth |= dict.fromkeys(some, left)
        if rng.random() < 0.1:
            assert departures.of(known) == [truth.get(each) for each in known]
    unknown = hashes(100, seed + 1000)
    assert departures.of([*known, *unknown]) == [truth.get(each) for each in known] + [None] * 100


def test_memory_is_bounded_and_what_is_forgotten_is_not_told_wrongly() -> None:
    departures = Departures(1 << 8)
    every = hashes(5000)
    for step, each in enumerate(every):
        departures.now = float(step)
        departures.left(A, E1, [each])
    assert departures.num_hashes <= 1 << 8 and departures.num_bytes == 20 << 8
    found = departures.of(every)
    assert all(left is None or left.at == step for step, left in enumerate(found))
    assert found[-1] is not None and sum(left is not None for left in found) == departures.num_hashes
    for number in range(MAX_INCARNATIONS):
        departures.left(A, Epoch(f"later-{number}"), ())
    assert departures.of(every) == [None] * 5000


def index_with(a: list[BlockHash], b: list[BlockHash]) -> PrefixIndex:
    """Every second block is indexed."""
    index = PrefixIndex(16, 32)
    index.replace(A, E1, a)
    index.replace(B, E1, b)
    return index


def test_what_was_removed_is_evicted_and_what_went_with_its_replica_is_not() -> None:
    chain = hashes(12)
    index = index_with(chain[1::2], chain[5:8:2])
    index.departures.now = 7.0
    index.apply(IndexChange(A, E1, 1, removed=tuple(chain[7::2])))
    assert index.departed(chain, 0) == [(each, Departure(A, E1, False, 7.0)) for each in (7, 9, 11)]
    assert index.departed(chain, 9) == [(each, Departure(A, E1, False, 7.0)) for each in (9, 11)]
    index.departures.now = 8.0
    index.forget(B)
    gone = {each: Departure(B, E1, True, 8.0) for each in (5, 7)}
    assert (
        dict(index.departed(chain, 0))
        == {9: Departure(A, E1, False, 7.0), 11: Departure(A, E1, False, 7.0)} | gone
    )
    while index.sweep():
        pass
    assert (
        dict(index.departed(chain, 0))
        == {9: Departure(A, E1, False, 7.0), 11: Departure(A, E1, False, 7.0)} | gone
    )
    assert not any(block_hash in index.stored(A) for block_hash in chain[7::2])


def test_each_block_that_was_removed_has_its_own_reason() -> None:
    chain = hashes(12)
    index = index_with(chain[1::2], [])
    reasons = bytes([Removal.CLEARED, Removal.EVICTED, 99, Removal.LOST, Removal.BROKEN, Removal.EXPIRED])
    index.apply(IndexChange(A, E1, 1, removed=tuple(chain[1::2]), reasons=reasons))
    found = [left.reason.name for _, left in index.departed(chain, 0)]
    assert found == ["CLEARED", "EVICTED", "EVICTED", "LOST", "BROKEN", "EXPIRED"]
    assert not index.stored(A)


def test_a_prompt_that_ended_off_the_stride_is_found_behind_the_last_that_left() -> None:
    chain = hashes(12)
    index = index_with([chain[1], chain[3], chain[4]], [])
    index.apply(IndexChange(A, E1, 1, removed=(chain[3], chain[4])))
    assert [block for block, _ in index.departed(chain, 2)] == [3, 4]
    assert [block for block, _ in index.departed(chain, 4)] == [4]


def test_another_incarnation_and_a_set_that_is_read_anew_differ() -> None:
    chain = hashes(4)
    index = index_with(chain[1::2], [])
    index.replace(A, E1, chain[1:2])
    while index.sweep():
        pass
    assert index.departed(chain, 0) == []
    index.replace(A, E2, [])
    while index.sweep():
        pass
    assert index.departed(chain, 0) == [(1, Departure(A, E1, True, 0.0))]
    assert index.num_entries == 0


def test_a_slot_that_is_used_again_is_retired_nobody() -> None:
    chain = hashes(4)
    index = index_with(chain[1::2], [])
    index.forget(A)
    while index.sweep():
        pass
    fresh = hashes(4, 9)
    index.replace(A, E2, fresh)
    assert index.departed(fresh, 0) == []
