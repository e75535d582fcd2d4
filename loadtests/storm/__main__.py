"""A storm: everything is killed, frozen and cut off in turn, and no client may notice more than time.

Greedy streaming clients ask a running cluster without pause; what each prompt's answer is was written down
in calm. Meanwhile a fault follows the other: to replicas, engine processes, Redis, the controller, Ray's
parts and one of several routers. Prints what was done, how long until all was well again, and what clients
saw; the exit status is 1 if a text was wrong, if a request failed that no killed router excuses, if the
cluster did not recover, or if something is left behind.

    ./kvasir up --routers 2 --replicas 3              # in one terminal
    python -m loadtests.storm --seconds 300 --seed 1  # in another
    python -m loadtests.storm --own "--routers 2 --replicas 3" --seconds 60
"""

import argparse
import asyncio
import contextlib
import os
import random
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from cluster.local.run_directory import RunDirectory, default_run_directory
from loadtests.arguments import count, positive, seed
from loadtests.figures import milliseconds, print_header
from loadtests.stacks.fresh_cluster import fresh_cluster
from loadtests.storm.bodies import StormBodies
from loadtests.storm.clients import StormClients
from loadtests.storm.faults import Faults, Freezer, RunningCluster, wait_healthy
from loadtests.storm.verdict import Fault, StormRequest, Verdict, describe, explain_wrong, judge, ttfts

CALM_SECONDS = 15.0
REST_SECONDS = (1.0, 3.0)
LEFT_SECONDS = 30.0
MOST_SHOWN = 10


def main() -> int:
    arguments = parse(sys.argv[1:])
    print_header("A storm")
    with cluster_of(arguments) as cluster:
        return asyncio.run(run(cluster, arguments))


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.storm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=positive, default=60.0, help="duration of the storm")
    parser.add_argument("--seed", type=seed, default=0, help="which faults in which order, and the prompts")
    parser.add_argument(
        "--faults", metavar="NAME,NAME", help="only these (default: all that there is a part for)"
    )
    parser.add_argument("--clients", type=count, default=12, help="streams at a time (default: %(default)s)")
    parser.add_argument("--prompts", type=count, default=24, help="different prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=count, default=96, help="of each answer (default: %(default)s)")
    parser.add_argument(
        "--uncached",
        type=count,
        default=0,
        metavar="WORDS",
        help="each prompt has this many words more, and no request finds any of it cached (default: none)",
    )
    parser.add_argument(
        "--calm-seconds", type=positive, default=CALM_SECONDS, help="load without faults, before"
    )
    parser.add_argument(
        "--worst-bodies",
        type=count,
        default=0,
        metavar="BYTES",
        help="also send the corpus of worst bodies, each of this size (default: none)",
    )
    parser.add_argument("--patience", type=positive, default=60.0, help="seconds after which a request hangs")
    parser.add_argument(
        "--heal-seconds", type=positive, default=180.0, help="longest time to recover from a fault"
    )
    parser.add_argument(
        "--run-dir", type=Path, default=default_run_directory(Path.cwd(), os.environ), help="of the cluster"
    )
    parser.add_argument(
        "--own", metavar="WORDS", help="start a cluster with these words of kvasir up instead"
    )
    return parser.parse_args(words)


@contextlib.contextmanager
def cluster_of(arguments: argparse.Namespace) -> Iterator[RunningCluster]:
    if arguments.own is None:
        yield RunningCluster(RunDirectory(arguments.run_dir))
        return
    logs = Path(tempfile.mkdtemp(prefix="kvasir-storm-"))
    with fresh_cluster(shlex.split(arguments.own), logs) as fresh:
        print(f"- a cluster of its own, up in {fresh.start_seconds:.1f} s; its logs will be in {logs}")
        yield RunningCluster(fresh.directory)


async def run(cluster: RunningCluster, arguments: argparse.Namespace) -> int:
    url = cluster.state().router_url
    models = await asyncio.to_thread(httpx.get, f"{url}/v1/models", trust_env=False)
    clients = StormClients(
        url,
        models.json()["data"][0]["id"],
        num_prompts=arguments.prompts,
        num_tokens=arguments.tokens,
        num_uncached_words=arguments.uncached,
        patience_seconds=arguments.patience,
        seed=arguments.seed,
    )
    at_rest = await asyncio.to_thread(AtRest, cluster)
    await clients.take_references()
    calm_until = clients.now() + arguments.calm_seconds
    await clients.run(arguments.clients, lambda: clients.now() > calm_until, arguments.seed)
    calm, clients.requests = clients.requests, []
    bodies = StormBodies(
        url, clients.model, num_bytes=arguments.worst_bodies, patience_seconds=arguments.patience
    )
    with Freezer() as freezer:
        async with bodies.beside() if arguments.worst_bodies else contextlib.nullcontext():
            faults = await blow(cluster, clients, freezer, arguments)
    left = await left_behind(cluster, at_rest)
    verdict = judge([*calm, *clients.requests], clients.references, faults, left, bodies.hung)
    print_report(calm, clients.requests, faults, verdict, clients.references)
    print_bodies(bodies)
    print(f"- {'BROKEN' if verdict.is_broken else 'all invariants hold'}")
    return 1 if verdict.is_broken else 0


async def blow(
    cluster: RunningCluster, clients: StormClients, freezer: Freezer, arguments: argparse.Namespace
) -> list[Fault]:
    """Faults for the set time, while the clients ask; both have ended when this returns."""
    rng = random.Random(arguments.seed)
    faults = Faults(cluster, freezer, rng)
    names = arguments.faults.split(",") if arguments.faults else await asyncio.to_thread(faults.possible)
    if unknown := set(names) - set(faults.names):
        raise SystemExit(f"there is no fault {sorted(unknown)[0]}; there are {', '.join(faults.names)}")
    print(f"- faults: {', '.join(names)}")
    is_over = False
    done: list[Fault] = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(clients.run(arguments.clients, lambda: is_over, arguments.seed + 1))
        try:
            until = clients.now() + arguments.seconds
            while clients.now() < until:
                for name in rng.sample(names, len(names)):
                    await asyncio.sleep(rng.uniform(*REST_SECONDS))
                    if clients.now() >= until:
                        break
                    fault = await one_fault(name, cluster, clients, faults, arguments.heal_seconds)
                    if fault is not None:
                        done.append(fault)
        finally:
            is_over = True
    return done


async def one_fault(
    name: str, cluster: RunningCluster, clients: StormClients, faults: Faults, heal_seconds: float
) -> Fault | None:
    began = clients.now()
    target = await faults.do(name)
    if target is None:
        return None
    ended = clients.now()
    complaint = await wait_healthy(cluster, heal_seconds)
    healthy = clients.now() if complaint is None else None
    print(
        f"- {began:7.1f} s  {name:<18} {target:<40} "
        + (f"well after {healthy - began:5.1f} s" if healthy is not None else f"NOT WELL: {complaint}"),
        flush=True,
    )
    return Fault(name, target, began, ended, healthy)


class AtRest:
    """The idle state: gauges that are never zero, and all processes."""

    def __init__(self, cluster: RunningCluster) -> None:
        self.gauges = {gauge for gauge, _ in cluster.raised_gauges()}
        self.gauges.add("replica_prefill_seconds_per_token")  # 0 until a prompt was computed
        self.processes = Counter(cluster.processes().values())
        for title, number in started_when_needed(cluster).items():
            self.processes[title] = max(self.processes[title], number)


def started_when_needed(cluster: RunningCluster) -> dict[str, int]:
    """Processes that a cluster at rest may not have yet, and keeps: each router's for large bodies, and the
    one that has started Ray's raylet again, with a second reader of Ray's logs."""
    python = Path(sys.executable).name
    return {
        f"{python} -m router.large_bodies.worker_process": len(cluster.routers()) or 1,
        f"{python} -m cluster.local.ray_start": 1,
        f"{python} log_monitor.py": 2,
    }


async def left_behind(cluster: RunningCluster, at_rest: AtRest) -> list[str]:
    """List what remains some time after the last request; empty ends the wait."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + LEFT_SECONDS
    while True:
        left = await asyncio.to_thread(_left_behind, cluster, at_rest)
        if not left or loop.time() > deadline:
            return left
        await asyncio.sleep(1.0)


def _left_behind(cluster: RunningCluster, at_rest: AtRest) -> list[str]:
    try:
        raised = sorted(cluster.raised_gauges())
        gauges = [f"{gauge} of {name}" for gauge, name in raised if gauge not in at_rest.gauges]
    except (httpx.HTTPError, OSError, RuntimeError) as error:
        gauges = [f"no metrics: {error}"]
    now, before = Counter(cluster.processes().values()), at_rest.processes
    more = [
        f"{now[title]} processes {title}, {before[title]} before"
        for title in now
        if now[title] > before[title] and not title.startswith("ray::IDLE")
    ]
    return [*gauges, *more, *cluster.frozen()]


def print_report(
    calm: Sequence[StormRequest],
    storm: Sequence[StormRequest],
    faults: Sequence[Fault],
    verdict: Verdict,
    references: Sequence[str],
) -> None:
    for what, requests in (("calm", calm), ("storm", storm)):
        answered = sum(request.failure is None for request in requests)
        num_split = sum(request.is_split for request in requests)
        print(f"- {what}: {len(requests)} requests, {answered} answered, {num_split} split")
        print_ttft(f"TTFT in {what}", ttfts(requests))
    print_ttft("TTFT in the storm, while all was well", ttfts(storm, faults))
    print_faults(faults)
    retries = [request for request in storm if request.is_retry]
    print(
        f"- streams of killed routers: {len(verdict.of_killed_routers)}; sent again at once: {len(retries)},"
        f" of which failed: {sum(request.failure is not None for request in retries)}"
    )
    print(f"- wrong texts: {len(verdict.wrong)}")
    for request in verdict.wrong[:MOST_SHOWN]:
        print(explain_wrong(request, references[request.prompt], faults))
    kinds = Counter(
        f"{request.failure.value if request.failure else ''} {request.detail}" for request in verdict.failed
    )
    print(f"- failed requests beyond those: {len(verdict.failed)}")
    for kind, number in kinds.most_common(MOST_SHOWN):
        print(f"    {number} x {kind}")
    for request in verdict.failed[:MOST_SHOWN]:
        print(f"    {describe(request)}")
    print(f"- not well in time: {len(verdict.unhealed)}")
    print(f"- left behind: {'; '.join(verdict.left_behind) or 'nothing'}")


def print_bodies(bodies: StormBodies) -> None:
    if bodies.outcomes:
        counts = ", ".join(f"{number} x {outcome}" for outcome, number in sorted(bodies.outcomes.items()))
        print(f"- worst bodies beside it: {counts}; not answered: {'; '.join(bodies.hung) or 'none'}")


def print_faults(faults: Sequence[Fault]) -> None:
    by_name: dict[str, list[float]] = {}
    for fault in faults:
        if fault.seconds_to_health is not None:
            by_name.setdefault(fault.name, []).append(fault.seconds_to_health)
    for name, seconds in sorted(by_name.items()):
        print(
            f"- {name:<18} {len(seconds):3} times, well again after"
            f" {min(seconds):5.1f} to {max(seconds):5.1f} s, on average {sum(seconds) / len(seconds):5.1f} s"
        )


def print_ttft(name: str, samples: Sequence[float]) -> None:
    print(f"- {name:<38} " + (f"{milliseconds(samples)}   n {len(samples)}" if samples else "none"))


if __name__ == "__main__":
    sys.exit(main())
