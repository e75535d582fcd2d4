"""The rule of each policy, and where tables send hostile and shared traffic."""

import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
from msgspec import structs

from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import ReplicaId
from router.routing.cost import CostParameters
from router.routing.decision import Claim, Decision, DecisionReason, RoutingRequest
from router.routing.load import ReplicaLoad
from router.routing.policies import BOUNDED_LOAD_FACTOR, BOUNDED_LOAD_SLACK, POLICIES
from router.routing.table import RoutedRequest, RoutingTable
from tests.router.routing.fleets import fleet, overlapping, ranked, ready, request
from tests.router.routing.tables import CARD, STRIDE, prompt, route, store, table_of

PARAMETERS = CostParameters()
WEIGHING = ["minimum_ttft", "lmetric", "radix"]


def decided(
    name: str,
    loads: Mapping[ReplicaId, ReplicaLoad],
    overlaps: Mapping[str, int] | None = None,
    *,
    asked: RoutingRequest | None = None,
    seed: int = 1,
) -> Decision:
    blocks = {ReplicaId(replica_id): depth for replica_id, depth in (overlaps or {}).items()}
    return POLICIES[name](
        asked or request(), ready(loads), overlapping(blocks), PARAMETERS, random.Random(seed)
    )


def queues(*num_requests: int) -> dict[ReplicaId, ReplicaLoad]:
    return {ReplicaId(f"r{n}"): ReplicaLoad(num_requests=queue) for n, queue in enumerate(num_requests)}


def choices(
    name: str,
    loads: Mapping[ReplicaId, ReplicaLoad],
    overlaps: Mapping[str, int] | None = None,
    count: int = 400,
) -> "Counter[ReplicaId]":
    return Counter(
        decided(name, loads, overlaps, asked=request(number), seed=number).replica_id
        for number in range(count)
    )


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_every_policy_chooses_one_of_the_replicas_and_says_why(name: str, size: int) -> None:
    loads = fleet(size, r0=ReplicaLoad(num_requests=3))
    for number in range(20):
        decision = decided(name, loads, {"r0": 3, "gone": 9}, asked=request(number), seed=number)
        assert decision.replica_id in loads
        assert decision.rank == ranked(size, number).index(decision.replica_id)
        assert decision.replica_id in {candidate.replica_id for candidate in decision.candidates}
        assert decision.overlap_tokens == (48 if decision.replica_id == "r0" else 0)
        assert (decision.reason is DecisionReason.ONLY_REPLICA) == (size == 1)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_decides_alike_whenever_it_is_asked_alike(name: str) -> None:
    for number in range(20):
        once, again = (decided(name, fleet(6), {"r2": 2}, asked=request(number), seed=3) for _ in range(2))
        assert once == again


@pytest.mark.parametrize("name", WEIGHING)
def test_a_policy_that_weighs_caches_explains_itself_with_every_replica(name: str) -> None:
    decision = decided(name, fleet(20, r4=ReplicaLoad(num_pending_tokens=100)), {"r3": 10, "r4": 500})
    assert decision.reason is DecisionReason.POLICY
    assert [candidate.replica_id for candidate in decision.candidates] == ranked(20)
    assert [candidate.rank for candidate in decision.candidates] == list(range(20))
    by_id = {candidate.replica_id: candidate for candidate in decision.candidates}
    assert by_id[ReplicaId("r3")].overlap_tokens == 160
    assert by_id[ReplicaId("r3")].cost.prefill_seconds == pytest.approx(7840 * 1e-4)
    assert by_id[ReplicaId("r4")].cost.wait_seconds == pytest.approx(100 * 1e-4)


def test_round_robin_takes_turns() -> None:
    assert set(choices("round_robin", fleet(4)).values()) == {100}


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "round_robin"])
def test_no_policy_favours_anybody_in_an_idle_and_empty_fleet(name: str) -> None:
    chosen = choices(name, fleet(4))
    assert len(chosen) == 4
    assert min(chosen.values()) > 60


def test_least_loaded_and_power_of_two_avoid_the_busy() -> None:
    busy = queues(9, 1, 0, 0)
    assert set(choices("least_loaded", busy)) == {"r2", "r3"}
    assert "r0" not in choices("power_of_two", busy)


def test_consistent_hash_never_looks_at_load() -> None:
    busy = fleet(4, **{ranked(4)[0]: ReplicaLoad(num_requests=1000)})
    assert decided("consistent_hash", busy).replica_id == ranked(4)[0]


@pytest.mark.parametrize("num_requests", [0, 1, 2, 3, 8, 50, 400])
def test_bounded_load_keeps_one_hot_bucket_within_its_bound_and_at_home_when_idle(num_requests: int) -> None:
    counts: Counter[ReplicaId] = Counter()
    for _ in range(num_requests):
        loads = {replica_id: ReplicaLoad(num_requests=counts[replica_id]) for replica_id in fleet(4)}
        counts[decided("bounded_load", loads).replica_id] += 1
    mean = num_requests / 4
    assert all(
        count <= max(BOUNDED_LOAD_FACTOR * mean + 1, mean + 1 + BOUNDED_LOAD_SLACK)
        for count in counts.values()
    )
    if 0 < num_requests <= BOUNDED_LOAD_SLACK:
        assert set(counts) == {ranked(4)[0]}


def test_radix_takes_the_longest_match_however_busy_while_the_fleet_is_in_balance() -> None:
    # 8,000 tokens are 500 blocks: 151 of them are more than 0.3.
    assert set(choices("radix", queues(0, 60, 0), {"r0": 151, "r1": 152}, 20)) == {"r1"}


def test_radix_wants_more_than_three_tenths_of_the_prompt() -> None:
    assert decided("radix", queues(5, 9, 6), {"r1": 150}).replica_id == "r0"
    assert decided("radix", queues(5, 9, 6), {"r1": 151}).replica_id == "r1"


@pytest.mark.parametrize(
    ("shortest", "longest", "is_imbalanced"),
    [(0, 64, False), (0, 65, True), (10, 75, True), (130, 195, False), (130, 196, True), (200, 270, False)],
)
def test_radix_leaves_the_match_when_the_longest_queue_is_64_and_half_as_much_again_above_the_shortest(
    shortest: int, longest: int, is_imbalanced: bool
) -> None:
    decision = decided("radix", queues(longest, shortest, (longest + shortest) // 2), {"r0": 500})
    assert decision.replica_id == ("r1" if is_imbalanced else "r0")


def test_radix_breaks_ties_by_the_shorter_queue_and_then_by_chance() -> None:
    assert set(choices("radix", queues(7, 3, 3, 0), {"r0": 400, "r1": 400, "r2": 400})) == {"r1", "r2"}
    assert set(choices("radix", queues(7, 3, 3, 5))) == {"r1", "r2"}


def test_lmetric_takes_the_least_product_of_prefill_tokens_and_batch() -> None:
    # 8,000 tokens cold; r1 holds 6,400 of them. (8,000) * 1 against (1,600) * 5 and (1,600) * 4.
    assert decided("lmetric", queues(0, 4), {"r1": 400}, asked=request(num_tokens=8001)).replica_id == "r0"
    assert decided("lmetric", queues(0, 3), {"r1": 400}, asked=request(num_tokens=8001)).replica_id == "r1"
    assert set(choices("lmetric", queues(0, 4), {"r1": 400})) == {"r0", "r1"}


def test_lmetric_counts_the_tokens_that_wait_for_prefill() -> None:
    waiting = fleet(2, r0=ReplicaLoad(num_requests=1, num_pending_tokens=6000), r1=ReplicaLoad(2, 1000))
    # (6,000 + 8,000) * 2 against (1,000 + 8,000) * 3; with 2,400 tokens at r0 11,600 * 2 is less.
    assert decided("lmetric", waiting).replica_id == "r1"
    assert decided("lmetric", waiting, {"r0": 150}).replica_id == "r0"


def test_sticky_keeps_a_program_where_it_ran_whatever_waits_or_is_cached_there() -> None:
    def at(home: str | None, *queue: int) -> set[ReplicaId]:
        claim = Claim(None if home is None else ReplicaId(home))
        return {
            decided(
                "sticky",
                queues(*queue),
                {"r0": 400},
                asked=structs.replace(request(), claim=claim),
                seed=seed,
            ).replica_id
            for seed in range(30)
        }

    assert at("r1", 0, 900, 0) == {"r1"}
    # A new program, one whose home is gone or takes nothing, and a request of none: by load, then by chance.
    assert at(None, 4, 2, 2) == at("gone", 4, 2, 2) == set(choices("sticky", queues(4, 2, 2))) == {"r1", "r2"}


def test_radix_and_lmetric_leave_a_tie_to_chance_and_minimum_ttft_to_the_affinity_order() -> None:
    def chosen(name: str) -> set[ReplicaId]:
        return {decided(name, fleet(4), seed=seed).replica_id for seed in range(60)}

    assert len(chosen("radix")) == len(chosen("lmetric")) == 4
    assert chosen("minimum_ttft") == {ranked(4)[0]}


def test_minimum_ttft_leaves_the_holder_as_soon_as_waiting_takes_longer_than_computing() -> None:
    # 6,400 of 8,000 tokens are worth 0.64 s of prefill: 64 steps of 10 ms.
    home = ranked(2)[0]
    holder = ranked(2)[1]
    for num_waiting, chosen in ((63, holder), (65, home)):
        loads = {home: ReplicaLoad(cache_fill=1.0), holder: ReplicaLoad(num_waiting, cache_fill=1.0)}
        assert decided("minimum_ttft", loads, {holder: 400}).replica_id == chosen
        assert decided("kvasir", loads, {holder: 400}).replica_id == holder


def test_minimum_ttft_knows_no_near_ties_but_ties_go_by_affinity_order() -> None:
    home, second, *_ = ranked(8)
    assert decided("minimum_ttft", fleet(8)).replica_id == home
    assert decided("minimum_ttft", fleet(8, **{home: ReplicaLoad(num_requests=1)})).replica_id == second
    assert decided("kvasir", fleet(8, **{home: ReplicaLoad(num_requests=1)})).replica_id == home


@contextlib.contextmanager
def running(
    table: RoutingTable, prompts: list[tuple[list[int], str | None]]
) -> Iterator[list[RoutedRequest]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(route(table, tokens, key)) for tokens, key in prompts]


def served_by(requests: list[RoutedRequest]) -> "Counter[ReplicaId]":
    return Counter(routed.decision.replica_id for routed in requests)


def test_one_key_and_one_head_for_all_pin_nobody_either() -> None:
    with running(table_of(8), [(prompt(256, n, 4000), "the-key") for n in range(200)]) as requests:
        counts = served_by(requests)
    assert len(counts) == 8
    assert max(counts.values()) <= 1.3 * 200 / 8


def test_a_key_per_request_does_not_keep_users_from_what_another_one_cached() -> None:
    table = table_of(8)
    num_cached = 0
    for number in range(100):
        with route(table, prompt(3000, number, 100), key=f"request-{number}") as routed:
            num_cached += routed.decision.overlap_tokens >= 2900
            store(table, routed.decision.replica_id, prompt(3000, number, 100))
    assert num_cached == 99


@pytest.mark.parametrize("length", [1, 15, 16, 255, 256, 257])
def test_equal_short_prompts_meet_on_every_router(length: int) -> None:
    chosen = set()
    for table in (table_of(8), table_of(8)):
        for _ in range(5):
            with route(table, prompt(0, length, length)) as routed:
                chosen.add(routed.decision.replica_id)
    assert len(chosen) == 1


def test_a_prompt_that_grows_past_the_head_stays_where_its_beginning_is_cached() -> None:
    table = table_of(8)
    chosen = set()
    for length in (200, 255, 256, 257, 300):
        with route(table, prompt(0, 1, length)) as routed:
            chosen.add(routed.decision.replica_id)
            store(table, routed.decision.replica_id, prompt(0, 1, length))
    assert len(chosen) == 1


def test_an_idle_moment_draws_only_as_much_as_makes_the_fleet_even() -> None:
    table = table_of(8)
    for replica_id in table.replica_ids("m"):
        table.update_load(replica_id, LoadSnapshot(num_running=20, num_context_tokens=80_000))
    table.update_load(ReplicaId("r3"), LoadSnapshot())
    with running(table, [(prompt(0, n, 500), None) for n in range(200)]) as requests:
        counts = served_by(requests)
    assert len(counts) == 8
    assert counts[ReplicaId("r3")] == max(counts.values())
    others = [count for replica_id, count in counts.items() if replica_id != "r3"]
    assert counts[ReplicaId("r3")] <= 20 + 1.5 * max(others)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_that_drains_or_goes_takes_nothing_from_that_moment(policy: str) -> None:
    table = table_of(4, policy)
    store(table, ReplicaId("r1"), prompt(2000, 0, 0))
    for replica_id, leave in ((ReplicaId("r1"), table.set_draining), (ReplicaId("r2"), table.remove_replica)):
        with route(table, prompt(2000, 0, 10)):
            pass
        leave(replica_id)
        with running(table, [(prompt(2000, n, 10), None) for n in range(60)]) as requests:
            assert replica_id not in served_by(requests)
    table.add_replica(ReplicaId("r1"), CARD, STRIDE)
    with running(table, [(prompt(0, n, 100), None) for n in range(60)]) as requests:
        assert set(served_by(requests)) == {"r0", "r1", "r3"}


def test_what_only_one_that_drains_holds_is_no_reason_to_go_anywhere() -> None:
    table = table_of(3)
    store(table, ReplicaId("r0"), prompt(2000, 0, 0))
    table.set_draining(ReplicaId("r0"))
    with route(table, prompt(2000, 0, 10)) as routed:
        assert routed.decision.reason is DecisionReason.HOME
        assert routed.decision.overlap_tokens == 0
        assert len({candidate.cost for candidate in routed.decision.candidates}) == 1


def test_a_large_fleet_shares_cold_traffic_evenly_and_lets_equal_prompts_meet() -> None:
    table = table_of(200)
    with running(table, [(prompt(0, n, 1000), None) for n in range(1000)]) as requests:
        counts = served_by(requests)
        again = [route(table, prompt(0, n, 1000)) for n in range(0, 1000, 50)]
        assert [routed.decision.replica_id for routed in again] == [
            routed.decision.replica_id for routed in requests[::50]
        ]
        for routed in again:
            routed.close()
    assert len(counts) >= 195
    assert max(counts.values()) <= 12


def test_a_burst_of_equal_prompts_lands_together_before_any_event_has_come() -> None:
    table = table_of(8)
    with contextlib.ExitStack() as burst:
        decisions = [burst.enter_context(route(table, prompt(0, 1, 6000))).decision for _ in range(12)]
    assert len({decision.replica_id for decision in decisions}) == 1
    assert decisions[0].reason is DecisionReason.HOME
    assert all(decision.overlap_tokens == 5984 for decision in decisions[1:])


def test_one_hot_prefix_stays_together_when_idle_and_spreads_under_load() -> None:
    table = table_of(8)
    idle: Counter[str] = Counter()
    for number in range(50):
        with route(table, prompt(2000, number, 100)) as routed:
            idle[routed.decision.replica_id] += 1
        store(table, routed.decision.replica_id, prompt(2000, number, 100))
    assert len(idle) == 1
    busy: Counter[str] = Counter()
    with contextlib.ExitStack() as running:
        for number in range(800):
            routed = running.enter_context(route(table, prompt(2000, number, 100)))
            routed.sent(busy[routed.decision.replica_id] + 1)
            busy[routed.decision.replica_id] += 1
            store(table, routed.decision.replica_id, prompt(2000, number, 100))
            routed.first_token()
            for replica_id in table.replica_ids("m"):
                num_requests = busy[replica_id]
                table.update_load(replica_id, LoadSnapshot(num_running=num_requests), num_requests)
    assert len(busy) == 8
    # What the copy of 2000 tokens is worth in requests, 5 * 2000 * 1e-4 s / 10 ms each, is the most
    # that any replica may lead by.
    assert max(busy.values()) - min(busy.values()) <= 110


def test_many_cache_keys_over_one_long_prefix_meet_where_it_is_cached() -> None:
    table = table_of(8)
    store(table, ReplicaId("r5"), prompt(9000, 0, 0))
    chosen = set()
    for number in range(60):
        with route(table, prompt(9000, number, 200), key=f"session-{number}") as routed:
            chosen.add(routed.decision.replica_id)
    assert chosen == {"r5"}


def test_many_cache_keys_meet_by_prediction_alone() -> None:
    table = table_of(8)
    with contextlib.ExitStack() as running:
        chosen = {
            running.enter_context(route(table, prompt(9000, n, 50), key=f"session-{n}")).decision.replica_id
            for n in range(10)
        }
    assert len(chosen) == 1


def test_without_any_index_a_conversation_still_returns_to_its_home() -> None:
    table, other_router = table_of(8), table_of(8)
    for number in range(30):
        turns = [prompt(0, number, length) for length in (300, 700, 2500)]
        chosen = set()
        for turn in turns:
            for router in (table, other_router):
                with route(router, turn, key="k") as routed:
                    chosen.add(routed.decision.replica_id)
        assert len(chosen) == 1
