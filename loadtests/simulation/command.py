"""`kvasir simulate`: which workload on which fleets, how often, and what to print.

Owns the command's arguments and its files. How a run is made is `jobs.py`'s, what happens in
a simulated fleet is its neighbours'.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cluster.errors import ClusterError
from cluster.sizes import size
from loadtests.arguments import count, number, positive, rate, share
from loadtests.reports.report import Slo
from loadtests.simulation.curve import BACK_POINTS, back_after, curve_table, ideal_hits_of, left_hits_of
from loadtests.simulation.jobs import Job, Source, load, load_sessions, run_all
from loadtests.simulation.options import (
    Autoscale,
    Delays,
    FleetOptions,
    PoolShape,
    parse_autoscale,
    parse_kill,
    parse_outage,
    parse_pools,
)
from loadtests.simulation.perfect import PERFECT
from loadtests.simulation.shape import ReplicaShape, TierShape
from loadtests.simulation.summary import Summary, median, table, tenant_table
from loadtests.simulation.sweep import SWEEPS, answer, plot
from loadtests.workloads import GENERATORS, Workload
from loadtests.workloads.sessions import SessionFile, is_session_file
from loadtests.workloads.sources import typed_parameters
from replicas.config import DEFAULT_MAX_RUNNING, DEFAULT_SLO_TPOT
from replicas.kvcache.cache_groups import CacheGroup
from replicas.protocol.status import Role
from replicas.simulated_engine.groups import MODELS, alignment_of, num_blocks_for, parse_groups
from replicas.simulated_engine.hardware import FREE, HARDWARE
from router.queue.held import QueueRules
from router.routing.cost import CostParameters
from router.routing.policies import POLICIES

TIMED_HARDWARE = tuple(name for name, hardware in HARDWARE.items() if hardware.cost != FREE)
"""In virtual time, what costs nothing would serve everything at once."""

MAX_WINDOWS = 10_000
"""For a curve of hits over time."""

NOT_FOR_SESSIONS = (
    *("qps", "set", "speed", "limit", "tenants", "flood", "without_keys"),
    *("warm_up", "slo_share", "deadlines", "sweep", "values", "window"),
    *("autoscale", "groups", "retention", "route_by_reach"),
)
"""Options that choose among arrivals, sweep, or need other blocks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve a trace, recorded sessions or a generated workload on simulated replicas, with the router's "
        "real decisions, in virtual time: what a policy is worth, and how many replicas it takes."
    )
    _add_workload(parser)
    _add_fleet(parser)
    _add_queue(parser)
    _add_accidents(parser)
    add = parser.add_argument
    add("--seed", type=int, action="append", metavar="N", help="repeatable: medians over all (default: 1)")
    add(
        "--warm-up",
        type=share,
        default=0.1,
        metavar="SHARE",
        help="share of the beginning that does not count (default: 0.1)",
    )
    add("--slo-ttft", type=positive, default=2.0, metavar="S", help="TTFT limit of the SLO (default: 2)")
    add(
        "--slo-tpot",
        type=positive,
        default=0.05,
        metavar="S",
        help="limit of an answer's mean time between tokens, for goodput within both (default: 0.05)",
    )
    add(
        "--slo-share",
        type=share,
        default=0.9,
        metavar="SHARE",
        help="share of requests that must meet the SLO (default: 0.9)",
    )
    add("--sweep", choices=tuple(SWEEPS), help="vary this, and find out how much of it is needed")
    add("--values", type=_numbers, metavar="A,B,…", help="the values that a sweep tries")
    add("--window", type=positive, metavar="S", help="also print hits over time, in windows of S seconds")
    add("--jobs", type=count, default=2, metavar="N", help="processes for several runs (default: 2)")
    add("--json", type=Path, metavar="FILE", help="also write the figures to this file")


def _add_workload(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "workload",
        metavar="TRACE",
        help=f"a file in Mooncake's format or of sessions, or one of {', '.join(GENERATORS)}",
    )
    add("--qps", type=positive, metavar="X", help="a generator's requests (or sessions) per second")
    add(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a generator's parameter; repeatable"
    )
    add("--speed", type=positive, default=1.0, metavar="X", help="speed up arrivals by this factor")
    add("--limit", type=count, metavar="N", help="only the first N requests")
    add("--tenants", type=count, metavar="N", help="deal the sessions to N tenants, who share nothing")
    add(
        "--flood",
        type=count,
        default=1,
        metavar="X",
        help="the first of the tenants sends X times what is its own (default: 1)",
    )
    add("--without-keys", action="store_true", help="ignore the requests' prompt_cache_key")


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--policy",
        default="kvasir",
        metavar="NAME,…",
        help=f"one, several, or all; {PERFECT} is kvasir knowing all caches as they are (default: kvasir)",
    )
    prices = CostParameters()
    for name in ("room_price", "delay_price", "split_room_price"):
        default, flag = getattr(prices, name), "--" + name.replace("_", "-")
        add(flag, type=float, default=default, metavar="X", help=f"as the router's (default: {default:g})")
    add("--replicas", type=count, default=8, metavar="N", help="default: 8")
    add(
        "--autoscale",
        type=_autoscale,
        metavar="MIN:MAX:TOKENS[:SECONDS]",
        help="as many replicas as prompt tokens wait, TOKENS for each; a new one is there after SECONDS "
        "(default: as many as --replicas says; SECONDS: 60)",
    )
    add("--routers", type=count, default=1, metavar="N", help="default: 1")
    add("--hardware", choices=TIMED_HARDWARE, default="h100-8b", help="default: h100-8b")
    add(
        "--capacity",
        type=count,
        metavar="TOKENS",
        help="tokens that a replica's KV cache holds (default: the hardware's)",
    )
    add(
        "--decodes-beside",
        action="store_true",
        help="prefill and decode do not slow each other down, as in most published comparisons",
    )
    add(
        "--reads-shared-once",
        action="store_true",
        help="a decode step reads a block once for all requests that share it",
    )
    add(
        "--counts-arrivals",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether a replica's load counts a request at its arrival, or only after the running step",
    )
    add("--index-stride", type=count, default=128, metavar="N", help="default: 128")
    _add_steps(parser)
    _add_pools(parser)
    _add_groups(parser)
    _add_tiers(parser)
    _add_delays(parser)


def _promise(text: str) -> float | None:
    return None if text == "none" else positive(text)


def _add_steps(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max-batched-tokens", type=count, metavar="N", help="per step (default: the hardware's)")
    add(
        "--step-tpot",
        type=_promise,
        default=DEFAULT_SLO_TPOT,
        metavar="S",
        help="as the replicas' setting slo_tpot: a step with decoding requests takes so long at most; none "
        f"is no bound (default: {DEFAULT_SLO_TPOT:g})",
    )
    add(
        "--max-running",
        type=count,
        default=DEFAULT_MAX_RUNNING,
        metavar="N",
        help=f"per replica (default: {DEFAULT_MAX_RUNNING})",
    )


def _add_pools(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--split-delay-price",
        type=float,
        metavar="X",
        help="as the router's, at decoders; a high one splits every prompt (default: as --delay-price)",
    )
    add(
        "--pools",
        type=_pools,
        default=(),
        metavar="ROLE:REPLICAS[:TOKENS],…",
        help="in place of --replicas, some that prefill, decode or do both, with TOKENS of a step; prompts "
        "are split by pulls, which --pull allows (default: each replica does both)",
    )


def _add_groups(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--groups",
        metavar="SHAPE",
        help=f"layers keep different KV: {', '.join(MODELS)}, or groups as the setting simulated_groups",
    )
    add(
        "--retention",
        type=int,
        default=0,
        metavar="TOKENS",
        help="with --groups, vLLM's prefix_cache_retention_interval (default: 0)",
    )
    add(
        "--route-by-reach",
        action="store_true",
        help="with --groups, routers take what full attention has for a hit, as if they knew no points",
    )


def _add_tiers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--ram",
        type=size,
        metavar="SIZE",
        help="host memory for KV, a replica (default: none)",
    )
    add("--disk", type=size, default=0, metavar="SIZE", help="disk for KV, a replica (default: none)")
    add("--pull", type=rate, metavar="RATE", help="between replicas, as 10GB/s (default: no pulls)")
    add(
        "--host-rate",
        type=rate,
        default=25e9,
        metavar="RATE",
        help="device to host memory (default: 25GB/s)",
    )
    add("--disk-rate", type=rate, default=5e9, metavar="RATE", help="of the disk (default: 5GB/s)")
    add(
        "--lease",
        type=count,
        metavar="S",
        help="every prompt is leased for S seconds after each use (default: none is)",
    )
    add("--write-rate", type=rate, metavar="RATE", help="most written to the disk (default: no bound)")


def _add_delays(parser: argparse.ArgumentParser) -> None:
    add, delays = parser.add_argument, Delays()
    for name, what in (
        ("event", "seconds until a router knows of a change in a cache"),
        ("load", "seconds until a router knows a replica's load"),
        ("network", "seconds one way between router and replica"),
    ):
        default = getattr(delays, name)
        add(
            f"--{name}-delay",
            type=_seconds,
            default=default,
            metavar="S",
            help=f"{what} (default: {default:g})",
        )
    add(
        "--snapshot-interval",
        type=_seconds,
        default=delays.snapshot_interval,
        metavar="S",
        help="between two snapshots of a replica's load (default: 0, with every step)",
    )


def _add_queue(parser: argparse.ArgumentParser) -> None:
    add, rules = parser.add_argument, QueueRules()
    add(
        "--queue",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether routers hold back what no replica can begin soon, in fair order over tenants",
    )
    add(
        "--programs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether routers place and admit the turns of a program by what its next ones will need",
    )
    add(
        "--queue-target",
        type=positive,
        default=rules.target_seconds,
        metavar="S",
        help=f"prompts that a replica may have and still get more (default: {rules.target_seconds:g})",
    )
    add(
        "--queue-seconds",
        type=positive,
        default=rules.longest_seconds,
        metavar="S",
        help="a request that would be held for longer is refused, whether or not it has a deadline "
        f"(default: {rules.longest_seconds:g})",
    )
    add(
        "--deadlines",
        action="store_true",
        help="routers know of --slo-ttft, and refuse what would come later",
    )


def _add_accidents(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--kill",
        action="append",
        default=[],
        metavar="REPLICA@SECONDS[:BACK_AFTER[:new|:drained]]",
        help="a replica dies, and comes back with its disk, or new on another machine; with drained it "
        "drains for 30 s first and hands over what it has leased; repeatable",
    )
    add("--redis-down", action="append", default=[], metavar="FROM-TO", help="in seconds; repeatable")
    add("--no-announcements", action="store_true", help="routers hear of blocks only when they are computed")
    add(
        "--drop-events",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="share of cache changes that each router misses",
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Simulate and report. Raises ClusterError."""
    policies = _policies(arguments)
    seeds = arguments.seed or [1]
    has_sessions = _has_sessions(arguments)
    if arguments.flood > 1 and arguments.tenants is None:
        raise ClusterError("--flood needs --tenants, one of which floods")
    if arguments.pools and (arguments.autoscale is not None or arguments.sweep == "replicas"):
        raise ClusterError(
            "--pools set the number of replicas: they go without --autoscale and --sweep replicas"
        )
    if arguments.autoscale is not None and arguments.sweep == "replicas":
        raise ClusterError("--autoscale sets the number of replicas: it goes without --sweep replicas")
    if (arguments.sweep is None) != (arguments.values is None):
        raise ClusterError("--sweep and --values need each other")
    jobs = [
        job
        for seed in seeds
        for value in arguments.values or [None]
        for policy in policies
        for job in [
            _session_job(arguments, policy, seed) if has_sessions else _job(arguments, policy, seed, value)
        ]
    ]
    source = jobs[0].source
    held = _sessions_line(load_sessions(source.name)) if has_sessions else _workload_line(load(source))
    say(_headline(arguments, held, jobs[0].options, seeds))
    found: dict[tuple[str, float | None], list[Summary]] = {}
    for job, summary in zip(jobs, run_all(jobs, arguments.jobs), strict=True):
        found.setdefault(job.label, []).append(summary)
    medians = {label: median(summaries) for label, summaries in found.items()}
    for text in _texts(arguments, medians, policies):
        say(text)
    if arguments.json is not None:
        _write_json(arguments, medians, found)
    return 0


def _texts(
    arguments: argparse.Namespace,
    medians: Mapping[tuple[str, float | None], Summary],
    policies: Sequence[str],
) -> list[str]:
    if arguments.sweep is None:
        curves = [text for policy in policies for text in _curve(arguments, policy, medians[policy, None])]
        tenants = [
            f"\n{policy}, by tenant\n{tenant_table(found)}"
            for policy in policies
            if (found := medians[policy, None].tenants)
        ]
        return [table({policy: medians[policy, None] for policy in policies}), *tenants, *curves]
    kind = SWEEPS[arguments.sweep]
    slo = f"within {arguments.slo_ttft:g} s to the first token"
    texts = []
    for policy in policies:
        points = {value: medians[policy, value] for value in arguments.values}
        texts.append(f"\n{policy}")
        texts.append(table({f"{value:g}": summary for value, summary in points.items()}))
        texts.append("\n" + plot(kind, points))
        texts.append(answer(kind, points, slo=slo, share=arguments.slo_share))
    return texts


def _curve(arguments: argparse.Namespace, policy: str, summary: Summary) -> list[str]:
    """Hits over time, and how long after the last loss they were back."""
    if arguments.window is None:
        return []
    texts = [f"\n{policy}, hits over time", curve_table(summary.windows)]
    kills = [parse_kill(text) for text in arguments.kill]
    if kills:
        lost_at = max(kill.at + kill.drain_seconds for kill in kills)
        for name, goal in (("the ideal", ideal_hits_of), ("what was not lost", left_hits_of)):
            seconds = back_after(summary.windows, lost_at, goal)
            when = "not back at the end" if seconds is None else f"back after {seconds:g} s"
            texts.append(f"within {100 * BACK_POINTS:g} points of {name}: {when}")
    return texts


def _workload_line(workload: Workload) -> str:
    return (
        f"{workload.name}: {len(workload.requests)} requests in {workload.duration_seconds:.0f} s, "
        f"{workload.num_input_tokens} prompt tokens"
    )


def _sessions_line(file: SessionFile) -> str:
    mains = [session for session in file.sessions if session.parent is None]
    turns = [turn for session in file.sessions for turn in session.turns]
    return (
        f"{file.name}: {len(mains)} sessions in {len({session.lane for session in mains})} lanes, "
        f"{len(file.sessions) - len(mains)} subagents, {len(turns)} turns, "
        f"{sum(turn.num_input_tokens for turn in turns)} prompt tokens"
    )


def _headline(arguments: argparse.Namespace, held: str, options: FleetOptions, seeds: Sequence[int]) -> str:
    shape = options.shape
    return (
        f"{held}; {'' if options.autoscale is None else 'up to '}"
        f"{options.num_replicas} replicas of {arguments.hardware} "
        f"with {shape.num_blocks} blocks of {shape.block_size} tokens; {options.num_routers} routers; "
        f"{len(seeds)} seeds."
    )


def _write_json(
    arguments: argparse.Namespace,
    medians: Mapping[tuple[str, float | None], Summary],
    found: Mapping[tuple[str, float | None], Sequence[Summary]],
) -> None:
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
        if name not in ("command", "json", "run_dir")
    }
    results = [
        {
            "policy": policy,
            "value": value,
            **summary.as_json(),
            "runs": [each.as_json() for each in found[policy, value]],
        }
        for (policy, value), summary in medians.items()
    ]
    text = json.dumps({"settings": settings, "results": results}, indent=2, default=dataclasses.asdict) + "\n"
    try:
        arguments.json.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ClusterError(f"{arguments.json}: {error.strerror}") from error


# What is run.


def _job(arguments: argparse.Namespace, policy: str, seed: int, value: float | None) -> Job:
    swept = {} if value is None else {arguments.sweep: value}
    groups = _groups(arguments)
    source = Source(
        arguments.workload,
        seed,
        _parameters(arguments),
        arguments.limit,
        arguments.speed,
        has_keys=not arguments.without_keys,
        num_tenants=arguments.tenants,
        flood=arguments.flood,
        block_tokens=alignment_of(groups) if groups else None,
    )
    if "rate" in swept:
        base = dataclasses.replace(source, speed=1.0)
        unscaled = load(base)
        speed = swept["rate"] * unscaled.duration_seconds / len(unscaled.requests)
        source = dataclasses.replace(source, speed=speed)
    block_size = _within_windows(arguments.window, load(source)).block_tokens
    options = _options(arguments, policy, block_size, groups, swept)
    slo = Slo(arguments.slo_ttft, arguments.slo_tpot)
    return Job((policy, value), source, options, arguments.warm_up, slo, arguments.window)


def _session_job(arguments: argparse.Namespace, policy: str, seed: int) -> Job:
    source = Source(arguments.workload, seed, (), None, 1.0, has_sessions=True)
    options = _options(arguments, policy, load_sessions(source.name).block_tokens, (), {})
    return Job((policy, None), source, options, 0.0, Slo(arguments.slo_ttft, arguments.slo_tpot))


def _has_sessions(arguments: argparse.Namespace) -> bool:
    """Raises ClusterError for what a closed loop has no use for."""
    path = Path(arguments.workload)
    try:
        if arguments.workload in GENERATORS or not path.is_file() or not is_session_file(path):
            return False
    except OSError as error:
        raise ClusterError(f"{path}: {error.strerror}") from error
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = [
        "--" + name.replace("_", "-")
        for name in NOT_FOR_SESSIONS
        if getattr(arguments, name) != parser.get_default(name)
    ]
    if given:
        raise ClusterError(
            f"{path} holds sessions, which are all served to the end, each turn after the answer before it:"
            f" that goes without {', '.join(given)}"
        )
    return True


def _options(
    arguments: argparse.Namespace,
    policy: str,
    block_size: int,
    groups: tuple[CacheGroup, ...],
    swept: Mapping[str, float],
) -> FleetOptions:
    hardware = HARDWARE[arguments.hardware]
    max_batched_tokens = arguments.max_batched_tokens or hardware.max_batched_tokens
    capacity = int(swept.get("capacity", arguments.capacity or hardware.cache_tokens))
    if capacity < block_size:
        raise ClusterError(f"a cache of {capacity} tokens holds no block of {block_size}")
    shape = ReplicaShape(
        hardware.cost,
        num_blocks_for(capacity, groups) if groups else capacity // block_size,
        block_size,
        max_batched_tokens=max(max_batched_tokens, arguments.max_running + 1),
        max_running=arguments.max_running,
        decodes_beside=arguments.decodes_beside,
        reads_shared_once=arguments.reads_shared_once,
        counts_arrivals=arguments.counts_arrivals,
        tiers=_tiers(arguments, hardware.bytes_per_token),
        groups=groups,
        retention=arguments.retention,
        slo_tpot=arguments.step_tpot,
    )
    try:
        return FleetOptions(
            shape,
            num_replicas=int(swept.get("replicas", _most_replicas(arguments))),
            num_routers=arguments.routers,
            policy=policy,
            parameters=CostParameters(
                room_price=arguments.room_price,
                delay_price=arguments.delay_price,
                split_room_price=arguments.split_room_price,
                split_delay_price=arguments.split_delay_price,
            ),
            index_stride=arguments.index_stride,
            delays=_delays(arguments),
            announces=not arguments.no_announcements,
            drop_share=arguments.drop_events,
            routes_by_reach=arguments.route_by_reach,
            queue=_queue(arguments),
            deadline_seconds=arguments.slo_ttft if arguments.deadlines else None,
            kills=tuple(map(parse_kill, arguments.kill)),
            outages=tuple(map(parse_outage, arguments.redis_down)),
            autoscale=arguments.autoscale,
            pools=_splits(arguments),
            has_programs=arguments.programs,
        )
    except ValueError as error:
        raise ClusterError(str(error)) from error


def _within_windows(seconds: float | None, workload: Workload) -> Workload:
    """Raises ClusterError."""
    if seconds is not None and workload.duration_seconds > MAX_WINDOWS * seconds:
        raise ClusterError(f"--window {seconds:g} would make more than {MAX_WINDOWS} windows")
    return workload


# What the words of the command line stand for.


def _policies(arguments: argparse.Namespace) -> list[str]:
    text = arguments.policy
    policies = list(POLICIES) if text == "all" else text.split(",")
    known = {*POLICIES, PERFECT}
    for policy in policies:
        if policy not in known:
            raise ClusterError(f"there is no policy {policy}; there are {', '.join(sorted(known))}")
    if PERFECT in policies and arguments.ram is not None:
        raise ClusterError(f"policy {PERFECT} knows the caches on devices: it goes without --ram")
    return policies


def _groups(arguments: argparse.Namespace) -> tuple[CacheGroup, ...]:
    if arguments.groups is None:
        if arguments.retention or arguments.route_by_reach:
            raise ClusterError("--retention and --route-by-reach need --groups")
        return ()
    try:
        groups = parse_groups(arguments.groups)
    except ValueError as error:
        raise ClusterError(f"--groups: {error}") from error
    if arguments.retention < 0 or arguments.retention % alignment_of(groups):
        raise ClusterError(
            f"--retention is a multiple of {alignment_of(groups)} for these groups, not {arguments.retention}"
        )
    if arguments.ram is not None:
        raise ClusterError("--groups go without --ram: a sparse model keeps no KV below the device")
    return groups


def _splits(arguments: argparse.Namespace) -> tuple[PoolShape, ...]:
    """Return the pools. Raises ClusterError for those of which no prompt could be split."""
    pools: tuple[PoolShape, ...] = arguments.pools
    if any(pool.role is Role.PREFILL for pool in pools) and not arguments.pull:
        raise ClusterError("a pool that prefills needs --ram and --pull, by which KV comes to others")
    return pools


def _most_replicas(arguments: argparse.Namespace) -> int:
    autoscale: Autoscale | None = arguments.autoscale
    if arguments.pools:
        return sum(pool.num_replicas for pool in arguments.pools)
    return int(arguments.replicas) if autoscale is None else autoscale.max_replicas


def _queue(arguments: argparse.Namespace) -> QueueRules | None:
    return QueueRules(arguments.queue_target, arguments.queue_seconds) if arguments.queue else None


def _delays(arguments: argparse.Namespace) -> Delays:
    return Delays(
        arguments.event_delay, arguments.load_delay, arguments.snapshot_interval, arguments.network_delay
    )


def _tiers(arguments: argparse.Namespace, bytes_per_token: int) -> TierShape | None:
    if arguments.ram is None:
        if arguments.disk or arguments.pull:
            raise ClusterError("--disk and --pull need --ram, through which KV moves")
        return None
    return TierShape(
        bytes_per_token,
        host_bytes=arguments.ram,
        disk_bytes=arguments.disk,
        host_bytes_per_second=arguments.host_rate,
        disk_bytes_per_second=arguments.disk_rate,
        pull_bytes_per_second=arguments.pull,
        write_bytes_per_second=arguments.write_rate,
        lease_seconds=arguments.lease,
    )


def _parameters(arguments: argparse.Namespace) -> tuple[tuple[str, float | int | str], ...]:
    try:
        return tuple(typed_parameters(arguments.workload, arguments.qps, arguments.set).items())
    except ValueError as error:
        raise ClusterError(str(error)) from error


def _autoscale(text: str) -> Autoscale:
    try:
        return parse_autoscale(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _pools(text: str) -> tuple[PoolShape, ...]:
    try:
        return parse_pools(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _seconds(text: str) -> float:
    seconds = number(text)
    if seconds < 0:
        raise argparse.ArgumentTypeError(f"needs seconds from 0, not {text}")
    return seconds


def _numbers(text: str) -> list[float]:
    return [positive(part) for part in text.split(",")]
