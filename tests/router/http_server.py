"""The router's application behind a real socket, in the test's own event loop."""

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from replicas.process.settings import build
from router.api.context import ApiContext, FindsCallers
from router.api.prepare_in_worker import prepare_in_worker
from router.app import create_apps
from router.assembly import Router
from router.config import RouterConfig
from router.edge.connections import Connections
from router.edge.http_protocol import protocol_of
from router.edge.listeners import SEND_BUFFER_BYTES
from router.features.explanations.feature import Explanations
from router.features.history.feature import ChatHistory
from router.features.history.history_sync import HistorySync
from router.features.live_page.feature import LiveFleet, LivePage
from router.features.named_caches.feature import NamedCacheFeature
from router.features.named_caches.named_caches import NamedCaches
from router.features.programs.feature import Programs
from router.features.published.feature import Published
from router.features.published.store import PublishedStore
from router.features.rate_limits.feature import RequestRates
from router.features.responses.feature import StoredResponses
from router.features.responses.store import ResponseStore
from router.features.usage.feature import Usage
from router.features.usage.store import UsageStore
from router.large_bodies.jobs import Bounds
from router.observation.metrics import RouterMetrics
from router.programs.book import ProgramBook
from router.prompt.catalog import ModelCatalog
from tests.router import tiny_model
from tests.router.scripted_dispatch import ScriptedDispatcher


@dataclass
class HttpServer:
    port: int
    context: ApiContext
    dispatcher: ScriptedDispatcher
    explanations: Explanations
    rates: RequestRates
    history: ChatHistory

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_idle(self) -> bool:
        return (
            self.context.in_flight.num == 0
            and self.context.bodies.num_bytes == 0
            and self.dispatcher.num_open == 0
        )

    async def wait_idle(self) -> None:
        while not self.is_idle:  # noqa: ASYNC110 (nobody else can tell)
            await asyncio.sleep(0.005)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


@contextlib.asynccontextmanager
async def http_server(
    fleet: LiveFleet | None = None,
    *,
    drain_seconds: int = 2,
    catalog: ModelCatalog | None = None,
    bounds: Bounds | None = None,
    caches: NamedCaches | None = None,
    responses: ResponseStore | None = None,
    keys: FindsCallers | None = None,
    usage: UsageStore | None = None,
    published: PublishedStore | None = None,
    history: HistorySync | None = None,
    programs: ProgramBook | None = None,
    **settings: object,
) -> AsyncIterator[HttpServer]:
    dispatcher = ScriptedDispatcher()
    context = ApiContext(
        config=build(RouterConfig, settings),
        catalog=catalog or tiny_model.catalog(),
        dispatcher=dispatcher,
        metrics=RouterMetrics(CollectorRegistry()),
        num_replicas=lambda model: 1 if model == tiny_model.MODEL else 0,
        rng=random.Random(0),
        prepare_beside=prepare_in_worker,
        bounds=bounds or Bounds(),
        keys=keys,
    )
    rates = RequestRates(context)
    context.add(rates)
    if "programs" not in context.config.off:
        context.add(Programs(context, ProgramBook() if programs is None else programs, time.monotonic, None))
    chat_history = ChatHistory(context, history)
    context.add(chat_history)
    context.add(Usage(context, usage))
    context.add(Published(context, published))
    context.add(NamedCacheFeature(context, caches))
    context.add(StoredResponses(context, responses))
    explanations = Explanations(context)
    context.add(explanations)
    if fleet is not None:
        context.add(LivePage(context, fleet, explanations.memory))
    apps = create_apps(context)
    try:
        async with (
            listening(apps.main, context.connections, drain_seconds) as port,
            background(history),
        ):
            yield HttpServer(port, context, dispatcher, explanations, rates, chat_history)
    finally:
        await context.worker.close()


@contextlib.asynccontextmanager
async def whole_router(
    redis_url: str, *, bounds: Bounds | None = None, **settings: object
) -> AsyncIterator[tuple[Router, str]]:
    """A router that follows its fleet by Redis, and its address."""
    config = build(RouterConfig, {"redis_url": redis_url, "poll_seconds": 0.02, **settings})
    router = Router(config, rng=random.Random(0), bounds=bounds)
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(router.run())
        async with listening(router.apps.main, router.connections) as port:
            yield router, f"http://127.0.0.1:{port}"
        following.cancel()


@contextlib.asynccontextmanager
async def background(history: HistorySync | None) -> AsyncIterator[None]:
    """It is closed with the server."""
    if history is None:
        yield
        return
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(history.run())
        yield
        running.cancel()
    await history.close()


@contextlib.asynccontextmanager
async def listening(app: ASGIApp, connections: Connections, drain_seconds: int = 2) -> AsyncIterator[int]:
    """Any application on a port of its own."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = _Server(
            uvicorn.Config(
                app,
                loop="none",
                http=protocol_of(connections),
                lifespan="off",
                log_config=None,
                timeout_graceful_shutdown=drain_seconds,
            )
        )
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=[listener]))
            while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
                await asyncio.sleep(0.001)
            try:
                yield listener.getsockname()[1]
            finally:
                server.should_exit = True
                await serving
