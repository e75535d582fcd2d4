"""ApiContext: what every HTTP endpoint of a router shares.

Knows no dialect. `router/assembly.py` builds it and its features.
"""

import copy
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from starlette.types import Receive, Scope

from replicas.protocol.frames import TokenDelta
from replicas.protocol.status import ReplicaId
from router.caller import Caller, Right
from router.config import RouterConfig
from router.edge.connections import Connections, address_of
from router.edge.http import read_body
from router.errors import KeyFault
from router.feature import Feature, Hooks
from router.fleet.inflight import Listener
from router.generation import Generation
from router.large_bodies.grammar_checks import GrammarChecks
from router.large_bodies.jobs import Bounds, Perform
from router.large_bodies.worker import Worker
from router.limits.admission import Admission, demand_of
from router.limits.body_budget import BodyBudget, BodyHold
from router.limits.concurrency_limit import ConcurrencyLimit
from router.limits.first_replica import FirstReplica
from router.limits.tenant_turns import TenantTurns
from router.observation.metrics import RouterMetrics
from router.observation.trace_points import Trace, Tracing
from router.observation.unknown_fields import UnknownFields
from router.prompt.catalog import ModelCatalog
from router.routing.decision import Decision
from router.routing.overlap import PrefixIndex
from router.routing.table import Preview
from router.served import ServedRequest
from router.shared.instruments import Instrument
from router.turns import Turns

if TYPE_CHECKING:
    from router.api.api_request import ApiRequest


class Decided(Protocol):
    """A generation for which a replica was chosen."""

    @property
    def decision(self) -> Decision: ...
    @property
    def decision_seconds(self) -> float: ...


class Runs(Decided, Protocol):
    """One generation under way: a `GenerationRun` of `router.dispatch`, or a script of one in tests."""

    @property
    def replica_id(self) -> ReplicaId: ...
    async def __aenter__(self) -> "Runs": ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    @property
    def num_waiting(self) -> int: ...
    def __aiter__(self) -> "Runs": ...
    async def __anext__(self) -> Sequence[TokenDelta]: ...
    def listen(self, listener: Listener) -> None: ...
    def abort_choice(self, choice: int) -> None: ...


class Dispatches(Protocol):
    def run(self, generation: Generation, trace: Trace) -> Runs: ...
    def preview(self, generation: Generation) -> Preview: ...
    def instruments(self) -> Iterator[Instrument]: ...
    def retry_after_seconds(self, model: str) -> float: ...


class FindsCallers(Protocol):
    """The keys in force: a Keyring, whichever that is just now."""

    def find(self, key: str, now: float) -> Caller | KeyFault: ...


def no_index(model: str) -> PrefixIndex | None:
    return None


@dataclass(slots=True)
class ApiContext:
    """`num_replicas` says how many replicas of a model are ready; `rng` makes seeds and ids."""

    config: RouterConfig
    catalog: ModelCatalog
    dispatcher: Dispatches
    metrics: RouterMetrics
    num_replicas: Callable[[str], int]
    rng: random.Random
    prepare_beside: Perform
    """Works on a body in the process beside this one."""
    index_of: Callable[[str], PrefixIndex | None] = no_index
    """Index of a served model."""
    wall_clock: Callable[[], float] = time.time
    clock: Callable[[], float] = time.perf_counter
    keys: FindsCallers | None = None
    """The API keys in force; None where everybody is one tenant."""
    features: list[Feature] = field(default_factory=list)
    hooks: Hooks = field(default_factory=Hooks)
    tracing: Tracing = field(default_factory=Tracing)
    in_flight: ConcurrencyLimit = field(init=False)
    """Counts requests while they are served."""
    bounds: Bounds = field(default_factory=Bounds)
    """Bounds on preparing a large body."""
    worker: Worker = field(init=False)
    """Prepares bodies that would block the loop; closed with the router."""
    grammars: GrammarChecks = field(init=False)
    admission: Admission = field(init=False)
    """Weighs requests once they have been read."""
    connections: Connections = field(init=False)
    """Connections of the clients' listener."""
    bodies: BodyBudget = field(init=False)
    images: BodyBudget = field(init=False)
    """Images of requests being served."""
    first_replica: FirstReplica | None = None
    """Keeps requests until their model has a first replica; None without that."""
    unknown_fields: UnknownFields = field(init=False)
    tenant_turns: TenantTurns = field(default_factory=TenantTurns)
    turns: Turns = field(default_factory=Turns)
    """For what takes long and is done on the event loop all the same."""

    def __post_init__(self) -> None:
        self.worker = Worker(
            self.catalog,
            self.prepare_beside,
            max_choices=self.config.max_choices,
            max_prompts=self.config.max_prompts,
            pass_fields=self.config.pass_fields,
            address_share=self.config.address_share,
            bounds=self.bounds,
        )
        self.unknown_fields = UnknownFields(self.metrics.count_unknown_fields)
        self.grammars = GrammarChecks(self.worker.work_out)
        self.in_flight = ConcurrencyLimit(self.config.max_in_flight, address_share=self.config.address_share)
        self.admission = Admission(
            max_sequences=self.config.max_sequences, max_tokens=self.config.max_tokens_in_flight
        )
        self.connections = Connections.of(self.config)
        self.bodies = BodyBudget(self.config.body_memory_bytes, address_share=self.config.address_share)
        self.images = BodyBudget(self.config.image_memory_bytes, address_share=self.config.address_share)
        self.metrics.add(self._instruments())

    @property
    def may_wait(self) -> bool:
        """Whether requests may wait for the first replica of a model that is registered."""
        return self.first_replica is not None and bool(self.first_replica.registered())

    def _instruments(self) -> Iterator[Instrument]:
        yield from self.bodies.body_instruments()
        yield from self.images.image_instruments()
        parts = (
            self.in_flight,
            self.admission,
            self.connections,
            self.worker,
            self.dispatcher,
            self.catalog,
        )
        for part in parts:
            yield from part.instruments()

    def without_hooks(self, *stages: str) -> "ApiContext":
        """Return it without these stages of the features' hooks."""
        other = copy.copy(self)
        other.hooks = Hooks()
        vars(other.hooks).update(vars(self.hooks), **{stage: [] for stage in stages})
        return other

    def add(self, feature: Feature) -> None:
        self.features.append(feature)
        if feature.is_on:
            self.hooks.add(feature)
            self.worker.has_history = bool(self.hooks.encoded)
        self.metrics.add(feature.instruments())
        if feature.store is not None:
            self.add(feature.store)

    def admit(self, request: "ApiRequest") -> ExitStack:
        """Hold what a prepared request takes while it is served. Raises Overloaded, BodiesFull, or
        InvalidRequest for one that asks for too much."""
        generations = request.generations
        model = generations[0].model
        num_bytes = sum([len(media.content) for each in generations for media in each.media])
        with ExitStack() as held:
            for hook in self.hooks.admitted:
                context = hook(request)
                if context is not None:
                    held.enter_context(context)
            if num_bytes:
                held.enter_context(self.images.hold(request.address)).take(num_bytes)
            demand = demand_of(generations)
            self.admission.take(demand, lambda: self.dispatcher.retry_after_seconds(model))
            held.callback(self.admission.give_back, demand)
            return held.pop_all()

    def hold_place(self, scope: Scope) -> AbstractContextManager[None]:
        """For a request's place among those in flight. Raises RouterBusy."""
        return self.in_flight.hold(address_of(scope.get("client")))

    async def read_body(self, scope: Scope, receive: Receive, held: BodyHold) -> bytes:
        """Raises BodyTooLarge, BodiesFull, UploadTooSlow or ClientGone."""
        config = self.config
        return await read_body(
            scope,
            receive,
            held,
            max_bytes=config.max_body_bytes,
            max_seconds=config.upload_seconds,
            bytes_per_second=config.upload_bytes_per_second,
        )

    @asynccontextmanager
    async def body(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """A request's body and its place among those in flight, for routes that answer at once."""
        address = address_of(scope.get("client"))
        with self.bodies.hold(address) as held:
            body = await self.read_body(scope, receive, held)
            with self.in_flight.hold(address):
                yield body

    def priority(self, asked: int | None, caller: Caller) -> int:
        """Return the effective priority of a client's request."""
        counts = self.config.client_priority or caller.may(Right.PRIORITY)
        return asked if asked is not None and counts else 0

    def has_ended(self, request: "ApiRequest", served: ServedRequest) -> None:
        self.metrics.observe(served)
        for hook in self.hooks.ended:
            hook(request, served)

    def new_id(self, prefix: str) -> str:
        return f"{prefix}{self.rng.getrandbits(96):024x}"
