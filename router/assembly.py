"""Router: all parts of one router process, put together.

Owns which part is given which, and the tasks that keep the view of the fleet fresh. Sockets, signals and
settings files are `__main__.py`'s.
"""

import asyncio
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from replicas.process.secret_file import open_secret_complaint, read_secret
from replicas.process.settings import SettingsError
from replicas.process.tls import RouterTls, TlsFiles
from replicas.protocol.cluster_secret import ClusterSecret
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.lease_seal import LeaseSeal
from replicas.protocol.status import ModelCard, ReplicaId, TokenizerBundle
from router.api.context import ApiContext
from router.api.gemini.paths import GENERATE_CONTENT
from router.api.prepare_in_worker import prepare_in_worker
from router.app import PREPARES, Apps, create_apps, create_gateway_app
from router.config import RouterConfig
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.overdue import OverdueWatch
from router.dispatch.retries import RetryPolicy
from router.dispatch.waiting_room import WaitingRoom
from router.feature import Feature
from router.features.api_keys.feature import ApiKeys
from router.features.explanations.feature import Explanations
from router.features.history.feature import ChatHistory
from router.features.live_page.feature import LivePage
from router.features.live_page.fleet_source import FleetSource
from router.features.named_caches.feature import NamedCacheFeature
from router.features.programs.feature import Programs
from router.features.published.feature import Published
from router.features.rate_limits.feature import RequestRates
from router.features.recorded_bodies.feature import BodyRecorder
from router.features.responses.feature import StoredResponses
from router.features.usage.feature import Usage
from router.fleet.index_mirror import IndexMirror, mirror_instruments
from router.fleet.membership import Membership
from router.fleet.registry_source import RegistrySource
from router.large_bodies.jobs import Bounds
from router.limits.first_replica import FirstReplica
from router.observation.access_log import AccessLog
from router.observation.loop_lag import LoopLag
from router.observation.metrics import RouterMetrics
from router.observation.trace_points import Tracing
from router.programs.book import ProgramBook
from router.prompt.catalog import ModelCatalog, bundle_digest
from router.queue.fair_queue import FairQueue
from router.queue.held import QueueRules
from router.queue.holding import Holding
from router.routing.cost import CostParameters
from router.routing.table import RoutingTable
from router.shared.instruments import Instrument, gauge

if TYPE_CHECKING:
    from router.picker.server import Picker

logger = logging.getLogger(__name__)

FAREWELL_SECONDS = 2.0
"""How long a trace collector may take for the last spans."""


class Router:
    """`apps` answer requests as soon as `run()` has found replicas. Raises SettingsError."""

    apps: Apps

    def __init__(
        self,
        config: RouterConfig,
        *,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
        own_secret: bytes | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        """`own_secret` is shared by several routers without a secret in their settings.

        A single router may make its own: after a restart it finds nothing of what is cached.
        """
        self._config, self._rng, self._clock = config, rng, clock
        self._tracing = _open_tracing(config)
        self._mirrors: dict[str, IndexMirror] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._table = _new_table(config, rng, clock)
        secret = _read_secret(config)
        self._has_common_secret = secret is not None or (own_secret is not None and config.processes > 1)
        common_secret = secret or ClusterSecret(own_secret or secrets.token_bytes(32))
        self._catalog = ModelCatalog(
            common_secret.current,
            cache_bytes=config.tokenizer_cache_bytes,
            chain_bytes=config.hash_cache_bytes,
        )
        self._tls = _open_tls(config)
        self._membership = self._follow_members(secret)
        self._first_replica = _new_first_replica(config, self._table, self._membership)
        self._book = None if "programs" in config.off else ProgramBook()
        self._dispatcher = _new_dispatcher(
            config, self._table, self._membership, self._first_replica, rng, clock, self._book
        )
        self.metrics = metrics = RouterMetrics(CollectorRegistry())
        self._lag = LoopLag()
        context = ApiContext(
            config=config,
            catalog=self._catalog,
            dispatcher=self._dispatcher,
            metrics=metrics,
            num_replicas=lambda model: len(self._table.replica_ids(model)),
            rng=rng,
            prepare_beside=prepare_in_worker,
            index_of=self._table.index,
            tracing=self._tracing,
            bounds=bounds or Bounds(),
            first_replica=self._first_replica,
        )
        self._context, self.connections = context, context.connections
        for feature in self._open_features(secret, common_secret):
            context.add(feature)
        metrics.add(self._instruments())
        if secret is None:
            logger.warning(
                "there is no cluster secret: anyone who can write to Redis can pose as a replica; set "
                "secret_file"
            )
        self.apps = create_apps(context)
        self.picker = _open_picker(config, context, lambda: self.is_ready)

    def _open_features(self, secret: ClusterSecret | None, common_secret: ClusterSecret) -> Iterator[Feature]:
        """Raises SettingsError."""
        config, context = self._config, self._context
        yield ApiKeys(context, secret)
        if config.log_requests:
            yield AccessLog()
        yield RequestRates(context)
        if self._book is not None:
            shared = common_secret if self._has_common_secret else None
            yield Programs(context, self._book, self._clock, shared)
        yield ChatHistory.open(context, common_secret if self._has_common_secret else None)
        yield Usage.open(context, secret)
        yield Published.open(context, secret)
        yield NamedCacheFeature.open(context, secret)
        yield StoredResponses.open(context, secret)
        name = f"{socket.gethostname()}, process {os.getpid()}"
        explanations = Explanations(context, config.redis_url, common_secret)
        fleet = FleetSource(name, self._membership, self._table, self._mirrors)
        yield LivePage(context, fleet, explanations.memory)
        yield explanations
        if config.record_bodies is not None:
            logger.warning(
                "all that clients ask is recorded in %s, as setting record_bodies says", config.record_bodies
            )
            yield BodyRecorder(config.record_bodies, config.record_bodies_bytes)

    def _set_cards(self, model: str, cards: Sequence[tuple[ReplicaId, ModelCard]]) -> None:
        self._catalog.set_cards(model, cards)
        if self.picker is not None:
            self.picker.see(model, cards)

    def _follow_members(self, secret: ClusterSecret | None) -> Membership:
        config = self._config
        return Membership(
            RegistrySource(
                config.redis_url, config.poll_seconds, seal=None if secret is None else LeaseSeal(secret)
            ),
            self._table,
            index_stride=config.index_stride,
            on_model=self._add_model,
            on_records=self._set_live,
            on_cards=self._set_cards,
            tls=self._tls,
            secret=secret,
        )

    @property
    def is_ready(self) -> bool:
        """Whether there is a replica to route to, or requests may wait for one."""
        return self._context.may_wait or any(self._table.replica_ids(model) for model in self._table.models)

    async def run(self) -> None:
        """Follow the fleet until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._membership.run(), name="membership")
                tasks.create_task(self._lag.run(), name="loop lag")
                watch = OverdueWatch(self._dispatcher, self._config.overdue_seconds)
                tasks.create_task(watch.run(), name="overdue requests")
                for feature in self._context.features:
                    tasks.create_task(feature.run(), name=type(feature).__name__)
                if self._tls is not None:
                    tasks.create_task(self._tls.follow(), name="TLS files")
        finally:
            for feature in self._context.features:
                await feature.close()
            await self._context.worker.close()

    async def close(self) -> None:
        """Write what is left, after the last request has ended."""
        await asyncio.to_thread(self._tracing.close, FAREWELL_SECONDS)

    async def _add_model(self, card: ModelCard, bundle: TokenizerBundle) -> None:
        verdict = await self._context.worker.try_out(bundle_digest(bundle), bundle)
        await asyncio.to_thread(self._catalog.add, card, bundle, created=int(time.time()), verdict=verdict)
        if verdict.complaint is not None:
            logger.error("model=%s has no chats: %s", card.name, verdict.complaint)
        model = self._catalog.get(card.name)
        logger.info(
            "serving model=%s tokenizer=%s segment_cache=%s template=%s",
            card.name,
            model.tokenizer.backend,
            model.tokenizer.caches_segments,
            model.template.engine,
        )

    def _set_live(self, model: str, records: Mapping[ReplicaId, ReplicaRecord]) -> None:
        if self._first_replica is not None:
            self._first_replica.look(model)
        mirror = self._mirrors.get(model)
        if mirror is None:
            if not records:
                return
            assert self._tasks is not None
            mirror = IndexMirror(self._config.redis_url, model, self._table.index(model), rng=self._rng)
            self._mirrors[model] = mirror
            self._tasks.create_task(mirror.run(), name=f"index of {model}")
        mirror.set_live(records)

    def _instruments(self) -> Iterator[Instrument]:
        """Instruments of the parts that are named here; `ApiContext` has those of the HTTP endpoints."""
        yield from self._membership.instruments()
        yield from self._table.instruments()
        yield from mirror_instruments(self._mirrors, self._table.end_lingering)
        yield from self._lag.instruments()
        yield from self._tracing.instruments()
        yield gauge(
            "router_tls_expiry_timestamp_seconds",
            "Expiry of this router's certificate or of its replicas' CA, in seconds since 1970",
            lambda: {} if self._tls is None else self._tls.ends,
            "file",
        )


def _new_table(config: RouterConfig, rng: random.Random, clock: Callable[[], float]) -> RoutingTable:
    """Raises SettingsError."""
    try:
        return RoutingTable(
            config.policy,
            CostParameters(room_price=config.room_price, delay_price=config.delay_price),
            rng,
            clock=clock,
        )
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _new_dispatcher(
    config: RouterConfig,
    table: RoutingTable,
    membership: Membership,
    first_replica: FirstReplica | None,
    rng: random.Random,
    clock: Callable[[], float],
    book: ProgramBook | None,
) -> Dispatcher:
    return Dispatcher(
        table,
        membership.client,
        rng=rng,
        retry=RetryPolicy(wait_seconds=max(config.wait_seconds, config.wait_for_replica_seconds)),
        room=WaitingRoom(max_waiting=config.max_waiting, max_bytes=config.max_waiting_bytes),
        outlook=membership.outlook,
        clock=clock,
        holding=Holding(
            table,
            QueueRules(config.queue_target_seconds, config.queue_seconds),
            lambda: FairQueue(max_waiting=config.max_queued, max_bytes=config.max_waiting_bytes),
            programs=book,
            has_gate="program_admission" not in config.off,
        ),
        first_replica=first_replica,
    )


def _new_first_replica(
    config: RouterConfig, table: RoutingTable, membership: Membership
) -> FirstReplica | None:
    if not config.wait_for_replica_seconds:
        return None
    return FirstReplica(
        config.wait_for_replica_seconds,
        FairQueue(max_waiting=config.max_waiting, max_bytes=config.max_waiting_bytes),
        has_ready=table.has_ready,
        registered=lambda: membership.registered,
    )


def _read_secret(config: RouterConfig) -> ClusterSecret | None:
    """Raises SettingsError."""
    secret = read_secret(config.secret, config.secret_file)
    if (complaint := open_secret_complaint(config.secret_file)) is not None:
        logger.warning(complaint)
    return secret


def _open_tls(config: RouterConfig) -> RouterTls | None:
    if config.replica_tls_ca is None:
        return None
    files = TlsFiles(config.replica_tls_certificate, config.replica_tls_key, config.replica_tls_ca)
    return RouterTls(files, config.replica_tls_name)


def _open_picker(config: RouterConfig, context: ApiContext, is_ready: Callable[[], bool]) -> "Picker | None":
    if config.picker_port is None:
        return None
    from router.picker.endpoint import picked_endpoints  # here, since most routers are no gateway's
    from router.picker.server import Picker

    prepares = {path: prepare for path, prepare in PREPARES.items() if path != GENERATE_CONTENT}
    picker = Picker(create_gateway_app(context, picked_endpoints(context, prepares)), config, is_ready)
    context.metrics.add(picker.instruments())
    return picker


def _open_tracing(config: RouterConfig) -> Tracing:
    if config.otlp_endpoint is None:
        return Tracing()
    from router.observation.tracing import (
        SpanTracing,  # here, since a router without traces must not load the SDK
    )

    return SpanTracing(config.otlp_endpoint, config.trace_sample_ratio)
