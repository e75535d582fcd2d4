"""One routing decision: which replica, and why.

Owns candidates, near-ties and the decision's explanation. Knows no clock, no index and no reservations:
plain data in, plain data out.
"""

import enum
import functools
import heapq
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from replicas.protocol.affinity import AffinityOrder, AffinityRanking
from replicas.protocol.blocks import ImageTokens
from replicas.protocol.status import ReplicaId, Role, SplitWay
from replicas.protocol.ways import Reach
from router.routing.cost import (
    Cost,
    CostParameters,
    FleetRates,
    cost_of,
    fleet_rates,
    typical_encode_seconds,
    with_future,
)
from router.routing.levels import NOWHERE, Depths, Holdings, Overlaps, Slots
from router.routing.load import ReplicaLoad

if TYPE_CHECKING:
    import random

SplitKind: TypeAlias = tuple[SplitWay, str]
"""A way of splits, and the layout of KV where it has to be equal. Replicas of one kind may split a prompt."""

_NO_LAYOUTS: Mapping[ReplicaId, str] = {}
_NO_PARTS: Mapping[ReplicaId, tuple[Role, SplitWay]] = {}

JUNCTION_SHARE = 0.5
"""The worth of a resume point where prompts were seen to part, in times of computing up to it."""

DRAWN_PER_CHOSEN = 3
"""The least busy of this many times the number that is wanted."""


class DecisionReason(enum.StrEnum):
    ONLY_REPLICA = "only_replica"
    """Only one candidate."""
    OVERLAP = "overlap"
    """No replica holds more of the prompt."""
    HOME = "home"
    """The bucket's first replica."""
    SPILL = "spill"
    """Away from home and from the cache, since both cost more: in time, or by the price of room."""
    SPLIT = "split"
    """Another replica computes the prompt, since no replica does both for less."""
    POLICY = "policy"
    """A baseline policy said so."""


class Claim(msgspec.Struct, frozen=True):
    """A program's last place and its future room. Its last turn ran at its `home`.

    `beyond` are, by replica, the tokens of live programs, with this one's, that exceed the room there. Those
    that are missing have room for all. It is the program's turn `num_turns`, and has waited for
    `gate_seconds` until the program might run, while `num_admitted` others did.
    """

    home: ReplicaId | None = None
    beyond: Mapping[ReplicaId, int] = msgspec.field(default_factory=dict)
    num_turns: int = 1
    gate_seconds: float = 0.0
    num_admitted: int = 0


class RoutingRequest(msgspec.Struct, frozen=True):
    """Everything about a request that a decision needs. `sequence` counts a router's requests (round robin).

    `media` are the positions of its images. `num_findable_blocks` of the prompt may be found cached; None is
    all but the last token. `peek_tokens` are the last of those found: a draft model has them computed again.
    `num_choices` take a place each. `head_bucket` is that of a beginning too short for the index, which other
    conversations may share.
    """

    bucket: bytes
    num_tokens: int
    block_size: int
    sequence: int = 0
    media: tuple[ImageTokens, ...] = ()
    num_findable_blocks: int | None = None
    peek_tokens: int = 0
    num_choices: int = 1
    head_bucket: bytes | None = None
    by_load: bool = False
    """It finds nothing cached: the replica with the fewest requests takes it."""
    claim: Claim | None = None
    """Set if it is a turn of a program."""
    may_split: bool = True
    """Whether one replica may compute it and another decode it."""


class Replicas(Mapping[ReplicaId, ReplicaLoad]):
    """Candidates. A load is looked up on demand: in a large fleet few are.

    `layouts` say how each lays out its KV; replicas of one layout may pull from each other, those without one
    from none. Layouts may also name replicas that take nothing new but may be pulled from while they live.

    `parts` are the role of each and its way of splits. `roles` are None unless a prefiller and a decoder may
    split a prompt: then all are alike.
    """

    __slots__ = ("_layouts", "_mask", "_parts", "_peer_masks", "_slots", "load_of", "ranking", "roles")

    def __init__(
        self,
        replica_ids: Iterable[ReplicaId],
        load_of: Callable[[ReplicaId], ReplicaLoad],
        layouts: Mapping[ReplicaId, str] = _NO_LAYOUTS,
        parts: Mapping[ReplicaId, tuple[Role, SplitWay]] = _NO_PARTS,
    ) -> None:
        self.ranking = AffinityRanking(replica_ids)
        self.load_of = load_of
        self._layouts = layouts
        self._parts = parts
        self.roles = None if not parts else self._roles(parts)
        self._slots: Slots | None = None
        self._mask = 0
        self._peer_masks: dict[str, int] = {}

    def __getitem__(self, replica_id: ReplicaId) -> ReplicaLoad:
        if replica_id not in self.ranking:
            raise KeyError(replica_id)
        return self.load_of(replica_id)

    def __iter__(self) -> Iterator[ReplicaId]:
        return iter(self.ranking.replica_ids)

    def __len__(self) -> int:
        return len(self.ranking.replica_ids)

    def __contains__(self, replica_id: object) -> bool:
        return replica_id in self.ranking

    def mask(self, slots: Slots) -> int:
        """The bits that they have there."""
        if self._slots is not slots:
            self._slots, self._mask, self._peer_masks = slots, slots.mask(self), {}
        return self._mask

    def layout(self, replica_id: ReplicaId) -> str:
        """Empty if it pulls from none, and none from it."""
        return self._layouts.get(replica_id, "")

    def peer_mask(self, slots: Slots, layout: str) -> int:
        """Return the bits of those with this layout there."""
        if not layout:
            return 0
        self.mask(slots)
        mask = self._peer_masks.get(layout)
        if mask is None:
            mask = slots.mask([each for each, its in self._layouts.items() if its == layout])
            self._peer_masks[layout] = mask
        return mask

    def seen_as(self, load_of: Callable[[ReplicaId], ReplicaLoad]) -> "Replicas":
        """Return them with other loads."""
        seen = Replicas.__new__(Replicas)
        seen.ranking, seen._layouts, seen.load_of = self.ranking, self._layouts, load_of
        seen._slots, seen._mask, seen._peer_masks = self._slots, self._mask, self._peer_masks
        seen._parts, seen.roles = self._parts, None if self.roles is None else self.roles.seen_as(load_of)
        return seen

    def without(self, excluded: Collection[ReplicaId]) -> "Replicas":
        """Neither to serve nor to be pulled from."""
        replica_ids = (replica_id for replica_id in self if replica_id not in excluded)
        layouts = {each: layout for each, layout in self._layouts.items() if each not in excluded}
        return Replicas(replica_ids, self.load_of, layouts, self._parts)

    def _roles(self, parts: Mapping[ReplicaId, tuple[Role, SplitWay]]) -> "Roles | None":
        """Return both parts, if some can split a prompt and one of these has the role of a prefiller."""
        kinds = {
            each: (way, self.layout(each) if way is SplitWay.PULL else "")
            for each in self
            if (way := parts[each][1]) is SplitWay.NIXL or (way is SplitWay.PULL and self.layout(each))
        }
        decoders = [each for each in self if parts[each][0] is not Role.PREFILL]
        prefillers = [each for each in kinds if parts[each][0] is not Role.DECODE]
        of_decoders = {kinds.get(each) for each in decoders}
        if not any(parts[each][0] is Role.PREFILL and kinds[each] in of_decoders for each in prefillers):
            return None
        return Roles(
            Replicas(decoders, self.load_of, self._layouts),
            Replicas(prefillers, self.load_of, self._layouts),
            kinds,
        )


class Roles(NamedTuple):
    """The parts of a fleet where prompts may be split; a replica may be in both. Decoders serve whole
    prompts, too. `kinds` has those that can split."""

    decoders: Replicas
    prefillers: Replicas
    kinds: Mapping[ReplicaId, SplitKind]

    def seen_as(self, load_of: Callable[[ReplicaId], ReplicaLoad]) -> "Roles":
        return Roles(self.decoders.seen_as(load_of), self.prefillers.seen_as(load_of), self.kinds)


class Candidate(msgspec.Struct, frozen=True):
    """A considered replica. `rank` is its place in the affinity order, 0 for home.

    `overlap_tokens` need no computing there: those that it is cheapest to have ready. `num_reached_blocks`
    are what full attention has of a sparse model: among equals, a request there leaves a resume point.
    """

    replica_id: ReplicaId
    rank: int
    overlap_tokens: int
    load: ReplicaLoad
    cost: Cost
    reach: Reach
    num_reached_blocks: int = 0


SPLIT_PATIENCE = 4.0
LEAST_SPLIT_SECONDS, MOST_SPLIT_SECONDS = 0.5, 30.0
"""A decoder waits for KV this many times as long as expected, and within these bounds."""


class Pair(msgspec.Struct, frozen=True):
    """The cheapest way to compute the prompt at one replica, the prefiller, and decode it at another, and
    what it was compared with. All costs are seconds.

    The prefiller has `overlap_tokens`, and the decoder lacks `num_lacking_tokens`, whose KV is there after
    `ready_seconds`. `alone_seconds` is the cost of the cheapest replica that does both. `prefiller` and
    `decoder` are candidates with their own costs; the prefiller itself pulls from `pull_from`.
    """

    prefiller: Candidate
    decoder: Candidate
    pull_from: ReplicaId | None
    num_lacking_tokens: int
    ready_seconds: float
    seconds: float
    alone_seconds: float

    @property
    def is_cheaper(self) -> bool:
        return self.seconds < self.alone_seconds

    @property
    def wait_seconds(self) -> float:
        """The longest that the decoder should wait for KV."""
        seconds = max(LEAST_SPLIT_SECONDS, SPLIT_PATIENCE * self.ready_seconds)
        return min(MOST_SPLIT_SECONDS, seconds)


class Decision(msgspec.Struct, frozen=True):
    """`pull_from` is the peer from which the replica should pull the overlap that it lacks. `holdings` is the
    index's view of all replicas, None if it had nothing. `claim` is that of a turn's program.

    `pair` is the cheapest split, in a fleet with roles. If it is the cheaper choice, `replica_id` is its
    decoder, which pulls from its prefiller, and `overlap_tokens` are all that it will not compute."""

    replica_id: ReplicaId
    overlap_tokens: int
    reason: DecisionReason
    rank: int
    candidates: tuple[Candidate, ...]
    pull_from: ReplicaId | None = None
    holdings: Holdings | None = None
    claim: Claim | None = None
    pair: Pair | None = None

    @property
    def split(self) -> Pair | None:
        """The pair, if it is the choice."""
        return self.pair if self.pair is not None and self.pair.is_cheaper else None

    @property
    def computed_at(self) -> ReplicaId:
        """The replica that computes the prompt."""
        return self.replica_id if self.split is None else self.split.prefiller.replica_id

    @property
    def num_found_tokens(self) -> int:
        """Tokens of the prompt that no replica computes."""
        return self.overlap_tokens if self.split is None else self.split.prefiller.overlap_tokens

    def of_prompt(self) -> "Decision":
        """Return what was decided of the replica that computes the prompt: of a split, its prefiller."""
        if self.split is None:
            return self
        prefiller = self.split.prefiller
        return msgspec.structs.replace(
            self,
            replica_id=prefiller.replica_id,
            overlap_tokens=prefiller.overlap_tokens,
            rank=prefiller.rank,
            candidates=(*self.candidates, prefiller),
            pull_from=self.split.pull_from,
            pair=None,
        )


def decide(
    request: RoutingRequest,
    replicas: Replicas,
    overlaps: Overlaps,
    parameters: CostParameters,
    rng: "random.Random",
) -> Decision:
    """Return the cheapest replica; among near-ties the deepest overlap, then the affinity order. A turn of a
    program goes to the cheapest alone.

    `replicas` are the candidates (at least one); `overlaps` are leading blocks, and may include other
    replicas, whose caches are ignored.
    """
    assert len(replicas), "a decision needs a replica"
    request = by_head(request, replicas)
    considered = considered_of(request, replicas, overlaps, parameters, rng)
    rates = fleet_rates([load for _, _, load in considered], parameters)
    candidates = weigh(request, replicas, considered, overlaps, rates, parameters)
    if request.claim is None:
        chosen = _choose(candidates, rates, parameters)
    else:  # the term of its future knows who is to meet where
        chosen = min(candidates, key=lambda candidate: (candidate.cost.seconds, candidate.rank))
    return Decision(
        replica_id=chosen.replica_id,
        overlap_tokens=chosen.overlap_tokens,
        reason=_reason(chosen, candidates),
        rank=chosen.rank,
        candidates=candidates,
        pull_from=peer_of(chosen, replicas, overlaps, rng),
        claim=request.claim,
    )


def by_head(request: RoutingRequest, replicas: Replicas) -> RoutingRequest:
    """Return the request in the bucket of its short head, while that one's home runs nothing.

    The index does not tell who holds the head. Sharing it is worth little, so a busy home draws no prompt.
    """
    if request.head_bucket is None:
        return request
    home = replicas.ranking.of(request.head_bucket).first(1)[0]
    if replicas.load_of(home).num_requests:
        return request
    return msgspec.structs.replace(request, bucket=request.head_bucket, head_bucket=None)


def overlap_tokens(request: RoutingRequest, num_blocks: int) -> int:
    """Tokens that need no computing: whole blocks, and never the last token, whose logits are wanted."""
    most_blocks = request.num_findable_blocks
    if most_blocks is None:
        most_blocks = (request.num_tokens - 1) // request.block_size
    return max(0, min(num_blocks, most_blocks) * request.block_size - request.peek_tokens)


Considered: TypeAlias = tuple[int, ReplicaId, ReplicaLoad]
"""A replica's place in the affinity order, its name, and how busy it is."""


def everybody(request: RoutingRequest, replicas: Replicas) -> list[Considered]:
    """All replicas, by affinity order."""
    everyone = replicas.ranking.replica_ids
    order = everyone if len(everyone) == 1 else replicas.ranking.of(request.bucket).whole()
    return list(zip(range(len(order)), order, map(replicas.load_of, order), strict=True))


def weigh(
    request: RoutingRequest,
    replicas: Replicas,
    considered: Collection[Considered],
    overlaps: Overlaps,
    rates: FleetRates,
    parameters: CostParameters,
) -> tuple[Candidate, ...]:
    """Compute each replica's cost, if it may pull from any of `replicas`."""
    if request.media:
        encode_seconds = typical_encode_seconds(load for _, _, load in considered)
        rates = rates._replace(encode_seconds_per_token=encode_seconds)
    candidates = []
    bits = overlaps.slots.bits([replica_id for _, replica_id, _ in considered])
    reaches = _Reaches(request, replicas, overlaps, bits)
    num_tokens, media = request.num_tokens, request.media
    beyond = None if request.claim is None else request.claim.beyond
    for bit, (rank, replica_id, load) in zip(bits, considered, strict=True):
        reach = reaches.of(bit, replica_id, load)
        cost = cost_of(load, num_tokens, reach, rates, parameters, media)
        if beyond and replica_id in beyond:
            cost = with_future(cost, load, beyond[replica_id], rates, parameters)
        candidates.append(Candidate(replica_id, rank, cost.num_ready_tokens, load, cost, reach))
    if not overlaps.reach:
        return tuple(candidates)
    return _reaching(request, candidates, [*map(overlaps.reach_of, bits)], rates)


def _reaching(
    request: RoutingRequest, candidates: Sequence[Candidate], reached: Sequence[int], rates: FleetRates
) -> tuple[Candidate, ...]:
    """Return the candidates with the blocks that full attention has reached at each.

    What it has of the prompt is computed again without a hit, and yet is no second copy in the fleet, which
    has its price. Where it reaches deeper than any resume point of the fleet, the request leaves a point that
    spares later ones the same tokens; a request that goes elsewhere pays for a share of them.
    """
    deepest_point = max(candidate.reach.device for candidate in candidates)
    deepest = max(reached) * request.block_size
    junction_price = JUNCTION_SHARE * rates.prefill_seconds_per_token
    found = []
    for candidate, num_reached_blocks in zip(candidates, reached, strict=True):
        num_hit, num_reached = candidate.reach.device, num_reached_blocks * request.block_size
        num_copied = request.num_tokens - max(num_hit, num_reached)
        room_seconds = candidate.cost.room_seconds * max(0, num_copied) / (request.num_tokens - num_hit)
        room_seconds += junction_price * max(0, deepest - max(deepest_point, num_reached))
        cost = msgspec.structs.replace(candidate.cost, room_seconds=room_seconds)
        found.append(msgspec.structs.replace(candidate, cost=cost, num_reached_blocks=num_reached_blocks))
    return tuple(found)


class _Reaches:
    """Reaches of one prompt, each computed once: few differ in a fleet."""

    def __init__(
        self,
        request: RoutingRequest,
        replicas: Replicas,
        overlaps: Overlaps,
        bits: Iterable[int],
    ) -> None:
        self._replicas = replicas
        self._overlaps = overlaps
        self._request = request
        self._at_peer: dict[str, int] = {"": 0}
        """By layout, the most that any replica of it has stored."""
        among = functools.reduce(operator.or_, bits, 0)
        self._alike: list[tuple[int, Depths, dict[str | None, Reach]]] = [
            (mask, depths, {}) for mask, depths in overlaps.alike(among)
        ]
        """Groups of replicas with equal depths, and each group's reach by layout."""
        self._of_others: dict[str | None, Reach] = {}

    def of(self, bit: int, replica_id: ReplicaId, load: ReplicaLoad) -> Reach:
        """Return the reach of the replica with this bit. One that does not report its speeds, whose layout is
        None, has all its tiers counted as ready."""
        speeds = load.speeds
        layout: str | None = None
        if speeds.host is not None:
            layout = "" if speeds.pull is None else self._replicas.layout(replica_id)
        depths, reaches = NOWHERE, self._of_others
        for mask, its_depths, its_reaches in self._alike:
            if mask & bit:
                depths, reaches = its_depths, its_reaches
                break
        reach = reaches.get(layout)
        if reach is None:
            reach = reaches[layout] = self._reach(depths, layout)
        return reach

    def _reach(self, depths: Depths, layout: str | None) -> Reach:
        overlaps, request = self._overlaps, self._request
        local = overlap_tokens(request, depths.anywhere)
        if layout is None:
            return Reach(local, local, local, local)
        at_peer = self._at_peer.get(layout)
        if at_peer is None:
            level = overlaps.deepest_stored(self._replicas.peer_mask(overlaps.slots, layout))
            at_peer = self._at_peer[layout] = 0 if level is None else overlap_tokens(request, level.depth)
        device, host = overlap_tokens(request, depths.device), overlap_tokens(request, depths.host)
        return Reach(device, host, local, max(local, at_peer))


def peer_of(
    chosen: Candidate, replicas: Replicas, overlaps: Overlaps, rng: "random.Random"
) -> ReplicaId | None:
    """Return the peer to pull from: a random one of those that have stored most.

    KV on a device counts: it was copied to host memory when it was complete.
    """
    if chosen.overlap_tokens <= chosen.reach.local:
        return None
    layout = replicas.layout(chosen.replica_id)
    level = overlaps.deepest_stored(replicas.peer_mask(overlaps.slots, layout))
    if level is None:
        return None
    peer = level.draw(1, rng)[0]
    return None if peer == chosen.replica_id else peer


def considered_of(
    request: RoutingRequest,
    replicas: Replicas,
    overlaps: Overlaps,
    parameters: CostParameters,
    rng: "random.Random",
) -> list[Considered]:
    """Return the replicas to compare: all, or in a large fleet a bounded number."""
    if len(replicas) <= parameters.num_compared_candidates:
        return everybody(request, replicas)
    order = replicas.ranking.of(request.bucket)
    few = order.first(parameters.num_affinity_candidates)
    home = None if request.claim is None else request.claim.home
    if home is not None and home in replicas and home not in few:
        few.append(home)
    if overlaps or overlaps.reach:
        few += _deepest(replicas, order, overlaps, few, parameters.num_holder_candidates, rng)
    few += _idlest(replicas, few, parameters.num_idle_candidates, rng)
    return list(zip(order.ranks(few), few, map(replicas.load_of, few), strict=True))


def _deepest(
    replicas: Replicas,
    order: AffinityOrder,
    overlaps: Overlaps,
    chosen: Collection[ReplicaId],
    count: int,
    rng: "random.Random",
) -> list[ReplicaId]:
    """Return the deepest holders that are not chosen yet; among equals the least busy, then by affinity
    order.

    Many equals are sampled: a prefix may lie in every cache of the fleet.
    """
    num_left = DRAWN_PER_CHOSEN * count + len(chosen)
    holders: list[tuple[int, ReplicaId]] = []
    among = replicas.mask(overlaps.slots)
    for level in overlaps.levels(among):
        drawn = level.draw(num_left, rng)
        holders += [(level.depth, replica_id) for replica_id in drawn if replica_id not in chosen]
        num_left -= len(drawn)
        if not num_left:
            break
    if not holders:
        reached = next(overlaps.reach_levels(among), None)
        drawn = [] if reached is None else reached.draw(num_left, rng)
        holders = [(0, replica_id) for replica_id in drawn if replica_id not in chosen]
    by_preference = sorted(
        (-depth, *_busyness(replicas[replica_id]), score, replica_id)
        for score, (depth, replica_id) in zip(
            order.scores(replica_id for _, replica_id in holders), holders, strict=True
        )
    )
    return [replica_id for *_, replica_id in by_preference[:count]]


def _idlest(
    replicas: Replicas, chosen: Collection[ReplicaId], count: int, rng: "random.Random"
) -> list[ReplicaId]:
    """Return the least busy of a random draw, without those that are chosen already."""
    everyone = replicas.ranking.replica_ids
    drawn = [
        replica_id
        for replica_id in rng.sample(everyone, min(len(everyone), DRAWN_PER_CHOSEN * count))
        if replica_id not in chosen
    ]
    return heapq.nsmallest(count, drawn, key=lambda replica_id: _busyness(replicas[replica_id]))


def _busyness(load: ReplicaLoad) -> tuple[int, int]:
    return (load.num_pending_tokens, load.num_requests)


def _choose(candidates: tuple[Candidate, ...], rates: FleetRates, parameters: CostParameters) -> Candidate:
    """Return the cheapest, unless a near-tie has more of the prompt or comes earlier in the affinity order.

    Overlap comes before affinity, so a near-tie never serves with less of the prompt than the cheapest. None
    waits for a place while the cheapest has one.
    """
    by_seconds = [(candidate.cost.seconds, candidate.rank, candidate) for candidate in candidates]
    least_seconds, _, cheapest = min(by_seconds)
    near_seconds = (
        parameters.near_tie_tokens * rates.prefill_seconds_per_token
        + parameters.near_tie_requests * rates.decode_step_seconds
    )
    most_seconds = least_seconds + near_seconds
    most_requests = cheapest.load.num_requests + parameters.near_tie_requests
    if cheapest.load.num_requests < cheapest.load.num_places:
        most_requests = min(most_requests, cheapest.load.num_places - 1)
    near_ties = [
        candidate
        for seconds, _, candidate in by_seconds
        if seconds <= most_seconds and candidate.load.num_requests <= most_requests
    ]
    return min(near_ties, key=_preference)


def _preference(candidate: Candidate) -> tuple[int, int, int, int]:
    """Sort key: most of the prompt first, without what would be pulled; then most on the device; then most in
    reach of full attention."""
    num_own_tokens = min(candidate.overlap_tokens, candidate.reach.local)
    return (-num_own_tokens, -candidate.reach.device, -candidate.num_reached_blocks, candidate.rank)


def _reason(chosen: Candidate, candidates: tuple[Candidate, ...]) -> DecisionReason:
    if len(candidates) == 1:
        return DecisionReason.ONLY_REPLICA
    if chosen.overlap_tokens and chosen.overlap_tokens == max(c.overlap_tokens for c in candidates):
        return DecisionReason.OVERLAP
    return DecisionReason.HOME if chosen.rank == 0 else DecisionReason.SPILL
