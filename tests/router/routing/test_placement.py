"""Where a table sends prompts that share something: together, home, or apart under load."""

import contextlib
from collections import Counter

from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import ReplicaId
from router.routing.decision import DecisionReason
from tests.router.routing.tables import prompt, route, store, table_of


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


def test_prompts_that_share_only_their_first_256_tokens_spread_over_the_replicas() -> None:
    table = table_of(8)
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as running:
        for number in range(200):
            counts[running.enter_context(route(table, prompt(256, number, 4000))).decision.replica_id] += 1
    assert len(counts) == 8
    assert max(counts.values()) <= 1.3 * 200 / 8


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
