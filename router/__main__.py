"""`python -m router`: one router as a process of its own.

Owns signals, logging and exit codes. The first SIGTERM stops accepting and lets what runs finish, while
operators may still look; a second SIGINT stops at once.
"""

import asyncio
import contextlib
import gc
import logging
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

import uvicorn
import uvloop
from starlette.types import ASGIApp

import replicas.protocol.lean_redis  # noqa: F401
from replicas.protocol.logs import set_up_logs
from replicas.protocol.settings import SettingsError, load_settings
from router.assembly import Router
from router.config import ENVIRONMENT_PREFIX, RouterConfig
from router.http_protocol import protocol_with_deadline
from router.listeners import BACKLOG, Listeners, address_of, listening

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_NOT_STARTED = 2

KEEP_ALIVE_SECONDS = 75
"""Longer than load balancers keep idle connections: they must be the ones to close."""

ADMIN_DRAIN_SECONDS = 1


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run until told to stop. 0: left in order; 1: died while serving; 2: did not start."""
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
        with listening(config) as listeners, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config, listeners))
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_NOT_STARTED
    except ExceptionGroup:
        logger.critical("the router has failed", exc_info=True)
        return EXIT_FAILED
    return 0


class _Server(uvicorn.Server):
    """A signal ends `serve`, not the process: what comes after serving is ours to do."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


class _AdminServer(uvicorn.Server):
    """Ends after the clients' server, and when that says so."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(config: RouterConfig, listeners: Listeners) -> None:
    """Answer requests until a signal comes. Fails if following the fleet does."""
    router = Router(config, rng=random.Random())
    server = _Server(_server_config(config, router.apps.main, config.drain_seconds))
    # All that exists now lives as long as the process: keep the collector from walking it again.
    gc.freeze()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(router.run(), name="fleet")
        logger.info("listening on %s", address_of(listeners.main))
        async with _admin_server(config, router.apps.admin, listeners):
            await server.serve(sockets=[listeners.main])
        following.cancel()
    await router.close()


@contextlib.asynccontextmanager
async def _admin_server(
    config: RouterConfig, app: ASGIApp | None, listeners: Listeners
) -> AsyncIterator[None]:
    """Serves operators while the block runs, if they have a listener of their own."""
    if listeners.admin is None or app is None:
        yield
        return
    logger.info("operators are served on %s", address_of(listeners.admin))
    server = _AdminServer(_server_config(config, app, ADMIN_DRAIN_SECONDS))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listeners.admin]), name="operators")
        try:
            yield
        finally:
            server.should_exit = True


def _server_config(config: RouterConfig, app: ASGIApp, drain_seconds: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        http=protocol_with_deadline(config.upload_seconds),
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
