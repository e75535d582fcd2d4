"""Figures of a benchmark run: percentiles, process costs, and the header that says what was measured where.

Owns how figures are computed and printed.
"""

import os
import platform
import statistics
import subprocess
import sys
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


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def proportional_set_bytes(pids: Sequence[int]) -> int:
    """Memory of several processes with shared pages counted once (PSS of Linux), in bytes."""
    total = 0
    for pid in pids:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        total += next(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


def print_header(title: str) -> None:
    """Print what makes a figure reproducible: command, commit, machine."""
    print(f"## {title}")
    print(f"command: python -m {_module()} {' '.join(sys.argv[1:])}")
    print(f"commit: {_commit() or 'unknown'}")
    print(f"machine: {os.cpu_count()} cores, {processor()}, Python {platform.python_version()}")


def _commit() -> str:
    """Empty outside of a checkout, or where there is no git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return described.stdout.strip()


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return "" if spec is None else spec.name.removesuffix(".__main__")


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
