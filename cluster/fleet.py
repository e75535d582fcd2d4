"""kvasir fleet: a fleet on any Ray cluster, kept as a file says by a controller that lives there.

Owns the arguments, what is printed and exit codes. Decides nothing of the fleet: the controller does,
and refuses what cannot be before anything is touched.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster.errors import ClusterError

Say = Callable[[str], None]

WAIT_SECONDS = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(
        dest="fleet_command", metavar="COMMAND", required=True, parser_class=type(parser)
    )

    def add(name: str, what: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, allow_abbrev=False, help=what, description=what)
        command.add_argument(
            "--address",
            metavar="RAY",
            help="the Ray cluster, host:port (default: RAY_ADDRESS, else the one on this machine)",
        )
        return command

    def add_waiting(command: argparse.ArgumentParser) -> None:
        command.add_argument(
            "--no-wait", action="store_true", help="do not wait until the fleet is as it should be"
        )
        command.add_argument(
            "--timeout",
            type=_seconds,
            default=WAIT_SECONDS,
            metavar="SECONDS",
            help="wait no longer than that; the controller goes on (default: %(default)g)",
        )

    apply = add("apply", "make the fleet what FILE says, and keep it so")
    apply.add_argument("file", metavar="FILE", type=Path, help="YAML; deploy/fleet.yaml explains every field")
    apply.add_argument("--redis-url", metavar="URL", help="goes before the file's redis_url")
    apply.add_argument("--dry-run", action="store_true", help="only say whether the file would be taken")
    add_waiting(apply)
    status = add("status", "show pools and replicas, and how busy they are")
    status.add_argument("--json", action="store_true", help="print it as JSON")
    scale = add("scale", "give a pool another number of replicas, until the next apply")
    scale.add_argument("pool", metavar="POOL")
    scale.add_argument("num_replicas", metavar="N", type=_count)
    add_waiting(scale)
    drain = add("drain", "let a replica finish what runs and leave; a fresh one takes its place")
    drain.add_argument("replica", metavar="REPLICA")
    add_waiting(drain)
    rollout = add("rollout", "make a pool's replicas anew, a few at a time, with other settings or the same")
    rollout.add_argument("pool", metavar="POOL")
    rollout.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting; repeatable"
    )
    add_waiting(rollout)
    stop = add("stop", "end all replicas and the controller; requests that run are aborted")
    stop.add_argument("--timeout", type=_seconds, default=60.0, metavar="SECONDS")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"needs a number of seconds above 0, not {text}")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"needs a whole number, not {text}")
    return int(text)


def run(arguments: argparse.Namespace, environment: Mapping[str, str], say: Say) -> int:
    """The command. Raises ClusterError."""
    raise ClusterError(f"fleet {arguments.fleet_command} does nothing yet")
