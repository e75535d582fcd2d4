"""`kvasir up`: from a parsed command line to a running LocalCluster, and back on a signal.

Owns the reading of options and the signals. What is started, and how, is `local.py`'s.
"""

import argparse
import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cluster.errors import ClusterError
from cluster.local import LocalCluster, LocalOptions
from cluster.run_directory import RunDirectory
from replicas.config import ReplicaConfig
from replicas.protocol.settings import SettingsError, build
from router.routing.policies import POLICIES

OWN_SETTINGS: Mapping[str, str] = {
    "replica_id": "kvasir up names the replicas itself",
    "redis_url": "use the environment variable REDIS_URL",
    "host": "replicas of a local cluster listen on loopback",
    "port": "replicas of a local cluster take free ports",
    "engine": "use --engine",
    "model": "use --model",
    "model_name": "use --model-name",
}


def options_from(
    arguments: argparse.Namespace, directory: RunDirectory, environment: Mapping[str, str]
) -> LocalOptions:
    """Raises ClusterError for what makes no sense."""
    if arguments.policy not in POLICIES:
        raise ClusterError(f"there is no policy {arguments.policy}; there are {', '.join(sorted(POLICIES))}")
    values = _settings(arguments.set)
    model = str(Path(arguments.model).absolute()) if arguments.model else None
    values |= {"engine": arguments.engine, "model": model, "model_name": arguments.model_name}
    try:
        replica = build(ReplicaConfig, values)
    except SettingsError as error:
        raise ClusterError(str(error)) from error
    return LocalOptions(
        run_directory=directory,
        num_replicas=arguments.replicas,
        replica=replica,
        host=arguments.host,
        port=arguments.port,
        policy=arguments.policy,
        redis_url=environment.get("REDIS_URL") or None,
        environment=environment,
    )


def _settings(pairs: Sequence[str]) -> dict[str, str | None]:
    values: dict[str, str | None] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise ClusterError(f"--set takes NAME=VALUE, not {pair}")
        if name in OWN_SETTINGS:
            raise ClusterError(f"--set cannot change {name}: {OWN_SETTINGS[name]}")
        values[name] = value
    return values


def serve(options: LocalOptions, say: Callable[[str], None]) -> int:
    """Run the cluster until SIGINT, SIGTERM or SIGHUP. Returns the exit code."""
    try:
        asyncio.run(_serve(LocalCluster(options, say)))
    except asyncio.CancelledError:
        say("Everything is stopped.")
    return 0


async def _serve(cluster: LocalCluster) -> None:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def listen() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, task.cancel)

    listen()
    await cluster.run(on_ray_started=listen)
