"""Figures of a benchmark run: percentiles, process costs, and the header that says what was measured where.

Owns how figures are computed and printed.
"""

import contextlib
import os
import platform
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In the unit of the samples."""

    p50: float
    p90: float
    p99: float
    num_samples: int


def percentiles(samples: Sequence[float]) -> Percentiles:
    """By linear interpolation between order statistics. Raises ValueError without samples."""
    if not samples:
        raise ValueError("there are no samples")
    if len(samples) == 1:
        return Percentiles(samples[0], samples[0], samples[0], 1)
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    return Percentiles(cuts[49], cuts[89], cuts[98], len(samples))


def milliseconds(samples: Sequence[float]) -> str:
    found = percentiles(samples)
    return f"p50 {found.p50 * 1e3:8.2f} ms   p90 {found.p90 * 1e3:8.2f} ms   p99 {found.p99 * 1e3:8.2f} ms"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table: the first column to the left, the others to the right."""
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([label.ljust(first), *map(str.rjust, cells, widths)]).rstrip() for label, *cells in rows
    )


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a process and its descendants.

    Resident pages of files come and go. Proportional counts a page that several processes share once.
    """

    resident: int = 0
    anonymous: int = 0
    proportional: int = 0


def memory_of(pid: int) -> Memory:
    """Sum a process and its children (Linux only), skipping ended ones. Raises psutil.NoSuchProcess."""
    sums: Counter[str] = Counter()
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
            sums.update({line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]})
    return Memory(sums["Rss"] * 1024, sums["Anonymous"] * 1024, sums["Pss"] * 1024)


def print_header(title: str) -> None:
    """Print what makes a figure reproducible: command, commit, machine."""
    print(f"## {title}")
    print(f"command: python -m {_module()} {' '.join(sys.argv[1:])}")
    print(f"commit: {commit_of(Path(__file__)) or 'unknown'}")
    print(f"machine: {os.cpu_count()} cores, {processor()}, Python {platform.python_version()}")


def commit_of(file: Path) -> str:
    """Return the commit that a source file belongs to, "+edits" if tracked files have changed since; else
    empty."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=file.parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        commit = git("rev-parse", "HEAD")
        has_edits = bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit + "+edits" if has_edits else commit


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return "" if spec is None else spec.name.removesuffix(".__main__")


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
