"""The commands that load tests add to `kvasir`: loadtest, replay, simulate.

`pyproject.toml` names them as entry points. Imports what a command needs when that command runs.
"""

import argparse
from collections.abc import Callable

from cluster.commands.added import AddedCommand
from cluster.commands.running import router_url
from cluster.errors import ClusterError


def _add_loadtest(parser: argparse.ArgumentParser) -> None:
    from loadtests.named.plan import add_arguments

    add_arguments(parser)


def _loadtest(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    try:
        from loadtests.named.command import run
    except ModuleNotFoundError as error:
        raise ClusterError(
            f"loadtest needs {error.name}, which is not installed: pip install 'kvasir[loadtest]'"
        ) from error
    return run(arguments, say)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    from loadtests.load.replay_command import add_arguments

    add_arguments(parser)


def _replay(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    from loadtests.load.replay_command import run

    return run(arguments, router_url(arguments), say)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    from loadtests.simulation.command import add_arguments

    add_arguments(parser)


def _simulate(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    from loadtests.simulation.command import run

    return run(arguments, say)


LOADTEST = AddedCommand(
    "compare policies on the same traffic",
    _add_loadtest,
    _loadtest,
    has_run_directory=False,
)
REPLAY = AddedCommand("send recorded or generated traffic to a cluster", _add_replay, _replay)
SIMULATE = AddedCommand("try policies and fleet sizes in virtual time", _add_simulate, _simulate)
