"""Picker: the gRPC server that gateways ask, and its health service.

Owns the port, the bounds on streams, and what becomes of a stream that breaks off. Until its first message,
which shows a key, a stream has one of a few places, for seconds.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import grpc
from google.protobuf.message import DecodeError
from starlette.types import ASGIApp

from replicas.process.settings import SettingsError
from replicas.process.tls import FollowedFiles, TlsFiles, server_credentials
from replicas.protocol.status import ModelCard, ReplicaId
from router.config import RouterConfig
from router.edge.http import ClientGone
from router.picker.ext_proc_pb2 import HealthAnswer, HealthQuestion
from router.picker.messages import METHOD, SERVICE, decode
from router.picker.stream import GatewayStream, Tally, Unsupported, Write
from router.shared.instruments import Instrument, counter, gauge

logger = logging.getLogger(__name__)

HEALTH = "grpc.health.v1.Health"
SERVING, NOT_SERVING = 1, 2
SERVICES = ("", "liveness", "readiness", SERVICE)
"""Names whose health may be asked for. Only `liveness` does not need a replica."""

ROOM_BYTES = 2**20
"""Room in a message besides a body that comes in one piece."""

FIRST_SECONDS = 5.0
"""Longest time to a stream's first message, which a gateway sends with it."""
MOST_SILENT = 1024
"""Streams whose first message has not come. Of more, the oldest is given up."""
LOG_SECONDS = 1.0
"""Shortest time between two lines about streams that gateways broke."""

Fault = tuple[grpc.StatusCode, str]

Call = grpc.aio.ServicerContext[bytes, bytes]


class Picker:
    """`app` answers requests at a gateway; `is_ready` says whether there is a replica to route to."""

    def __init__(self, app: ASGIApp, config: RouterConfig, is_ready: Callable[[], bool]) -> None:
        self._app = app
        self._config = config
        self._is_ready = is_ready
        self._is_stopping = False
        self._tally = Tally()
        self._silent: dict[asyncio.Timeout, None] = {}
        self._complained_at = -LOG_SECONDS
        self._hidden: dict[str, set[ReplicaId]] = {}
        self.port = 0
        self._server: grpc.aio.Server | None = None

    async def bind(self) -> None:
        """Raises SettingsError if it cannot listen, or if its TLS files are wrong."""
        config = self._config
        options = [
            ("grpc.max_receive_message_length", config.max_body_bytes + ROOM_BYTES),
            ("grpc.max_send_message_length", config.max_body_bytes + ROOM_BYTES),
            ("grpc.http2.bdp_probe", 0),  # what is not read yet stays with the gateway
            ("grpc.so_reuseport", int(config.processes > 1)),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
        ]
        most = config.max_connections + 2 * MOST_SILENT  # as many again are on their way out
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=most)
        server.add_generic_rpc_handlers((self._processing(), self._health()))
        host = f"[{config.picker_host}]" if ":" in config.picker_host else config.picker_host
        try:
            port = await self._listen(server, f"{host}:{config.picker_port}")
        except RuntimeError as error:
            where = f"{config.picker_host} port {config.picker_port}"
            raise SettingsError(f"the router cannot listen on {where} for gateways") from error
        self._server, self.port, self._where = server, port, f"{host}:{port}"

    async def _listen(self, server: grpc.aio.Server, address: str) -> int:
        certificate, key = self._config.picker_tls_certificate, self._config.picker_tls_key
        if certificate is None:
            return server.add_insecure_port(address)
        followed = await asyncio.to_thread(FollowedFiles, TlsFiles(certificate, key, ca=None))
        return server.add_secure_port(address, server_credentials(followed))

    def _processing(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        handler = grpc.stream_stream_rpc_method_handler(self._process)
        return grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})

    def _health(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        handler = grpc.unary_unary_rpc_method_handler(self._check)
        return grpc.method_handlers_generic_handler(HEALTH, {"Check": handler})

    async def start(self) -> None:
        assert self._server is not None, "it is bound first"
        await self._server.start()
        logger.info("gateways are served on %s", self._where)

    async def stop(self) -> None:
        """Take nothing new, and let open streams end."""
        self._is_stopping = True
        assert self._server is not None, "it is bound first"
        await self._server.stop(self._config.drain_seconds)

    def see(self, model: str, cards: Sequence[tuple[ReplicaId, ModelCard]]) -> None:
        """Say of each new replica of a model that no gateway is sent to it, if that is so."""
        hidden = {replica_id for replica_id, card in cards if not card.endpoint}
        for replica_id, card in cards:
            if replica_id in hidden - self._hidden.get(model, set()):
                reason = (
                    "its server is on loopback or below a path and has no engine_endpoint, or has another "
                    "model_name"
                    if card.engine == "remote"
                    else f"its engine is {card.engine}; they need engine remote, or routes"
                )
                logger.warning("gateways are not sent to replica %s of %s: %s", replica_id, model, reason)
        self._hidden[model] = hidden

    def instruments(self) -> Iterator[Instrument]:
        tally = self._tally
        yield gauge("router_picker_streams", "Requests at gateways that are open", lambda: tally.num_open)
        yield counter(
            "router_picker_requests_total",
            "Requests of gateways, by who answered: a server, this router itself, or none, as what came was "
            "nothing, too much or nonsense",
            lambda: {
                "server": tally.num_forwarded,
                "router": tally.num_answered,
                "none": tally.num_broken,
            },
            "by",
        )
        yield counter(
            "router_picker_other_renderings_total",
            "Requests of gateways whose server has counted another number of prompt tokens than this router",
            lambda: tally.num_other_renderings,
        )

    async def _check(self, request: bytes, call: Call) -> bytes:
        try:
            name = HealthQuestion.FromString(request).service
        except DecodeError:
            name = "?"
        if name not in SERVICES:
            await call.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        is_well = name == "liveness" or (self._is_ready() and not self._is_stopping)
        answer: bytes = HealthAnswer(status=SERVING if is_well else NOT_SERVING).SerializeToString()
        return answer

    async def _process(self, _: AsyncIterator[bytes], call: Call) -> None:
        lock = asyncio.Lock()

        async def write(message: bytes) -> None:
            async with lock:  # one message at a time
                try:
                    await call.write(message)
                except grpc.aio.BaseError as error:
                    raise ClientGone from error

        with self._tally.open():
            fault = await self._run(call, write)
        if fault is not None:
            self._complain(fault[1])
            with contextlib.suppress(grpc.aio.InternalError):  # it has left
                await call.abort(*fault)

    async def _run(self, call: Call, write: Write) -> Fault | None:
        try:
            first = await self._first(call)
            if first is None:
                return None
            if self._tally.num_open - len(self._silent) > self._config.max_connections:
                return grpc.StatusCode.RESOURCE_EXHAUSTED, "more streams are open than max_connections"
            stream = GatewayStream(decode(first), write, self._tally)
        except TimeoutError:
            return grpc.StatusCode.DEADLINE_EXCEEDED, "the first message of a stream has not come in time"
        except (ValueError, Unsupported) as error:
            return grpc.StatusCode.INVALID_ARGUMENT, str(error)
        with contextlib.suppress(ClientGone):
            await stream.begin()
            await self._serve(stream, call)
        return None

    async def _first(self, call: Call) -> bytes | None:
        """None: there is none. Raises TimeoutError."""
        silent = self._silent
        async with asyncio.timeout(FIRST_SECONDS) as deadline:
            silent[deadline] = None
            try:
                if len(silent) > MOST_SILENT:
                    oldest = next(iter(silent))
                    del silent[oldest]
                    with contextlib.suppress(RuntimeError):  # it is just expiring
                        oldest.reschedule(0.0)
                return await _message(call)
            finally:
                silent.pop(deadline, None)

    async def _serve(self, stream: GatewayStream, call: Call) -> None:
        """Serve one request. The gateway cancels the call if the client leaves, or ends its side."""
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read(stream, call))
            serving = tasks.create_task(self._answer(stream))
            try:
                await asyncio.wait({serving})
                if not stream.was_answered:  # the rest of somebody else's answer has to go on
                    await asyncio.wait({reading})
            finally:
                stream.leave()
                await asyncio.wait({serving})
                reading.cancel()

    async def _answer(self, stream: GatewayStream) -> None:
        await self._app(stream.scope(), stream.receive, stream.send)

    async def _read(self, stream: GatewayStream, call: Call) -> None:
        try:
            while not stream.has_ended:
                await stream.until_wanted()
                encoded = await _message(call)
                if encoded is None:
                    break
                await stream.take(decode(encoded))
        except ValueError as error:
            self._complain(str(error))
        except ClientGone:
            pass
        finally:
            stream.leave()

    def _complain(self, words: str) -> None:
        self._tally.num_broken += 1
        now = asyncio.get_running_loop().time()
        if now - self._complained_at >= LOG_SECONDS:
            self._complained_at = now
            logger.warning("a gateway's request cannot be answered: %s", words)


async def _message(call: Call) -> bytes | None:
    """None: the peer sends no more."""
    message = await call.read()
    return message if isinstance(message, bytes) else None
