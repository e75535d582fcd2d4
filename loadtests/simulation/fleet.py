"""VirtualFleet: a workload served from its first arrival to its last token, in virtual time.

Owns the clock, the agenda and every request's way: routed, served, lost, retried or resumed, ended.
Does not know what is printed. Each request ends exactly once, as a record.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from loadtests.reports.report import Images, RequestRecord
from loadtests.simulation.host import Feed, HostReport, VirtualHost
from loadtests.simulation.leaving import VirtualHandOver
from loadtests.simulation.options import DRAIN_SECONDS, FleetOptions, Kill
from loadtests.simulation.replica import LoadReport, Meter, VirtualReplica
from loadtests.simulation.request import HashedRequest, VirtualRequest, block_id
from loadtests.simulation.router import VirtualRouter
from loadtests.simulation.scaling import LOOK_SECONDS, Autoscaler
from loadtests.simulation.shape import ReplicaShape
from loadtests.simulation.sparse_replica import SparseReplica
from loadtests.simulation.splits import Following
from loadtests.simulation.store import OnDisk, VirtualStore
from loadtests.workloads import Loss
from replicas.protocol.frames import RefusalCode
from replicas.protocol.status import ReplicaId
from router.dispatch.retries import Patience, RetryPolicy, Tries
from router.dispatch.suspects import SURVIVED_TOKENS
from router.errors import NoReplicaAvailable, Overloaded, RouterError, TooLate
from router.programs.book import Turn
from router.queue.held import Held
from router.queue.work import Charge
from router.routing.table import RoutedRequest

if TYPE_CHECKING:
    import random

RETRY = RetryPolicy()
"""The router's own."""

NEWS_SECONDS = 0.2
"""Interval of `router/features/programs/exchange.py`."""

PROGRAM_LOOK_SECONDS = 1.0
"""Interval at which a held turn looks whether it may go."""

NUM_LOOKS = 8
"""Number of counts of the copies in the fleet's caches, evenly over the arrivals after the warm-up."""


@dataclass(slots=True, eq=False)
class _FleetRun:
    """A request on its way. `virtual` is its present attempt, if it has one."""

    prepared: HashedRequest
    router: VirtualRouter
    virtual: VirtualRequest | None = None
    routed: RoutedRequest | None = None
    host: VirtualHost | None = None
    following: Following | None = None
    """While the first part of its split is computed."""
    followed: Following | None = None
    """The same, if that has computed its prompt."""
    held: Held | None = None
    """While it waits in its router."""
    charge: Charge | None = None
    num_output_tokens: int = 0
    patience: Patience = field(default_factory=lambda: Patience(RETRY))
    tries: Tries = field(default_factory=Tries)
    has_been_placed: bool = False
    replica_id: ReplicaId | None = None
    turn: Turn | None = None
    """Set if it is one of a program."""
    predicted_tokens: int | None = None
    ttft_seconds: float | None = None
    num_cached_tokens: int | None = None
    num_device_tokens: int = 0
    num_cross_user_tokens: int = 0


@dataclass(slots=True)
class FleetResult:
    """`records` are in order of arrival, warm-up included; times of decisions are real ones."""

    records: list[RequestRecord]
    reasons: Counter[str]
    decision_seconds: float
    num_decisions: int
    num_retries: int
    num_resumes: int
    num_preemptions: int
    num_rereads: int
    duplication: float | None
    """Mean over a few looks: indexed blocks in all caches / distinct ones."""
    losses: list[Loss]
    """Remaining KV after each death of a replica."""
    images: Images | None = None
    """Warm-up included. None if no prompt had any."""
    mean_replicas: float | None = None
    """None where their number is fixed."""


def new_replica(shape: ReplicaShape, meter: Meter, restored: Sequence[OnDisk] = ()) -> VirtualReplica:
    return SparseReplica(shape, meter) if shape.groups else VirtualReplica(shape, meter, restored)


class VirtualFleet:
    """`stopwatch` is a real clock, for what decisions cost; `new_meter` makes a replica's speed meter."""

    def __init__(
        self,
        options: FleetOptions,
        *,
        rng: "random.Random",
        new_rng: Callable[[], "random.Random"],
        new_meter: Callable[[], Meter],
        stopwatch: Callable[[], float],
    ) -> None:
        self._options = options
        self._rng = rng
        self._new_meter = new_meter
        self._stopwatch = stopwatch
        self.on_end: Callable[[HashedRequest, RequestRecord, int], None] | None = None
        """Called when a request has ended, with the cached tokens that it has found on a device."""
        self._now = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0
        self._feed = Feed()
        self.hosts = [VirtualHost(number, options.index_stride) for number in range(options.num_replicas)]
        scale = options.autoscale
        self._autoscaler = None if scale is None else Autoscaler(scale)
        self._sizes: list[int] = []
        """Replicas at each look of the autoscaler."""
        for host in self.hosts if scale is None else self.hosts[: scale.min_replicas]:
            host.start(new_replica(options.shape_of(host.number), new_meter()))
        by_id = {host.replica_id: host for host in self.hosts}
        self.routers = [
            VirtualRouter(options, by_id, self._feed, new_rng(), lambda: self._now, f"router-{number}")
            for number in range(options.num_routers)
        ]
        self._runs: dict[int, _FleetRun] = {}
        self._line: list[_FleetRun] = []
        """Requests that wait for a replica to come back, in the order of their coming."""
        self._records: dict[int, RequestRecord] = {}
        self._duplications: list[float] = []
        self._losses: list[Loss] = []
        self._followings: list[Following] = []
        """Splits whose KV is still to come."""
        self._leaving: dict[ReplicaId, VirtualHandOver] = {}
        self._reasons: Counter[str] = Counter()
        self._decision_seconds = 0.0
        self._num_decisions = self._num_retries = self._num_resumes = self._num_preemptions = 0
        self._num_images_taken = self._num_encoded_tokens = 0

    @property
    def now(self) -> float:
        return self._now

    @property
    def num_ended(self) -> int:
        """Requests that were answered or refused."""
        return len(self._records)

    def serve(self, requests: Sequence[HashedRequest], *, num_warm_up: int = 0) -> FleetResult:
        """Serve all of them to the end, and what is submitted meanwhile. Once per fleet."""
        for host in self.hosts:
            if host.replica is not None:
                self._introduce(host)
        if self._autoscaler is not None:
            self.at(LOOK_SECONDS, lambda: self._scale(requests[-1].trace.arrival_seconds))
        for kill in self._options.kills:
            self.at(kill.at, lambda kill=kill: self._drain(kill))  # type: ignore[misc]
        for outage in self._options.outages:
            self.at(outage.end, self._write_all)
        stride = max(1, (len(requests) - num_warm_up) // NUM_LOOKS)
        looks = {num_warm_up + stride * (look + 1) - 1 for look in range(NUM_LOOKS)}
        for request in requests:
            self._work_until(request.trace.arrival_seconds)
            self._now = request.trace.arrival_seconds
            if request.number in looks:
                self._look_for_copies()
            self.submit(request)
        if any(router.news is not None for router in self.routers):
            self.at(self._now + NEWS_SECONDS, self._exchange)
        self._work_until(None)
        assert not self._runs, "requests are left, and nothing is going to happen"
        for router in self.routers:
            router.catch_up(float("inf"))
        records = [self._records[number] for number in sorted(self._records)]
        return FleetResult(
            records=records,
            reasons=self._reasons,
            decision_seconds=self._decision_seconds,
            num_decisions=self._num_decisions,
            num_retries=self._num_retries,
            num_resumes=self._num_resumes,
            num_preemptions=self._num_preemptions
            + sum(host.replica.num_preemptions for host in self.hosts if host.replica is not None),
            num_rereads=sum(router.num_rereads for router in self.routers),
            duplication=sum(self._duplications) / len(self._duplications) if self._duplications else None,
            losses=self._losses,
            images=self._images(records),
            mean_replicas=sum(self._sizes) / len(self._sizes) if self._sizes else None,
        )

    def _exchange(self) -> None:
        """Routers tell each other of programs, as long as something is going to happen."""
        delay = self._options.delays.event
        for router in self.routers:
            assert router.news is not None
            router.news.forget_quiet(self._now)
            news = router.news.tell(self._now)
            if news is not None:
                for other in self.routers:
                    assert other.news is not None
                    self._after(delay, partial(other.news.hear, news, self._now))
        if self._agenda:
            self.at(self._now + NEWS_SECONDS, self._exchange)

    def submit(self, request: HashedRequest) -> None:
        """It arrives now."""
        run = _FleetRun(request, self._rng.choice(self.routers))
        self._runs[request.number] = run
        self._place(run)

    def _images(self, records: Sequence[RequestRecord]) -> Images | None:
        """Count the images of every computed prompt, and those that replicas received and encoded, in all
        their lives."""
        computed = [record for record in records if record.num_cached_tokens is not None]
        num_in_prompts = sum(record.num_images for record in computed)
        if not num_in_prompts:
            return None
        for host in self.hosts:
            if host.replica is not None:
                self._count_images(host.replica)
        num_tokens = sum(record.num_image_tokens for record in computed)
        return Images(num_in_prompts, self._num_images_taken, 0, num_tokens, self._num_encoded_tokens)

    def _count_images(self, replica: VirtualReplica) -> None:
        """Count the images of a replica that ended."""
        self._num_images_taken += len(replica.images)
        self._num_encoded_tokens += replica.num_encoded_tokens

    # Time.

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._num_planned += 1
        heappush(self._agenda, (when, self._num_planned, action))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        if seconds:
            self.at(self._now + seconds, action)
        else:
            action()

    def _work_until(self, end: float | None) -> None:
        """Do what is planned before `end`, or everything."""
        agenda = self._agenda
        while agenda and (end is None or agenda[0][0] < end):
            self._now, _, action = heappop(agenda)
            action()

    # A request's way.

    def _place(self, run: _FleetRun) -> None:
        router = run.router
        router.catch_up(self._now)
        if self._now < run.patience.not_before:
            self.at(run.patience.not_before, lambda: self._place(run))
            return
        if not run.tries.are_left(RETRY):
            self._end(run, "attempts")
            return
        started = self._stopwatch()
        try:
            routed = self._route(run)
        except NoReplicaAvailable:
            self._wait(run)
            return
        except (TooLate, Overloaded) as error:
            self._end(run, error.kind.value)
            return
        self._decision_seconds += self._stopwatch() - started
        self._num_decisions += 1
        if routed is not None:
            self._send(run, routed)

    def _route(self, run: _FleetRun) -> RoutedRequest | None:
        """None if it waits in its router. What was routed once goes on without waiting."""
        router, prepared = run.router, run.prepared
        if router.holding is None or run.has_been_placed:
            routed = router.route(prepared, run.num_output_tokens, run.patience.excluded)
            if run.turn is not None and router.holding is not None:
                router.holding.turn_moves(run.turn, routed, self._now)
            return routed
        if run.turn is None:
            run.turn = router.begin_turn(prepared, self._now)
        asked = router.ask(prepared, run.patience.excluded, self._now, lambda: self._called(run), run.turn)
        if isinstance(asked, Held):
            run.held = asked
            self._plan_look(run)
            return None
        return asked

    def _plan_look(self, run: _FleetRun) -> None:
        """Look when its time in the router is over; a turn looks more often."""
        assert run.held is not None and run.held.latest_start is not None
        when = run.held.latest_start
        if run.turn is not None:
            when = min(when, self._now + PROGRAM_LOOK_SECONDS)
        self.at(when, lambda: self._look_at(run))

    def _look_at(self, run: _FleetRun) -> None:
        """It looks whether its time is over, if it still waits there."""
        if run.held is not None:
            assert run.router.holding is not None
            run.router.catch_up(self._now)
            if run.held is not None:
                run.router.holding.look_at(run.held, self._now + 1e-9)
            if run.held is not None:
                self._plan_look(run)

    def _called(self, run: _FleetRun) -> None:
        """It has waited in its router, and goes now, or is refused."""
        held, run.held = run.held, None
        assert held is not None
        if held.routed is None:
            assert isinstance(held.error, RouterError)
            self._end(run, held.error.kind.value)
            return
        self._send(run, held.routed, held)

    def _send(self, run: _FleetRun, routed: RoutedRequest, held: Held | None = None) -> None:
        router = run.router
        if router.holding is not None and run.charge is None:
            run.charge = router.charge(run.prepared, routed, held)
        self._reasons[routed.decision.reason] += 1
        run.patience.placed()
        if run.has_been_placed:
            self._num_retries += run.ttft_seconds is None
            self._num_resumes += run.ttft_seconds is not None
        run.has_been_placed = True
        run.tries.begin()
        run.routed = routed
        run.host = self._host(routed.decision.replica_id)
        virtual = run.virtual = self._attempt(run)
        router.sent(routed)
        self._after(self._options.delays.network, lambda: self._arrive(run, virtual))

    def _attempt(self, run: _FleetRun) -> VirtualRequest:
        trace = run.prepared.trace
        return VirtualRequest(
            run.prepared.number,
            num_prompt_tokens=trace.num_input_tokens,
            max_tokens=trace.num_output_tokens,
            prompt_hashes=run.prepared.block_hashes,
            user=run.prepared.user,
            tenant=(trace.tenant or "").encode(),
            num_output_tokens=run.num_output_tokens,
            media=run.prepared.media,
        )

    def _wait(self, run: _FleetRun) -> None:
        """In line while a replica is on its way back, else for a moment and another."""
        if any(host.is_coming for host in self.hosts):
            seconds = run.patience.wait_in_line(self._now, RETRY.wait_seconds)
            if seconds > 0:
                self._line.append(run)
                self.at(self._now + seconds, lambda: self._leave_line(run))
                return
        elif run.patience.wait_for_all(self._now, self._rng.random()):
            self.at(run.patience.not_before, lambda: self._place(run))
            return
        self._end(run, "no replica")

    def _leave_line(self, run: _FleetRun) -> None:
        """Its time in line is over, if no replica came back before."""
        if run in self._line:
            self._line.remove(run)
            self._place(run)

    def _arrive(self, run: _FleetRun, virtual: VirtualRequest) -> None:
        if run.virtual is not virtual:
            return  # its replica died while it was on the way
        host, routed = run.host, run.routed
        assert host is not None and host.replica is not None and routed is not None
        fits = host.replica.accepts(virtual)
        host.num_received += fits
        run.router.came(host)
        if not fits:
            self._end(run, "too long")
            return
        announced = routed.announcement
        if self._options.announces and (announced.block_hashes or announced.points):
            virtual.announcement_id = announced.announcement_id
            host.announce(announced)
            self._publish(host)
        following = None if routed.prefill is None else self._begin_split(run, routed, host)
        peer = None if following is not None else self._peer(routed)
        host.replica.submit(virtual, self._now, peer=peer, following=following)
        if self._options.shape.counts_arrivals:
            self._report(host, host.replica.report(self._now))
        self._plan_step(host, host.replica)
        self._plan_moves(host, host.replica)

    def _begin_split(self, run: _FleetRun, routed: RoutedRequest, host: VirtualHost) -> Following | None:
        """Begin its first part; None if that one's replica has died, so that the decoder computes it all."""
        prefill, here = routed.prefill, host.replica
        assert prefill is not None and here is not None and here.store is not None
        there = self._host(prefill.decision.replica_id)
        run.router.came(there)
        if there.replica is None or there.replica.store is None:
            prefill.close()
            return None
        there.num_received += 1
        first = self._attempt(run)
        first.max_tokens = first.num_output_tokens + 1
        if self._options.announces and (prefill.announcement.block_hashes or prefill.announcement.points):
            first.announcement_id = prefill.announcement.announcement_id
            there.announce(prefill.announcement)
            self._publish(there)

        def moved() -> None:
            if host.replica is here:
                here.look(self._now)
                self._plan_step(host, here)
                self._plan_moves(host, here)

        following = Following(first, prefill, routed, there.replica.store, here.store, moved)
        run.following = following
        self._followings.append(following)
        there.replica.submit(first, self._now, peer=self._peer(prefill))
        if self._options.shape.counts_arrivals:
            self._report(there, there.replica.report(self._now))
        self._plan_step(there, there.replica)
        self._plan_moves(there, there.replica)
        self.at(self._now + following.wait_seconds + 1e-9, moved)
        return following

    def _go_on_with_splits(self, store: VirtualStore | None) -> None:
        """Chunks may have come there."""
        if self._followings:
            for following in [each for each in self._followings if each.source is store]:
                following.go_on(self._now)
            self._followings = [each for each in self._followings if not each.is_over]

    def _peer(self, routed: RoutedRequest) -> VirtualStore | None:
        """Whom the replica should pull from, if it still lives."""
        if routed.decision.pull_from is None:
            return None
        replica = self._host(routed.decision.pull_from).replica
        return None if replica is None else replica.store

    def _plan_moves(self, host: VirtualHost, replica: VirtualReplica) -> None:
        ends_at = replica.moves_end_at
        if ends_at is not None and (host.planned_moves_end is None or ends_at < host.planned_moves_end):
            host.planned_moves_end = ends_at
            self.at(ends_at, lambda: self._end_moves(host, replica, ends_at))

    def _end_moves(self, host: VirtualHost, replica: VirtualReplica, ends_at: float) -> None:
        if host.replica is not replica or host.planned_moves_end != ends_at:
            return  # it died, or a move that ends sooner was planned since
        host.planned_moves_end = None
        host.observe(replica.end_moves(self._now))
        self._publish(host)
        self._plan_step(host, replica)
        self._plan_moves(host, replica)
        for leaving in [*self._leaving.values()]:
            leaving.go_on(self._now)
        self._go_on_with_splits(replica.store)

    def _plan_step(self, host: VirtualHost, replica: VirtualReplica) -> None:
        ends_at = replica.ends_at
        if ends_at is not None and ends_at != host.planned_end:
            host.planned_end = ends_at
            self.at(ends_at, lambda: self._step(host, replica, ends_at))

    def _step(self, host: VirtualHost, replica: VirtualReplica, ends_at: float) -> None:
        if host.replica is not replica or replica.ends_at != ends_at:
            return  # it died, or a request came and cut the run of steps short
        host.planned_end = None
        outcome = replica.advance(self._now)
        host.observe(outcome.events)
        for virtual in outcome.first_tokens:
            if virtual.announcement_id is not None:
                host.end_announcement(virtual.announcement_id)
        self._publish(host)
        self._report(host, outcome.report)
        network = self._options.delays.network
        for virtual in outcome.first_tokens:
            self._after(network, lambda virtual=virtual: self._see_first_token(virtual))  # type: ignore[misc]
        for virtual in outcome.finished:
            self._after(network, lambda virtual=virtual: self._see_end(virtual))  # type: ignore[misc]
        self._plan_step(host, replica)
        self._plan_moves(host, replica)
        for following in [each for each in self._followings if each.first_part in outcome.finished]:
            following.computed(self._now)

    def _see_first_token(self, virtual: VirtualRequest) -> None:
        run = self._runs.get(virtual.number)
        if run is not None and run.following is not None and run.following.first_part is virtual:
            self._end_first_part(run, run.following)
            return
        if run is None or run.virtual is not virtual:
            return
        assert run.routed is not None and run.host is not None
        run.routed.first_token()
        if run.ttft_seconds is None:
            run.ttft_seconds = self._now - run.prepared.trace.arrival_seconds
            if run.charge is not None:
                run.charge.begins(virtual.num_cached_tokens)
            computed, decision = virtual, run.routed.decision
            if run.followed is not None:
                computed, decision = run.followed.first_part, run.followed.prefill.decision
            run.num_cached_tokens = computed.num_cached_tokens
            run.num_device_tokens = computed.num_device_tokens
            run.num_cross_user_tokens = computed.num_cross_user_tokens
            run.predicted_tokens = decision.overlap_tokens
            run.replica_id = run.host.replica_id

    def _end_first_part(self, run: _FleetRun, following: Following) -> None:
        """Give back the part of a split that has computed the prompt."""
        run.following, run.followed = None, following
        following.prefill.first_token()
        following.prefill.close()
        run.router.room_made(following.prefill.decision.replica_id, self._now)

    def _see_end(self, virtual: VirtualRequest) -> None:
        run = self._runs.get(virtual.number)
        if run is not None and run.virtual is virtual:
            if run.charge is not None:
                run.charge.produces(virtual.num_output_tokens - run.num_output_tokens)
            run.num_output_tokens = virtual.num_output_tokens
            self._end(run, None)

    def _end(self, run: _FleetRun, error: str | None) -> None:
        trace = run.prepared.trace
        if run.charge is not None:
            run.charge.close(self._now)
        self._give_back(run)
        if run.turn is not None:
            run.router.end_turn(run.turn, run.prepared, self._now)
        del self._runs[run.prepared.number]
        self._records[run.prepared.number] = record = RequestRecord(
            arrival_seconds=trace.arrival_seconds,
            num_input_tokens=trace.num_input_tokens,
            num_output_tokens=run.num_output_tokens,
            ttft_seconds=run.ttft_seconds,
            e2e_seconds=self._now - trace.arrival_seconds,
            num_cached_tokens=run.num_cached_tokens,
            num_cross_user_tokens=run.num_cross_user_tokens,
            predicted_tokens=run.predicted_tokens,
            replica=run.replica_id,
            tenant=trace.tenant,
            error=error,
            num_images=len(trace.images),
            num_image_tokens=trace.num_image_tokens,
        )
        if self.on_end is not None:
            self.on_end(run.prepared, record, run.num_device_tokens)

    def _give_back(self, run: _FleetRun) -> None:
        host, router = run.host, run.router
        if run.routed is not None:
            run.routed.close()
        if run.following is not None:
            run.following.end()
        run.routed = run.virtual = run.host = run.following = run.followed = None
        if host is not None and router.holding is not None:
            router.room_made(host.replica_id, self._now)

    # The fleet's own life.

    def _publish(self, host: VirtualHost) -> None:
        if any(outage.covers(self._now) for outage in self._options.outages):
            return
        change = host.take_change()
        if change is not None:
            self._feed.add_change(self._now, change)

    def _report(self, host: VirtualHost, report: LoadReport) -> None:
        self._feed.add_load(self._now, HostReport(host.replica_id, host.epoch, report))
        for router in self.routers:
            if router.num_held:
                self._after(self._options.delays.load, lambda router=router: router.catch_up(self._now))  # type: ignore[misc]

    def _write_all(self) -> None:
        for host in self.hosts:
            if host.replica is not None:
                self._feed.add_change(self._now, host.whole_set())

    def _drain(self, kill: Kill) -> None:
        """It is told to leave, if it is; what it has not finished then goes on elsewhere."""
        host = self.hosts[kill.replica]
        if kill.drain_seconds and host.replica is not None:
            for router in self.routers:
                router.table.set_draining(host.replica_id)
            host.is_draining = True
            if host.replica.store is not None:
                leaving = VirtualHandOver(host, self.hosts, self._pulls_now)
                self._leaving[host.replica_id] = leaving
                leaving.go_on(self._now)
        self._after(kill.drain_seconds, lambda: self._kill(kill))

    def _pulls_now(self, replica_id: ReplicaId) -> None:
        host = self._host(replica_id)
        assert host.replica is not None
        self._plan_moves(host, host.replica)

    def _kill(self, kill: Kill) -> None:
        host = self.hosts[kill.replica]
        if host.replica is None:
            return
        self._leaving.pop(host.replica_id, None)
        host.replica.crash(self._now)
        self._num_preemptions += host.replica.num_preemptions
        self._count_images(host.replica)
        if kill.keeps_disk and host.replica.store is not None:
            host.left_on_disk = host.replica.store.on_disk()
        host.die()
        for router in self.routers:
            router.remove(host)
        self._note_loss(host)
        for run in self._runs.values():
            if run.following is not None and run.following.prefill.decision.replica_id == host.replica_id:
                run.following.prefill.close()
                run.following.end()
                run.following = None
        for run in [run for run in self._runs.values() if run.host is host]:
            virtual = run.virtual
            assert virtual is not None
            num_tokens = virtual.num_output_tokens - run.num_output_tokens
            if run.ttft_seconds is not None:
                run.num_output_tokens = max(run.num_output_tokens, virtual.num_output_tokens)
            self._give_back(run)
            run.tries.failed(is_death=True, has_survived=num_tokens >= SURVIVED_TOKENS)
            run.patience.failed(host.replica_id, RefusalCode.INTERNAL, self._now, self._rng.random())
            self._after(self._options.delays.network, lambda run=run: self._place(run))  # type: ignore[misc]
        if kill.back_after is not None:
            back_at = self._now + kill.back_after
            host.is_coming = True
            ends = [outage.end for outage in self._options.outages if outage.covers(back_at)]
            self.at(max([back_at, *ends]), lambda: self._bring_back(host))

    def _scale(self, last_arrival: float) -> None:
        """Compare the fleet's size with the load, until nothing arrives any more."""
        scale = self._options.autoscale
        assert scale is not None and self._autoscaler is not None
        if self._now > last_arrival:
            return
        serving = [host for host in self.hosts if host.replica is not None and not host.is_draining]
        absent = [host for host in self.hosts if host.replica is None and not host.is_coming]
        num_replicas = len(serving) + sum(host.is_coming for host in self.hosts)
        self._sizes.append(sum(host.replica is not None for host in self.hosts))
        wanted = self._autoscaler.wanted(self._now, self._num_waiting_tokens(serving), num_replicas)
        for host in absent[: max(0, wanted - num_replicas)]:
            host.is_coming = True
            self.at(self._now + scale.start_seconds, lambda host=host: self._bring_back(host))  # type: ignore[misc]
        if wanted < num_replicas and len(serving) > 1:
            number = self.hosts.index(serving[-1])
            self._drain(Kill(number, self._now, keeps_disk=False, drain_seconds=DRAIN_SECONDS))
        self.at(self._now + LOOK_SECONDS, lambda: self._scale(last_arrival))

    def _num_waiting_tokens(self, serving: Sequence[VirtualHost]) -> int:
        """Count prompt tokens that are still to be computed, those of requests in routers included."""
        unplaced = [run for run in self._runs.values() if run.held is not None]
        num_tokens = sum(run.prepared.trace.num_input_tokens for run in [*unplaced, *self._line])
        for host in serving:
            assert host.replica is not None
            num_tokens += host.replica.report(self._now).load.num_pending_tokens
        return num_tokens

    def _note_loss(self, lost: VirtualHost) -> None:
        """Note what remains: at the others, by their index; on its disk; and what continuing requests will
        compute."""
        left = {block_hash for host in self.hosts for block_hash in host.kept}
        left.update(name.key for name, _ in lost.left_on_disk)
        left.update(block_hash for run in self._runs.values() for block_hash in run.prepared.block_hashes)
        self._losses.append(Loss(self._now, frozenset(map(block_id, left))))

    def _bring_back(self, host: VirtualHost) -> None:
        replica = new_replica(self._options.shape_of(host.number), self._new_meter(), host.left_on_disk)
        host.left_on_disk = []
        host.start(replica)
        host.is_coming = False
        for router in self.routers:
            router.add(host)
        self._introduce(host)
        line, self._line = self._line, []
        for run in line:
            self._place(run)

    def _introduce(self, host: VirtualHost) -> None:
        """Report a tiered replica's found chunks and speeds, before its first request."""
        assert host.replica is not None
        if host.replica.store is not None:
            host.observe(host.replica.store.take_events())
            self._publish(host)
            self._report(host, host.replica.report(self._now))

    def _look_for_copies(self) -> None:
        kept = [host.kept for host in self.hosts]
        num_distinct = len(frozenset().union(*kept))
        if num_distinct:
            self._duplications.append(sum(map(len, kept)) / num_distinct)

    def _host(self, replica_id: ReplicaId) -> VirtualHost:
        return self.hosts[int(replica_id.rpartition("-")[2])]
