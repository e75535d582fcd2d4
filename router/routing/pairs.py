"""Pairs: the second choice of a decision, a prompt computed at one replica and decoded at another.

Owns the cost of such a split. Knows no clock, no index and no reservations: plain data in, plain data out.

    split(p, d) = max(begin(p) + prefill(rest at p), max(begin(p), moves(d)) + lack(d) * link(d))
                + tail(d) + step(d)
                + delay_price * requests at p * prefill(rest at p)
                + room(p) + split_room_price * room(d) + future(d)

The decoder d lacks what lies neither on its device nor below it. Chunks move while p computes those behind
them, so the later of both counts. `tail` is one more chunk over the link and what is computed of the prompt
at d, after the decode step that runs when it comes. The other terms are those of `cost.py`; alone, d may cost
`split_delay_price` in place of `delay_price`. A server's
connector moves the KV when the prompt has been computed whole, so there both times are added.

Decoder first: only what it lacks must move. There is no least length of a split: a short one costs its tail
for nothing. Fixed numbers of decoders and prefillers are paired, whatever the size of the fleet.
"""

from collections.abc import Sequence
from heapq import nsmallest
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING

from msgspec import structs

from replicas.protocol.status import SplitWay
from replicas.protocol.ways import PULL_MOVE_SECONDS, Reach
from router.routing.cost import (
    CostParameters,
    FleetRates,
    cost_of,
    decode_seconds,
    fleet_rates,
    typical_encode_seconds,
)
from router.routing.decision import (
    Candidate,
    Decision,
    DecisionReason,
    Pair,
    Roles,
    RoutingRequest,
    considered_of,
    overlap_tokens,
    peer_of,
    weigh,
)
from router.routing.levels import Overlaps

if TYPE_CHECKING:
    import random

CHUNK_TOKENS = 128
"""Tokens of a chunk that is pulled; it has a block if that is longer."""

NUM_DECODERS = NUM_PREFILLERS = 2


class _Decoding:
    """A decoder's part of the cost, with any of its `prefillers`."""

    __slots__ = (
        "begins_after",
        "candidate",
        "last_seconds",
        "move_seconds",
        "num_lacking",
        "num_ready",
        "prefillers",
        "price",
        "way",
    )

    def __init__(
        self,
        candidate: Candidate,
        prefillers: Sequence[Candidate],
        request: RoutingRequest,
        way: SplitWay,
        rates: FleetRates,
        parameters: CostParameters,
    ) -> None:
        load, speeds = candidate.load, candidate.load.speeds
        chunk_blocks, link = 1, parameters.nixl_seconds_per_token
        if way is SplitWay.PULL:
            assert speeds.pull is not None and speeds.host is not None
            chunk_blocks, link = max(1, CHUNK_TOKENS // request.block_size), speeds.pull + speeds.host
        num_blocks = (request.num_tokens - 1) // (chunk_blocks * request.block_size) * chunk_blocks
        self.candidate, self.prefillers, self.way = candidate, prefillers, way
        self.num_ready = max(candidate.reach.local, overlap_tokens(request, num_blocks))
        self.num_lacking = self.num_ready - candidate.reach.local
        self.begins_after = speeds.backlog_seconds
        self.move_seconds = self.num_lacking * link
        self.last_seconds = PULL_MOVE_SECONDS
        if way is SplitWay.PULL:
            self.last_seconds += min(self.num_lacking, chunk_blocks * request.block_size) * link
        reach = Reach(self.num_ready, self.num_ready, self.num_ready, self.num_ready)
        tail = cost_of(load, request.num_tokens, reach, rates, parameters, request.media)
        self.price = (
            tail.prefill_seconds
            + decode_seconds(load, rates)
            + parameters.split_room_price * candidate.cost.room_seconds
            + candidate.cost.future_seconds
        )

    @property
    def seconds(self) -> float:
        """Its cost without the prompt's computing."""
        return self.candidate.cost.wait_seconds + self.move_seconds + self.price


def with_pair(
    request: RoutingRequest,
    decision: Decision,
    roles: Roles,
    overlaps: Overlaps,
    parameters: CostParameters,
    rng: "random.Random",
) -> Decision:
    """Return the decision with the cheapest split, made one if that is cheaper than `decision`'s candidates.

    A replica splits only if how fast it pulls is known, and it lacks something.
    """
    prefillers = _by_soonest(request, roles, overlaps, parameters, rng)
    decodings = _decodings(request, decision.candidates, prefillers, roles, parameters)
    if not decodings:
        return decision
    seconds, ready_seconds, prefiller, decoding = min(
        [_cost(prefiller, decoding) for decoding in decodings for prefiller in decoding.prefillers],
        key=itemgetter(0),
    )
    decoder = decoding.candidate
    pair = Pair(
        prefiller=prefiller,
        decoder=decoder,
        pull_from=peer_of(prefiller, roles.prefillers, overlaps, rng),
        num_lacking_tokens=decoding.num_lacking,
        ready_seconds=ready_seconds,
        seconds=seconds,
        alone_seconds=min(_alone_seconds(candidate, parameters) for candidate in decision.candidates),
    )
    if not pair.is_cheaper:
        return structs.replace(decision, pair=pair)
    return structs.replace(
        decision,
        replica_id=decoder.replica_id,
        overlap_tokens=decoding.num_ready,
        reason=DecisionReason.SPLIT,
        rank=decoder.rank,
        pull_from=prefiller.replica_id,
        pair=pair,
    )


def _alone_seconds(candidate: Candidate, parameters: CostParameters) -> float:
    """Return the cost of a decoder that computes the prompt, too."""
    cost = candidate.cost
    if parameters.split_delay_price is None:
        return cost.seconds
    dearer = parameters.split_delay_price - parameters.delay_price
    return cost.seconds + dearer * candidate.load.num_requests * cost.prefill_seconds


def _by_soonest(
    request: RoutingRequest,
    roles: Roles,
    overlaps: Overlaps,
    parameters: CostParameters,
    rng: "random.Random",
) -> list[Candidate]:
    """Return the prefillers, the one first that would have computed the prompt first."""
    request = structs.replace(request, claim=None)  # a program is at home where its turns are decoded
    considered = considered_of(request, roles.prefillers, overlaps, parameters, rng)
    rates = fleet_rates([load for _, _, load in considered], parameters)
    found = weigh(request, roles.prefillers, considered, overlaps, rates, parameters)
    return sorted(found, key=lambda prefiller: (_computed_after(prefiller), prefiller.rank))


def _decodings(
    request: RoutingRequest,
    candidates: Sequence[Candidate],
    prefillers: Sequence[Candidate],
    roles: Roles,
    parameters: CostParameters,
) -> list[_Decoding]:
    """Return the decoders to pair: those with the least cost without the prompt's computing."""
    rates = fleet_rates([candidate.load for candidate in candidates], parameters)
    if request.media:
        encode_seconds = typical_encode_seconds(candidate.load for candidate in candidates)
        rates = rates._replace(encode_seconds_per_token=encode_seconds)
    found = []
    for candidate in candidates:
        kind = roles.kinds.get(candidate.replica_id)
        speeds = candidate.load.speeds
        if kind is None or (kind[0] is SplitWay.PULL and (speeds.pull is None or speeds.host is None)):
            continue
        others = (
            each
            for each in prefillers
            if roles.kinds[each.replica_id] == kind and each.replica_id != candidate.replica_id
        )
        decoding = _Decoding(
            candidate, [*islice(others, NUM_PREFILLERS)], request, kind[0], rates, parameters
        )
        if decoding.num_lacking and decoding.prefillers:
            found.append(decoding)
    return nsmallest(NUM_DECODERS, found, key=lambda each: (each.seconds, each.candidate.rank))


def _cost(prefiller: Candidate, decoding: _Decoding) -> tuple[float, float, Candidate, _Decoding]:
    """Return the pair with its cost before it, and the seconds until the decoder has all but the tail."""
    cost, computed_after = prefiller.cost, _computed_after(prefiller)
    if decoding.way is SplitWay.NIXL:
        ready_seconds = computed_after + decoding.move_seconds
    else:
        begins_after = max(cost.wait_seconds + cost.move_seconds, decoding.begins_after)
        ready_seconds = max(computed_after, begins_after + decoding.move_seconds)
    ready_seconds += decoding.last_seconds
    seconds = ready_seconds + decoding.price + cost.delay_seconds + cost.room_seconds
    return seconds, ready_seconds, prefiller, decoding


def _computed_after(prefiller: Candidate) -> float:
    cost = prefiller.cost
    return cost.wait_seconds + cost.move_seconds + cost.prefill_seconds
