"""ReplicaHost: everything of one replica in one object: engine thread, server, index, lease.

Owns the replica's state, the order in which its parts start and end, and the one task that they all
hang on. `__main__.py` and the fleet's actor host it, and have the process, the signals and Ray.

    start: engine ─▶ proof ─▶ engine thread ─▶ server listens ─▶ READY ─▶ lease
    end:   lease given back ─▶ streams flushed and ended ─▶ engine thread ─▶ index set removed
"""

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from replicas.building import EngineBuilder, ProvenEngine, build_in_time
from replicas.config import ReplicaConfig
from replicas.engine import SharedKv
from replicas.engine_process.build import build_engine
from replicas.engine_process.process_loop import drive
from replicas.errors import EngineDied, EngineHung, LeaseLost, StartupError
from replicas.index.index_writer import IndexWriter
from replicas.kvstore.layout import file_bytes
from replicas.kvstore.pulling.chunk_reader import ChunkReader
from replicas.leaving.hand_over import HandOver
from replicas.leaving.live_peers import LivePeers
from replicas.leaving.peer_calls import PeerCalls
from replicas.observation.metrics import ReplicaMetrics, metrics_endpoint
from replicas.observation.trace_points import Tracing
from replicas.openings import open_peer_tls, open_secret, open_tls, open_tracing
from replicas.process.tls import FollowedFiles, server_credentials
from replicas.protocol.bounds import MAX_CARD_NAMES
from replicas.protocol.cluster_secret import ClusterSecret, Purpose
from replicas.protocol.frames import StepFrame
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.lease_seal import LeaseSeal
from replicas.protocol.pulls import PullHint
from replicas.protocol.status import Epoch, ModelCard, ReplicaId, ReplicaState, Role, advance
from replicas.redis_client import FAREWELL_SECONDS, connect, farewell
from replicas.registration import Registration
from replicas.serving.frame_bridge import FrameBridge
from replicas.serving.intake import Intake
from replicas.serving.ports import host_port
from replicas.serving.server import Identity, ReplicaServer
from replicas.watchdog import Watchdog

logger = logging.getLogger(__name__)

OPEN_CACHES = 16
"""How many times over the tokens of the requests taken may fill the KV cache: a request that waits for more
than that is better off elsewhere."""

LEASES_PER_SET = 20
"""How many leases long the blocks set outlives its own: a pause costs no rewrite; a dead replica's goes."""

FIRST_INDEX_SECONDS = 5.0
"""Seconds that a replica delays readiness until routers can find its disk's chunks."""

FLUSH_SECONDS = 2.0
"""Seconds for routers to read queued messages when the replica ends."""

TELL_SECONDS = 1.0
"""Seconds for routers to learn of a drain; later submits are refused."""

HAND_OVER_PAUSE_SECONDS = 5.0
"""How long after leases were handed over it is looked for new ones, of requests that still run."""

ENGINE_STOP_SECONDS = 10.0

HUNG_ENGINE_STOP_SECONDS = 1.0
"""Seconds for a hung engine, which is not expected to answer."""


class ReplicaHost:
    """`start`, then `wait_dead`; `drain` or `stop` end it, and so does the death of the engine."""

    def __init__(self, config: ReplicaConfig, *, build: EngineBuilder = build_engine) -> None:
        self._config = config
        self._build = build
        self.epoch = Epoch(f"{time.time_ns():016x}-{secrets.token_hex(4)}")
        self._state = ReplicaState.STARTING
        self._address: str | None = None
        self._failure: BaseException | None = None
        self._end = asyncio.Event()
        self._ended = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._tls: FollowedFiles | None = None
        self._secret: ClusterSecret | None = None
        self._parts: _Parts | None = None
        self.metrics_port: int | None = None
        """Port of the Prometheus endpoint, if any."""

    @property
    def state(self) -> ReplicaState:
        return self._state

    @property
    def address(self) -> str:
        """Address for routers: host:port. Known once it has started."""
        assert self._address is not None, "the replica has not started"
        return self._address

    @property
    def metrics_address(self) -> str | None:
        """Address of its metrics: host:port."""
        return None if self.metrics_port is None else host_port(self._config.host, self.metrics_port)

    async def start(self) -> None:
        """Return when routers may come. Raises StartupError, CheckpointError or SettingsError.

        Redis may be away: the replica serves all the same, and registers when it is back.
        """
        assert self._supervisor is None, "a replica starts once"
        tls = self._tls = await asyncio.to_thread(open_tls, self._config)
        self._secret = await asyncio.to_thread(open_secret, self._config)
        proven = await build_in_time(self._config, self._build)
        engine = proven.engine
        whole_because = self._config.whole_because
        if self._config.role != Role.BOTH and whole_because is not None:
            logger.warning("role %s, but no prompt is split here: %s", self._config.role, whole_because)
        logger.info("engine is ready model=%s engine=%s", engine.card.name, engine.card.engine)
        try:
            tracing = await asyncio.to_thread(open_tracing, self._config, self.epoch, engine.card.name)
            self._parts = _Parts(self._config, self.epoch, proven, self, tracing, self._secret)
            if tls is not None:
                self._parts.metrics.read_tls_ends(tls.pems.ends, lambda: tls.current().ends)
        except BaseException:
            engine.close()
            raise
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(self._parts, started), name="replica")
        await started

    async def drain(self) -> None:
        """Admit nothing more, finish running requests within `drain_seconds`, and leave."""
        self.begin_drain()
        if self._supervisor is not None:
            await self._ended.wait()

    async def stop(self) -> None:
        """End now, aborting what runs. Idempotent."""
        self._end.set()
        if self._supervisor is not None:
            await self._ended.wait()

    async def wait_dead(self) -> None:
        """Return when the replica has ended. Raises the cause, unless it was asked to end."""
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def record(self) -> ReplicaRecord:
        """Return the record for the next heartbeat."""
        assert self._parts is not None
        return ReplicaRecord(
            replica_id=ReplicaId(self._config.replica_id),
            epoch=self.epoch,
            address=self.address,
            state=self._state,
            card_digest=self._parts.card.digest(),
            last_change=self._parts.index.last_change,
            load=self._parts.server.load,
        )

    def fail(self, error: BaseException) -> None:
        """End because of `error`."""
        if self._failure is None:
            self._failure = error
        self._end.set()

    def begin_drain(self) -> None:
        """Start draining as the supervisor's task, independent of the caller. Idempotent."""
        if self._state is ReplicaState.STARTING:
            self._end.set()
        elif self._state is ReplicaState.READY and not self._end.is_set():
            assert self._parts is not None
            self._state = advance(self._state, ReplicaState.DRAINING)
            self._parts.spawn(self._finish_requests(self._parts))

    async def _finish_requests(self, parts: "_Parts") -> None:
        server = parts.server
        logger.info("draining requests=%d", server.num_requests)
        parts.registration.announce()
        await server.set_serving(False)
        ends_at = time.monotonic() + self._config.drain_seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_seconds):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TELL_SECONDS):
                        await server.tell_draining()
                server.drain()
                is_idle = False
                while not is_idle:
                    if parts.hand_over is not None:
                        await parts.hand_over.run(ends_at - time.monotonic())
                    is_idle = server.is_idle
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(HAND_OVER_PAUSE_SECONDS):
                            await server.wait_idle()
        self._end.set()

    async def _supervise(self, parts: "_Parts", started: "asyncio.Future[None]") -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(self._shut_down, parts)
                await self._open(parts, stack)
                async with asyncio.TaskGroup() as group:
                    parts.run_tasks(group)
                    await self._become_ready(parts)
                    started.set_result(None)
                    await self._end.wait()
                    parts.cancel_tasks()
        except BaseException as error:  # the replica's outermost frame: those that wait must hear of it
            if not started.done():
                started.set_exception(error)
            elif self._failure is None:
                self._failure = error
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._ended.set()

    async def _open(self, parts: "_Parts", stack: contextlib.AsyncExitStack) -> None:
        config = self._config
        credentials = None if self._tls is None else server_credentials(self._tls)
        try:
            if config.metrics_port is not None:
                endpoint = metrics_endpoint(parts.metrics.registry, config.host, config.metrics_port)
                self.metrics_port = await stack.enter_async_context(endpoint)
            port = await parts.server.start(
                config.host, config.port, credentials, health_socket=config.health_socket
            )
        except OSError as error:
            raise StartupError(f"cannot listen: {error}") from error
        self._address = host_port(config.host, port)
        parts.engine_loop.start()

    async def _become_ready(self, parts: "_Parts") -> None:
        if self._config.disk_kv_bytes is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_INDEX_SECONDS):
                    await parts.wait_indexed()
        self._state = advance(self._state, ReplicaState.READY)
        await parts.server.set_serving(True)
        parts.registration.announce()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.lease_seconds):
                await parts.registration.wait_registered()
        logger.info(
            "ready replica=%s epoch=%s address=%s model=%s engine=%s blocks=%d",
            self._config.replica_id,
            self.epoch,
            self.address,
            parts.card.name,
            parts.card.engine,
            parts.card.num_blocks,
        )

    async def _shut_down(self, parts: "_Parts") -> None:
        self._state = advance(self._state, ReplicaState.STOPPED)
        logger.info("leaving replica=%s epoch=%s", self._config.replica_id, self.epoch)
        await parts.server.set_serving(False)
        await farewell(parts.registration.remove())
        await parts.server.stop(FLUSH_SECONDS)
        parts.bridge.close()
        is_hung = isinstance(self._failure, EngineHung)
        in_order = ENGINE_STOP_SECONDS + self._config.seconds_to_spill
        patience = HUNG_ENGINE_STOP_SECONDS if is_hung else in_order
        if not await asyncio.to_thread(parts.engine_loop.stop, patience):
            logger.error("the engine does not finish its step; the replica ends without it")
        await farewell(parts.index.remove())
        await parts.close_clients()
        await asyncio.to_thread(parts.tracing.close, FAREWELL_SECONDS)


class _Parts:
    """The parts of one replica, wired to each other."""

    def __init__(
        self,
        config: ReplicaConfig,
        epoch: Epoch,
        proven: ProvenEngine,
        host: ReplicaHost,
        tracing: Tracing,
        secret: ClusterSecret | None,
    ) -> None:
        engine = self._engine = proven.engine
        self._aliases = config.model_aliases
        self.tracing = tracing
        self.metrics = _metrics_of(config, self.card, tracing)
        self.bridge = FrameBridge(asyncio.get_running_loop(), self._deliver)
        self.engine_loop = drive(
            engine,
            self.bridge.put,
            lambda error: self.bridge.call(lambda: host.fail(EngineDied(f"the engine failed: {error!r}"))),
        )
        # The lease must not wait behind a large index write, nor as long: two clients.
        self._lease_redis, self._index_redis = connect(config.redis_url), connect(config.redis_url)
        replica_id = ReplicaId(config.replica_id)
        self.index = self._index_writer(config, epoch)
        self.registration = Registration(
            self._lease_redis,
            self.card.name,
            replica_id,
            epoch,
            record=host.record,
            index=self.index,
            lease_seconds=config.lease_seconds,
            heartbeat_seconds=config.heartbeat_seconds,
            set_ttl_seconds=LEASES_PER_SET * config.lease_seconds,
            on_lost=lambda lost: self._step_down(host, lost),
            metrics=self.metrics,
            seal=None if secret is None else LeaseSeal(secret),
        )
        self.server = ReplicaServer(
            Identity(replica_id, epoch, lambda: self.card, proven.bundle),
            self.engine_loop,
            self.index,
            list_blocks=lambda: self.index.block_hashes,
            on_drain=host.begin_drain,
            metrics=self.metrics,
            heartbeat_seconds=config.heartbeat_seconds,
            intake=_intake(config, self.card),
            call_keys=() if secret is None else secret.keys(Purpose.CALLS),
            kv=_reader(proven.engine.shared_kv, config),
            tracing=tracing,
        )
        self.hand_over = self._hand_over(host, config, proven.engine.shared_kv, secret)
        self.watchdog = self._watch(host, config.engine_hang_seconds, proven.token_seconds)
        self._group: asyncio.TaskGroup | None = None
        self._begun = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def card(self) -> ModelCard:
        """The model's card as it is now: the engine's, with the other names that the settings add."""
        card = self._engine.card
        if not self._aliases:
            return card
        names = dict.fromkeys((*self._aliases, *card.aliases))
        names.pop(card.name, None)
        return replace(card, aliases=tuple(names)[:MAX_CARD_NAMES])

    def _index_writer(self, config: ReplicaConfig, epoch: Epoch) -> IndexWriter:
        return IndexWriter(
            self._index_redis,
            self.card,
            ReplicaId(config.replica_id),
            epoch,
            index_stride=config.index_stride,
            stream_length=config.events_stream_length,
            stream_bytes=config.events_stream_bytes,
            rng=random.Random(),
            set_ttl_seconds=LEASES_PER_SET * config.lease_seconds,
            metrics=self.metrics,
        )

    def _hand_over(
        self,
        host: ReplicaHost,
        config: ReplicaConfig,
        shared: SharedKv | None,
        secret: ClusterSecret | None,
    ) -> HandOver | None:
        """Build the hand-over; None if peers cannot pull from here, or if it is off."""
        if shared is None or config.hand_over_bytes == 0:
            return None
        replica_id, seal = ReplicaId(config.replica_id), None if secret is None else LeaseSeal(secret)
        key = None if secret is None else secret.key(Purpose.CALLS)
        return HandOver(
            self.server.store,
            LivePeers(self._lease_redis, self.card.name, replica_id, seal),
            PeerCalls(key=key, open_tls=lambda: open_peer_tls(config)),
            source=lambda: PullHint(replica_id, host.epoch, host.address, 0),
            layout=shared.layout,
            chunk_bytes=file_bytes(shared.payload_bytes),
            max_bytes=config.hand_over_bytes,
            metrics=self.metrics.leaving,
        )

    def run_tasks(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self.spawn(self.index.run())
        self.spawn(self.registration.run())
        self.spawn(self.watchdog.run())

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        assert self._group is not None
        self._tasks.append(self._group.create_task(work))

    def cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def close_clients(self) -> None:
        await self._lease_redis.aclose()
        await self._index_redis.aclose()

    async def wait_indexed(self) -> None:
        """Wait until the index has the engine's initial chunks."""
        await self._begun.wait()
        await self.index.wait_settled()

    def _deliver(self, frame: StepFrame, step_seconds: float) -> None:
        self.index.observe(frame.events)  # first: with a request's first delta its blocks are stored
        self._begun.set()
        self.server.deliver(frame, step_seconds)
        self.watchdog.observe(frame, step_seconds)
        self.metrics.observe(frame, step_seconds)

    def _watch(self, host: ReplicaHost, floor_seconds: float, token_seconds: float) -> Watchdog:
        return Watchdog(
            floor_seconds=floor_seconds,
            max_step_tokens=self.card.max_batched_tokens,
            seconds_per_token=token_seconds,
            has_work=lambda: self.server.num_requests > 0,
            on_hung=lambda hung: self._give_up(host, hung),
            metrics=self.metrics,
        )

    def _give_up(self, host: ReplicaHost, hung: EngineHung) -> None:
        host.fail(hung)
        self.engine_loop.kill()

    def _step_down(self, host: ReplicaHost, lost: LeaseLost) -> None:
        logger.error("%s; this replica ends", lost)
        host.fail(lost)


def _reader(shared: SharedKv | None, config: ReplicaConfig) -> ChunkReader | None:
    if shared is None:
        return None
    try:
        folder = None if config.disk_kv_bytes is None or config.kv_folder is None else Path(config.kv_folder)
        return ChunkReader(shared, folder)
    except OSError as error:
        logger.warning("other replicas cannot pull KV from here: the engine's memory: %s", error)
        return None


def _intake(config: ReplicaConfig, card: ModelCard) -> Intake:
    return Intake(
        max_sequences=config.max_running + config.max_waiting,
        max_tokens=config.max_open_tokens or OPEN_CACHES * card.num_cache_tokens,
    )


def _metrics_of(config: ReplicaConfig, card: ModelCard, tracing: Tracing) -> ReplicaMetrics:
    metrics = ReplicaMetrics(CollectorRegistry())
    metrics.info.labels(config.replica_id, card.name, card.engine).set(1)
    metrics.dropped_spans.read = lambda: tracing.num_dropped
    return metrics
