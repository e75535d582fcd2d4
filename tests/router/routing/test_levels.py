"""Overlaps by level: the same answers as a dictionary, and the same holders chosen from them."""

import random
from collections import Counter
from collections.abc import Collection, Mapping

import hypothesis.strategies as st
from hypothesis import given

from replicas.protocol.affinity import AffinityOrder
from replicas.protocol.status import ReplicaId
from router.routing.decision import DRAWN_PER_CHOSEN, Replicas, _deepest
from router.routing.levels import Slots
from router.routing.load import ReplicaLoad
from tests.router.routing.fleets import fleet, overlapping, ready, request

depths_by_number = st.dictionaries(st.integers(0, 60), st.integers(1, 4), max_size=60)


def named(depths: Mapping[int, int]) -> dict[ReplicaId, int]:
    return {ReplicaId(f"r{number}"): depth for number, depth in depths.items()}


@given(depths_by_number)
def test_overlaps_are_a_mapping_with_the_deepest_first(depths: dict[int, int]) -> None:
    by_name = named(depths)
    overlaps = overlapping(by_name)
    assert dict(overlaps) == by_name
    assert len(overlaps) == len(by_name) and bool(overlaps) == bool(by_name)
    assert list(overlaps.values()) == sorted(by_name.values(), reverse=True)
    assert all(overlaps.depth(name) == depth == overlaps[name] for name, depth in by_name.items())
    assert overlaps.depth(ReplicaId("stranger")) == 0
    assert "stranger" not in overlaps


@given(st.sets(st.integers(0, 300)))
def test_slots_name_the_bits_that_they_were_given(numbers: set[int]) -> None:
    bits = {ReplicaId(f"r{number}"): 1 << number for number in range(0, 301)}
    slots = Slots(bits)
    mask = slots.mask(ReplicaId(f"r{number}") for number in numbers)
    assert mask == sum(1 << number for number in numbers)
    assert slots.of(mask) == [f"r{number}" for number in sorted(numbers)]
    assert slots.of(mask, range(len(numbers))[::-2]) == slots.of(mask)[::-2]
    assert slots.of(mask, []) == []
    assert slots.everyone == 2**301 - 1
    assert slots.mask([ReplicaId("stranger")]) == 0


def test_a_draw_from_a_level_gives_everybody_the_same_chance() -> None:
    (level,) = overlapping(dict.fromkeys(fleet(20), 7)).levels(2**20 - 1)
    rng = random.Random(1)
    drawn = Counter(replica_id for _ in range(4000) for replica_id in level.draw(5, rng))
    assert len(drawn) == 20
    assert max(drawn.values()) < 1.25 * min(drawn.values())


def test_replicas_that_do_not_serve_are_no_holders() -> None:
    overlaps = overlapping({ReplicaId(f"r{number}"): 5 + number % 2 for number in range(40)})
    few = ready(fleet(3))
    levels = list(overlaps.levels(few.mask(overlaps.slots)))
    drawn = [(level.depth, level.draw(9, random.Random(1))) for level in levels]
    assert drawn == [(6, ["r1"]), (5, ["r0", "r2"])]


def test_replicas_know_their_bits_when_the_slots_change() -> None:
    replicas = ready(fleet(2))
    assert replicas.mask(Slots({ReplicaId("r0"): 1, ReplicaId("r1"): 2})) == 3
    assert replicas.mask(Slots({ReplicaId("r0"): 8, ReplicaId("gone"): 1})) == 8


def deepest_by_sorting(
    replicas: Replicas,
    order: AffinityOrder,
    overlaps: Mapping[ReplicaId, int],
    chosen: Collection[ReplicaId],
    count: int,
    rng: random.Random,
) -> list[ReplicaId]:
    """The rule as it reads: all holders in one list."""
    holders = sorted((each for each in overlaps if each in replicas), key=lambda each: -overlaps[each])
    num_drawn = DRAWN_PER_CHOSEN * count + len(chosen)
    if len(holders) > num_drawn:
        least = overlaps[holders[num_drawn - 1]]
        deeper = [each for each in holders if overlaps[each] > least]
        equals = [each for each in holders if overlaps[each] == least]
        holders = deeper + rng.sample(equals, num_drawn - len(deeper))
    holders = [each for each in holders if each not in chosen]
    ranks = order.ranks(holders)
    loads = [replicas[each] for each in holders]
    by_preference = sorted(
        (-overlaps[each], load.num_pending_tokens, load.num_requests, rank, each)
        for each, load, rank in zip(holders, loads, ranks, strict=True)
    )
    return [each for *_, each in by_preference[:count]]


@given(
    depths=st.lists(st.sampled_from([0, *[1] * 30, 2, 3]), min_size=60, max_size=60),
    busy=st.lists(st.integers(0, 99), min_size=50, max_size=50),
    num_chosen=st.integers(0, 4),
    count=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_the_deepest_holders_are_those_that_sorting_everybody_would_find(
    depths: list[int], busy: list[int], num_chosen: int, count: int, seed: int
) -> None:
    replicas = ready({ReplicaId(f"r{n}"): ReplicaLoad(num_requests=load) for n, load in enumerate(busy)})
    order = replicas.ranking.of(request(seed).bucket)
    by_name = named({number: depth for number, depth in enumerate(depths) if depth})
    overlaps = overlapping(by_name)
    chosen = order.first(num_chosen)
    found = _deepest(replicas, order, overlaps, chosen, count, random.Random(seed))
    expected = deepest_by_sorting(replicas, order, by_name, chosen, count, random.Random(seed))
    assert found == expected
