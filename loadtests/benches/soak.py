"""Mixed load for a while, at a share of what the machine carries: does memory grow, is all given back?

Starts Redis, two replicas and a router, and finds out how much they carry: `--users` play the
sessions of the workload `mixed` and wait for each answer. Then sends that workload at the rate found times
`--load`, most of it through Locust, some by clients who leave before their answer is whole. In the last
minute, /metrics is scraped and the live page is open.

Prints growth of memory over the second half, errors by kind, TTFT of the first and the last quarter, and
every gauge that is not back at zero. The exit status is 1 if one is not, or if a request failed whose client
had not left.

    python -m loadtests.benches.soak --minutes 10
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

import httpx

from loadtests.arguments import count, positive, share
from loadtests.benches.harness import bench_options, settings_of
from loadtests.benches.soak_figures import errors_by_kind, growth, raised_gauges
from loadtests.figures import Memory, memory_of, milliseconds, print_header
from loadtests.load.cluster_samples import parse_metrics
from loadtests.load.locust_run import HeadlessRun, run_headless
from loadtests.load.streaming import Connection, StreamCut
from loadtests.named.named_tests import NAMED_TESTS, SIMULATED_SETTINGS
from loadtests.reports.report import RequestRecord
from loadtests.reports.run_file import Run
from loadtests.stacks.local_stack import LocalStack, free_port, local_stack
from loadtests.workloads import GENERATORS, Workload, without_longer_than
from loadtests.workloads.chat_bodies import ChatBodies
from replicas.config import DEFAULT_BLOCK_SIZE, DEFAULT_VLLM_BLOCK_SIZE

MODEL = "toy"
WORKLOAD = "mixed"
SAMPLE_SECONDS = 5.0
WATCHED_SECONDS = 60.0
REST_SECONDS = 20.0
LEAVERS = 0.1
"""Share of the requests whose clients may leave."""
PATIENCE_SECONDS = (0.02, 1.5)
CAPACITY_SECONDS = 45.0
CAPACITY_WARMUP = 20.0
CAPACITY_QPS = 10.0
"""Enough for the users not to run out of sessions."""
IN_FLIGHT = "router_in_flight"
CACHES = ("router_token_cache_bytes", "router_hash_cache_bytes")
SMALL_CACHES: dict[str, object] = {"tokenizer_cache_bytes": 8 << 20, "hash_cache_bytes": 1 << 20}
SHORT_STREAM: dict[str, object] = {"events_stream_length": 5000}
"""Bounded stores must be full before half-time: while they fill, other growth would be hidden."""
MEBIBYTE = 2**20


@dataclass(slots=True)
class Sample:
    seconds: float
    memory: dict[str, Memory]
    router: dict[str, float]
    """The router's own counts: requests in flight, bytes of caches."""
    load_average: float


@dataclass(slots=True)
class Soak:
    """Observations. Times are seconds since `began`, on the wall clock."""

    began: float
    samples: list[Sample] = field(default_factory=list)
    leavers: Counter[str] = field(default_factory=Counter)
    watched_from: float = 0.0
    run: Run | None = None

    def ttfts(self, start: float, end: float) -> list[float]:
        """Return the TTFTs of requests scheduled in the interval."""
        assert self.run is not None
        zero = datetime.fromisoformat(self.run.info.started_at).timestamp() - self.began
        return [
            record.ttft_seconds
            for record in self.run.records
            if record.ttft_seconds is not None and start <= zero + record.arrival_seconds < end
        ]


@dataclass(frozen=True, slots=True)
class Cluster:
    stack: LocalStack
    metrics_ports: tuple[int, ...]
    context_length: int

    @property
    def replica_metrics(self) -> list[str]:
        return [f"replica-{number}=127.0.0.1:{port}" for number, port in enumerate(self.metrics_ports)]

    @property
    def names(self) -> list[str]:
        return ["router", *(f"replica-{number}" for number in range(len(self.metrics_ports))), "redis"]

    def metrics(self) -> dict[str, str]:
        """Each process's own text."""
        urls = {"router": self.stack.url}
        urls |= {f"replica-{n}": f"http://127.0.0.1:{port}" for n, port in enumerate(self.metrics_ports)}
        return {name: httpx.get(f"{url}/metrics").text for name, url in urls.items()}

    def router_values(self, names: Sequence[str]) -> dict[str, float]:
        values = parse_metrics(httpx.get(f"{self.stack.url}/metrics").text)
        return {name: values.get(name, 0.0) for name in names}

    def memory(self) -> dict[str, Memory]:
        return {name: memory_of(self.stack.pid(name)) for name in self.names}


@contextlib.contextmanager
def cluster_of(arguments: argparse.Namespace) -> Iterator[Cluster]:
    block_size = DEFAULT_VLLM_BLOCK_SIZE if arguments.engine == "vllm" else DEFAULT_BLOCK_SIZE
    num_blocks = NAMED_TESTS[WORKLOAD].cache_tokens // block_size + 1
    settings: dict[str, object] = {"engine": arguments.engine, "model_name": MODEL, "num_blocks": num_blocks}
    settings |= SIMULATED_SETTINGS if arguments.engine == "simulated" else {"num_threads": 1}
    settings |= SHORT_STREAM | settings_of(arguments.set)
    router_settings = SMALL_CACHES | settings_of(arguments.router_set)
    ports = tuple(free_port() for _ in range(arguments.replicas))
    each = [{**settings, "metrics_port": port} for port in ports]
    with local_stack(replica_settings=each, router_settings=router_settings) as stack:
        (model,) = httpx.get(f"{stack.url}/v1/models").json()["data"]
        yield Cluster(stack, ports, int(model["max_model_len"]))


def send(
    cluster: Cluster, folder: Path, seed: int, seconds: float, qps: float, options: Mapping[str, str]
) -> Run:
    return run_headless(
        HeadlessRun(
            base_url=cluster.stack.url,
            model=MODEL,
            workload=WORKLOAD,
            options={"qps": f"{qps:g}", "test-name": "soak", **options},
            seed=seed,
            duration_seconds=seconds,
            replica_metrics=cluster.replica_metrics,
            output=folder / f"run-{seed}.json",
        )
    )


def send_closed_loop(cluster: Cluster, folder: Path, seed: int, num_users: int) -> Run:
    """Users who wait for their answers.

    The workload is one of ten times as long, made faster, so that its conversations come to their ends.
    """
    options = {"closed-loop": str(num_users), "speed": "10"}
    return send(cluster, folder, seed, CAPACITY_SECONDS, CAPACITY_QPS, options)


def capacity_of(run: Run) -> float:
    """Answers per second, once the caches have filled."""
    ends = [record.arrival_seconds + record.e2e_seconds for record in run.records if record.e2e_seconds]
    counted = sum(CAPACITY_WARMUP <= end < CAPACITY_SECONDS for end in ends)
    return counted / (CAPACITY_SECONDS - CAPACITY_WARMUP)


def workload_of(cluster: Cluster, seed: int, seconds: float, qps: float) -> Workload:
    made = GENERATORS[WORKLOAD](seed=seed, qps=qps, duration_seconds=seconds)
    return without_longer_than(made, cluster.context_length)


def asked_rate(cluster: Cluster, seed: int, seconds: float, wanted: float) -> float:
    """Return the rate to ask of the generator, which gives less because late sessions are cut off."""
    given = len(workload_of(cluster, seed, seconds, wanted).requests) / seconds
    return wanted * wanted / given


async def soak(cluster: Cluster, folder: Path, seed: int, seconds: float, qps: float) -> Soak:
    seen = Soak(time.time())
    around = [
        asyncio.create_task(sample(cluster, seen)),
        asyncio.create_task(leave_early(cluster, seen, seed + 1, seconds, qps * LEAVERS)),
        asyncio.create_task(watch(cluster, seen, seconds - WATCHED_SECONDS)),
    ]
    rate = asked_rate(cluster, seed, seconds, qps * (1 - LEAVERS))
    try:
        seen.run = await asyncio.to_thread(send, cluster, folder, seed, seconds, rate, {})
        await around[1]
    finally:
        for task in around:
            task.cancel()
        await asyncio.wait(around)
    for task in around:
        if not task.cancelled() and (error := task.exception()):
            raise error
    return seen


async def sample(cluster: Cluster, seen: Soak) -> None:
    while True:
        now, memory = time.time() - seen.began, cluster.memory()
        values = await asyncio.to_thread(cluster.router_values, (IN_FLIGHT, *CACHES))
        seen.samples.append(Sample(now, memory, values, os.getloadavg()[0]))
        await asyncio.sleep(SAMPLE_SECONDS)


async def leave_early(cluster: Cluster, seen: Soak, seed: int, seconds: float, qps: float) -> None:
    """Clients with little patience, each on a connection of its own."""
    rng = random.Random(seed)
    workload = workload_of(cluster, seed, seconds, qps)
    bodies = ChatBodies(MODEL, workload.block_tokens, seed)
    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for request in workload.requests:
            await asyncio.sleep(max(0.0, request.arrival_seconds - (time.perf_counter() - began)))
            tasks.create_task(one_leaver(cluster, seen, bodies.body(request), rng.uniform(*PATIENCE_SECONDS)))


async def one_leaver(cluster: Cluster, seen: Soak, body: bytes, patience: float) -> None:
    connection = Connection("127.0.0.1", cluster.stack.port)
    try:
        answer = await asyncio.wait_for(connection.post("/v1/chat/completions", body), patience)
        is_whole = answer.status == 200 and answer.is_whole
        seen.leavers["answered whole" if is_whole else f"status {answer.status}, cut short"] += 1
    except TimeoutError:
        seen.leavers["left"] += 1
    except (OSError, EOFError, StreamCut) as error:
        seen.leavers[type(error).__name__] += 1
    finally:
        connection.abort()


async def watch(cluster: Cluster, seen: Soak, wait: float) -> None:
    """Scrape metrics, and ask for what the live page asks for, once a second each."""
    await asyncio.sleep(max(0.0, wait))
    seen.watched_from = time.time() - seen.began
    scraper, page = (Connection("127.0.0.1", cluster.stack.port) for _ in range(2))
    latest = 0
    for turn in range(sys.maxsize):
        await scraper.get("/metrics")
        state = json.loads(await page.get("/live/state"))
        if state["num_decisions"] > latest:
            await page.get(f"/live/decisions?after={latest}")
            latest = state["num_decisions"]
        if turn % 5 == 0:
            await page.get("/live/prefixes?order=used")
        await asyncio.sleep(1.0)


def wait_for_rest(cluster: Cluster) -> dict[str, dict[str, float]]:
    """By process, the gauges that are still raised after a while; none ends the wait."""
    deadline = time.monotonic() + REST_SECONDS
    while True:
        found = {name: raised_gauges(text) for name, text in cluster.metrics().items()}
        raised = {name: gauges for name, gauges in found.items() if gauges}
        if not raised or time.monotonic() > deadline:
            return raised
        time.sleep(0.5)


def print_memory(names: Sequence[str], samples: Sequence[Sample]) -> None:
    half = samples[len(samples) // 2 :]
    seconds = [each.seconds for each in half]
    for name in names:
        for kind in ("anonymous", "resident"):
            values = [getattr(each.memory[name], kind) for each in samples]
            slope = slope_of(seconds, values[len(samples) // 2 :])
            print(
                f"- {name:<10} {kind:<9} first {values[0] / MEBIBYTE:7.1f} MiB   half-way"
                f" {values[len(values) // 2] / MEBIBYTE:7.1f}   last {values[-1] / MEBIBYTE:7.1f}   {slope}"
            )


def print_router_caches(samples: Sequence[Sample]) -> None:
    """By the router's own count: until they are full, the router grows."""
    for name in CACHES:
        sizes = [samples[at].router[name] / MEBIBYTE for at in (0, len(samples) // 2, -1)]
        print(f"- {name}: first {sizes[0]:.1f} MiB, half-way {sizes[1]:.1f}, last {sizes[2]:.1f}")


def slope_of(seconds: Sequence[float], values: Sequence[float]) -> str:
    try:
        found = growth(seconds, values)
    except ValueError:
        return "too few samples for a slope"
    scale = 3600 / MEBIBYTE
    return f"second half {found.per_second * scale:+7.1f} ± {found.margin * scale:.1f} MiB/h"


def _quarters(values: Sequence[float]) -> list[Sequence[float]]:
    edges = [round(number * len(values) / 4) for number in range(5)]
    return [values[start:end] for start, end in itertools.pairwise(edges)]


def print_ttft(seen: Soak, seconds: float) -> None:
    quarter = seconds / 4
    spans = {
        "first quarter": (0.0, quarter),
        "last quarter": (3 * quarter, seconds),
        "minute before": (seen.watched_from - WATCHED_SECONDS, seen.watched_from),
        "watched minute": (seen.watched_from, seen.watched_from + WATCHED_SECONDS),
    }
    for name, (start, end) in spans.items():
        if seen.watched_from or "quarter" in name:
            ttfts = seen.ttfts(start, end)
            print(f"- TTFT, {name:<14} " + (f"{milliseconds(ttfts)}   n {len(ttfts)}" if ttfts else "none"))


def judge(cluster: Cluster, records: Sequence[RequestRecord], seen: Soak) -> bool:
    """Prints what went wrong; False if something did."""
    errors = Counter(record.error for record in records if record.error is not None)
    of_leavers = {kind: n for kind, n in seen.leavers.items() if kind not in ("left", "answered whole")}
    print(f"- {len(records)} requests by Locust, errors: {dict(errors) or 'none'}")
    print(f"- {seen.leavers.total()} by clients who may leave: {dict(seen.leavers)}")
    raised = wait_for_rest(cluster)
    kinds = errors_by_kind(cluster.metrics()["router"])
    print(f"- router's errors by kind: {kinds or 'none'}; gauges still raised: {raised or 'none'}")
    num_gone = kinds.pop("client_gone", 0)
    return not (errors or of_leavers or raised or kinds) and num_gone <= seen.leavers["left"]


def measure(arguments: argparse.Namespace, folder: Path) -> bool:
    seconds = arguments.minutes * 60
    with cluster_of(arguments) as cluster:
        records: tuple[RequestRecord, ...] = ()
        capacity = arguments.capacity
        if capacity is None:
            burst = send_closed_loop(cluster, folder, arguments.seed, arguments.users)
            capacity, records = capacity_of(burst), burst.records
        qps = capacity * arguments.load
        print(
            f"- {arguments.replicas} x {arguments.engine}: capacity {capacity:.1f} requests/s, sent {qps:.1f}"
        )
        seen = asyncio.run(soak(cluster, folder, arguments.seed + 1, seconds, qps))
        assert seen.run is not None
        loads = [each.load_average for each in seen.samples]
        print(f"- {arguments.minutes:g} minutes, load average {min(loads):.1f} to {max(loads):.1f}")
        print_memory(cluster.names, seen.samples)
        in_flight = [each.router[IN_FLIGHT] for each in seen.samples]
        quarters = [round(statistics.fmean(each), 1) for each in _quarters(in_flight)]
        print(f"- requests in flight, mean of each quarter: {quarters}")
        print_router_caches(seen.samples)
        print_ttft(seen, seconds)
        if arguments.output:
            arguments.output.write_text(json.dumps([asdict(each) for each in seen.samples]))
        return judge(cluster, (*records, *seen.run.records), seen)


def main() -> int:
    options = bench_options(__doc__)
    add = options.add_argument
    add("--minutes", type=positive, default=10.0)
    add("--engine", choices=("torch", "vllm", "simulated"), default="torch")
    add("--replicas", type=count, default=2)
    add("--load", type=share, default=0.8, help="share of the capacity (default: 0.8)")
    add("--capacity", type=positive, help="requests/s; without it, found first")
    add("--users", type=count, default=16, help="who wait for their answers, to find it (default: 16)")
    add("--seed", type=int, default=1)
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the replicas")
    add("--router-set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the router")
    add("--output", type=Path, help="samples of memory, as JSON")
    arguments = options.parse_args()
    print_header("Soak")
    with tempfile.TemporaryDirectory(prefix="kvasir-soak-") as folder:
        return 0 if measure(arguments, Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
