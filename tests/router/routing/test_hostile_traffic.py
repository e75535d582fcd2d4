"""Traffic that breaks routers: keys and heads that say nothing, moments that mislead, changes in between."""

import contextlib
from collections import Counter
from collections.abc import Iterator

import pytest

from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import ReplicaId
from router.routing.decision import DecisionReason
from router.routing.policies import POLICIES
from router.routing.table import RoutedRequest, RoutingTable
from tests.router.routing.tables import CARD, STRIDE, prompt, route, store, table_of


@contextlib.contextmanager
def running(
    table: RoutingTable, prompts: list[tuple[list[int], str | None]]
) -> Iterator[list[RoutedRequest]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(route(table, tokens, key)) for tokens, key in prompts]


def served_by(requests: list[RoutedRequest]) -> "Counter[ReplicaId]":
    return Counter(routed.decision.replica_id for routed in requests)


def test_one_key_for_all_pins_nobody() -> None:
    with running(table_of(8), [(prompt(0, n, 4000), "the-key") for n in range(200)]) as requests:
        counts = served_by(requests)
    assert len(counts) == 8
    assert max(counts.values()) <= 1.3 * 200 / 8


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
