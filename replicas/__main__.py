"""`python -m replicas`: one replica as a process of its own.

Owns signals, logging and exit codes. The first SIGTERM or SIGINT drains, the second stops at once.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence

import uvloop

import replicas.process.lean_redis  # noqa: F401
from replicas.checkpoints.model_config import CheckpointError
from replicas.config import ENVIRONMENT_PREFIX, ReplicaConfig
from replicas.errors import ReplicaError, StartupError
from replicas.host import ReplicaHost
from replicas.process.logs import set_up_logs
from replicas.process.settings import SettingsError, load_settings
from replicas.process.standstill import end_on_standstill
from replicas.vllm_engine.environment import vllm_environment

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_NOT_STARTED = 2


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run until told to stop. Returns 0 after an orderly end, 1 if it died while serving, 2 if it did not
    start."""
    set_up_logs()
    try:
        config = load_settings(
            ReplicaConfig,
            arguments=arguments,
            environment=environment,
            prefix=ENVIRONMENT_PREFIX,
            program="python -m replicas",
            description="Serve one model from one engine, for routers to find.",
        )
        set_up_logs(
            config.log_format, config.log_level, fields={"service": "replica", "replica": config.replica_id}
        )
        if config.engine == "vllm":
            os.environ.update(vllm_environment(config.num_threads, config.engine_args, os.environ))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config))
    except (SettingsError, CheckpointError, StartupError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_NOT_STARTED
    except ReplicaError as error:
        logger.critical("%s", error)
        return EXIT_FAILED
    return 0


async def serve(config: ReplicaConfig) -> None:
    """Host the replica until it ends. Raises the cause, unless that was a signal."""
    host = ReplicaHost(config)
    signals: asyncio.Queue[None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, None)
    leaving = asyncio.create_task(_leave(host, signals), name="signals")
    try:
        async with end_on_standstill(config.standstill_seconds):
            await host.start()
            await host.wait_dead()
    finally:
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving


async def _leave(host: ReplicaHost, signals: "asyncio.Queue[None]") -> None:
    await signals.get()
    async with asyncio.TaskGroup() as group:
        group.create_task(host.drain())
        await signals.get()
        logger.warning("stopping at once")
        await host.stop()


if __name__ == "__main__":
    status = main(sys.argv[1:], os.environ)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)  # an engine thread whose step never returns would hold the interpreter's end up
