"""RoutingTable: the replicas of every model, and one synchronous step from a prompt to a reservation.

Owns the loads and one prefix index per model. How replicas are found and reached is `router/fleet/`'s.
`route()` reads, decides, reserves and predicts without giving up control once, so two requests of one event
loop never decide on the same state.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.hits import num_searched, points_left
from replicas.protocol.keys import Announcement, blocks_per_stride
from replicas.protocol.status import Adapter, ModelCard, ReplicaId, Role, SplitWay
from replicas.protocol.ways import num_image_tokens_left
from router.errors import NoReplicaAvailable, UnknownModel
from router.routing.cost import CostParameters
from router.routing.decision import Decision, Replicas, RoutingRequest, by_head, decide
from router.routing.doubts import Doubts
from router.routing.load import LoadBook, ReplicaLoad, Reservation
from router.routing.overlap import PrefixIndex
from router.routing.pairs import with_pair
from router.routing.policies import POLICIES
from router.shared.instruments import Instrument, counter, gauge

if TYPE_CHECKING:
    import random

BY_LOAD = POLICIES["least_loaded"]

LINGER_SECONDS = 0.2
"""How long a prediction that the index did not hear of (Redis is away, or the request was quick) outlives
the first token: the index hears of the blocks a little later."""

REFUSALS_IN_A_ROW, REFUSING_SECONDS = 3, 30.0
"""A replica is passed over after this many requests that its server refused and another took, for so long."""

UNREAD_IN_A_ROW, UNREAD_SECONDS = 4, 60.0
"""A replica's share of the index does not count after this many prompts of which it promised much and read
nothing, for so long."""


@dataclass(slots=True)
class _RoutedModel:
    index: PrefixIndex
    card: ModelCard
    """The first replica's card. All find hits alike."""
    blocks_per_stride: int
    replicas: dict[ReplicaId, frozenset[Adapter]] = field(default_factory=dict)
    """With the adapters that each has loaded."""
    cards: dict[ReplicaId, ModelCard] = field(default_factory=dict)
    draining: set[ReplicaId] = field(default_factory=set)
    gone: set[ReplicaId] = field(default_factory=set)
    """Replicas whose engine is gone: nothing is pulled from them."""
    stalled: set[ReplicaId] = field(default_factory=set)
    """Alive, but getting nowhere."""
    ready: dict[Adapter | None, Replicas] = field(default_factory=dict)
    """Candidates by adapter. Cleared when one comes, goes or drains."""

    @property
    def finds_all(self) -> bool:
        """Whether a hit is as long as the blocks that were found, whatever these are."""
        return not (self.card.is_sparse or self.card.peek_tokens)


class Preview(NamedTuple):
    """A decision that no request follows, and the bucket's affinity order, home first."""

    decision: Decision
    affinity_order: tuple[ReplicaId, ...]


class Choice(NamedTuple):
    """A decision that has not been acted upon. It is valid until the next decision: `act` at once."""

    decision: Decision
    act: Callable[[], "RoutedRequest"]


class RoutedRequest:
    """A decision that has been acted upon. Leaving it returns everything, whatever happened.

    `announcement` is for the replica to announce when it takes the request; its hashes may be none. Of a
    split, this is the decoder's part, and `prefill` the prefiller's.
    """

    __slots__ = (
        "_end_prediction",
        "_reservation",
        "announcement",
        "decision",
        "num_uncached_tokens",
        "prefill",
    )

    def __init__(
        self,
        decision: Decision,
        reservation: Reservation,
        announcement: Announcement,
        end_prediction: Callable[[bool], None],
        prefill: "RoutedRequest | None" = None,
    ) -> None:
        self.decision = decision
        self.announcement = announcement
        self.prefill = prefill
        self._reservation = reservation
        self.num_uncached_tokens = reservation.num_uncached_tokens
        self._end_prediction: Callable[[bool], None] | None = end_prediction

    def sent(self, ordinal: int) -> None:
        """The request is the replica's `ordinal`-th (from 1) on the stream that its loads come from."""
        self._reservation.sent(ordinal)

    def counted(self) -> None:
        """The replica's own load counts the request, which somebody else has sent there."""
        self._reservation.counted()

    def first_token(self) -> None:
        """The prompt has been computed: its blocks are stored."""
        self._finish_prediction(is_computed=True)

    def close(self) -> None:
        if self.prefill is not None:
            self.prefill.close()
        self._reservation.release()
        self._finish_prediction(is_computed=False)

    def _finish_prediction(self, *, is_computed: bool) -> None:
        if self._end_prediction is not None:
            end_prediction, self._end_prediction = self._end_prediction, None
            end_prediction(is_computed)

    def __enter__(self) -> "RoutedRequest":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RoutingTable:
    """`clock` is any clock in seconds; without one, predictions end with the first token at once."""

    def __init__(
        self,
        policy: str,
        parameters: CostParameters,
        rng: "random.Random",
        *,
        clock: Callable[[], float] | None = None,
        linger_seconds: float = LINGER_SECONDS,
        new_index: Callable[..., PrefixIndex] = PrefixIndex,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"there is no routing policy {policy!r}; there are {', '.join(POLICIES)}")
        self._policy = POLICIES[policy]
        self._parameters = parameters
        self._rng = rng
        self._clock = clock
        self._linger_seconds = linger_seconds
        self._new_index = new_index
        self._models: dict[str, _RoutedModel] = {}
        self._model_of: dict[ReplicaId, str] = {}
        self._num_routed = 0
        self._first_id = rng.getrandbits(64)  # so that no two routers use the same ids
        self._lingering: deque[tuple[float, PrefixIndex, int]] = deque()
        self.refusing = Doubts(REFUSALS_IN_A_ROW, REFUSING_SECONDS)
        """Replicas that are passed over while others are ready."""
        self.unread = Doubts(UNREAD_IN_A_ROW, UNREAD_SECONDS)
        """Replicas whose share of the index does not count."""
        self.loads = LoadBook()
        self.load: Callable[[ReplicaId], ReplicaLoad] = self.loads.view
        self.on_change: Callable[[str, ReplicaId], None] = _ignore
        """Called with model and replica when one arrives or reports its load."""
        self.on_absence: Callable[[str, ReplicaId], None] = _ignore
        """Called likewise when one may not be chosen any more."""

    @property
    def models(self) -> list[str]:
        """Every model that a replica was ever added for."""
        return list(self._models)

    @property
    def num_predictions(self) -> int:
        return sum(model.index.num_predictions for model in self._models.values())

    def add_replica(self, replica_id: ReplicaId, card: ModelCard, index_stride: int) -> None:
        """A ready replica. Adding one that is there already gives it its new card and ends its drain.

        Raises ValueError if the model's other replicas have another block size or thin their index
        differently: then no walk through the index would be right for all.
        """
        if self._model_of.get(replica_id, card.name) != card.name:
            self.remove_replica(replica_id)
        stride = blocks_per_stride(card.block_size, index_stride)
        model = self._models.get(card.name)
        if model is None:
            index = self._new_index(card.block_size, index_stride, is_sparse=card.is_sparse)
            model = self._models[card.name] = _RoutedModel(index, card, stride)
        elif set(model.replicas) <= {replica_id}:
            model.index.thin(card.block_size, index_stride, is_sparse=card.is_sparse)
            model.card, model.blocks_per_stride = card, stride
        elif (model.card.block_size, model.blocks_per_stride) != (card.block_size, stride):
            raise ValueError(
                f"replica {replica_id} of {card.name} has blocks of {card.block_size} and indexes every"
                f" {stride}th; the others have blocks of {model.card.block_size} and index every"
                f" {model.blocks_per_stride}th"
            )
        elif (model.card.is_sparse, model.card.peek_tokens) != (card.is_sparse, card.peek_tokens):
            raise ValueError(
                f"replica {replica_id} of {card.name} finds hits in another way than the others: its cache is"
                f" {'sparse' if card.is_sparse else 'dense'}, and its draft model reads {card.peek_tokens}"
                f" tokens"
            )
        model.draining.discard(replica_id)
        model.gone.discard(replica_id)
        model.stalled.discard(replica_id)
        self._model_of[replica_id] = card.name
        self.update_card(replica_id, card)

    def update_card(self, replica_id: ReplicaId, card: ModelCard) -> None:
        """The replica has loaded or unloaded adapters."""
        model = self._models[card.name]
        model.replicas[replica_id] = frozenset(card.adapters)
        model.cards[replica_id] = card
        model.ready.clear()
        self.on_change(card.name, replica_id)

    def remove_replica(self, replica_id: ReplicaId) -> None:
        """The replica is gone, with its load, its index and its predictions. Unknown ones are ignored."""
        name = self._model_of.pop(replica_id, None)
        if name is None:
            return
        model = self._models[name]
        del model.replicas[replica_id], model.cards[replica_id]
        model.draining.discard(replica_id)
        model.gone.discard(replica_id)
        model.stalled.discard(replica_id)
        model.ready.clear()
        model.index.forget(replica_id)
        self.loads.forget(replica_id)
        self.refusing.right(replica_id)
        self.unread.right(replica_id)
        self.on_absence(name, replica_id)

    def set_draining(self, replica_id: ReplicaId) -> None:
        """The replica takes nothing new, and may be pulled from until it leaves. Unknown ones are ignored."""
        name = self._model_of.get(replica_id)
        if name is not None:
            self._models[name].draining.add(replica_id)
            self._models[name].ready.clear()
            self.on_absence(name, replica_id)

    def set_dead(self, replica_id: ReplicaId) -> None:
        """The replica's engine is gone: it takes nothing and gives nothing. Unknown ones are ignored."""
        name = self._model_of.get(replica_id)
        if name is not None:
            self._models[name].gone.add(replica_id)
            self.set_draining(replica_id)

    def set_stalled(self, replica_id: ReplicaId, *, is_stalled: bool) -> None:
        """The replica gets nothing new while it makes no progress. Unknown ones are ignored."""
        name = self._model_of.get(replica_id)
        if name is not None:
            model = self._models[name]
            (model.stalled.add if is_stalled else model.stalled.discard)(replica_id)
            model.ready.clear()
            self.on_change(name, replica_id)
            if is_stalled:
                self.on_absence(name, replica_id)

    def update_load(
        self, replica_id: ReplicaId, snapshot: LoadSnapshot, num_counted_submits: int = 0
    ) -> None:
        """A snapshot from the replica's stream, which counts the first of the requests that were `sent`.

        One of a replica that is gone is ignored.
        """
        model = self._model_of.get(replica_id)
        if model is not None:
            self.loads.update(replica_id, snapshot, num_counted_submits)
            self.on_change(model, replica_id)

    def update_load_from_registry(self, replica_id: ReplicaId, snapshot: LoadSnapshot) -> None:
        """A snapshot from the replica's heartbeat, which counts while its stream is silent."""
        if replica_id in self._model_of:
            self.loads.update_from_registry(replica_id, snapshot)

    def replica_ids(self, model: str) -> list[ReplicaId]:
        """All replicas of the model, those that drain as well. Raises UnknownModel."""
        return list(self._model(model).replicas)

    def num_replicas(self, model: str) -> int:
        """How many replicas the model has, with those that drain. Raises UnknownModel."""
        return len(self._model(model).replicas)

    def card(self, replica_id: ReplicaId) -> ModelCard | None:
        name = self._model_of.get(replica_id)
        return None if name is None else self._models[name].cards[replica_id]

    def capacity(self, replica_id: ReplicaId) -> int | None:
        """Return the tokens of KV that its device holds; None if that is not known."""
        card = self.card(replica_id)
        return (card.num_blocks * card.block_size or None) if card is not None else None

    def ready_ids(self, model: str) -> Iterable[ReplicaId]:
        fleet = self._models.get(model)
        return () if fleet is None else self._ready(fleet, None)

    def has_ready(
        self, model: str, *, adapter: Adapter | None = None, exclude: Collection[ReplicaId] = ()
    ) -> bool:
        """Whether `route` would find a replica."""
        fleet = self._models.get(model)
        return fleet is not None and any(
            replica_id not in exclude for replica_id in self._ready(fleet, adapter)
        )

    def has_stalled(self, model: str) -> bool:
        fleet = self._models.get(model)
        return fleet is not None and bool(fleet.stalled)

    def has_room(
        self, model: str, *, adapter: Adapter | None = None, exclude: Collection[ReplicaId] = ()
    ) -> bool:
        """Whether a ready replica has fewer requests than it could begin soon: two full batches."""
        fleet = self._models.get(model)
        if fleet is None:
            return False
        for replica_id in self._ready(fleet, adapter):
            if replica_id in exclude:
                continue
            max_running = fleet.cards[replica_id].max_running
            if not max_running or self.loads.view(replica_id).num_requests < 2 * max_running:
                return True
        return False

    def block_size(self, model: str) -> int:
        """Tokens per block. Raises UnknownModel."""
        return self._model(model).card.block_size

    def index(self, model: str) -> PrefixIndex:
        """Return the same object for as long as the table lives. Raises UnknownModel."""
        return self._model(model).index

    def backlog_seconds(self, model: str) -> float:
        """Return the seconds until the first replica has done its prompts; 0 without replicas."""
        fleet = self._models.get(model)
        if fleet is None:
            return 0.0
        default = self._parameters.default_prefill_seconds_per_token
        loads = (self.loads.view(replica) for replica in fleet.replicas if replica not in fleet.draining)
        return min(
            (load.num_pending_tokens * (load.prefill_seconds_per_token or default) for load in loads),
            default=0.0,
        )

    def route(
        self,
        model: str,
        request: RoutingRequest,
        block_hashes: Sequence[BlockHash],
        *,
        exclude: Collection[ReplicaId] = (),
        adapter: Adapter | None = None,
    ) -> RoutedRequest:
        """Decide, reserve and predict, among the replicas that have just this adapter if one is asked for.

        Raises UnknownModel or NoReplicaAvailable.
        """
        return self.choose(model, request, block_hashes, exclude=exclude, adapter=adapter).act()

    def choose(
        self,
        model: str,
        request: RoutingRequest,
        block_hashes: Sequence[BlockHash],
        *,
        exclude: Collection[ReplicaId] = (),
        adapter: Adapter | None = None,
        load_of: Callable[[ReplicaId], ReplicaLoad] | None = None,
    ) -> Choice:
        """Decide, and let the caller act. `load_of` overrides this table's loads.

        Raises UnknownModel or NoReplicaAvailable.
        """
        fleet = self._model(model)
        decision, _ = self._decide(fleet, request, block_hashes, exclude, adapter, load_of)
        return Choice(decision, lambda: self._act(fleet, request, block_hashes, decision))

    def is_ready(self, replica_id: ReplicaId, *, adapter: Adapter | None = None) -> bool:
        """Whether it may be chosen."""
        name = self._model_of.get(replica_id)
        return name is not None and replica_id in self._ready(self._models[name], adapter)

    def preview(
        self,
        model: str,
        request: RoutingRequest,
        block_hashes: Sequence[BlockHash],
        *,
        adapter: Adapter | None = None,
    ) -> Preview:
        """Return what `route` would decide now. Nothing is reserved, and later decisions do not change.

        Raises UnknownModel or NoReplicaAvailable.
        """
        chance = self._rng.getstate()
        try:
            decision, replicas = self._decide(self._model(model), request, block_hashes, (), adapter)
        finally:
            self._rng.setstate(chance)
        return Preview(decision, tuple(replicas.ranking.of(by_head(request, replicas).bucket).whole()))

    def _decide(
        self,
        fleet: _RoutedModel,
        request: RoutingRequest,
        block_hashes: Sequence[BlockHash],
        exclude: Collection[ReplicaId],
        adapter: Adapter | None,
        load_of: Callable[[ReplicaId], ReplicaLoad] | None = None,
    ) -> tuple[Decision, Replicas]:
        self.end_lingering()
        replicas = self._ready(fleet, adapter)
        if exclude:
            replicas = replicas.without(exclude)
        if self.refusing.counts and (refusing := self.refusing.at(self._now())):
            others = replicas.without(refusing)
            replicas = others if 2 * len(others) >= len(replicas) else replicas
        if load_of is not None:
            replicas = replicas.seen_as(load_of)
        if not len(replicas):
            raise NoReplicaAvailable("no replica is ready at the moment")
        if fleet.finds_all:
            request = msgspec.structs.replace(request, sequence=self._num_routed)
        else:
            num_findable = num_searched(fleet.card, request.num_tokens)
            if fleet.card.is_sparse:  # a point behind them is none for this prompt
                block_hashes = block_hashes[:num_findable]
            request = msgspec.structs.replace(
                request,
                sequence=self._num_routed,
                num_findable_blocks=num_findable,
                peek_tokens=fleet.card.peek_tokens,
            )
        overlaps = fleet.index.overlaps(block_hashes)
        counted = overlaps
        if self.unread.counts and (unread := self.unread.at(self._now())):
            counted = overlaps.without(unread)
        policy = BY_LOAD if request.by_load else self._policy
        if replicas.roles is None:
            decision = policy(request, replicas, counted, self._parameters, self._rng)
        else:
            roles, replicas = replicas.roles, replicas.roles.decoders
            decision = policy(request, replicas, counted, self._parameters, self._rng)
            if policy is decide and request.may_split:
                decision = with_pair(request, decision, roles, counted, self._parameters, self._rng)
        holdings = overlaps.holdings(frozenset(fleet.gone))
        if holdings is not None:
            decision = msgspec.structs.replace(decision, holdings=holdings)
        return decision, replicas

    def _act(
        self,
        fleet: _RoutedModel,
        request: RoutingRequest,
        block_hashes: Sequence[BlockHash],
        decision: Decision,
    ) -> RoutedRequest:
        prefill = None
        if decision.split is not None:
            once = msgspec.structs.replace(request, num_choices=1)
            prefill = self._act(fleet, once, block_hashes, decision.of_prompt())
        index = fleet.index
        # 64 bits, and never 0, which says that there is none.
        announcement_id = 1 + (self._first_id + self._num_routed) % (2**64 - 1)
        self._num_routed += 1
        reservation = self.loads.reserve(
            decision.replica_id,
            num_uncached_tokens=request.num_tokens - decision.overlap_tokens,
            num_tokens=request.num_tokens,
            num_image_tokens=num_image_tokens_left(request.media, decision.overlap_tokens),
            num_choices=request.num_choices,
        )
        missing = index.missing(decision.replica_id, block_hashes)
        points = _points_left(fleet, request, block_hashes, decision) if fleet.card.is_sparse else ()
        index.predict(announcement_id, decision.replica_id, missing, points)

        def end_prediction(is_computed: bool) -> None:
            if is_computed and self._clock is not None:
                self._lingering.append((self._clock() + self._linger_seconds, index, announcement_id))
            else:
                index.end_prediction(announcement_id)

        announcement = Announcement(announcement_id, missing, points)
        return RoutedRequest(decision, reservation, announcement, end_prediction, prefill)

    def instruments(self) -> Iterator[Instrument]:
        def each(read: Callable[[ReplicaLoad], float]) -> Callable[[], Mapping[str, float]]:
            return lambda: {
                replica_id: read(self.load(replica_id))
                for model in self.models
                for replica_id in self.replica_ids(model)
            }

        yield counter(
            "router_replica_faults_total",
            "Requests that one replica's server refused and another's took (refused), and prompts of which a"
            " replica's share of the index promised much and nothing was read (unread)",
            lambda: {"refused": self.refusing.num_wrong, "unread": self.unread.num_wrong},
            "kind",
        )
        yield gauge(
            "router_doubted_replicas",
            "Replicas that are passed over because of such refusals (refused), or whose share of the index"
            " does not count (unread)",
            lambda: {
                "refused": len(self.refusing.at(self._now())),
                "unread": len(self.unread.at(self._now())),
            },
            "kind",
        )
        yield gauge(
            "router_reservations", "Reservations of load that are open", lambda: self.loads.num_reserved
        )
        yield gauge(
            "router_replica_requests",
            "Requests that run or wait at a replica, as this router estimates",
            each(lambda load: load.num_requests),
            "replica",
        )
        yield gauge(
            "router_replica_pending_tokens",
            "Prompt tokens that a replica has yet to compute, as this router estimates",
            each(lambda load: load.num_pending_tokens),
            "replica",
        )

    def doubt(self, replica_id: ReplicaId) -> str | None:
        """Say why a replica is passed over, or its share of the index does not count."""
        if replica_id in self.refusing.at(self._now()):
            return "it is passed over: its server refuses requests that others take"
        if replica_id in self.unread.at(self._now()):
            return "its share of the index does not count: nothing was read of prompts that it should have"
        return None

    def _now(self) -> float:
        return 0.0 if self._clock is None else self._clock()

    def end_lingering(self) -> None:
        """Drop the predictions whose time is over: before each decision, and before they are counted."""
        if self._clock is None or not self._lingering:
            return
        now = self._clock()
        while self._lingering and self._lingering[0][0] <= now:
            _, index, announcement_id = self._lingering.popleft()
            index.end_prediction(announcement_id)

    def _ready(self, fleet: _RoutedModel, adapter: Adapter | None) -> Replicas:
        ready = fleet.ready.get(adapter)
        if ready is None:
            replica_ids = (
                replica_id
                for replica_id, adapters in fleet.replicas.items()
                if replica_id not in fleet.draining
                and replica_id not in fleet.stalled
                and (adapter is None or adapter in adapters)
            )
            layouts = {
                each: card.kv_layout
                for each, card in fleet.cards.items()
                if card.kv_layout and each not in fleet.stalled and each not in fleet.gone
            }
            cards = fleet.cards.items()
            has_prefiller = any(card.role is Role.PREFILL for _, card in cards)
            parts = {each: (card.role, _split_way(card)) for each, card in cards} if has_prefiller else {}
            ready = fleet.ready[adapter] = Replicas(replica_ids, self.loads.view, layouts, parts)
        return ready

    def _model(self, name: str) -> _RoutedModel:
        model = self._models.get(name)
        if model is None:
            raise UnknownModel(f"there is no model {name}")
        return model


def _split_way(card: ModelCard) -> SplitWay:
    """Return no way where a client's body goes to one server, or a sparse model keeps no chunks."""
    if card.takes_bodies or (card.is_sparse and card.splits_by is SplitWay.PULL):
        return SplitWay.NONE
    return card.splits_by


def _points_left(
    fleet: _RoutedModel, request: RoutingRequest, block_hashes: Sequence[BlockHash], decision: Decision
) -> tuple[BlockHash, ...]:
    """Return the resume points that a sparse replica will have after the prompt, and had not before.

    The index is thinned, so full attention may reach further than is known here; the point that it leaves at
    the junction is then deeper than the one foretold. A resumed answer has no hashes behind its prompt, and
    points there are of use to no other request.
    """
    card = fleet.card
    num_reached = fleet.index.reach(
        decision.replica_id, block_hashes[: num_searched(card, request.num_tokens)]
    )
    is_junction = num_reached * card.block_size > decision.overlap_tokens + card.peek_tokens
    ends = points_left(card, request.num_tokens, num_reached if is_junction else 0)
    found = decision.overlap_tokens + card.peek_tokens if decision.overlap_tokens else 0
    known = len(block_hashes)
    return tuple([block_hashes[end - 1] for end in ends if end <= known and found < end * card.block_size])


def _ignore(model: str, replica_id: ReplicaId) -> None:
    """No listener was set."""
