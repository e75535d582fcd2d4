"""What metrics cost a router: counting a request, answering a scrape, and what a scrape does to a stream.

The router knows 64 replicas (one in a process, the rest in another) and has served 100 tenants, so its
metrics have all the series that they ever have. It has core 0 to itself; everything else shares core 1.
Streams are 8 ms a token; they are timed in turns, without scrapes and with one scrape after another.

    python -m loadtests.benches.metrics
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from loadtests.figures import cpu_seconds, percentiles, print_header
from loadtests.load.streaming import Connection
from loadtests.stacks.local_stack import LocalStack, local_stack, python_command
from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import PromptUsage, SamplingParams, Submit
from replicas.protocol.status import ReplicaId
from router.generation import Generation
from router.observation.metrics import MOST_TENANTS, RouterMetrics
from router.observation.served import ServedPrompt, ServedRequest, TokenGaps
from router.routing.decision import Decision, DecisionReason

MODEL = "toy"
ROUNDS = 5


def body(max_tokens: int, tenant: int = 0) -> bytes:
    return json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Hello from {tenant}"}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "user": f"user-{tenant}",
            "cache_salt": f"salt-{tenant}",
        }
    ).encode()


def counting_seconds(count: int) -> float:
    """Of one request, told to the metrics at its end."""
    metrics = RouterMetrics(CollectorRegistry())
    gaps = TokenGaps(0.0, 1)
    for number in range(31):
        gaps.arrived((number + 1) * 0.008)
    requests = []
    for number in range(MOST_TENANTS):
        generation = Generation(
            *(MODEL, (), Submit(0, b"", SamplingParams(max_tokens=32), BlockHash(bytes(16))), (), b"bucket"),
            tenant=f"salt-{number}",
        )
        decision = Decision(ReplicaId("replica-0"), 800, DecisionReason.OVERLAP, number % 4, ())
        usage = PromptUsage(1000, 800, 100, 400, 300)
        requests.append(
            ServedRequest(
                request_id="r",
                route="chat_completions",
                model=MODEL,
                status=200,
                error=None,
                arrived_at=0.0,
                read_seconds=0.001,
                prepared_seconds=0.002,
                first_token_seconds=0.02,
                ended_seconds=0.3,
                is_stream=True,
                prompts=(ServedPrompt(generation, decision, usage, 32, 0.0001),),
                token_gaps=gaps,
            )
        )
    for request in requests:
        metrics.observe(request)
    started = time.perf_counter()
    for number in range(count):
        metrics.observe(requests[number % MOST_TENANTS])
    return (time.perf_counter() - started) / count


async def scrape(connection: Connection) -> tuple[float, int]:
    """Seconds and lines."""
    started = time.perf_counter()
    text = await connection.get("/metrics")
    return time.perf_counter() - started, text.count(b"\n")


async def stream_gaps(stack: LocalStack, num_streams: int, num_tokens: int) -> list[float]:
    connections = [Connection("127.0.0.1", stack.port) for _ in range(num_streams)]
    answers = await asyncio.gather(
        *(connection.post("/v1/chat/completions", body(num_tokens)) for connection in connections)
    )
    for connection in connections:
        await connection.close()
    return [gap for answer in answers for gap in answer.itl_seconds]


async def scrape_until(stack: LocalStack, done: asyncio.Event) -> list[float]:
    connection = Connection("127.0.0.1", stack.port)
    seconds = []
    while not done.is_set():
        seconds.append((await scrape(connection))[0])
    await connection.close()
    return seconds


async def measure(stack: LocalStack, num_streams: int, num_tokens: int) -> None:
    connection = Connection("127.0.0.1", stack.port)
    for tenant in range(MOST_TENANTS + 20):
        await connection.post("/v1/chat/completions", body(2, tenant))
    pid = stack.pid("router")
    before = cpu_seconds(pid)
    idle = [await scrape(connection) for _ in range(300)]
    cost = (cpu_seconds(pid) - before) / len(idle)
    print(f"- {idle[0][1]} lines; one scrape costs the router {cost * 1e3:.1f} ms of CPU")
    print(f"    scrape, router idle          {figures([seconds for seconds, _ in idle])}")
    calm: list[float] = []
    scraped: list[float] = []
    scrapes: list[float] = []
    for _ in range(ROUNDS):
        calm += await stream_gaps(stack, num_streams, num_tokens)
        done = asyncio.Event()
        scraping = asyncio.create_task(scrape_until(stack, done))
        scraped += await stream_gaps(stack, num_streams, num_tokens)
        done.set()
        scrapes += await scraping
    print(f"    scrape, {num_streams:2d} streams           {figures(scrapes)}")
    print(f"- time between tokens of {num_streams} streams, {len(calm)} gaps each")
    print(f"    no scrapes                   {figures(calm)}")
    print(f"    scraped without a pause      {figures(scraped)}")
    await connection.close()


def figures(samples: Sequence[float]) -> str:
    found = percentiles(samples)
    longest = max(samples) * 1e3
    return f"p50 {found.p50 * 1e3:7.2f} ms   p99 {found.p99 * 1e3:7.2f} ms   longest {longest:7.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400, help="per stream and round")
    arguments = parser.parse_args()
    print_header(f"Metrics of a router, {arguments.replicas} replicas, {MOST_TENANTS} tenants")
    seconds = min(counting_seconds(20_000) for _ in range(5))
    print(f"- counting a request of 32 tokens at its end: {seconds * 1e6:.1f} us")
    settings = {"engine": "simulated", "num_blocks": 65536, "model_name": MODEL}
    with local_stack(num_replicas=1, replica_settings=settings, router_core=0, other_core=1) as stack:
        crowd = {"count": arguments.replicas - 1, **stack.shared, "model_name": MODEL}
        stack.start("crowd", python_command("loadtests.stacks.many_replicas", crowd))
        stack.wait_ready(arguments.replicas)
        asyncio.run(measure(stack, arguments.streams, arguments.tokens))


if __name__ == "__main__":
    main()
