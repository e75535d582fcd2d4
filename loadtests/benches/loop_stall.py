"""Measures the harm of the worst bodies: the event loop's lag, and gaps in another client's stream.

A real router process with one replica of the simulated engine, a token every few milliseconds. One client
streams; beside it each body of the corpus is sent by itself, then the worst of them several at a time. For
each: status and time, the longest gap in the other client's stream (the replica's steps are part of it), the
longest answer to /health (which no replica serves), the router's loop-lag gauge, and the peak memory of the
router and its children.

    python -m loadtests.benches.loop_stall                      bodies of 8 MiB
    python -m loadtests.benches.loop_stall --size 1000000 --only tokenize
    python -m loadtests.benches.loop_stall --pictures DIRECTORY [--engine vllm]

With a model that takes images (replicas.toy_model.make_image_model) the bodies are hostile images.
"""

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtests.benches.harness import bench_options
from loadtests.figures import cpu_seconds, memory_of, print_header
from loadtests.load.streaming import Connection
from loadtests.stacks.local_stack import LocalStack, local_stack
from loadtests.workloads.worst_bodies import WorstBody, worst_bodies
from loadtests.workloads.worst_images import worst_images

BIGGEST = 8 * 2**20 - 4096
"""Just under the longest body that routers take."""

MODEL = "toy"
ALLOWED_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    status: int
    seconds: float
    gap_seconds: float
    health_seconds: float
    lag_seconds: float
    peak_bytes: int


class Stream:
    """Another client's answer, and when its pieces came."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._last = 0.0
        self._longest = 0.0

    async def run(self) -> None:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(_request("/v1/completions", json.dumps(body).encode()))
            self._last = time.perf_counter()
            while await reader.read(65536):
                now = time.perf_counter()
                self._longest = max(self._longest, now - self._last)
                self._last = now
            writer.close()

    def longest_gap(self) -> float:
        """Since it was last asked, with the one that lasts."""
        longest, self._longest = max(self._longest, time.perf_counter() - self._last), 0.0
        return longest


class Health:
    """A client that asks for /health again and again, and the longest answer."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._longest = 0.0

    async def run(self) -> None:
        connection = Connection("127.0.0.1", self._port)
        while True:
            asked = time.perf_counter()
            await connection.get("/health")
            self._longest = max(self._longest, time.perf_counter() - asked)
            await asyncio.sleep(0.001)

    def longest(self) -> float:
        """Since it was last asked."""
        longest, self._longest = self._longest, 0.0
        return longest


def _request(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    )
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


async def send(port: int, body: WorstBody) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        writer.write(_request(body.route, body.content))
        await writer.drain()
    try:
        head = await reader.readline()
        while await reader.read(2**20):
            pass
    except ConnectionError:
        head = b"HTTP/1.1 0"
    writer.close()
    return int(head.split()[1]) if head else 0


async def lag_seconds(port: int) -> float:
    """Return the gauge's worst of the last 10 to 20 seconds."""
    connection = Connection("127.0.0.1", port)
    text = (await connection.get("/metrics")).decode()
    await connection.close()
    lines = [line for line in text.splitlines() if line.startswith("router_event_loop_lag_seconds ")]
    return float(lines[0].split()[1]) if lines else 0.0


@contextlib.asynccontextmanager
async def watched_memory(pid: int) -> AsyncIterator[list[int]]:
    """Sample the memory of the router and its children, in bytes."""
    samples: list[int] = []

    async def sample() -> None:
        while True:
            with contextlib.suppress(psutil.Error):
                samples.append((await asyncio.to_thread(memory_of, pid)).proportional)
            await asyncio.sleep(0.25)

    task = asyncio.create_task(sample())
    try:
        yield samples
    finally:
        task.cancel()


async def measure(
    stack: LocalStack, stream: Stream, health: Health, bodies: Sequence[WorstBody], name: str
) -> Outcome:
    await asyncio.sleep(0.1)
    stream.longest_gap()
    health.longest()
    async with watched_memory(stack.pid("router")) as samples:
        started = time.perf_counter()
        statuses = await asyncio.gather(*(send(stack.port, body) for body in bodies))
        seconds = time.perf_counter() - started
        gap = stream.longest_gap()
        await asyncio.sleep(0.15)
    return Outcome(
        name=name,
        status=max(statuses, default=0),
        seconds=seconds,
        gap_seconds=max(gap, stream.longest_gap()),
        health_seconds=health.longest(),
        lag_seconds=await lag_seconds(stack.port),
        peak_bytes=max(samples, default=0),
    )


def show(outcome: Outcome) -> None:
    mark = " <" if outcome.health_seconds > ALLOWED_SECONDS else ""
    print(
        f"| {outcome.name} | {outcome.status} | {outcome.seconds:.2f} s"
        f" | {outcome.gap_seconds * 1000:.0f} ms | {outcome.health_seconds * 1000:.0f} ms{mark}"
        f" | {outcome.lag_seconds * 1000:.0f} ms"
        f" | {outcome.peak_bytes / 2**20:.0f} MiB |",
        flush=True,
    )


async def run(stack: LocalStack, options: argparse.Namespace) -> None:
    stream = Stream(stack.port)
    health = Health(stack.port)
    watching = [asyncio.create_task(stream.run()), asyncio.create_task(health.run())]
    await asyncio.sleep(2.0)
    quiet = await measure(stack, stream, health, [], "nothing")
    print("| body | status | answered after | longest gap | longest /health | loop lag | memory at most |")
    print("|---|---|---|---|---|---|---|")
    show(quiet)
    outcomes: list[tuple[Outcome, WorstBody]] = []
    before = cpu_seconds(stack.pid("router"))
    for body in (worst_images if options.pictures else worst_bodies)(options.size, model=MODEL):
        name = f"{body.route} {body.name}"
        if options.only in name:
            outcome = await measure(stack, stream, health, [body], name)
            show(outcome)
            outcomes.append((outcome, body))
    print(f"\nrouter: {cpu_seconds(stack.pid('router')) - before:.1f} s of processor time\n")
    worst = sorted(outcomes, key=lambda pair: pair[0].health_seconds, reverse=True)[: options.worst]
    for outcome, body in worst:
        name = f"{options.at_once} x {outcome.name}"
        show(await measure(stack, stream, health, [body] * options.at_once, name))
    for task in watching:
        task.cancel()


def main() -> None:
    options = bench_options(__doc__)
    options.add_argument("--size", type=int, default=BIGGEST, help="bytes of each body")
    options.add_argument("--only", default="", help="bodies with this in `route name`")
    options.add_argument("--at-once", type=int, default=4)
    options.add_argument("--worst", type=int, default=5, help="how many bodies are sent several at a time")
    options.add_argument("--pictures", type=Path, help="a model that takes images: send hostile ones")
    options.add_argument("--engine", default="simulated", help="simulated, or vllm with --pictures")
    arguments = options.parse_args()
    print_header("worst bodies, and another client's stream")
    replica: dict[str, object] = {"engine": arguments.engine, "model_name": MODEL}
    if arguments.pictures is not None:
        replica["model"] = arguments.pictures.absolute()
    with local_stack(replica_settings=replica) as stack:
        asyncio.run(run(stack, arguments))


if __name__ == "__main__":
    main()
