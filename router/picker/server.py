"""Picker: the gRPC server that gateways ask, and its health service.

Owns the port, the bound on streams, and what becomes of a stream that breaks off.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
from starlette.types import ASGIApp

from replicas.process.settings import SettingsError
from replicas.process.tls import FollowedFiles, TlsFiles, server_credentials
from router.config import RouterConfig
from router.picker.messages import METHOD, SERVICE, decode
from router.picker.protobuf import field, fields, text
from router.picker.stream import GatewayStream, Tally, Unsupported
from router.shared.instruments import Instrument, counter, gauge

logger = logging.getLogger(__name__)

HEALTH = "grpc.health.v1.Health"
SERVING, NOT_SERVING = 1, 2
SERVICES = ("", "liveness", "readiness", SERVICE)
"""Names whose health may be asked for. Only `liveness` does not need a replica."""

ROOM_BYTES = 2**20
"""Room in a message besides a body that comes in one piece."""

Call = grpc.aio.ServicerContext[bytes, bytes]


class Picker:
    """`app` answers requests at a gateway; `is_ready` says whether there is a replica to route to."""

    def __init__(self, app: ASGIApp, config: RouterConfig, is_ready: Callable[[], bool]) -> None:
        self._app = app
        self._config = config
        self._is_ready = is_ready
        self._is_stopping = False
        self._tally = Tally()
        self.port = 0
        self._server: grpc.aio.Server | None = None

    async def bind(self) -> None:
        """Raises SettingsError if it cannot listen, or if its TLS files are wrong."""
        config = self._config
        options = [
            ("grpc.max_receive_message_length", config.max_body_bytes + ROOM_BYTES),
            ("grpc.max_send_message_length", config.max_body_bytes + ROOM_BYTES),
            ("grpc.so_reuseport", int(config.processes > 1)),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
        ]
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=config.max_connections)
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

    def instruments(self) -> Iterator[Instrument]:
        tally = self._tally
        yield gauge("router_picker_streams", "Requests at gateways that are open", lambda: tally.num_open)
        yield counter(
            "router_picker_requests_total",
            "Requests of gateways, by who answered: a server, or this router itself",
            lambda: {"server": tally.num_forwarded, "router": tally.num_answered},
            "by",
        )
        yield counter(
            "router_picker_other_renderings_total",
            "Requests of gateways whose server has counted another number of prompt tokens than this router",
            lambda: tally.num_other_renderings,
        )

    async def _check(self, request: bytes, call: Call) -> bytes:
        try:
            name = next((text(value) for number, value in fields(request) if number == 1), "")
        except ValueError:
            name = "?"
        if name not in SERVICES:
            await call.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        is_well = name == "liveness" or (self._is_ready() and not self._is_stopping)
        return field(1, SERVING if is_well else NOT_SERVING)

    async def _process(self, messages: AsyncIterator[bytes], call: Call) -> None:
        lock = asyncio.Lock()

        async def write(message: bytes) -> None:
            async with lock:  # one message at a time
                await call.write(message)

        try:
            first = decode(await anext(messages))
            stream = GatewayStream(first, write, self._tally)
        except StopAsyncIteration:
            return
        except (ValueError, Unsupported) as error:
            logger.error("a gateway's request cannot be answered: %s", error)
            await call.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        await self._serve(stream, messages)

    async def _serve(self, stream: GatewayStream, messages: AsyncIterator[bytes]) -> None:
        """Serve one request. The gateway cancels the call if the client leaves, or ends its side."""
        async with asyncio.TaskGroup() as tasks:
            with self._tally.open():
                await stream.begin()
                reading = tasks.create_task(_read(stream, messages))
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


async def _read(stream: GatewayStream, messages: AsyncIterator[bytes]) -> None:
    try:
        async for encoded in messages:
            await stream.take(decode(encoded))
            if stream.has_ended:
                break
    except ValueError as error:
        logger.error("a gateway's message cannot be read: %s", error)
    finally:
        stream.leave()
