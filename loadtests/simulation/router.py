"""VirtualRouter: a real RoutingTable that hears everything a little later than it happens.

Owns one router's reading of what replicas say: delays, missed changes and the reading anew that
follows. Knows no replica and no request; every decision is the table's.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from loadtests.simulation.host import Feed, VirtualHost
from loadtests.simulation.options import FleetOptions
from loadtests.simulation.perfect import PERFECT, perfect_index
from loadtests.simulation.request import HashedRequest
from replicas.kvcache.cache_groups import state_tokens_of
from replicas.protocol.events import Tier
from replicas.protocol.status import ModelCard, ReplicaId, SplitWay
from router.caller import Tenant
from router.programs.book import ProgramBook, Turn
from router.programs.news import ProgramNews
from router.programs.pauses import Pause
from router.queue.held import Asking, Held
from router.queue.holding import Holding
from router.queue.work import Charge
from router.routing.decision import RoutingRequest
from router.routing.overlap import ChangeOutcome
from router.routing.resume_points import as_points
from router.routing.table import RoutedRequest, RoutingTable

if TYPE_CHECKING:
    import random

MODEL = "simulated"
STICKY = "sticky"
"""The policy that knows where programs began, and nothing else of them."""


class VirtualRouter:
    def __init__(
        self,
        options: FleetOptions,
        hosts: Mapping[ReplicaId, VirtualHost],
        feed: Feed,
        rng: "random.Random",
        clock: Callable[[], float],
        name: str = "router",
    ) -> None:
        self._options = options
        self._hosts = hosts
        self._feed = feed
        self._rng = rng
        self._num_changes_read = 0
        self._num_loads_read = 0
        self._card = _card(options)
        self._num_sent: dict[ReplicaId, int] = {}
        self._came: dict[ReplicaId, list[int]] = {}
        """By replica, for each of this router's requests: how many had come to it then, from anyone."""
        self.num_rereads = 0
        if options.policy == PERFECT:
            self.table = RoutingTable(
                "kvasir", options.parameters, rng, clock=clock, new_index=perfect_index(hosts)
            )
        else:
            self.table = RoutingTable(options.policy, options.parameters, rng, clock=clock)
        self.holding: Holding | None = None
        self.news: ProgramNews | None = None
        """Set if there are other routers to tell of programs."""
        if options.queue is not None:
            is_own = options.policy in ("kvasir", PERFECT) and options.has_programs
            book = ProgramBook() if is_own or options.policy == STICKY else None
            if book is not None and options.num_routers > 1:
                self.news = ProgramNews(book, name)
            self.holding = holding = Holding(self.table, options.queue, programs=book, has_gate=is_own)
            self.table.on_change = lambda model, replica_id: holding.changed(model, replica_id, clock())
            self.table.on_absence = holding.absent
        for host in hosts.values():
            if host.replica is not None:
                self.add(host)

    def add(self, host: VirtualHost) -> None:
        """The replica is there, and this incarnation of it has nothing yet."""
        card = _card_of(self._options, host.number, self._card)
        self.table.add_replica(host.replica_id, card, self._options.index_stride)
        self.table.index(MODEL).replace(host.replica_id, host.epoch, ())

    def remove(self, host: VirtualHost) -> None:
        self.table.remove_replica(host.replica_id)
        self._num_sent.pop(host.replica_id, None)
        self._came.pop(host.replica_id, None)

    def sent(self, routed: RoutedRequest) -> None:
        """The request is on its way to where it was routed, both parts of a split together."""
        if routed.prefill is not None:
            self.sent(routed.prefill)
        already = self._num_sent.get(routed.decision.replica_id, 0)
        self._num_sent[routed.decision.replica_id] = already + 1
        routed.sent(already + 1)

    def came(self, host: VirtualHost) -> None:
        """The oldest one on its way has come there. What was sent first comes first."""
        self._came.setdefault(host.replica_id, []).append(host.num_received)

    def route(
        self, request: HashedRequest, num_output_tokens: int, exclude: Collection[ReplicaId]
    ) -> RoutedRequest:
        """By what is known since the last `catch_up`. Raises NoReplicaAvailable."""
        num_tokens = request.trace.num_input_tokens + num_output_tokens
        routing_request = RoutingRequest(
            request.bucket, num_tokens, self._card.block_size, media=request.media
        )
        return self.table.route(MODEL, routing_request, request.block_hashes, exclude=exclude)

    def ask(
        self,
        request: HashedRequest,
        exclude: Collection[ReplicaId],
        now: float,
        call: Callable[[], None],
        turn: Turn | None = None,
    ) -> RoutedRequest | Held:
        """Route like `route`, but a request may be held until there is room. Raises TooLate and Overloaded
        too."""
        assert self.holding is not None
        return self.holding.ask(self._asking(request, turn), now, call, exclude=exclude)

    def begin_turn(self, request: HashedRequest, now: float) -> Turn | None:
        """Return a turn that is to be ended, if it is one and this router knows programs."""
        if request.program is None or self.holding is None:
            return None
        return self.holding.begin_turn(
            MODEL,
            Tenant(name=request.trace.tenant or ""),
            request.program,
            request.trace.num_input_tokens,
            request.block_hashes,
            now,
        )

    def end_turn(self, turn: Turn, request: HashedRequest, now: float) -> None:
        """A session's last answer looks like any that asks its user."""
        assert self.holding is not None and self.holding.programs is not None
        self.holding.end_turn(turn, now)
        pause = Pause.TOOL if request.ends_user_turn is False else Pause.USER
        self.holding.programs.paused(turn.program, pause)

    def charge(self, request: HashedRequest, routed: RoutedRequest, held: Held | None) -> Charge:
        """Return the charge of the request's tenant at release."""
        assert self.holding is not None
        return self.holding.charge(self._asking(request), routed, held)

    @property
    def num_held(self) -> int:
        return 0 if self.holding is None else self.holding.num_waiting

    def room_made(self, replica_id: ReplicaId, now: float) -> None:
        """Something of this router's has ended there."""
        if self.holding is not None:
            self.holding.changed(MODEL, replica_id, now)

    def _asking(self, request: HashedRequest, turn: Turn | None = None) -> Asking:
        trace, deadline = request.trace, self._options.deadline_seconds
        return Asking(
            MODEL,
            trace.tenant or "",
            RoutingRequest(
                request.bucket, trace.num_input_tokens, self._card.block_size, media=request.media
            ),
            request.block_hashes,
            deadline=None if deadline is None else trace.arrival_seconds + deadline,
            has_others=trace.tenant is not None,
            turn=turn,
        )

    def catch_up(self, now: float) -> None:
        """Take in all that can be known by now."""
        delays, feed = self._options.delays, self._feed
        end = bisect_right(feed.change_times, now - delays.event, lo=self._num_changes_read)
        if end > self._num_changes_read:
            self._read_changes(self._num_changes_read, end, is_redis_up=not self._is_redis_down(now))
            self._num_changes_read = end
        horizon = now - delays.load
        if delays.snapshot_interval:
            horizon = horizon // delays.snapshot_interval * delays.snapshot_interval
        end = bisect_right(feed.load_times, horizon, lo=self._num_loads_read)
        if end > self._num_loads_read:
            self._read_loads(self._num_loads_read, end)
            self._num_loads_read = end

    def _read_changes(self, start: int, end: int, *, is_redis_up: bool) -> None:
        index, drop_share = self.table.index(MODEL), self._options.drop_share
        for number in range(start, end):
            change = self._feed.changes[number]
            if drop_share and self._rng.random() < drop_share:
                continue
            if index.apply(change) is ChangeOutcome.GAP and is_redis_up:
                host = self._hosts[change.replica_id]
                staged = index.stage()
                for tier in Tier:
                    staged.add((each for each, it in host.fastest.items() if it is tier), tier)
                staged.add_points(as_points(host.points))
                index.replace(host.replica_id, host.epoch, staged, last_change=host.last_change)
                self.num_rereads += 1

    def _read_loads(self, start: int, end: int) -> None:
        """Only each replica's last one: it counts whatever those before it counted."""
        index = self.table.index(MODEL)
        last = {said.replica_id: said for said in self._feed.loads[start:end]}
        for replica_id, said in last.items():
            if index.epoch(replica_id) == said.epoch:
                num_counted = bisect_right(self._came.get(replica_id, ()), said.report.num_counted)
                self.table.update_load(replica_id, said.report.load, num_counted)

    def _is_redis_down(self, now: float) -> bool:
        return any(outage.covers(now) for outage in self._options.outages)


def _card_of(options: FleetOptions, number: int, card: ModelCard) -> ModelCard:
    """Return the card of the replica with this number."""
    if not options.pools:
        return card
    shape, tiers = options.shape_of(number), options.shape.tiers
    return replace(
        card,
        max_batched_tokens=shape.max_batched_tokens,
        role=options.pool_of(number).role,
        splits_by=SplitWay.PULL if tiers is not None and tiers.pull_bytes_per_second else SplitWay.NONE,
    )


def _card(options: FleetOptions) -> ModelCard:
    shape = options.shape
    return ModelCard(
        name=MODEL,
        fingerprint="",
        engine="simulated",
        block_size=shape.block_size,
        num_blocks=shape.num_blocks,
        context_length=shape.capacity_tokens,
        vocab_size=0,
        max_batched_tokens=shape.max_batched_tokens,
        max_running=shape.max_running,
        kv_layout="" if shape.groups else MODEL,
        is_sparse=bool(shape.groups) and not options.routes_by_reach,
        retention_interval=shape.retention,
        state_tokens=state_tokens_of(shape.groups),
    )
