"""A picker over a real table and dispatcher, with replicas that only have cards."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import pytest
from prometheus_client import CollectorRegistry

from replicas.process.settings import build
from replicas.protocol.status import ModelCard, ReplicaId
from router.api.context import ApiContext, FindsCallers
from router.api.gemini.paths import GENERATE_CONTENT
from router.api.prepare_in_worker import prepare_in_worker
from router.app import PREPARES, create_gateway_app
from router.config import RouterConfig
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.retries import RetryPolicy
from router.features.explanations.feature import Explanations
from router.features.history.feature import ChatHistory
from router.features.programs.feature import Programs
from router.observation.metrics import RouterMetrics
from router.picker.endpoint import picked_endpoints
from router.picker.server import Picker
from router.programs.book import ProgramBook
from router.prompt.catalog import ModelCatalog
from router.routing.cost import CostParameters
from router.routing.table import RoutingTable
from router.served import ServedRequest
from tests.router import tiny_model
from tests.router.picker.gateway import Gateway

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


class Ended(Explanations):
    """Explanations, and what has ended."""

    def __init__(self, context: ApiContext) -> None:
        super().__init__(context)
        self.served: list[ServedRequest] = []

    def ended(self, request: object, served: ServedRequest) -> None:
        super().ended(request, served)  # type: ignore[arg-type]
        self.served.append(served)


@dataclass
class Picking:
    context: ApiContext
    table: RoutingTable
    dispatcher: Dispatcher
    gateway: Gateway
    picker: Picker
    ended: Ended

    def join(self, name: str, endpoint: str, **values: object) -> None:
        card: ModelCard = replace(
            self.context.catalog.get(tiny_model.MODEL).card, engine="remote", endpoint=endpoint, **values
        )
        self.table.add_replica(ReplicaId(name), card, card.block_size)

    @property
    def is_idle(self) -> bool:
        return (
            self.table.loads.num_reserved == 0
            and self.context.in_flight.num == 0
            and self.context.bodies.num_bytes == 0
            and self.dispatcher.num_running == 0
            and self.dispatcher.holding.num_waiting == 0
            and self.picker._tally.num_open == 0
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def until_idle(self) -> None:
        await self.until(lambda: self.is_idle)


@contextlib.asynccontextmanager
async def picking_fleet(
    keys: FindsCallers | None = None, catalog: ModelCatalog | None = None, **settings: object
) -> AsyncIterator[Picking]:
    config = build(RouterConfig, {"picker_port": 0, "wait_seconds": 0.2, **settings})
    rng = random.Random(0)
    table = RoutingTable("kvasir", CostParameters(), rng)
    retry = RetryPolicy(max_waits=2, first_wait_seconds=0.01, wait_seconds=config.wait_seconds)
    dispatcher = Dispatcher(table, lambda _: None, rng=rng, retry=retry)
    context = ApiContext(
        config=config,
        catalog=catalog or tiny_model.catalog(),
        dispatcher=dispatcher,
        metrics=RouterMetrics(CollectorRegistry()),
        num_replicas=lambda model: len(table.replica_ids(model)),
        rng=rng,
        prepare_beside=prepare_in_worker,
        index_of=table.index,
        keys=keys,
    )
    context.add(Programs(context, ProgramBook(), context.clock, None))
    context.add(ChatHistory(context))
    ended = Ended(context)
    context.add(ended)
    prepares = {path: prepare for path, prepare in PREPARES.items() if path != GENERATE_CONTENT}
    app = create_gateway_app(context, picked_endpoints(context, prepares))
    picker = Picker(app, config, lambda: bool(table.models))
    await picker.bind()
    await picker.start()
    gateway = Gateway(picker.port)
    picking = Picking(context, table, dispatcher, gateway, picker, ended)
    try:
        yield picking
        await picking.until_idle()
    finally:
        await gateway.close()
        await picker.stop()
        await context.worker.close()


@pytest.fixture
async def picking() -> AsyncIterator[Picking]:
    async with picking_fleet() as picking:
        picking.join("a", A)
        picking.join("b", B)
        yield picking
