"""What a turn's claim changes in a decision: its home, and the price of tokens that live programs lack."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from replicas.protocol.blocks import hash_blocks
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import ReplicaId
from router.routing.cost import CostParameters, fleet_rates, with_future
from router.routing.decision import Claim, Decision, RoutingRequest
from router.routing.load import ReplicaLoad
from router.routing.table import RoutingTable
from tests.router.routing.fleets import BLOCK_SIZE, fleet, ranked, request
from tests.router.routing.tables import CARD, ROOT, STRIDE, prompt, store, table_of
from tests.router.routing.test_decision import decided

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
