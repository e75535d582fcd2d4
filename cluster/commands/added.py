"""AddedCommand: a command of `kvasir` that another package provides.

Owns the lookup, by entry points in the group `kvasir.commands`. So load tests may import the cluster, and the
cluster never imports them.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

GROUP = "kvasir.commands"


@dataclass(frozen=True, slots=True)
class AddedCommand:
    """A command; `add_arguments` and `run` import lazily, because `--help` shows every command."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Callable[[str], None]], int]
    """Run the command and return its exit status. Raises ClusterError."""

    has_run_directory: bool = True
    """Whether the command takes `--run-dir`."""


@cache
def added_commands() -> dict[str, AddedCommand]:
    return {each.name: each.load() for each in sorted(entry_points(group=GROUP), key=lambda each: each.name)}
