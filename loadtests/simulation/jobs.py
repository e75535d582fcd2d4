"""Jobs of `kvasir simulate`: one run each, in this process or in one of several.

Owns the random numbers and the clocks that a simulation is given. Knows no command line.
"""

import concurrent.futures
import contextlib
import functools
import multiprocessing
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from cluster.errors import ClusterError
from loadtests.progress import showing
from loadtests.reports.fairness import fairness
from loadtests.reports.report import Slo, make_report
from loadtests.simulation.closed_loop import ClosedLoop
from loadtests.simulation.curve import Window, curve
from loadtests.simulation.fleet import VirtualFleet
from loadtests.simulation.options import FleetOptions
from loadtests.simulation.request import HashedRequest, prepare
from loadtests.simulation.session_figures import session_figures
from loadtests.simulation.summary import Summary, summarise
from loadtests.workloads import (
    Workload,
    first_requests,
    first_seconds,
    ideal_hits,
    scale,
    with_block_tokens,
    with_tenants,
    without_keys,
)
from loadtests.workloads.sessions import SessionFile, read_sessions
from loadtests.workloads.sources import open_workload
from replicas.scheduling.speed_meter import SpeedMeter


@dataclass(frozen=True, slots=True)
class Source:
    """A workload that any process can make for itself."""

    name: str
    seed: int
    parameters: tuple[tuple[str, float | int | str], ...]
    limit: int | None
    speed: float
    has_keys: bool = True
    """Without, every `prompt_cache_key` is left out."""
    num_tenants: int | None = None
    """None leaves them as they are."""
    flood: int = 1
    """Factor by which one of the tenants exceeds its own share."""
    block_tokens: int | None = None
    """The size of its blocks; None is the workload's own."""
    has_sessions: bool = False
    """The file's sessions are served in a closed loop. Then the fields between are the defaults."""
    seconds: float | None = None
    """End of the trace that is simulated, in seconds."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run. `label` is the policy, or the policy and the value that a sweep tries."""

    label: tuple[str, float | None]
    source: Source
    options: FleetOptions
    warm_up: float
    slo: Slo
    """Limits of `good_both` and `goodput_both`; other figures heed the limit of TTFT alone."""
    window_seconds: float | None = None
    """Interval of the curve of hits, if one is wanted."""


def run_all(jobs: Sequence[Job], num_processes: int) -> list[Summary]:
    """In their order. Says now and then how far it is."""
    if num_processes == 1 or len(jobs) == 1:
        return [_run(job, f"run {number} of {len(jobs)}, ") for number, job in enumerate(jobs, start=1)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(num_processes, len(jobs)), context) as pool:
        running = [pool.submit(_run, job) for job in jobs]
        with showing(
            lambda seconds: f"{seconds:6.0f} s  {sum(map(Future.done, running))} of {len(jobs)} runs done"
        ):
            return [each.result() for each in running]


def _run(job: Job, place: str | None = None) -> Summary:
    """Serve one fleet from beginning to end. Equal jobs give equal figures, except real times.

    `place` is the job's among others; with it, progress is shown.
    """
    if job.source.has_sessions:
        prefix = None if place is None else f"{place}{job.label[0]}"
        return run_sessions(load_sessions(job.source.name), job.options, job.source.seed, job.slo, prefix)
    started = time.perf_counter()
    prepared = _prepared(job.source)
    num_warm_up = int(len(prepared) * job.warm_up)
    fleet = _new_fleet(job.options, random.Random(job.source.seed))

    def line(seconds: float) -> str:
        done = f"{fleet.num_ended} of {len(prepared)} requests done"
        return f"{seconds:6.0f} s  {place}{job.label[0]}: {done}"

    with contextlib.nullcontext() if place is None else showing(line):
        result = fleet.serve(prepared, num_warm_up=num_warm_up)
    counted, slo = result.records[num_warm_up:], replace(job.slo, tpot=None)
    report = make_report(counted, slo, num_replicas=job.options.num_replicas)
    windows: tuple[Window, ...] = ()
    if job.window_seconds is not None:
        windows = curve(load(job.source), result.records, result.losses, job.window_seconds)
    return summarise(
        result,
        report,
        ideal_hit_rate=_ideal_hit_rate(job.source, num_warm_up),
        wall_seconds=time.perf_counter() - started,
        windows=windows,
        fairness=fairness(counted, slo),
        both=job.slo,
    )


def run_sessions(
    file: SessionFile, options: FleetOptions, seed: int, slo: Slo, name: str | None = None
) -> Summary:
    """Serve every session to its end. With a `name`, progress is shown. Raises ClusterError."""
    started = time.perf_counter()
    capacity = options.shape.capacity_tokens
    num_turns = sum(len(session.turns) for session in file.sessions)
    longest = max(
        turn.num_input_tokens + turn.num_output_tokens for session in file.sessions for turn in session.turns
    )
    if longest > capacity:
        raise ClusterError(f"a turn has {longest} tokens; the cache of a replica holds {capacity}")
    rng = random.Random(seed)
    fleet = _new_fleet(options, rng)
    loop = ClosedLoop(fleet, file, random.Random(rng.getrandbits(64)))

    def line(seconds: float) -> str:
        return f"{seconds:6.0f} s  {name}: {len(loop.result.turns)} of {num_turns} turns done"

    with contextlib.nullcontext() if name is None else showing(line):
        served = loop.serve()
    figures = session_figures(
        loop.result, file, options.shape.cost, num_replicas=options.num_replicas, both=slo
    )
    figures |= {
        "num_retries": served.num_retries,
        "num_resumes": served.num_resumes,
        "num_preemptions": served.num_preemptions,
        "num_rereads": served.num_rereads,
        "decision_us": 1e6 * served.decision_seconds / served.num_decisions,
        "wall_seconds": time.perf_counter() - started,
    }
    return Summary(figures, dict(served.reasons))


def _new_fleet(options: FleetOptions, rng: random.Random) -> VirtualFleet:
    return VirtualFleet(
        options,
        rng=rng,
        new_rng=lambda: random.Random(rng.getrandbits(64)),
        new_meter=lambda: SpeedMeter(options.shape.capacity_tokens),
        stopwatch=time.perf_counter,
    )


@functools.lru_cache(maxsize=2)
def load_sessions(path: str) -> SessionFile:
    try:
        return read_sessions(path)
    except (ValueError, OSError, EOFError) as error:
        raise ClusterError(f"{path}: {error}") from error


@functools.lru_cache(maxsize=2)
def _prepared(source: Source) -> list[HashedRequest]:
    return prepare(load(source))


@functools.lru_cache(maxsize=2)
def _ideal_hit_rate(source: Source, num_warm_up: int) -> float:
    return ideal_hits(load(source), warm_up=num_warm_up).token_hit_rate


@functools.lru_cache(maxsize=2)
def load(source: Source) -> Workload:
    try:
        workload = open_workload(source.name, source.seed, dict(source.parameters))
    except ValueError as error:
        raise ClusterError(str(error)) from error
    if source.limit is not None:
        workload = first_requests(workload, source.limit)
    if source.seconds is not None:
        workload = first_seconds(workload, source.seconds)
    if not workload.requests:
        raise ClusterError(f"{source.name} has no requests")
    if source.block_tokens is not None:
        try:
            workload = with_block_tokens(workload, source.block_tokens)
        except ValueError as error:
            raise ClusterError(f"{source.name}: {error}") from error
    if not source.has_keys:
        workload = without_keys(workload)
    if source.num_tenants is not None:
        workload = with_tenants(workload, source.num_tenants, source.flood)
    return scale(workload, source.speed)
