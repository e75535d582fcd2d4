"""AddedCommand: a command of `kvasir` that another package brings along.

Owns how they are found: by the entry points of what is installed, in the group `kvasir.commands`. So the load
tests may import the cluster, and the cluster need not import them.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

GROUP = "kvasir.commands"


@dataclass(frozen=True, slots=True)
class AddedCommand:
    """`add_arguments` and `run` import what they need when they are called: `--help` shows every command."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Callable[[str], None]], int]
    """Returns the exit status. Raises ClusterError."""

    has_run_directory: bool = True
    """Whether `--run-dir` is an option of it."""


@cache
def added_commands() -> dict[str, AddedCommand]:
    return {each.name: each.load() for each in sorted(entry_points(group=GROUP), key=lambda each: each.name)}
