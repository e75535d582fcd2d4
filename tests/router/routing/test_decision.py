"""Costs, near-ties, tiers, claims of programs, and the bounded set of candidates."""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from msgspec import structs

from replicas.protocol.blocks import ImageTokens, hash_blocks
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import ReplicaId
from replicas.protocol.ways import DISK_MOVE_SECONDS, HOST_MOVE_SECONDS, PULL_MOVE_SECONDS, MoveSpeeds, Reach
from router.routing.cost import CostParameters, FleetRates, cost_of, fleet_rates, with_future
from router.routing.decision import Claim, Decision, DecisionReason, Replicas, RoutingRequest, decide
from router.routing.levels import Overlaps, Slots, View
from router.routing.load import ReplicaLoad
from router.routing.table import RoutingTable
from tests.router.routing.fleets import BLOCK_SIZE, fleet, overlapping, ranked, ready, request
from tests.router.routing.tables import CARD, ROOT, STRIDE, prompt, store, table_of

PARAMETERS = CostParameters()


def decided(
    replicas: Mapping[ReplicaId, ReplicaLoad],
    overlaps: Mapping[str, int] | None = None,
    *,
    asked: RoutingRequest | None = None,
    parameters: CostParameters = PARAMETERS,
) -> Decision:
    blocks = {ReplicaId(name): depth for name, depth in (overlaps or {}).items()}
    return decide(asked or request(), ready(replicas), overlapping(blocks), parameters, random.Random(1))


def test_a_single_replica_is_no_choice() -> None:
    decision = decided(fleet(1))
    assert (decision.replica_id, decision.reason, decision.rank) == ("r0", DecisionReason.ONLY_REPLICA, 0)


def test_a_cold_prompt_goes_home_in_an_idle_fleet() -> None:
    for number in range(50):
        decision = decided(fleet(8), asked=request(number))
        assert decision.replica_id == ranked(8, number)[0]
        assert (decision.reason, decision.rank, decision.overlap_tokens) == (DecisionReason.HOME, 0, 0)


@pytest.mark.parametrize("size", [2, 40])
def test_a_short_head_brings_prompts_together_only_at_a_home_that_runs_nothing(size: int) -> None:
    home = ranked(size, 999)[0]
    busy = fleet(size, **{home: ReplicaLoad(num_requests=1)})
    holder = next(each for each in ranked(size) if each != home)
    for number in range(30):
        asked = request(number)
        headed = structs.replace(asked, head_bucket=request(999).bucket)
        decision = decided(fleet(size), asked=headed)
        assert (decision.replica_id, decision.rank, decision.reason) == (home, 0, DecisionReason.HOME)
        assert decided(busy, asked=headed) == decided(busy, asked=asked), "a busy one draws nobody"
        assert decided(fleet(size), {holder: 400}, asked=headed).replica_id == holder


def test_ties_are_spread_evenly_over_the_fleet() -> None:
    homes = Counter(decided(fleet(8), asked=request(number)).replica_id for number in range(4000))
    assert len(homes) == 8
    assert max(homes.values()) < 1.2 * min(homes.values())


def test_the_prompt_goes_where_it_is_cached() -> None:
    for holder in ranked(8):
        decision = decided(fleet(8), {holder: 400})
        assert decision.replica_id == holder
        assert decision.reason is DecisionReason.OVERLAP
        assert decision.overlap_tokens == 6400


def with_places(num_requests: int, place_seconds: float = 0.0) -> ReplicaLoad:
    return ReplicaLoad(num_requests=num_requests, num_places=2, place_seconds=place_seconds)


def test_no_affinity_waits_for_a_place_while_another_is_free() -> None:
    home, other = ranked(2)

    def chosen(at_home: ReplicaLoad, elsewhere: ReplicaLoad) -> ReplicaId:
        return decided({home: at_home, other: elsewhere}, asked=request(num_tokens=100)).replica_id

    assert chosen(ReplicaLoad(num_requests=3), ReplicaLoad()) == home
    assert chosen(with_places(1), with_places(0)) == home
    assert chosen(with_places(2), with_places(0)) == other
    assert chosen(with_places(2), with_places(2)) == home


def test_a_cached_prompt_waits_for_a_place_if_that_is_sooner_than_computing_it() -> None:
    holder, other = ranked(2)
    for place_seconds, expected in ((0.1, holder), (10.0, other)):
        loads = {holder: with_places(3, place_seconds), other: with_places(1, place_seconds)}
        decision = decided(loads, {holder: 400})
        assert decision.replica_id == expected
        waiting = next(each.cost.wait_seconds for each in decision.candidates if each.replica_id == holder)
        assert waiting == pytest.approx(3 * 0.01 + place_seconds)


def test_among_equal_overlaps_the_affinity_order_decides() -> None:
    order = ranked(8)
    decision = decided(fleet(8), {order[5]: 100, order[2]: 100, order[7]: 100})
    assert (decision.replica_id, decision.rank) == (order[2], 2)


@pytest.mark.parametrize(("num_tokens", "found"), [(8000, 7984), (8001, 8000), (7999, 7984)])
def test_whole_blocks_are_found_but_the_last_token_is_always_computed(num_tokens: int, found: int) -> None:
    decision = decided(fleet(2), {"r0": 500, "r1": 500}, asked=request(num_tokens=num_tokens))
    assert decision.overlap_tokens == found


def test_a_busy_home_spills_a_cold_prompt_along_the_affinity_order() -> None:
    first, second, *_ = ranked(8)
    busy = ReplicaLoad(num_requests=20, num_pending_tokens=20_000)
    decision = decided(fleet(8, **{first: busy}))
    assert (decision.replica_id, decision.reason, decision.rank) == (second, DecisionReason.SPILL, 1)


def test_a_little_more_work_at_home_is_a_near_tie() -> None:
    home = ranked(8)[0]
    asked = request(num_tokens=500)
    slightly = ReplicaLoad(num_requests=PARAMETERS.near_tie_requests, num_pending_tokens=100)
    assert decided(fleet(8, **{home: slightly}), asked=asked).replica_id == home
    more = ReplicaLoad(num_requests=PARAMETERS.near_tie_requests + 1)
    assert decided(fleet(8, **{home: more}), asked=asked).replica_id != home


def test_a_near_tie_never_costs_overlap() -> None:
    home, *_, last = ranked(8)
    loads = {last: ReplicaLoad(num_requests=2, num_pending_tokens=60)}
    assert decided(fleet(8, **loads), {last: 6}, asked=request(num_tokens=100)).replica_id == last
    assert home != last


def test_a_near_tie_with_more_of_the_prompt_comes_before_the_affinity_order() -> None:
    *_, last = ranked(8)
    loads = {last: ReplicaLoad(num_requests=2)}
    decision = decided(fleet(8, **loads), {last: 1}, asked=request(num_tokens=1000))
    assert min(decision.candidates, key=lambda c: c.cost.seconds).replica_id != last
    assert (decision.replica_id, decision.overlap_tokens) == (last, 16)


def test_with_full_caches_a_holder_is_left_only_when_waiting_costs_more_than_a_copy_and_its_room() -> None:
    asked, overlap_blocks = request(num_tokens=6400 + 100), 400
    holder = ranked(8)[3]
    for pending, stays in ((3.5, True), (4.5, False)):
        loads = {f"r{n}": ReplicaLoad(cache_fill=1.0) for n in range(8)}
        loads[holder] = ReplicaLoad(num_pending_tokens=int(pending * 6400), cache_fill=1.0)
        decision = decided(fleet(8, **loads), {holder: overlap_blocks}, asked=asked)
        assert (decision.replica_id == holder) is stays
        assert decision.reason is (DecisionReason.OVERLAP if stays else DecisionReason.HOME)


def test_with_room_for_free_a_holder_is_left_when_waiting_costs_more_than_prefill() -> None:
    holder = ranked(8)[3]
    loads = {f"r{n}": ReplicaLoad(cache_fill=1.0) for n in range(8)}
    loads[holder] = ReplicaLoad(num_pending_tokens=2 * 6400, cache_fill=1.0)
    free = CostParameters(room_price=0.0)
    assert decided(fleet(8, **loads), {holder: 400}, parameters=free).replica_id != holder
    assert decided(fleet(8, **loads), {holder: 400}).replica_id == holder


def test_sessions_that_share_a_head_leave_a_full_cache_for_an_empty_one() -> None:
    holder, other = ranked(2)
    asked = request(num_tokens=6400 + 6400)
    for fill, stays in ((1.0, True), (0.0, False)):
        loads = {holder: ReplicaLoad(cache_fill=1.0), other: ReplicaLoad(cache_fill=fill)}
        assert (decided(fleet(2, **loads), {holder: 400}, asked=asked).replica_id == holder) is stays


def test_empty_caches_are_filled_before_anything_is_evicted() -> None:
    home, *others = ranked(4)
    loads = {home: ReplicaLoad(cache_fill=1.0), **{other: ReplicaLoad(cache_fill=0.5) for other in others}}
    assert decided(fleet(4, **loads), asked=request(num_tokens=5000)).rank == 1


def test_overlap_at_replicas_that_may_not_serve_counts_for_nothing() -> None:
    decision = decided(fleet(4), {"gone": 500})
    assert decision.reason is DecisionReason.HOME
    assert len({candidate.cost for candidate in decision.candidates}) == 1


def test_rates_that_differ_by_chance_do_not_move_a_bucket_from_its_home() -> None:
    rng = random.Random(3)
    for number in range(50):
        loads = {
            f"r{n}": ReplicaLoad(prefill_seconds_per_token=3e-5 * rng.uniform(0.75, 1.35)) for n in range(8)
        }
        assert decided(fleet(8, **loads), asked=request(number)).rank == 0


def test_a_replica_that_is_truly_slower_gets_less() -> None:
    home = ranked(3)[0]
    loads = {f"r{n}": ReplicaLoad(prefill_seconds_per_token=3e-5) for n in range(3)}
    loads[home] = ReplicaLoad(prefill_seconds_per_token=2e-4)
    assert decided(fleet(3, **loads)).replica_id != home


def test_the_median_stands_in_for_a_replica_that_has_measured_nothing() -> None:
    loads = [
        ReplicaLoad(prefill_seconds_per_token=1e-5, decode_step_seconds=0.01),
        ReplicaLoad(prefill_seconds_per_token=2e-5),
        ReplicaLoad(prefill_seconds_per_token=9e-5, decode_step_seconds=0.03),
        ReplicaLoad(),
    ]
    assert fleet_rates(loads, PARAMETERS) == pytest.approx((2e-5, 0.02, 0.0))
    assert fleet_rates([ReplicaLoad()], PARAMETERS) == pytest.approx((1e-4, 0.01, 0.0))


def test_the_cost_is_wait_and_prefill_and_the_prices_of_delay_and_room() -> None:
    load = ReplicaLoad(num_requests=3, num_pending_tokens=100, cache_fill=0.5, prefill_seconds_per_token=1e-3)
    rates = fleet_rates([load], PARAMETERS)
    parameters = CostParameters(room_price=4, delay_price=0.2)
    cost = cost_of(load, num_tokens=80, reach=Reach(30, 30, 30, 30), rates=rates, parameters=parameters)
    assert msgspec.structs.astuple(cost) == pytest.approx(
        (0.1 + 0.03, 0.05, 0.03, 0.1, 0.0, 30, 1e-3, 0.0, 0.0)
    )
    assert cost.seconds == pytest.approx(0.31)


def test_a_long_prompt_goes_where_it_disturbs_few_and_a_short_one_where_it_waits_least() -> None:
    few, many = ranked(2)
    loads = fleet(
        2,
        **{
            few: ReplicaLoad(num_requests=2, num_pending_tokens=5000),
            many: ReplicaLoad(num_requests=12, num_pending_tokens=3000),
        },
    )
    assert decided(loads, asked=request(num_tokens=20_000)).replica_id == few
    assert decided(loads, asked=request(num_tokens=200)).replica_id == many


def test_every_candidate_of_a_small_fleet_is_explained() -> None:
    decision = decided(fleet(16), {"r3": 10})
    assert [candidate.replica_id for candidate in decision.candidates] == ranked(16)
    assert [candidate.rank for candidate in decision.candidates] == list(range(16))
    assert {c.overlap_tokens for c in decision.candidates if c.replica_id == "r3"} == {160}


@pytest.mark.parametrize("size", [17, 100, 500])
def test_a_large_fleet_compares_a_bounded_few(size: int) -> None:
    holders = {f"r{n}": n for n in range(0, size, 2)}
    decision = decided(fleet(size), holders)
    assert len(decision.candidates) <= 12
    assert len({candidate.replica_id for candidate in decision.candidates}) == len(decision.candidates)
    assert decision.replica_id == f"r{(size - 1) // 2 * 2}"
    assert decision.reason is DecisionReason.OVERLAP


def test_a_large_fleet_sends_cold_prompts_home_and_past_a_busy_head_to_idle_ones() -> None:
    order = ranked(100)
    assert decided(fleet(100)).replica_id == order[0]
    busy = ReplicaLoad(num_requests=100, num_pending_tokens=100_000)
    loads = dict.fromkeys(order[:60], busy)
    assert decided(fleet(100, **loads)).rank >= 60


@given(
    loads=st.lists(
        st.builds(ReplicaLoad, st.integers(0, 50), st.integers(0, 50_000)), min_size=1, max_size=30
    ),
    depths=st.lists(st.integers(0, 500), min_size=30, max_size=30),
    number=st.integers(0, 1000),
)
def test_the_choice_is_never_far_from_the_cheapest(
    loads: list[ReplicaLoad], depths: list[int], number: int
) -> None:
    replicas = {ReplicaId(f"r{n}"): load for n, load in enumerate(loads)}
    overlaps = {f"r{n}": depth for n, depth in enumerate(depths) if depth}
    decision = decided(replicas, overlaps, asked=request(number))
    chosen = next(c for c in decision.candidates if c.replica_id == decision.replica_id)
    cheapest = min(decision.candidates, key=lambda c: c.cost.seconds)
    assert chosen.cost.seconds <= cheapest.cost.seconds + 256 * 1e-4 + 4 * 0.01 + 1e-9
    assert chosen.overlap_tokens >= cheapest.overlap_tokens or chosen.cost.seconds == cheapest.cost.seconds
    assert decision.overlap_tokens == chosen.overlap_tokens
    assert (
        decision.rank
        == chosen.rank
        == ready(replicas).ranking.of(request(number).bucket).whole().index(chosen.replica_id)
    )


RUBBISH = [0.0, -1e-4, float("nan"), float("inf"), -float("inf"), 1e300, 5e-324]


@pytest.mark.parametrize("rate", RUBBISH)
@pytest.mark.parametrize("size", [1, 2, 3, 8, 40])
def test_a_replica_that_reports_rubbish_rates_changes_nobody_elses_costs(rate: float, size: int) -> None:
    measured = ReplicaLoad(prefill_seconds_per_token=3e-5, decode_step_seconds=0.02)
    loads = {f"r{n}": measured for n in range(size)}
    loads["r0"] = ReplicaLoad(prefill_seconds_per_token=rate, decode_step_seconds=rate)
    for number in range(20):
        decision = decided(fleet(size, **loads), {"r0": 3}, asked=request(number))
        assert all(0 < candidate.cost.seconds < 100 for candidate in decision.candidates)
        others = [candidate for candidate in decision.candidates if candidate.replica_id != "r0"]
        if rate != 5e-324 or size > 2:  # a tiny rate is one that may have been measured
            assert all(c.cost.prefill_seconds == pytest.approx(8000 * 3e-5) for c in others)


def test_a_fleet_of_nothing_but_rubbish_rates_decides_by_the_defaults() -> None:
    for rate in RUBBISH[:-1]:
        load = ReplicaLoad(prefill_seconds_per_token=rate, decode_step_seconds=rate)
        assert fleet_rates([load, load], PARAMETERS) == pytest.approx((1e-4, 0.01, 0.0))
        assert decided(fleet(8, **{f"r{n}": load for n in range(8)})).replica_id == ranked(8)[0]


def test_a_replica_that_seems_endlessly_fast_or_slow_neither_gets_everything_nor_nothing() -> None:
    cold, warm = request(1), request(2)
    typical = {f"r{n}": ReplicaLoad(prefill_seconds_per_token=3e-5) for n in range(1, 4)}
    fast = fleet(4, r0=ReplicaLoad(num_pending_tokens=80_000, prefill_seconds_per_token=1e-12), **typical)
    assert decided(fast, asked=cold).replica_id != "r0"
    slow = fleet(4, r0=ReplicaLoad(prefill_seconds_per_token=50.0), **typical)
    assert decided(slow, {"r0": 499}, asked=warm).replica_id == "r0"


def test_equals_everywhere_still_meet_at_home_whatever_order_the_fleet_is_listed_in() -> None:
    replicas = fleet(8, **{f"r{n}": ReplicaLoad(num_requests=5, num_pending_tokens=900) for n in range(8)})
    everywhere = {f"r{n}": 100 for n in range(8)}
    backwards = dict(reversed(replicas.items()))
    for number in range(50):
        first, second = (
            decided(listed, everywhere, asked=request(number)) for listed in (replicas, backwards)
        )
        assert first == second
        assert (first.replica_id, first.reason) == (ranked(8, number)[0], DecisionReason.OVERLAP)


@pytest.mark.parametrize("size", [17, 1000])
def test_in_a_large_fleet_that_holds_a_prefix_everywhere_a_bounded_few_are_compared(size: int) -> None:
    everywhere = dict.fromkeys(fleet(size), 100)
    assert decided(fleet(size), everywhere).replica_id == ranked(size)[0]
    busy = dict.fromkeys(ranked(size)[: size * 3 // 4], ReplicaLoad(num_requests=90, num_pending_tokens=9000))
    looked_at: Counter[ReplicaId] = Counter()
    loads = fleet(size, **busy)

    def look(replica_id: ReplicaId) -> ReplicaLoad:
        looked_at[replica_id] += 1
        return loads[replica_id]

    replicas = Replicas(loads, look)
    decision = decide(request(), replicas, overlapping(everywhere), PARAMETERS, random.Random(1))
    assert decision.replica_id not in busy
    assert decision.overlap_tokens == 1600
    assert len(looked_at) <= 32


def test_in_a_large_fleet_the_deepest_holder_is_found_among_many_that_hold_less() -> None:
    for number in range(30):
        everywhere = dict.fromkeys(fleet(400), 100)
        everywhere |= {ReplicaId("r77"): 300, ReplicaId("r78"): 299}
        decision = decided(fleet(400), everywhere, asked=request(number))
        assert (decision.replica_id, decision.overlap_tokens) == ("r77", 4800)
        assert "r78" in {candidate.replica_id for candidate in decision.candidates}


def test_two_routers_that_list_the_fleet_differently_compare_the_same_holders() -> None:
    replicas = fleet(60)
    holders = [f"r{n}" for n in range(9, 20)]
    for number in range(30):
        listed = [dict(random.Random(seed).sample(list(replicas.items()), 60)) for seed in (1, 2)]
        blocks = [dict.fromkeys(random.Random(seed).sample(holders, 11), 400) for seed in (3, 4)]
        first, second = (
            decided(loads, overlaps, asked=request(number))
            for loads, overlaps in zip(listed, blocks, strict=True)
        )
        assert first.replica_id == second.replica_id
        assert first.replica_id == next(r for r in ranked(60, number) if r in holders)


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 255, 256, 257])
def test_prompts_of_any_length_are_decided(num_tokens: int) -> None:
    for size in (1, 8, 40):
        decision = decided(fleet(size), {"r0": 500}, asked=request(num_tokens=num_tokens))
        found = max(0, num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert decision.overlap_tokens == (found if decision.replica_id == "r0" else 0)
        assert decision.replica_id == "r0" or not found


IMAGE = ImageTokens(b"", 3000, 1024)
"""Its last block is the 252nd."""


def with_image(number: int = 0) -> RoutingRequest:
    return structs.replace(request(number, num_tokens=4100), media=(IMAGE,))


def test_a_cold_encode_is_worth_waiting_for_the_replica_that_has_the_image() -> None:
    """It has 2,500 tokens to compute first, which takes longer than the 1,600 that are lacking elsewhere, and
    not as long as those and the encoding of the image."""
    loads = [ReplicaLoad(num_pending_tokens=2500, encode_seconds_per_token=rate) for rate in (None, 1e-3)]
    depths = {ReplicaId("r0"): 256, ReplicaId("r1"): 156}
    parameters = CostParameters(room_price=0.0)
    chosen = [
        decide(
            with_image(),
            ready(fleet(2, r0=load, r1=ReplicaLoad(encode_seconds_per_token=load.encode_seconds_per_token))),
            overlapping(depths),
            parameters,
            random.Random(1),
        )
        for load in loads
    ]
    assert [decision.replica_id for decision in chosen] == ["r1", "r0"]
    costs = {each.replica_id: each.cost.encode_seconds for each in chosen[1].candidates}
    assert costs == pytest.approx({"r0": 0.0, "r1": 1.024})


@pytest.mark.parametrize("claim", [float("nan"), -1.0, 1e9, float("inf")])
def test_a_claim_about_encoding_that_is_no_measurement_counts_for_nothing(claim: float) -> None:
    liar = ReplicaLoad(encode_seconds_per_token=claim, num_pending_image_tokens=1)
    decision = decide(with_image(), ready(fleet(2, r0=liar)), overlapping({}), PARAMETERS, random.Random(1))
    assert all(each.cost.encode_seconds == 0.0 for each in decision.candidates)
    plain = decide(request(), ready(fleet(2, r0=liar)), overlapping({}), PARAMETERS, random.Random(1))
    assert all(math.isfinite(each.cost.seconds) and each.cost.wait_seconds >= 0 for each in plain.candidates)


TOKENS = prompt(0, 1, 4000)
HASHES = hash_blocks(ROOT, TOKENS, BLOCK_SIZE)


def asked(home: ReplicaId | None = None, **beyond: int) -> RoutingRequest:
    return structs.replace(
        request(), claim=Claim(home, {ReplicaId(each): num for each, num in beyond.items()})
    )


def holding_home(size: int, blocks: int = 250) -> tuple[ReplicaId, Mapping[str, int]]:
    """A home that is not the first in the affinity order, and what it holds of the prompt."""
    home = ranked(size)[-1]
    return home, {home: blocks}


def test_an_overbooked_home_is_left_where_another_has_room() -> None:
    home, overlaps = holding_home(3)
    assert decided(fleet(3), overlaps, asked=asked(home)).replica_id == home
    moved = decided(fleet(3), overlaps, asked=asked(home, **{home: 1_000_000}))
    assert moved.replica_id != home and moved.claim is not None and moved.claim.home == home
    stays = decided(fleet(3), overlaps, asked=asked(home, **{home: 3_000}))
    assert stays.replica_id == home, "to compute the prompt elsewhere would cost more"


@pytest.mark.parametrize("size", [3, 40])
def test_where_all_are_overbooked_alike_a_turn_stays_home(size: int) -> None:
    home, overlaps = holding_home(size)
    everywhere = asked(home, **{f"r{number}": 1_000_000 for number in range(size)})
    assert decided(fleet(size), overlaps, asked=everywhere).replica_id == home


def test_a_home_is_compared_in_a_large_fleet_also_if_nothing_says_that_it_holds_the_prompt() -> None:
    """In its whole affinity order it is the last."""
    home = ranked(100)[-1]
    others = {each: ReplicaLoad(num_requests=30, num_pending_tokens=50_000) for each in ranked(100)[:-1]}
    loads = fleet(100, **others)
    found = decided(loads, asked=asked(home))
    assert [each.replica_id for each in found.candidates].count(home) == 1
    assert found.replica_id == home
    gone = {each: load for each, load in loads.items() if each != home}
    assert decided(gone, asked=asked(home)).replica_id != home, "nor one that is not ready"
    assert len(decided(loads, asked=asked(ranked(100)[0])).candidates) == len(
        decided(loads, asked=asked(None)).candidates
    ), "one in the order is not compared twice"


def test_the_price_is_that_of_having_the_tokens_again() -> None:
    parameters, load = CostParameters(future_price=2.0), ReplicaLoad()
    rates, plain = fleet_rates([load], parameters), decided(fleet(1)).candidates[0].cost
    for host, seconds in ((None, rates.prefill_seconds_per_token), (1e-5, 1e-5), (1.0, None)):
        there = structs.replace(load, speeds=load.speeds._replace(host=host))
        cost = with_future(plain, there, 1000, rates, parameters)
        assert cost.future_seconds == pytest.approx(2000 * (seconds or rates.prefill_seconds_per_token))
        assert cost.seconds == pytest.approx(plain.seconds + cost.future_seconds)


def test_without_a_claim_or_with_one_that_says_nothing_all_costs_are_the_same() -> None:
    loads = fleet(5, r1=ReplicaLoad(num_requests=4, num_pending_tokens=9000))
    plain = decided(loads, {"r1": 300, "r2": 100})
    empty = decided(loads, {"r1": 300, "r2": 100}, asked=asked(ReplicaId("r2")))
    assert [each.cost for each in plain.candidates] == [each.cost for each in empty.candidates]
    assert plain.claim is None and empty.claim is not None and empty.claim.home == "r2"


def route(table: RoutingTable, claim: Claim | None, *, by_load: bool = False) -> Decision:
    asked = RoutingRequest(b"b" * 16, len(TOKENS), BLOCK_SIZE, claim=claim, by_load=by_load)
    with table.route("m", asked, HASHES) as routed:
        return routed.decision


@pytest.mark.parametrize("policy", ["by load", "random", "round_robin"])
def test_other_policies_decide_as_without_a_claim(policy: str) -> None:
    found: list[Sequence[ReplicaId]] = []
    for claim in (None, Claim(ReplicaId("r0"), {ReplicaId("r2"): 10**6})):
        table = table_of(4, "kvasir" if policy == "by load" else policy)
        for number in (0, 1, 3):
            table.update_load(ReplicaId(f"r{number}"), LoadSnapshot(num_running=3))
        found.append([route(table, claim, by_load=policy == "by load").replica_id for _ in range(12)])
    assert found[0] == found[1]
    if policy == "by load":
        assert set(found[0]) == {"r2"}


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_table_moves_a_turn_from_its_overbooked_home_whatever_its_model_is(is_sparse: bool) -> None:
    table = table_of(0)
    for number in range(3):
        table.add_replica(ReplicaId(f"r{number}"), replace(CARD, is_sparse=is_sparse), STRIDE)
    home = ReplicaId("r1")
    store(table, home, TOKENS)
    assert route(table, None).replica_id == route(table, Claim(home)).replica_id == home
    assert route(table, Claim(home, {home: 10**6})).replica_id != home
    everywhere = {ReplicaId(f"r{number}"): 10**6 for number in range(3)}
    assert route(table, Claim(home, everywhere)).replica_id == home


def test_a_table_knows_the_room_of_a_replica_only_where_its_card_tells() -> None:
    table = table_of(1)
    table.add_replica(ReplicaId("r1"), replace(CARD, num_blocks=0), STRIDE)
    names = [ReplicaId(name) for name in ("r0", "r1", "unknown")]
    assert [table.capacity(each) for each in names] == [CARD.num_blocks * BLOCK_SIZE, None, None]
    assert set(table.ready_ids("m")) == {"r0", "r1"} and list(table.ready_ids("unknown")) == []
    table.set_stalled(ReplicaId("r0"), is_stalled=True)
    assert set(table.ready_ids("m")) == {"r1"}


RATES = FleetRates(1e-4, 1e-2)

SPEEDS = st.none() | st.sampled_from([1e-7, 5e-6, 5e-5, 1e-4, 1e-3])
LOADS = st.builds(
    ReplicaLoad,
    num_requests=st.integers(0, 20),
    num_pending_tokens=st.integers(0, 5000),
    cache_fill=st.floats(0, 1),
    speeds=st.builds(MoveSpeeds, SPEEDS, SPEEDS, SPEEDS, st.sampled_from([0.0, 0.05, 2.0])),
)
IMAGES = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 400)), max_size=4).map(
    lambda images: tuple(ImageTokens(b"", 1000 * n + gap, length) for n, (gap, length) in enumerate(images))
)
REACHES = st.lists(st.integers(0, 4000), min_size=4, max_size=4).map(lambda ends: Reach(*sorted(ends)))


def seconds_of(
    load: ReplicaLoad,
    reach: Reach,
    num_tokens: int,
    num_ready: int,
    images: Sequence[ImageTokens] = (),
    encode: float = 0.0,
) -> float:
    """Time to first token and what others lose, if just so much is made ready; infinite if it cannot be."""
    wait = load.num_pending_tokens * 1e-4 + load.num_requests * 1e-2 + load.num_pending_image_tokens * encode
    move = load.speeds.backlog_seconds if num_ready > reach.device else 0.0
    ways = (
        (reach.device, reach.host, 0.0, HOST_MOVE_SECONDS),
        (reach.host, reach.local, load.speeds.disk, DISK_MOVE_SECONDS),
        (reach.local, reach.peer, load.speeds.pull, PULL_MOVE_SECONDS),
    )
    for start, end, per_token, fixed in ways:
        if start < end <= num_ready:
            if load.speeds.host is None or per_token is None:
                return float("inf")
            move += fixed + (end - start) * (load.speeds.host + per_token)
    prefill = (num_tokens - num_ready) * 1e-4
    for image in images:
        if any(place >= num_ready for place in range(image.start, image.start + image.length)):
            prefill += image.length * encode
    return max(wait, move) + prefill * (1 + PARAMETERS.delay_price * load.num_requests)


@given(LOADS, REACHES)
def test_the_cheapest_way_is_taken(load: ReplicaLoad, reach: Reach) -> None:
    cost = cost_of(load, num_tokens=5000, reach=reach, rates=RATES, parameters=PARAMETERS)
    wanted = {end: seconds_of(load, reach, 5000, end) for end in reach}
    assert cost.seconds - cost.room_seconds == pytest.approx(min(wanted.values()))
    assert cost.num_ready_tokens in reach
    assert wanted[cost.num_ready_tokens] == pytest.approx(min(wanted.values()))


@given(LOADS, REACHES, IMAGES, st.sampled_from([1e-5, 1e-3]), st.integers(0, 5000))
def test_the_cheapest_way_is_taken_of_a_prompt_with_images(
    load: ReplicaLoad, reach: Reach, images: tuple[ImageTokens, ...], encode: float, num_pending: int
) -> None:
    load = structs.replace(load, num_pending_image_tokens=num_pending)
    rates = RATES._replace(encode_seconds_per_token=encode)
    cost = cost_of(load, num_tokens=5000, reach=reach, rates=rates, parameters=PARAMETERS, media=images)
    wanted = {end: seconds_of(load, reach, 5000, end, images, encode) for end in reach}
    assert cost.seconds - cost.room_seconds == pytest.approx(min(wanted.values()))
    assert wanted[cost.num_ready_tokens] == pytest.approx(min(wanted.values()))
    assert cost.prefill_seconds - cost.encode_seconds == pytest.approx((5000 - cost.num_ready_tokens) * 1e-4)


@given(LOADS, REACHES)
def test_what_is_known_below_the_device_never_makes_a_replica_dearer(load: ReplicaLoad, reach: Reach) -> None:
    only_device = Reach(*[reach.device] * 4)
    with_tiers = cost_of(load, num_tokens=5000, reach=reach, rates=RATES, parameters=PARAMETERS)
    without = cost_of(load, num_tokens=5000, reach=only_device, rates=RATES, parameters=PARAMETERS)
    assert with_tiers.seconds <= without.seconds + 1e-9


FAST = ReplicaLoad(speeds=MoveSpeeds(5e-6, 3e-5, 1e-5))


def in_tiers(depths: dict[str, tuple[int, int, int]], loads: dict[str, ReplicaLoad]) -> Decision:
    """Depths in blocks on the device, in host memory or faster, and anywhere."""
    slots = Slots({ReplicaId(name): 1 << number for number, name in enumerate(depths)})

    def levels(tier: int) -> list[tuple[int, int]]:
        return sorted(
            ((ends[tier], slots.bit(ReplicaId(name))) for name, ends in depths.items() if ends[tier]),
            reverse=True,
        )

    tiers = {View.ON_DEVICE: 0, View.IN_HOST: 1, View.STORED: 2}
    overlaps = Overlaps(slots, levels(2), lambda view: levels(tiers[view]))
    return decide(request(), ready(fleet(len(loads), **loads)), overlaps, PARAMETERS, random.Random(1))


def test_what_lies_in_host_memory_is_as_good_as_on_the_device() -> None:
    for holder, other in (("r0", "r1"), ("r1", "r0")):
        decision = in_tiers({holder: (0, 400, 400), other: (100, 100, 100)}, {"r0": FAST, "r1": FAST})
        assert (decision.replica_id, decision.overlap_tokens) == (holder, 400 * BLOCK_SIZE)
        assert decision.pull_from is None


def test_a_busy_holder_is_pulled_from() -> None:
    busy = ReplicaLoad(num_requests=30, num_pending_tokens=60_000, speeds=MoveSpeeds(5e-6, None, None))
    decision = in_tiers({"r0": (400, 400, 400)}, {"r0": busy, "r1": FAST})
    assert (decision.replica_id, decision.pull_from) == ("r1", "r0")
    assert decision.overlap_tokens == 400 * BLOCK_SIZE


def test_what_cannot_be_pulled_is_computed() -> None:
    busy = ReplicaLoad(num_requests=30, num_pending_tokens=60_000)
    decision = in_tiers({"r0": (400, 400, 400)}, {"r0": busy, "r1": ReplicaLoad()})
    assert (decision.replica_id, decision.pull_from, decision.overlap_tokens) == ("r1", None, 0)


def test_a_replica_that_does_not_say_what_moving_takes_has_all_its_tiers_counted() -> None:
    """As one whose engine moves KV by itself."""
    decision = in_tiers({"r0": (0, 0, 0), "r1": (0, 400, 400)}, {"r0": ReplicaLoad(), "r1": ReplicaLoad()})
    assert (decision.replica_id, decision.overlap_tokens) == ("r1", 400 * BLOCK_SIZE)


def test_what_cannot_be_reached_attracts_nothing() -> None:
    """A copy on a disk of unknown speed, next to a little less on a device."""
    host_only = ReplicaLoad(speeds=MoveSpeeds(5e-6, None, None))
    decision = in_tiers({"r0": (0, 0, 24), "r1": (22, 22, 22)}, {"r0": host_only, "r1": host_only})
    assert (decision.replica_id, decision.overlap_tokens) == ("r1", 22 * BLOCK_SIZE)


def test_only_a_replica_that_may_serve_is_pulled_from() -> None:
    slots = Slots({ReplicaId("gone"): 1, ReplicaId("r0"): 2})
    overlaps = Overlaps(slots, [(400, 1)], lambda view: [(400, 1)])
    decision = decide(request(), ready(fleet(1, r0=FAST)), overlaps, PARAMETERS, random.Random(1))
    assert (decision.pull_from, decision.overlap_tokens) == (None, 0)


def test_what_is_only_predicted_is_not_pulled() -> None:
    slots = Slots({ReplicaId("r0"): 1, ReplicaId("r1"): 2})
    predicted = {View.ON_DEVICE: [(400, 1)], View.IN_HOST: [(400, 1)], View.STORED: []}
    overlaps = Overlaps(slots, [(400, 1)], predicted.__getitem__)
    busy = ReplicaLoad(num_requests=30, num_pending_tokens=60_000, speeds=MoveSpeeds(5e-6, None, None))
    replicas = ready(fleet(2, r0=busy, r1=FAST))
    decision = decide(request(), replicas, overlaps, PARAMETERS, random.Random(1))
    assert decision.pull_from is None


@pytest.mark.parametrize(("layouts", "source"), [("aa", "r0"), ("ab", None), ("a", None), ("", None)])
def test_only_who_lays_out_its_kv_alike_is_pulled_from(layouts: str, source: str | None) -> None:
    busy = ReplicaLoad(num_requests=30, num_pending_tokens=60_000, speeds=MoveSpeeds(5e-6, None, None))
    loads = fleet(2, r0=busy, r1=FAST)
    overlaps = Overlaps(Slots({ReplicaId("r0"): 1}), [(400, 1)], lambda view: [(400, 1)])
    replicas = Replicas(loads, loads.__getitem__, dict(zip(sorted(loads), layouts, strict=False)))
    for each in (replicas, replicas.without([ReplicaId("r2")])):
        decision = decide(request(), each, overlaps, PARAMETERS, random.Random(1))
        assert (decision.replica_id, decision.pull_from) == ("r1", source)
        assert decision.overlap_tokens == (400 * BLOCK_SIZE if source else 0)
