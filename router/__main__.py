"""`python -m router`: a router as a process of its own, or several on one port.

Owns signals, logging and exit codes. The first SIGTERM stops accepting and lets running requests finish, with
the operators' port still open; a second SIGINT stops at once. `edge/processes.py` keeps several running.
"""

import asyncio
import contextlib
import logging
import os
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import uvicorn
import uvloop
from starlette.types import ASGIApp

import replicas.process.lean_redis  # noqa: F401
from replicas.process.logs import TEXT_FORMAT, set_up_logs
from replicas.process.settings import SettingsError, load_settings, old_setting_warnings
from router.assembly import Router
from router.config import ENVIRONMENT_PREFIX, RouterConfig
from router.edge.connections import Connections
from router.edge.http_protocol import protocol_of
from router.edge.listeners import BACKLOG, AllListeners, Listeners, address_of, listening
from router.edge.open_files import allow_connections
from router.edge.processes import EXIT_FAILED, EXIT_NOT_STARTED, ProcessSlot, RouterProcesses
from router.memory import return_large_blocks, spare_long_lived_objects

if TYPE_CHECKING:
    from router.picker.server import Picker

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
"""Longer than load balancers keep idle connections: they must be the ones to close."""

ADMIN_DRAIN_SECONDS = 1

LOOK_SECONDS = 0.05
FIRST_LOOK_SECONDS = 5.0
"""How long one of several routers waits for replicas before it answers; longer while a sibling answers."""
HELP_SECONDS = 0.05
"""Seconds that a connection waits for its own router before another may accept it."""
STOP_SECONDS = 15.0
"""Seconds that a router may need to stop, besides its requests."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run until told to stop. Returns 0 after an orderly end, 1 if it died while serving, 2 if it did not
    start."""
    set_up_logs()
    try:
        config = load_settings(
            RouterConfig,
            arguments=arguments,
            environment=environment,
            prefix=ENVIRONMENT_PREFIX,
            program="python -m router",
            description="Serve OpenAI's API from the replicas that hold the prompts' KV blocks.",
        )
        set_up_logs(config.log_format, config.log_level, fields={"service": "router"})
        for warning in old_setting_warnings(config):
            logger.warning(warning)
        allow_connections(config.max_connections)
        with listening(config) as listeners:
            if config.processes == 1:
                return run_one(config, listeners.of(0), secrets.token_bytes(32))
            return run_several(config, listeners)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_NOT_STARTED


def run_one(
    config: RouterConfig, listeners: Listeners, own_secret: bytes, place: ProcessSlot | None = None
) -> int:
    """`own_secret` counts where the settings have none; `place` is this router's among several."""
    return_large_blocks()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config, listeners, own_secret, place))
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_NOT_STARTED
    except ExceptionGroup:
        logger.critical("the router has failed", exc_info=True)
        return EXIT_FAILED
    return 0


def run_several(config: RouterConfig, listeners: AllListeners) -> int:
    # Made up once, if at all: with one each, none would find what the others' prompts have left in caches.
    own_secret = secrets.token_bytes(32)

    def run(place: ProcessSlot) -> int:
        name = f"router-{place.number}"
        text_format = TEXT_FORMAT.replace("%(name)s", f"{name} %(name)s")
        fields = {"service": "router", "router": name}
        set_up_logs(config.log_format, config.log_level, fields=fields, text_format=text_format)
        return run_one(config, listeners.of(place.number), own_secret, place)

    patience = config.drain_seconds + STOP_SECONDS
    return RouterProcesses(config.processes, run, patience_seconds=patience).run()


class _RouterServer(uvicorn.Server):
    """A server whose signals end `serve`, not the process."""

    def __init__(
        self, config: uvicorn.Config, others: Sequence[socket.socket], picker: "Picker | None"
    ) -> None:
        super().__init__(config)
        self._others = others
        self._picker = picker

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections accepted at the last moment before all are asked to end."""
        for server in self.servers:
            server.close()
        for other in self._others:
            other.close()
        for _ in range(3):
            await asyncio.sleep(0)
        async with asyncio.TaskGroup() as tasks:
            stopping = None if self._picker is None else tasks.create_task(self._picker.stop())
            await super().shutdown(sockets)
            if stopping is not None and self.force_exit:
                stopping.cancel()

    async def help_others(self) -> None:
        """Accept connections waiting at siblings that died, are frozen or do not accept yet, until it
        stops."""
        loop = asyncio.get_running_loop()
        for other in self._others:
            other.setblocking(False)
        while not self.should_exit:
            await asyncio.sleep(HELP_SECONDS)
            for other in self._others:
                await self._take_waiting(loop, other)

    async def _take_waiting(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # nothing waits, it is gone already, or we have closed ours
            while self.started and not self.should_exit:
                connection, _ = listener.accept()
                connection.setblocking(False)
                await loop.connect_accepted_socket(self._protocol, connection)

    def _protocol(self) -> asyncio.Protocol:
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return make(config=self.config, server_state=self.server_state, app_state={})


class _AdminServer(uvicorn.Server):
    """A server that ends after the clients' server, when told."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    config: RouterConfig, listeners: Listeners, own_secret: bytes, place: ProcessSlot | None = None
) -> None:
    """Answer requests until a signal comes. Fails if following the fleet does.

    One of several routers accepts nothing before it has found replicas: another serves waiting connections
    sooner.
    """
    router = Router(config, rng=random.Random(), own_secret=own_secret)
    served = _server_config(router.apps.main, router.connections, config.drain_seconds)
    server = _RouterServer(served, listeners.others, router.picker)
    if router.picker is not None:
        await router.picker.bind()
    spare_long_lived_objects()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(router.run(), name="fleet")
        async with _admin_server(config, router.apps.admin, listeners):
            if place is not None:
                await _wait_for_replicas(router, place)
                place.accept()
            if router.picker is not None:
                await router.picker.start()
            logger.info("listening on %s", address_of(listeners.main))
            helping = tasks.create_task(server.help_others(), name="siblings") if listeners.others else None
            await server.serve(sockets=[listeners.main])
        following.cancel()
        if helping is not None:
            helping.cancel()
    await router.close()


async def _wait_for_replicas(router: Router, place: ProcessSlot) -> None:
    patient_until = time.monotonic() + FIRST_LOOK_SECONDS
    while not router.is_ready and (place.has_accepting_sibling or time.monotonic() < patient_until):  # noqa: ASYNC110
        await asyncio.sleep(LOOK_SECONDS)


@contextlib.asynccontextmanager
async def _admin_server(
    config: RouterConfig, app: ASGIApp | None, listeners: Listeners
) -> AsyncIterator[None]:
    """Serves operators while the block runs, if they have a listener of their own."""
    if listeners.admin is None or app is None:
        yield
        return
    logger.info("operators are served on %s", address_of(listeners.admin))
    server = _AdminServer(_server_config(app, Connections.of(config), ADMIN_DRAIN_SECONDS))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listeners.admin]), name="operators")
        try:
            yield
        finally:
            server.should_exit = True


def _server_config(app: ASGIApp, connections: Connections, drain_seconds: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        http=protocol_of(connections),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=drain_seconds,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
