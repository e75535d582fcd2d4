"""Splits: the cheapest pair of a prefiller and a decoder, roles as a preference, and both reservations."""

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from msgspec import structs

from replicas.protocol.blocks import ImageTokens, hash_blocks
from replicas.protocol.frames import BodyForm, LoadSnapshot
from replicas.protocol.status import ModelCard, ReplicaId, Role, SplitWay
from replicas.protocol.ways import PULL_MOVE_SECONDS, MoveSpeeds, Reach
from router.routing.cost import CostParameters, cost_of, decode_seconds, fleet_rates
from router.routing.decision import (
    Candidate,
    Claim,
    Decision,
    DecisionReason,
    Pair,
    Replicas,
    RoutingRequest,
    decide,
    everybody,
    weigh,
)
from router.routing.levels import Overlaps
from router.routing.load import ReplicaLoad
from router.routing.pairs import with_pair
from router.routing.table import RoutedRequest, RoutingTable
from tests.examples import examples
from tests.router.routing.fleets import BLOCK_SIZE, overlapping, request
from tests.router.routing.tables import CARD, ROOT, STRIDE, prompt, route, store

PARAMETERS = CostParameters()
LAYOUT = "one layout"
FAST = MoveSpeeds(host=1e-6, disk=None, pull=1e-5)
SLOW = MoveSpeeds(host=1e-6, disk=None, pull=1e-3)
UNKNOWN = MoveSpeeds(host=1e-6, disk=None, pull=None)
BUSY = ReplicaLoad(num_requests=30, num_pending_tokens=20_000, speeds=FAST)

PRESSED = ReplicaLoad(num_pending_tokens=10_000, speeds=FAST)

Part = tuple[Role, SplitWay, str]
PREFILL: Part = (Role.PREFILL, SplitWay.PULL, LAYOUT)
DECODE: Part = (Role.DECODE, SplitWay.PULL, LAYOUT)
BOTH: Part = (Role.BOTH, SplitWay.PULL, LAYOUT)


def replicas_of(parts: Mapping[ReplicaId, Part], loads: Mapping[ReplicaId, ReplicaLoad]) -> Replicas:
    return Replicas(
        parts,
        lambda replica_id: loads.get(replica_id, ReplicaLoad(speeds=FAST)),
        {each: layout for each, (_, _, layout) in parts.items()},
        {each: (role, way) for each, (role, way, _) in parts.items()},
    )


def decided(
    replicas: Replicas,
    depths: Mapping[ReplicaId, int],
    asked: RoutingRequest,
    parameters: CostParameters = PARAMETERS,
) -> Decision:
    overlaps, rng = overlapping(depths), random.Random(1)
    if replicas.roles is None:
        return decide(asked, replicas, overlaps, parameters, rng)
    alone = decide(asked, replicas.roles.decoders, overlaps, parameters, rng)
    return with_pair(asked, alone, replicas.roles, overlaps, parameters, rng)


# The formula.


def may_split(prefiller: Part, decoder: Part, load: ReplicaLoad) -> bool:
    if prefiller[0] is Role.DECODE or decoder[0] is Role.PREFILL or prefiller[1] is not decoder[1]:
        return False
    if prefiller[1] is SplitWay.PULL:
        is_known = load.speeds.pull is not None and load.speeds.host is not None
        return is_known and prefiller[2] == decoder[2] != ""
    return prefiller[1] is SplitWay.NIXL


def twin(
    parts: Mapping[ReplicaId, Part],
    replicas: Replicas,
    asked: RoutingRequest,
    overlaps: Overlaps,
    parameters: CostParameters,
) -> dict[tuple[ReplicaId, ReplicaId], float]:
    """Return the cost of every pair that lacks something."""
    prefillers = [
        each
        for each, (role, way, layout) in parts.items()
        if role is not Role.DECODE and (way is SplitWay.NIXL or (way is SplitWay.PULL and layout))
    ]
    decoders = [each for each in parts if parts[each][0] is not Role.PREFILL]
    of_prefillers = Replicas(prefillers, replicas.load_of, {each: parts[each][2] for each in parts})
    of_decoders = Replicas(decoders, replicas.load_of, {each: parts[each][2] for each in parts})

    def weighed(group: Replicas) -> dict[ReplicaId, Candidate]:
        considered, rates = everybody(asked, group), fleet_rates(group.values(), parameters)
        found = weigh(asked, group, considered, overlaps, rates, parameters)
        return {candidate.replica_id: candidate for candidate in found}

    at_prefillers, at_decoders = weighed(of_prefillers), weighed(of_decoders)
    rates = fleet_rates(of_decoders.values(), parameters)
    seconds = {}
    for p, d in product(prefillers, decoders):
        load = replicas.load_of(d)
        if p == d or not may_split(parts[p], parts[d], load):
            continue
        is_pull = parts[p][1] is SplitWay.PULL
        link = (
            (load.speeds.pull or 0) + (load.speeds.host or 0)
            if is_pull
            else parameters.nixl_seconds_per_token
        )
        step = 128 if is_pull else asked.block_size
        here = at_decoders[d].reach.local
        end = max(here, (asked.num_tokens - 1) // step * step)
        if end == here:
            continue
        at_p, at_d = at_prefillers[p].cost, at_decoders[d].cost
        begin = at_p.wait_seconds + at_p.move_seconds
        moving = (end - here) * link
        if is_pull:
            ready = max(begin + at_p.prefill_seconds, max(begin, load.speeds.backlog_seconds) + moving)
            ready += min(128, end - here) * link
        else:
            ready = begin + at_p.prefill_seconds + moving
        tail = cost_of(load, asked.num_tokens, Reach(end, end, end, end), rates, parameters).prefill_seconds
        seconds[p, d] = (
            ready
            + PULL_MOVE_SECONDS
            + tail
            + decode_seconds(load, rates)
            + parameters.delay_price * replicas.load_of(p).num_requests * at_p.prefill_seconds
            + at_p.room_seconds
            + parameters.split_room_price * at_d.room_seconds
        )
    return seconds


some_loads = st.builds(
    ReplicaLoad,
    num_requests=st.sampled_from([0, 1, 5, 60]),
    num_pending_tokens=st.sampled_from([0, 100, 5000, 20_000]),
    cache_fill=st.sampled_from([0.0, 0.5, 1.0]),
    prefill_seconds_per_token=st.sampled_from([None, 3e-5, 1e-4, 3e-4]),
    decode_step_seconds=st.sampled_from([None, 0.01, 0.03]),
    speeds=st.sampled_from([FAST, FAST, SLOW, UNKNOWN, FAST._replace(backlog_seconds=0.5)]),
)
OTHERS = [(SplitWay.PULL, "another"), (SplitWay.PULL, ""), (SplitWay.NIXL, ""), (SplitWay.NONE, LAYOUT)]
some_ways = st.sampled_from([*[(SplitWay.PULL, LAYOUT)] * 8, *OTHERS])
FleetOf = list[tuple[Role, tuple[SplitWay, str], ReplicaLoad, int]]


def some_fleet(role: Role, least: int, most: int) -> st.SearchStrategy[FleetOf]:
    of_one = st.tuples(st.just(role), some_ways, some_loads, st.integers(0, 60))
    return st.lists(of_one, min_size=least, max_size=most)


@settings(max_examples=examples(400))
@given(
    prefillers=some_fleet(Role.PREFILL, 1, 3),
    decoders=some_fleet(Role.DECODE, 1, 3),
    others=some_fleet(Role.BOTH, 0, 1),
    num_tokens=st.sampled_from([1, 128, 129, 300, 1000, 1001, 3000]),
    delay_price=st.sampled_from([0.0, 0.05, 1.0]),
    split_delay_price=st.sampled_from([None, 0.0, 0.1]),
)
def test_the_pair_is_the_cheapest_by_the_whole_formula(
    prefillers: FleetOf,
    decoders: FleetOf,
    others: FleetOf,
    num_tokens: int,
    delay_price: float,
    split_delay_price: float | None,
) -> None:
    fleet = [((role, *kind), load, depth) for role, kind, load, depth in prefillers + decoders + others]
    names = [ReplicaId(f"r{number}") for number in range(len(fleet))]
    parts = {name: part for name, (part, _, _) in zip(names, fleet, strict=True)}
    loads = {name: load for name, (_, load, _) in zip(names, fleet, strict=True)}
    depths = {name: depth for name, (_, _, depth) in zip(names, fleet, strict=True)}
    parameters = CostParameters(delay_price=delay_price, split_delay_price=split_delay_price)
    asked, replicas = request(num_tokens=num_tokens), replicas_of(parts, loads)
    decision = decided(replicas, depths, asked, parameters)
    kinds = {
        (way, layout if way is SplitWay.PULL else "")
        for role, way, layout in parts.values()
        if role is Role.PREFILL and (way is SplitWay.NIXL or (way is SplitWay.PULL and layout))
    }
    assert (replicas.roles is not None) == any(
        (way, layout if way is SplitWay.PULL else "") in kinds
        for role, way, layout in parts.values()
        if role is not Role.PREFILL
    )
    if replicas.roles is None:
        assert decision.pair is None
        return
    all_pairs = twin(parts, replicas, asked, overlapping(depths), parameters)
    assert (decision.pair is not None) == bool(all_pairs)
    if decision.pair is None:
        return
    pair = decision.pair
    names_of_pair = (pair.prefiller.replica_id, pair.decoder.replica_id)
    assert pair.seconds == pytest.approx(all_pairs[names_of_pair])
    num_prefillers, num_decoders = (len(set(side)) for side in zip(*all_pairs, strict=True))
    if num_decoders <= 2 and num_prefillers <= 2:
        assert pair.seconds == pytest.approx(min(all_pairs.values()))
    check_what_follows(decision, pair, asked, parameters)


def check_what_follows(
    decision: Decision, pair: Pair, asked: RoutingRequest, parameters: CostParameters
) -> None:
    dearer = 0.0
    if parameters.split_delay_price is not None:
        dearer = parameters.split_delay_price - parameters.delay_price
    assert pair.alone_seconds == pytest.approx(
        min(
            each.cost.seconds + dearer * each.load.num_requests * each.cost.prefill_seconds
            for each in decision.candidates
        )
    )
    assert (decision.split is not None) == (pair.seconds < pair.alone_seconds)
    if decision.split is None:
        assert decision.reason is not DecisionReason.SPLIT
        return
    assert decision.replica_id == pair.decoder.replica_id != pair.prefiller.replica_id
    assert (decision.reason, decision.pull_from) == (DecisionReason.SPLIT, pair.prefiller.replica_id)
    assert pair.decoder.reach.local < decision.overlap_tokens < asked.num_tokens
    assert decision.overlap_tokens - pair.decoder.reach.local == pair.num_lacking_tokens
    first = decision.of_prompt()
    assert (first.replica_id, first.overlap_tokens) == (
        pair.prefiller.replica_id,
        pair.prefiller.overlap_tokens,
    )
    assert first.split is None


# When a prompt is split.


def named(**parts: Part) -> dict[ReplicaId, Part]:
    return {ReplicaId(name): part for name, part in parts.items()}


def split_by(
    parts: Mapping[ReplicaId, Part],
    asked: RoutingRequest | None = None,
    depths: Mapping[ReplicaId, int] | None = None,
    **loads: ReplicaLoad,
) -> Decision:
    """Decoders are busy unless said otherwise."""
    busy = {each: BUSY for each, (role, _, _) in parts.items() if role is not Role.PREFILL}
    known = {**busy, **{ReplicaId(name): load for name, load in loads.items()}}
    return decided(replicas_of(parts, known), depths or {}, asked or request())


def test_a_prompt_is_split_where_its_decoder_is_busy() -> None:
    decision = split_by(named(p=PREFILL, d=DECODE))
    assert decision.split is not None
    assert (decision.replica_id, decision.pull_from) == ("d", "p")
    assert decision.overlap_tokens == 7936, "whole chunks up to the last token"
    assert [each.replica_id for each in decision.candidates] == ["d"], "a prefiller serves none alone"


def test_what_is_cheaper_alone_names_its_pair_all_the_same() -> None:
    idle = ReplicaLoad(speeds=FAST)
    decision = split_by(named(p=PREFILL, d=DECODE), d=idle)
    assert decision.split is None
    assert decision.pair is not None
    assert decision.pair.seconds >= decision.pair.alone_seconds
    assert (decision.replica_id, decision.pull_from) == ("d", None)


@pytest.mark.parametrize(
    ("slow", "pair"),
    [(FAST, ("p", "d")), (SLOW, None), (UNKNOWN, None), (MoveSpeeds(None, None, 1e-5), None)],
)
def test_only_a_link_that_is_known_and_fast_splits(slow: MoveSpeeds, pair: tuple[str, str] | None) -> None:
    decision = split_by(named(p=PREFILL, d=DECODE), d=structs.replace(BUSY, speeds=slow))
    assert (decision.split is not None) == (pair is not None)
    assert (decision.pair is None) == (None in slow[::2])


def test_other_layouts_and_ways_are_no_pair() -> None:
    other: Part = (Role.PREFILL, SplitWay.PULL, "another")
    assert split_by(named(p=PREFILL, q=other, d=DECODE), p=PRESSED).pull_from == "p"
    for lonely in (
        other,
        (Role.PREFILL, SplitWay.PULL, ""),
        (Role.PREFILL, SplitWay.NIXL, LAYOUT),
        (Role.PREFILL, SplitWay.NONE, LAYOUT),
    ):
        decision = split_by(named(p=lonely, d=DECODE))
        assert decision.pair is None
        assert {each.replica_id for each in decision.candidates} == {"p", "d"}, "all are alike"


def test_a_prompt_that_the_decoder_has_or_that_fills_no_chunk_is_not_split() -> None:
    assert split_by(named(p=PREFILL, d=DECODE), request(num_tokens=128)).pair is None
    assert split_by(named(p=PREFILL, d=DECODE), depths={ReplicaId("d"): 500}).pair is None
    assert split_by(named(p=PREFILL, d=DECODE), request(num_tokens=129)).pair is not None


def test_a_decoder_pulls_only_what_it_lacks_below_its_device_as_well() -> None:
    decision = split_by(named(p=PREFILL, d=DECODE), depths={ReplicaId("d"): 300, ReplicaId("p"): 400})
    pair = decision.pair
    assert pair is not None
    assert (pair.num_lacking_tokens, pair.prefiller.overlap_tokens) == (7936 - 4800, 6400)


def test_one_that_is_both_may_take_either_part_but_not_both() -> None:
    decision = split_by(named(p=PREFILL, b=BOTH, c=BOTH), p=structs.replace(BUSY, num_requests=300))
    assert decision.pair is not None
    assert {decision.pair.prefiller.replica_id, decision.pair.decoder.replica_id} == {"b", "c"}
    nobody = split_by(named(b=BOTH, c=BOTH, d=DECODE))
    assert nobody.pair is None, "without a prefiller all are alike"


def test_a_connector_moves_all_but_the_last_block_when_the_prompt_is_computed() -> None:
    parts = named(p=(Role.PREFILL, SplitWay.NIXL, ""), d=(Role.DECODE, SplitWay.NIXL, ""))
    decision = split_by(parts, d=structs.replace(BUSY, speeds=MoveSpeeds(None, None, None)))
    assert decision.split is not None
    assert decision.overlap_tokens == 7984
    assert decision.pair is not None
    moved = 7984 * PARAMETERS.nixl_seconds_per_token + PULL_MOVE_SECONDS
    computed = decision.pair.prefiller.cost
    assert decision.pair.ready_seconds == pytest.approx(computed.prefill_seconds + moved)


def test_images_are_encoded_where_the_prompt_is_computed_and_again_in_the_tail() -> None:
    encoding = structs.replace(BUSY, encode_seconds_per_token=1e-3)
    seconds = []
    for start in (100, 7900):
        asked = structs.replace(request(), media=(ImageTokens(b"i" * 32, start, 60),))
        decision = split_by(named(p=PREFILL, d=DECODE), asked, d=encoding)
        assert decision.pair is not None
        seconds.append(decision.pair.seconds)
    assert seconds[1] - seconds[0] == pytest.approx(60 * 1e-3, rel=0.01)


def test_a_program_is_at_home_where_it_is_decoded() -> None:
    parts = named(p=PREFILL, d=DECODE, e=DECODE)
    beyond = {ReplicaId("p"): 10**6, ReplicaId("d"): 10**6}
    asked = structs.replace(request(), claim=Claim(ReplicaId("d"), beyond))
    decision = split_by(parts, asked)
    assert decision.pair is not None
    assert decision.pair.prefiller.cost.future_seconds == 0
    assert decision.split is not None
    assert (decision.replica_id, decision.pull_from) == ("e", "p")
    assert decision.claim == asked.claim


def test_a_prefiller_is_chosen_by_when_it_has_computed_the_prompt() -> None:
    parts = named(p=PREFILL, q=PREFILL, r=PREFILL, d=DECODE)
    for idle in "pqr":
        p, q, r = (ReplicaLoad() if each == idle else PRESSED for each in "pqr")
        decision = split_by(parts, p=p, q=q, r=r)
        assert decision.pull_from == idle


def test_moves_under_way_at_the_decoder_come_first() -> None:
    parts, link = named(p=PREFILL, d=DECODE), MoveSpeeds(1e-6, None, 1e-4)
    ready_seconds = []
    for backlog_seconds in (0.0, 2.0):
        load = structs.replace(BUSY, speeds=link._replace(backlog_seconds=backlog_seconds))
        pair = split_by(parts, d=load).pair
        assert pair is not None
        ready_seconds.append(pair.ready_seconds)
    assert ready_seconds[1] - ready_seconds[0] == pytest.approx(2.0)


def test_a_large_fleet_pairs_a_bounded_number() -> None:
    parts = named(**{f"p{n}": PREFILL for n in range(200)}, **{f"d{n}": DECODE for n in range(200)})
    looked = set()
    replicas = replicas_of(parts, {})
    seen = replicas.seen_as(lambda replica_id: looked.add(replica_id) or BUSY)  # type: ignore[func-returns-value]
    decision = decided(seen, {}, request())
    assert decision.pair is not None
    assert len(looked) < 40


# The table.


def card(role: Role) -> ModelCard:
    return replace(CARD, role=role, splits_by=SplitWay.PULL, kv_layout=LAYOUT)


def table_with(**cards: ModelCard) -> RoutingTable:
    """Every replica has much to do but the prefillers."""
    return table_by("kvasir", **cards)


def table_by(policy: str, **cards: ModelCard) -> RoutingTable:
    table = RoutingTable(policy, PARAMETERS, random.Random(1))
    for name, its in cards.items():
        table.add_replica(ReplicaId(name), its, STRIDE)
        table.update_load(ReplicaId(name), report(0 if its.role is Role.PREFILL else 20_000))
    return table


def report(num_pending_tokens: int) -> LoadSnapshot:
    return LoadSnapshot(
        0, 0, num_pending_tokens, 0, 0, 0, 0, host_seconds_per_token=1e-6, pull_seconds_per_token=1e-5
    )


TOKENS = prompt(0, 1, 2000)


def test_a_split_reserves_at_both_and_gives_both_back() -> None:
    table = table_with(p=card(Role.PREFILL), d=card(Role.DECODE))
    with route(table, TOKENS) as routed:
        assert isinstance(routed, RoutedRequest)
        assert routed.prefill is not None
        assert (routed.decision.replica_id, routed.prefill.decision.replica_id) == ("d", "p")
        assert (routed.num_uncached_tokens, routed.prefill.num_uncached_tokens) == (2000 - 1920, 2000)
        assert (table.load(ReplicaId("p")).num_pending_tokens, table.load(ReplicaId("p")).num_requests) == (
            2000,
            1,
        )
        assert table.load(ReplicaId("d")).num_pending_tokens == 20_080
        assert routed.announcement.announcement_id != routed.prefill.announcement.announcement_id
        assert table.num_predictions == 2
        hashes = hash_blocks(ROOT, TOKENS, BLOCK_SIZE)
        assert dict(table.index("m").overlaps(hashes)) == {"p": 125, "d": 125}, "both are about to have it"
    assert (table.num_predictions, table.loads.num_reserved) == (0, 0)
    assert table.load(ReplicaId("p")).num_requests == 0


def test_loads_that_a_caller_knows_better_count_for_pairs_too() -> None:
    table = table_with(p=card(Role.PREFILL), d=card(Role.DECODE))
    asked = RoutingRequest(b"b" * 16, len(TOKENS), BLOCK_SIZE)
    hashes = hash_blocks(ROOT, TOKENS, BLOCK_SIZE)
    full = structs.replace(BUSY, num_pending_tokens=10**6)
    choice = table.choose("m", asked, hashes, load_of=lambda each: full if each == "p" else table.load(each))
    assert choice.decision.split is None
    assert table.choose("m", asked, hashes, load_of=table.load).decision.split is not None


def test_n_choices_take_places_at_the_decoder_alone() -> None:
    table = table_with(p=card(Role.PREFILL), d=card(Role.DECODE))
    asked = RoutingRequest(b"b" * 16, len(TOKENS), BLOCK_SIZE, num_choices=3)
    with table.route("m", asked, hash_blocks(ROOT, TOKENS, BLOCK_SIZE)) as routed:
        assert routed.decision.split is not None
        assert (table.load(ReplicaId("p")).num_requests, table.load(ReplicaId("d")).num_requests) == (1, 3)
    assert table.loads.num_reserved == 0


def test_a_role_is_a_preference() -> None:
    table = table_with(p=card(Role.PREFILL), d=card(Role.DECODE), e=card(Role.DECODE))

    def taken(*excluded: str) -> tuple[ReplicaId, bool]:
        with route(table, TOKENS, exclude={ReplicaId(each) for each in excluded}) as routed:
            return routed.decision.replica_id, routed.decision.split is not None

    assert taken("d") == ("e", True)
    assert taken("d", "e") == ("p", False), "no decoder is ready"
    assert taken("p", "e") == ("d", False), "no prefiller is ready"
    table.set_draining(ReplicaId("p"))
    assert not taken()[1]
    table.add_replica(ReplicaId("p"), card(Role.PREFILL), STRIDE)
    assert taken()[1], "it is back"
    for name in ("d", "e"):
        table.set_stalled(ReplicaId(name), is_stalled=True)
    assert taken() == ("p", False)


def test_what_must_not_be_split_goes_to_decoders_whole() -> None:
    asked = RoutingRequest(b"b" * 16, len(TOKENS), BLOCK_SIZE)
    hashes = hash_blocks(ROOT, TOKENS, BLOCK_SIZE)

    def decision_of(policy: str, asked: RoutingRequest = asked) -> Decision:
        table = table_by(policy, p=card(Role.PREFILL), d=card(Role.DECODE))
        with table.route("m", asked, hashes) as routed:
            return routed.decision

    assert decision_of("kvasir").split is not None
    by_load = decision_of("kvasir", structs.replace(asked, by_load=True))
    assert (by_load.replica_id, by_load.pair) == ("d", None)
    assert decision_of("kvasir", structs.replace(asked, may_split=False)).pair is None
    for policy in ("round_robin", "minimum_ttft", "sticky"):
        decision = decision_of(policy)
        assert (decision.replica_id, decision.pair) == ("d", None)


@pytest.mark.parametrize("words", [{"takes_bodies": (BodyForm.CHAT,)}, {"is_sparse": True}])
def test_bodies_and_sparse_models_are_not_split(words: dict[str, object]) -> None:
    table = table_with(p=replace(card(Role.PREFILL), **words), d=replace(card(Role.DECODE), **words))  # type: ignore[arg-type]
    with route(table, TOKENS) as routed:
        assert routed.decision.pair is None
        assert routed.decision.replica_id == "p", "all are alike"


def test_what_is_cached_at_the_decoder_needs_no_split() -> None:
    table = table_with(p=card(Role.PREFILL), d=card(Role.DECODE))
    store(table, ReplicaId("d"), TOKENS)
    with route(table, TOKENS) as routed:
        assert routed.decision.replica_id == "d"
        assert routed.decision.pair is None
