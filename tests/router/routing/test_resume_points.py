"""A sparse model: overlaps are by resume points, full attention's reach only breaks ties."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from replicas.index.residency import Residency
from replicas.protocol.blocks import BlockHash, hash_blocks, pack_token_ids
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import Announcement, IndexChange
from replicas.protocol.status import Epoch, ModelCard, ReplicaId
from router.explain.preview import because
from router.routing.bucket import bucket_of
from router.routing.cost import CostParameters
from router.routing.decision import RoutingRequest
from router.routing.overlap import PrefixIndex
from router.routing.table import RoutedRequest, RoutingTable
from tests.replicas.builders import ROOT as CACHE_ROOT
from tests.replicas.simulated_engine.test_grouped_cache import SHAPES, Served
from tests.router.routing.chains import chain
from tests.router.routing.tables import ROOT, prompt

A, B = ReplicaId("a"), ReplicaId("b")
BLOCK = 32
CARD = ModelCard("m", "fingerprint", "simulated", BLOCK, 1000, 100_000, 1000, is_sparse=True)


def index_of(*replica_ids: ReplicaId, stride: int = 1) -> PrefixIndex:
    index = PrefixIndex(16, 16 * stride, is_sparse=True)
    for replica_id in replica_ids:
        index.replace(replica_id, Epoch("e"), ())
    return index


def change(index: PrefixIndex, replica_id: ReplicaId, **parts: object) -> None:
    number = index.last_change(replica_id) + 1
    index.apply(IndexChange(replica_id, Epoch("e"), number, **parts))  # type: ignore[arg-type]


def test_the_deepest_point_counts_whatever_lies_before_it_and_full_attention_does_not() -> None:
    index, hashes = index_of(A, B), chain("abcdef")
    change(index, A, added=tuple(hashes), points=(hashes[1], hashes[3]))
    change(index, B, added=tuple(hashes[:5]))
    overlaps = index.overlaps(hashes)
    assert dict(overlaps) == {A: 4}
    assert [overlaps.reach_of(overlaps.slots.bit(each)) for each in (A, B)] == [6, 5]
    change(index, A, points_removed=(hashes[3],))
    assert dict(index.overlaps(hashes)) == {A: 2}
    change(index, A, points_removed=(hashes[1],))
    assert dict(index.overlaps(hashes)) == {}


def test_a_block_and_a_point_of_one_hash_come_and_go_apart() -> None:
    index, hashes = index_of(A, stride=2), chain("abcd")
    change(index, A, added=(hashes[1], hashes[2], hashes[3]), points=(hashes[2],))
    assert index.num_stored(A) == 4
    change(index, A, removed=(hashes[2],))
    assert dict(index.overlaps(hashes)) == {A: 3}
    change(index, A, added=(hashes[2],), points_removed=(hashes[2],))
    assert index.num_stored(A) == 3
    assert dict(index.overlaps(hashes)) == {}


def test_points_that_went_are_remembered_apart_from_blocks_and_from_those_of_others() -> None:
    index, hashes = index_of(A, B), chain("abcd")
    index.departures.now = 7.0
    change(index, A, added=tuple(hashes), points=(hashes[1], hashes[3]))
    change(index, A, points_removed=(hashes[1],))
    index.departures.now = 8.0
    change(index, B, added=tuple(hashes), points=(hashes[1], hashes[2]))
    change(index, B, points_removed=(hashes[1], hashes[2]))

    def gone(replica_id: ReplicaId, first: int = 0) -> list[tuple[int, ReplicaId, float]]:
        return [
            (at, left.replica_id, left.at) for at, left in index.departed_points(replica_id, hashes, first)
        ]

    assert gone(A) == [(1, A, 7.0)]
    assert gone(B) == [(1, B, 8.0), (2, B, 8.0)]
    assert gone(A, 2) == []
    assert index.departed(hashes, 0) == []
    change(index, A, removed=(hashes[3],))
    assert [at for at, _ in index.departed(hashes, 0)] == [3]
    assert [at for at, *_ in gone(A)] == [1]


def test_without_full_attention_points_are_found_anywhere() -> None:
    index, hashes = index_of(A, B, stride=4), chain("abcdefghijkl")
    change(index, A, points=(hashes[2], hashes[9]))
    assert dict(index.overlaps(hashes)) == {A: 10}
    assert dict(index.overlaps(hashes[:9])) == {A: 3}


def test_predicted_points_count_until_they_end_and_are_not_stored() -> None:
    index, hashes = index_of(A), chain("abcd")
    change(index, A, added=(hashes[0],), points=(hashes[0],))
    index.predict(7, A, index.missing(A, hashes), [hashes[2]])
    overlaps = index.overlaps(hashes)
    assert dict(overlaps) == {A: 3}
    held = overlaps.holdings(frozenset())
    assert held is not None and (held.depth(A), held.stored_depth(A)) == (3, 1)
    announced = Announcement(7, index.missing(A, hashes), (hashes[2],))
    change(index, A, announced=(announced,))
    index.end_prediction(7)
    assert dict(index.overlaps(hashes)) == {A: 3}
    change(index, A, ended=(7,))
    assert dict(index.overlaps(hashes)) == {A: 1}
    assert index.num_predictions == 0


def test_a_removed_point_is_no_longer_predicted() -> None:
    index, hashes = index_of(A), chain("abcd")
    change(index, A, added=(hashes[0],))
    index.predict(7, A, hashes[1:], [hashes[2]])
    change(index, A, points_removed=(hashes[2],))
    assert dict(index.overlaps(hashes)) == {}


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("has_full", [True, False])
def test_levels_are_those_of_a_naive_twin(stride: int, has_full: bool) -> None:
    rng = random.Random(stride)
    replica_ids = [ReplicaId(f"r{number}") for number in range(5)]
    index = index_of(*replica_ids, stride=stride)
    points: dict[ReplicaId, set[BlockHash]] = {each: set() for each in replica_ids}
    foretold: dict[ReplicaId, set[BlockHash]] = {each: set() for each in replica_ids}
    chains = [chain("ab" * 3 + text * 4) for text in "cdef"]
    for number in range(400):
        replica_id, hashes = rng.choice(replica_ids), rng.choice(chains)
        end = rng.randint(1, len(hashes))
        if has_full and number % 3 == 0:
            change(index, replica_id, added=tuple(hashes[stride - 1 : end : stride]))
        reach = index.reach(replica_id, hashes) if has_full else len(hashes)
        point = hashes[rng.randint(1, min(len(hashes), reach + stride - 1) or 1) - 1]
        if rng.random() < 0.2 and reach:
            index.predict(number, replica_id, [], [point])
            foretold[replica_id].add(point)
        elif rng.random() < 0.6 and reach:
            change(index, replica_id, points=(point,))
            points[replica_id].add(point)
        else:
            gone = tuple(each for each in points[replica_id] | foretold[replica_id] if rng.random() < 0.5)
            change(index, replica_id, points_removed=gone)
            points[replica_id] -= set(gone)
            foretold[replica_id] -= set(gone)
        asked = rng.choice(chains)[: rng.randint(1, 18)]

        def deepest(known: set[BlockHash], asked: Sequence[BlockHash] = asked) -> int:
            return max((end for end, each in enumerate(asked, start=1) if each in known), default=0)

        overlaps = index.overlaps(asked)
        assert {each: overlaps.depth(each) for each in replica_ids} == {
            each: deepest(points[each] | foretold[each]) for each in replica_ids
        }
        held = overlaps.holdings(frozenset())
        if held is not None:
            assert {each: held.stored_depth(each) for each in replica_ids} == {
                each: deepest(points[each]) for each in replica_ids
            }
        depths = [level.depth for level in overlaps.levels(overlaps.slots.everyone)]
        assert depths == sorted(set(depths), reverse=True)


@pytest.mark.parametrize("retention_blocks", [0, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_router_expects_of_one_prompt_at_a_time_is_what_the_cache_has(
    shape: str, retention_blocks: int
) -> None:
    """Events, thinning, index and lookup, with evictions."""
    served = Served(shape, num_blocks=260, budget=256)
    alignment = served.cache.alignment
    served = Served(shape, retention_blocks * alignment, num_blocks=260, budget=256)
    residency = Residency(alignment, 128)
    index = PrefixIndex(alignment, 128, is_sparse=True)
    index.replace(A, Epoch("e"), ())
    rng, known = random.Random(3), [served.fresh(300)]
    take, num_hits = served.cache.take_events, 0

    def observed() -> object:
        events = take()
        residency.observe(events)
        net = residency.take_change()
        change(
            index,
            A,
            added=net.added,
            removed=net.removed,
            points=net.points,
            points_removed=net.points_removed,
        )
        return events

    served.cache.take_events = observed  # type: ignore[method-assign,assignment]
    for _ in range(100):
        base = rng.choice(known[-12:])
        tokens = (base[: rng.randint(1, len(base))] + served.fresh(rng.randint(0, 200)))[:900]
        hashes = hash_blocks(CACHE_ROOT, tokens, alignment)[: (len(tokens) - 1) // alignment]
        expected = index.overlaps(hashes).depth(A) * alignment
        hit, whole = served.serve(tokens, rng.choice([1, 2, 40]))
        assert hit.num_tokens == expected
        num_hits += expected > 0
        known.append(whole)
        assert index.num_stored(A) == len(residency.kept) + len(residency.points)
    assert num_hits > 10


def sparse_table(size: int = 2, card: ModelCard = CARD) -> RoutingTable:
    table = RoutingTable("kvasir", CostParameters(), random.Random(1))
    for number in range(size):
        table.add_replica(ReplicaId(f"r{number}"), card, 128)
        table.index("m").replace(ReplicaId(f"r{number}"), Epoch("e"), ())
    return table


def route(table: RoutingTable, tokens: Sequence[int], num_output_tokens: int = 0) -> RoutedRequest:
    """An answer that is resumed has output tokens, whose blocks the router does not name."""
    bucket = bucket_of(ROOT, None, pack_token_ids(tokens), None, BLOCK)
    request = RoutingRequest(bucket, len(tokens) + num_output_tokens, BLOCK)
    return table.route("m", request, hash_blocks(ROOT, tokens, BLOCK))


def computed(table: RoutingTable, routed: RoutedRequest) -> None:
    """Its replica has what it announced."""
    announced = routed.announcement
    change(
        table.index("m"),
        routed.decision.replica_id,
        added=announced.block_hashes,
        points=announced.points,
    )
    routed.close()


@pytest.mark.parametrize("home", ["r0", "r1"])
def test_the_second_request_goes_where_its_junction_can_form_and_the_third_is_resumed_there(
    home: str,
) -> None:
    table = sparse_table()
    first = prompt(0, 7, 1300)
    hashes = hash_blocks(ROOT, first, BLOCK)
    change(table.index("m"), ReplicaId(home), added=tuple(hashes[3::4]), points=(hashes[39],))
    second, third = ([*first[:1200], *prompt(0, number, 100)] for number in (8, 9))
    routed = route(table, second)
    assert (routed.decision.replica_id, routed.decision.overlap_tokens) == (home, 0)
    if routed.decision.rank:
        other = "r1" if home == "r0" else "r0"
        assert because(routed.decision).startswith(f"not to {other}, its home: it has less of the prompt")
    ends = [hash_blocks(ROOT, second, BLOCK).index(each) + 1 for each in routed.announcement.points]
    assert ends == [36, 40]  # what the thinned index knows of 37 common blocks, and the prompt's end
    with route(table, third) as expected:
        assert expected.decision.overlap_tokens == 36 * BLOCK
    computed(table, routed)
    with route(table, third) as expected:
        assert expected.decision.overlap_tokens == 36 * BLOCK


def test_a_prompts_last_token_is_computed_and_so_is_the_block_that_it_ends() -> None:
    table = sparse_table(1)
    tokens = prompt(0, 1, 4 * BLOCK)
    routed = route(table, tokens)
    assert routed.announcement.points == tuple(hash_blocks(ROOT, tokens, BLOCK)[2:3])
    computed(table, routed)
    assert route(table, tokens).decision.overlap_tokens == 3 * BLOCK
    whole = tuple(hash_blocks(ROOT, tokens, BLOCK)[3:])
    change(table.index("m"), ReplicaId("r0"), points=whole)
    assert route(table, tokens).decision.overlap_tokens == 3 * BLOCK
    assert route(table, [*tokens, 1]).decision.overlap_tokens == 4 * BLOCK


@pytest.mark.parametrize("peek_tokens", [0, BLOCK])
@pytest.mark.parametrize("num_output_tokens", [1, BLOCK - 1, BLOCK, 5 * BLOCK])
def test_a_resumed_answer_announces_no_points_behind_its_prompt(
    num_output_tokens: int, peek_tokens: int
) -> None:
    table = sparse_table(1, replace(CARD, peek_tokens=peek_tokens))
    tokens = prompt(0, 1, 4 * BLOCK + 1)
    hashes = hash_blocks(ROOT, tokens, BLOCK)
    announced = route(table, tokens, num_output_tokens).announcement
    assert set(announced.points) <= {hashes[3]}


def test_a_draft_model_reads_the_last_block_of_what_is_found() -> None:
    table = sparse_table(1, replace(CARD, peek_tokens=BLOCK))
    tokens = prompt(0, 1, 4 * BLOCK)
    routed = route(table, tokens)
    assert routed.announcement.points == tuple(hash_blocks(ROOT, tokens, BLOCK)[2:4])
    computed(table, routed)
    assert route(table, tokens).decision.overlap_tokens == 3 * BLOCK
    dense = sparse_table(1, replace(CARD, peek_tokens=BLOCK, is_sparse=False))
    computed(dense, route(dense, tokens))
    assert route(dense, tokens).decision.overlap_tokens == 2 * BLOCK
    assert route(dense, [*tokens, 1]).decision.overlap_tokens == 3 * BLOCK


def test_replicas_that_find_hits_in_different_ways_are_not_mixed() -> None:
    table = sparse_table(1)
    with pytest.raises(ValueError, match="in another way"):
        table.add_replica(B, replace(CARD, is_sparse=False), 128)
    with pytest.raises(ValueError, match="in another way"):
        table.add_replica(B, replace(CARD, peek_tokens=BLOCK), 128)
    table.add_replica(ReplicaId("r0"), replace(CARD, is_sparse=False), 128)
    assert dict(table.index("m").overlaps(chain("a"))) == {}


def test_in_a_large_fleet_those_that_full_attention_reaches_are_compared() -> None:
    table = sparse_table(60)
    first = prompt(0, 7, 1300)
    there = ReplicaId("r47")
    change(table.index("m"), there, added=tuple(hash_blocks(ROOT, first, BLOCK)[3::4]))
    routed = route(table, [*first[:1200], *prompt(0, 8, 100)])
    assert routed.decision.replica_id == there


def test_what_full_attention_has_is_computed_again_but_is_no_second_copy() -> None:
    table = sparse_table(2)
    first = prompt(0, 7, 1280)
    change(table.index("m"), ReplicaId("r1"), added=tuple(hash_blocks(ROOT, first, BLOCK)[3::4]))
    decision = route(table, [*first, *prompt(0, 8, 640)]).decision
    there, elsewhere = (
        next(each for each in decision.candidates if each.replica_id == name) for name in ("r1", "r0")
    )
    assert there.overlap_tokens == elsewhere.overlap_tokens == 0
    assert there.cost.prefill_seconds == elsewhere.cost.prefill_seconds
    junction_seconds = 0.5 * 1280 * CostParameters().default_prefill_seconds_per_token
    assert there.cost.room_seconds == pytest.approx((elsewhere.cost.room_seconds - junction_seconds) / 3)
    assert decision.replica_id == "r1"


def test_a_request_waits_where_it_leaves_a_junction_unless_a_point_as_deep_is_elsewhere() -> None:
    table = sparse_table(3)
    first = prompt(0, 7, 6400)
    hashes = hash_blocks(ROOT, first, BLOCK)
    index = table.index("m")
    change(index, ReplicaId("r1"), added=tuple(hashes[3::4]))
    table.update_load(ReplicaId("r1"), LoadSnapshot(num_pending_tokens=6000))
    with route(table, [*first, *prompt(0, 8, 640)]) as routed:
        assert routed.decision.replica_id == "r1"
    change(index, ReplicaId("r2"), added=tuple(hashes[3::4]), points=(hashes[-1],))
    table.update_load(ReplicaId("r2"), LoadSnapshot(num_pending_tokens=20_000))
    assert route(table, [*first, *prompt(0, 9, 640)]).decision.replica_id == "r0"
