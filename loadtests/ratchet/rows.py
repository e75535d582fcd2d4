"""Rows: small seeded workloads, the fleets that serve them in virtual time, and the figures of each.

Owns which there are. How much a figure may change is `verdict.py`'s.
"""

import functools
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from loadtests.ratchet.loads import H100, LOADS, ROOM_LOADS, TIER_LOADS, WAYS, Load
from loadtests.reports.report import Slo
from loadtests.simulation.jobs import Job, Source, load, load_sessions, run_all
from loadtests.simulation.options import FleetOptions
from loadtests.simulation.shape import ReplicaShape, TierShape
from loadtests.workloads.sessions import SESSIONS
from replicas.config import DEFAULT_MAX_RUNNING
from replicas.simulated_engine.hardware import HARDWARE
from router.queue.held import QueueRules

SEEDS = (1, 2)
"""A figure is the mean over them: one run's p99 moves by itself where a near tie is decided otherwise."""

WARM_UP = 0.1
SLO = Slo(ttft=2.0)

FIGURES = {
    "hits": "token_hit_rate",
    "p50": "ttft_p50",
    "p90": "ttft_p90",
    "p99": "ttft_p99",
    "goodput": "goodput_arriving",
    "failed": "num_failed",
}
"""Names of the file, and of a summary. Goodput is per second of arrivals, because the last answers take
longer or shorter by chance.
"""

SESSION_SEEDS = (1, 2, 3)
SESSION_FIGURES = {
    "session": "session_mean",
    "hits": "repeatable_cached",
    "p50": "ttft_p50",
    "p90": "ttft_p90",
    "p99": "ttft_p99",
    "failed": "num_refusals",
}
H100X4 = HARDWARE["h100x4-70b"]
SESSION_TIERS = TierShape(
    H100X4.bytes_per_token, host_bytes=1e12, disk_bytes=8e12, pull_bytes_per_second=10e9
)

OVERLOADED = ("conversations", "documents", "tool agents")
OVERLOAD_FIGURES = ("hits", "goodput")
"""Under overload a fleet has to refuse, and what counts is how many are served in time, next to the same at
the load that it carries. Only while new sessions come: afterwards an overload ends."""


@dataclass(frozen=True, slots=True)
class Row:
    """`times` is how many times the load's own rate arrives, for as long as that takes once. With
    `is_overload`, or next to one, what arrives when no new sessions come is left out.
    """

    load: Load
    num_routers: int = 1
    has_queue: bool = True
    times: int = 1
    is_overload: bool = False
    tiers: TierShape | None = None

    @property
    def without_queue(self) -> "Row":
        return replace(self, has_queue=False)

    @property
    def figures(self) -> Mapping[str, float]:
        return _figures(self)


def _rows() -> Iterator[tuple[str, Row]]:
    for name, each in LOADS.items():
        yield f"{name}, 1 router", Row(each)
        yield f"{name}, 4 routers", Row(each, num_routers=4)
    for name in OVERLOADED:
        for times in (1, 2, 4):
            for num_routers, words in ((1, "1 router"), (4, "4 routers")):
                yield (
                    f"{name} x{times}, {words}",
                    Row(LOADS[name], num_routers, times=times, is_overload=True),
                )
    for name, each in ROOM_LOADS.items():
        for times in (1, 2):
            for num_routers, words in ((1, "1 router"), (4, "4 routers")):
                yield f"{name} x{times}, {words}", Row(each, num_routers, times=times, is_overload=True)
    for name, each in TIER_LOADS.items():
        for way, tiers in WAYS.items():
            yield f"{name}, {way}", Row(each, tiers=tiers)


@dataclass(frozen=True, slots=True)
class SessionRow:
    """Sessions of coding agents in a closed loop, on the devices alone or with tiers."""

    num_lanes: int
    tiers: TierShape | None = None

    @property
    def figures(self) -> Mapping[str, float]:
        return _session_figures(self)


SESSION_ROWS = {
    f"sessions in {num_lanes} lanes, {way}": SessionRow(num_lanes, tiers)
    for num_lanes in (32, 48)
    for way, tiers in (("device alone", None), ("host memory, disk and pulls", SESSION_TIERS))
}

ROWS: Mapping[str, Row | SessionRow] = {**dict(_rows()), **SESSION_ROWS}
CARRIED = {name: row for name, row in _rows() if not row.is_overload and row.tiers is None}
"""Rows whose load the fleet carries: the queue must not change these."""


@functools.cache
def _session_figures(row: SessionRow) -> Mapping[str, float]:
    jobs = [_session_job(row, seed) for seed in SESSION_SEEDS]
    summaries = run_all(jobs, num_processes=1)
    found = {}
    for name, figure in SESSION_FIGURES.items():
        values = [summary.figures[figure] for summary in summaries]
        found[name] = statistics.fmean(value for value in values if value is not None)
    return found


def _session_job(row: SessionRow, seed: int) -> Job:
    name = str(SESSIONS / f"sessions-{row.num_lanes}-s{seed}.jsonl.gz")
    source = Source(name, seed, (), None, 1.0, has_sessions=True)
    block_size = load_sessions(name).block_tokens
    shape = ReplicaShape(
        H100X4.cost,
        H100X4.cache_tokens // block_size,
        block_size,
        max_batched_tokens=H100X4.max_batched_tokens,
        max_running=DEFAULT_MAX_RUNNING,
        tiers=row.tiers,
    )
    return Job(("kvasir", None), source, FleetOptions(shape, queue=QueueRules()), 0.0, Slo())


@functools.cache
def _figures(row: Row) -> Mapping[str, float]:
    summaries = run_all([_job(row, seed) for seed in SEEDS], num_processes=1)
    found: dict[str, float] = {}
    for name in OVERLOAD_FIGURES if row.is_overload else FIGURES:
        values = [summary.figures[FIGURES[name]] for summary in summaries]
        found[name] = statistics.fmean(value for value in values if value is not None)
    return found


def _job(row: Row, seed: int) -> Job:
    source = Source(
        row.load.generator,
        seed,
        row.load.parameters_of(row.times),
        limit=None,
        speed=1.0,
        seconds=row.load.seconds if row.is_overload else None,
    )
    block_size = load(source).block_tokens
    shape = ReplicaShape(
        H100.cost,
        row.load.cache_tokens // block_size,
        block_size,
        max_batched_tokens=H100.max_batched_tokens,
        max_running=DEFAULT_MAX_RUNNING,
        decodes_beside=row.load.decodes_beside,
        tiers=row.tiers,
    )
    options = FleetOptions(
        shape,
        num_replicas=row.load.num_replicas,
        num_routers=row.num_routers,
        queue=QueueRules() if row.has_queue else None,
    )
    return Job(("kvasir", None), source, options, WARM_UP, SLO)
