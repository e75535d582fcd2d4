"""`python -m router`: one router as a process of its own.

Owns the listening socket, signals, logging and exit codes. The first SIGTERM stops accepting and lets
what runs finish; a second SIGINT stops at once.
"""

import asyncio
import contextlib
import gc
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence

import uvicorn
import uvloop

import replicas.protocol.lean_redis  # noqa: F401
from replicas.protocol.logs import set_up_logs
from replicas.protocol.settings import SettingsError, load_settings
from router.assembly import Router
from router.config import ENVIRONMENT_PREFIX, RouterConfig
from router.http_protocol import protocol_with_deadline

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_NOT_STARTED = 2

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""Longer than load balancers keep idle connections: they must be the ones to close."""


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
        with listening(config) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config, listener))
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_NOT_STARTED
    except ExceptionGroup:
        logger.critical("the router has failed", exc_info=True)
        return EXIT_FAILED
    return 0


@contextlib.contextmanager
def listening(config: RouterConfig) -> Iterator[socket.socket]:
    """The bound socket, before anything else is built. Raises SettingsError if that cannot be."""
    with contextlib.ExitStack() as stack:
        try:
            family, _, _, _, address = socket.getaddrinfo(
                config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            where = f"{config.host} port {config.port}"
            raise SettingsError(f"the router cannot listen on {where}: {error.strerror}") from error
        yield listener


class _Server(uvicorn.Server):
    """A signal ends `serve`, not the process: what comes after serving is ours to do."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


async def serve(config: RouterConfig, listener: socket.socket) -> None:
    """Answer requests until a signal comes. Fails if following the fleet does."""
    router = Router(config, rng=random.Random())
    server = _Server(
        uvicorn.Config(
            router.app,
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
            timeout_graceful_shutdown=config.drain_seconds,
        )
    )
    # All that exists now lives as long as the process: keep the collector from walking it again.
    gc.freeze()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(router.run(), name="fleet")
        host, port = listener.getsockname()[:2]
        logger.info("listening on http://%s:%d", host, port)
        await server.serve(sockets=[listener])
        following.cancel()
    await router.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
