"""kvasir join: replicas for the servers that a fleet file's pools find, on this machine and without Ray.

Owns the arguments and the signals.
"""

import argparse
import asyncio
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster.errors import ClusterError
from cluster.fleet_file import parse_fleet
from cluster.local.joined_replicas import JoinedReplicas
from cluster.role_complaints import role_complaints
from replicas.process.settings import SettingsError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="a fleet file whose pools have engines")
    parser.add_argument("--redis-url", metavar="URL", help="default: $REDIS_URL, else the file's redis_url")
    parser.add_argument("--host", default="127.0.0.1", help="where replicas listen (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=int,
        default=50051,
        help="port of the first replica; others follow (default: %(default)s)",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=9100,
        help="port with the metrics of all; each replica has one of its own behind it (default: %(default)s)",
    )


def run(arguments: argparse.Namespace, environment: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Run until SIGTERM or SIGINT. Raises ClusterError."""
    try:
        redis_url = arguments.redis_url or environment.get("REDIS_URL")
        spec = parse_fleet(arguments.file.read_text(encoding="utf-8"), redis_url)
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cannot read {arguments.file}: {error}") from error
    except SettingsError as error:
        raise ClusterError(f"{arguments.file}: {error}") from error
    for pool in spec.pools:
        if pool.engines is None:
            raise ClusterError(f"pool {pool.name} has no engines, and kvasir join starts no others")
    for complaint in role_complaints(spec):
        say(complaint)
    replicas = JoinedReplicas(
        spec,
        environment,
        say,
        host=arguments.host,
        port=arguments.port,
        metrics_port=arguments.metrics_port,
    )
    try:
        asyncio.run(_until_signal(replicas))
    except OSError as error:
        raise ClusterError(f"port {arguments.metrics_port} cannot be used: {error}") from error
    return 0


async def _until_signal(replicas: JoinedReplicas) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await replicas.run(ended)
