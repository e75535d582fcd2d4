"""Costs, near-ties and the bounded set of candidates."""

import random
from collections import Counter
from collections.abc import Mapping

import hypothesis.strategies as st
import pytest
from hypothesis import given

from replicas.protocol.status import ReplicaId
from router.routing.bucket import affinity_order
from router.routing.cost import CostParameters, cost_of, fleet_rates
from router.routing.decision import Decision, DecisionReason, RoutingRequest, decide
from router.routing.load import ReplicaLoad
from router.routing.policies import BOUNDED_LOAD_FACTOR, BOUNDED_LOAD_SLACK, POLICIES

PARAMETERS = CostParameters()
BLOCK_SIZE = 16


def fleet(size: int, **loads: ReplicaLoad) -> dict[ReplicaId, ReplicaLoad]:
    return {ReplicaId(f"r{n}"): loads.get(f"r{n}", ReplicaLoad()) for n in range(size)}


def request(number: int = 0, num_tokens: int = 8000) -> RoutingRequest:
    return RoutingRequest(number.to_bytes(16, "big"), num_tokens, BLOCK_SIZE, sequence=number)


def decided(
    replicas: Mapping[ReplicaId, ReplicaLoad],
    overlaps: Mapping[str, int] | None = None,
    *,
    asked: RoutingRequest | None = None,
    parameters: CostParameters = PARAMETERS,
) -> Decision:
    blocks = {ReplicaId(name): depth for name, depth in (overlaps or {}).items()}
    return decide(asked or request(), replicas, blocks, parameters, random.Random(1))


def ranked(size: int, number: int = 0) -> list[ReplicaId]:
    return affinity_order(request(number).bucket, fleet(size))


def test_a_single_replica_is_no_choice() -> None:
    decision = decided(fleet(1))
    assert (decision.replica_id, decision.reason, decision.rank) == ("r0", DecisionReason.ONLY_REPLICA, 0)


def test_a_cold_prompt_goes_home_in_an_idle_fleet() -> None:
    for number in range(50):
        decision = decided(fleet(8), asked=request(number))
        assert decision.replica_id == ranked(8, number)[0]
        assert (decision.reason, decision.rank, decision.overlap_tokens) == (DecisionReason.HOME, 0, 0)


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


def test_even_a_single_cached_block_beats_the_affinity_order() -> None:
    last = ranked(8)[-1]
    assert decided(fleet(8), {last: 1}, asked=request(num_tokens=100)).replica_id == last


def test_the_deeper_overlap_wins_among_equals() -> None:
    first, second, third, *_ = ranked(8)
    assert decided(fleet(8), {first: 100, second: 101, third: 99}).replica_id == second


def test_among_equal_overlaps_the_affinity_order_decides() -> None:
    order = ranked(8)
    decision = decided(fleet(8), {order[5]: 100, order[2]: 100, order[7]: 100})
    assert (decision.replica_id, decision.rank) == (order[2], 2)


def test_the_last_token_is_always_computed() -> None:
    decision = decided(fleet(2), {"r0": 500, "r1": 500}, asked=request(num_tokens=8000))
    assert decision.overlap_tokens == 7999


def test_a_busy_home_spills_a_cold_prompt_along_the_affinity_order() -> None:
    first, second, *_ = ranked(8)
    busy = ReplicaLoad(num_requests=20, num_pending_tokens=20_000)
    decision = decided(fleet(8, **{first: busy}))
    assert (decision.replica_id, decision.reason, decision.rank) == (second, DecisionReason.SPILL, 1)


def test_a_little_more_work_at_home_is_a_near_tie() -> None:
    home = ranked(8)[0]
    slightly = ReplicaLoad(num_requests=PARAMETERS.near_tie_requests, num_pending_tokens=200)
    assert decided(fleet(8, **{home: slightly})).replica_id == home
    more = ReplicaLoad(num_requests=PARAMETERS.near_tie_requests + 1)
    assert decided(fleet(8, **{home: more})).replica_id != home


def test_a_near_tie_never_costs_overlap() -> None:
    home, *_, last = ranked(8)
    loads = {last: ReplicaLoad(num_requests=2, num_pending_tokens=60)}
    assert decided(fleet(8, **loads), {last: 6}, asked=request(num_tokens=100)).replica_id == last
    assert home != last


def test_a_near_tie_with_more_of_the_prompt_comes_before_the_affinity_order() -> None:
    *_, last = ranked(8)
    loads = {last: ReplicaLoad(num_requests=2)}
    decision = decided(fleet(8, **loads), {last: 1})
    assert min(decision.candidates, key=lambda c: c.cost.seconds).replica_id != last
    assert (decision.replica_id, decision.overlap_tokens) == (last, 16)


def test_of_two_replicas_with_equal_caches_the_idle_one_serves() -> None:
    first, second = ranked(2)
    busy = ReplicaLoad(num_requests=40)
    assert decided(fleet(2, **{first: busy}), {first: 400, second: 400}).replica_id == second


def test_a_holder_is_left_only_when_waiting_costs_more_than_a_copy() -> None:
    asked, overlap_blocks = request(num_tokens=6400 + 100), 400
    holder = ranked(8)[3]
    for pending, stays in ((4.5, True), (5.5, False)):
        loads = {holder: ReplicaLoad(num_pending_tokens=int(pending * 6400))}
        decision = decided(fleet(8, **loads), {holder: overlap_blocks}, asked=asked)
        assert (decision.replica_id == holder) is stays
        assert decision.reason is (DecisionReason.OVERLAP if stays else DecisionReason.HOME)


def test_with_copies_for_free_a_holder_is_left_when_waiting_costs_more_than_prefill() -> None:
    holder = ranked(8)[3]
    loads = {holder: ReplicaLoad(num_pending_tokens=2 * 6400)}
    free = CostParameters(copy_price=0.0)
    assert decided(fleet(8, **loads), {holder: 400}, parameters=free).replica_id != holder
    assert decided(fleet(8, **loads), {holder: 400}).replica_id == holder


def test_overlap_at_replicas_that_may_not_serve_counts_for_nothing() -> None:
    decision = decided(fleet(4), {"gone": 500})
    assert decision.reason is DecisionReason.HOME
    assert all(candidate.cost.copy_seconds == 0 for candidate in decision.candidates)


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
    assert fleet_rates(loads, PARAMETERS) == pytest.approx((2e-5, 0.02))
    assert fleet_rates([ReplicaLoad()], PARAMETERS) == pytest.approx((1e-4, 0.01))


def test_the_cost_is_wait_and_prefill_and_the_price_of_a_copy() -> None:
    load = ReplicaLoad(num_requests=3, num_pending_tokens=100, prefill_seconds_per_token=1e-3)
    rates = fleet_rates([load], PARAMETERS)
    cost = cost_of(load, num_uncached_tokens=50, num_copied_tokens=30, rates=rates, copy_price=4)
    assert cost == pytest.approx((0.1 + 0.03, 0.05, 0.12))
    assert cost.seconds == pytest.approx(0.3)


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
        == affinity_order(request(number).bucket, replicas).index(chosen.replica_id)
    )


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_every_policy_chooses_one_of_the_replicas_and_says_why(name: str, size: int) -> None:
    replicas = fleet(size, r0=ReplicaLoad(num_requests=3))
    for number in range(20):
        overlaps = {ReplicaId("r0"): 3, ReplicaId("gone"): 9}
        decision = POLICIES[name](request(number), replicas, overlaps, PARAMETERS, random.Random(number))
        assert decision.replica_id in replicas
        assert decision.rank == ranked(size, number).index(decision.replica_id)
        assert decision.replica_id in {candidate.replica_id for candidate in decision.candidates}
        assert decision.overlap_tokens == (48 if decision.replica_id == "r0" else 0)
        assert (decision.reason is DecisionReason.ONLY_REPLICA) == (size == 1)


def choices(name: str, replicas: Mapping[ReplicaId, ReplicaLoad], count: int = 400) -> "Counter[ReplicaId]":
    rng = random.Random(2)
    return Counter(POLICIES[name](request(n), replicas, {}, PARAMETERS, rng).replica_id for n in range(count))


def test_round_robin_takes_turns() -> None:
    assert set(choices("round_robin", fleet(4)).values()) == {100}


@pytest.mark.parametrize(
    "name", ["random", "least_loaded", "power_of_two", "consistent_hash", "bounded_load"]
)
def test_no_baseline_favours_anybody_in_an_idle_fleet(name: str) -> None:
    chosen = choices(name, fleet(4))
    assert len(chosen) == 4
    assert min(chosen.values()) > 60


def test_least_loaded_and_power_of_two_avoid_the_busy() -> None:
    busy = fleet(4, r0=ReplicaLoad(num_requests=9), r1=ReplicaLoad(num_requests=1))
    assert set(choices("least_loaded", busy)) == {"r2", "r3"}
    assert "r0" not in choices("power_of_two", busy)


def test_consistent_hash_never_looks_at_load() -> None:
    busy = {ranked(4)[0]: ReplicaLoad(num_requests=1000)}
    chosen = POLICIES["consistent_hash"](request(), fleet(4, **busy), {}, PARAMETERS, random.Random(1))
    assert chosen.replica_id == ranked(4)[0]


@pytest.mark.parametrize("num_requests", [0, 1, 2, 3, 8, 50, 400])
def test_bounded_load_keeps_one_hot_bucket_within_its_bound_and_at_home_when_idle(num_requests: int) -> None:
    counts: Counter[ReplicaId] = Counter()
    for _ in range(num_requests):
        replicas = {r: ReplicaLoad(num_requests=counts[r]) for r in fleet(4)}
        counts[
            POLICIES["bounded_load"](request(), replicas, {}, PARAMETERS, random.Random(1)).replica_id
        ] += 1
    mean = num_requests / 4
    assert all(
        count <= max(BOUNDED_LOAD_FACTOR * mean + 1, mean + 1 + BOUNDED_LOAD_SLACK)
        for count in counts.values()
    )
    if 0 < num_requests <= BOUNDED_LOAD_SLACK:
        assert set(counts) == {ranked(4)[0]}
