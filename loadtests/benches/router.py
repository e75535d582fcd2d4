"""What the router costs: added latency, requests per second and core, memory over many requests.

The replica runs the simulated engine with a cost of zero, so all time that passes is the router's and
the transport's. The router has core 0 to itself; replica, Redis and this client share core 1. Requests
per second *per core* are what the router's own CPU time allows (1 / CPU seconds per request), since on
two cores the other processes set the pace; the pace itself is printed beside it. *Added* latency is the
difference of the medians to the same prompts sent straight to the replica over gRPC, in the same run.

    python -m loadtests.benches.router                  latency and throughput
    python -m loadtests.benches.router --soak 100000    memory over that many requests
    python -m loadtests.benches.router --traces 1       with spans of every request sent to a sink
"""

import argparse
import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from loadtests.figures import cpu_seconds, milliseconds, percentiles, print_header, resident_bytes
from loadtests.load.streaming import Answer, Connection
from loadtests.stacks.local_stack import LocalStack, local_stack
from replicas.protocol.blocks import BlockHash, pack_token_ids
from replicas.protocol.call_tokens import Caller
from replicas.protocol.frames import SamplingParams, Submit
from router.fleet.replica_client import ReplicaClient

WORDS = (
    "cache block prefix replica router prompt token answer question engine memory the a of to and in "
    "for with that this when which holds keeps reads writes sends finds waits serves long short first "
    "last next same other shared private recent old new fast slow large small"
).split()


@dataclass(frozen=True, slots=True)
class PromptMix:
    """Chat prompts of about 1,000 tokens: `system_words` shared by a tenant, `user_words` never repeated."""

    name: str
    num_tenants: int
    system_words: int
    user_words: int


WORKLOADS = (
    PromptMix("shared system prompts (50 tenants, 80 % of the prompt)", 50, 800, 190),
    PromptMix("no reuse at all", 0, 0, 990),
)


def bodies(workload: PromptMix, count: int, *, stream: bool, max_tokens: int, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    systems = [" ".join(rng.choices(WORDS, k=workload.system_words)) for _ in range(workload.num_tenants)]
    made = []
    for number in range(count):
        messages = [
            {"role": "user", "content": f"{number} " + " ".join(rng.choices(WORDS, k=workload.user_words))}
        ]
        if systems:
            messages.insert(0, {"role": "system", "content": rng.choice(systems)})
        body: dict[str, object] = {
            "model": "toy",
            "messages": messages,
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        made.append(json.dumps(body).encode())
    return made


async def closed_loop(stack: LocalStack, requests: Sequence[bytes], concurrency: int) -> list[Answer]:
    """Every connection sends its next request when it has the last answer."""
    port = stack.port
    queue = iter(requests)
    answers: list[Answer] = []

    async def client() -> None:
        connection = Connection("127.0.0.1", port)
        for body in queue:
            answer = await connection.post("/v1/chat/completions", body)
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}")
            answers.append(answer)
        await connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return answers


async def straight_loop(
    address: str, caller: Caller, count: int, concurrency: int, *, num_prompt_tokens: int, max_tokens: int
) -> list[tuple[float, float]]:
    """The same load without a router: TTFT and E2E of `count` requests over one gRPC stream."""
    client = ReplicaClient(caller.audience.replica_id, address, lambda *_: None, caller=caller)
    rng = random.Random(concurrency)
    numbers = iter(range(count))
    times: list[tuple[float, float]] = []

    async def one_at_a_time() -> None:
        for _ in numbers:
            token_ids = rng.choices(range(300, 2000), k=num_prompt_tokens)
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            sent = time.perf_counter()
            inflight = client.submit(Submit(0, pack_token_ids(token_ids), sampling, BlockHash(bytes(16))))
            first, num_tokens = None, 0
            while num_tokens < max_tokens:
                num_tokens += sum(len(delta.token_ids) for delta in await inflight.batch())
                first = first or time.perf_counter()
            assert first is not None
            times.append((first - sent, time.perf_counter() - sent))

    stream = asyncio.create_task(client.serve())
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_at_a_time())
    await client.close()
    await stream
    return times


async def measure(
    stack: LocalStack, workload: PromptMix, *, concurrency: int, stream: bool, max_tokens: int, count: int
) -> None:
    requests = bodies(workload, count + count // 5, stream=stream, max_tokens=max_tokens, seed=concurrency)
    await closed_loop(stack, requests[count:], concurrency)
    before, started = cpu_seconds(stack.pid("router")), time.perf_counter()
    answers = await closed_loop(stack, requests[:count], concurrency)
    elapsed, busy = time.perf_counter() - started, cpu_seconds(stack.pid("router")) - before
    kind = f"{'stream' if stream else 'whole '} x {max_tokens:2d} tokens"
    prompt_tokens = sum(int(str(answer.usage.get("prompt_tokens", 0))) for answer in answers) / len(answers)
    print(f"- {kind}, concurrency {concurrency:2d}, {prompt_tokens:.0f} prompt tokens, {workload.name}")
    direct = await straight_loop(
        stack.replica_address("toy", "replica-0"),
        stack.router_caller("toy", "replica-0"),
        count // 2,
        concurrency,
        num_prompt_tokens=int(prompt_tokens),
        max_tokens=max_tokens,
    )
    ttft, e2e = [answer.ttft for answer in answers], [answer.e2e for answer in answers]
    added_first = percentiles(ttft).p50 - percentiles([first for first, _ in direct]).p50
    added_whole = percentiles(e2e).p50 - percentiles([whole for _, whole in direct]).p50
    if stream:
        print(f"    TTFT {milliseconds(ttft)}   added at p50 {added_first * 1e3:6.2f} ms")
    print(f"    E2E  {milliseconds(e2e)}   added at p50 {added_whole * 1e3:6.2f} ms")
    print(
        f"    {count / elapsed:7.0f} requests/s here; router CPU {busy / count * 1e6:6.0f} us a request"
        f" = {count / busy:6.0f} requests/s per core"
    )


async def soak(stack: LocalStack, count: int) -> None:
    """Memory of the router after every tenth of `count` streamed requests."""
    workload = WORKLOADS[0]
    print(f"- {count} streamed requests x 8 tokens, {workload.name}; router RSS in MiB after each tenth:")
    sizes = []
    for tenth in range(10):
        requests = bodies(workload, count // 10, stream=True, max_tokens=8, seed=tenth)
        await closed_loop(stack, requests, 32)
        sizes.append(resident_bytes(stack.pid("router")) / 2**20)
        print(f"    {(tenth + 1) * count // 10:7d}  {sizes[-1]:7.1f}")
    slope = (sizes[9] - sizes[4]) / (count / 2) * 1e5
    print(f"    slope of the second half: {slope:+.2f} MiB per 100,000 requests")


@contextlib.contextmanager
def trace_sink() -> Iterator[str]:
    """A collector that takes spans and forgets them."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


async def run(arguments: argparse.Namespace, stack: LocalStack) -> None:
    if arguments.soak:
        await soak(stack, arguments.soak)
        return
    for workload in WORKLOADS:
        for stream, max_tokens in ((False, 1), (False, 32), (True, 32)):
            await measure(
                stack,
                workload,
                concurrency=1,
                stream=stream,
                max_tokens=max_tokens,
                count=arguments.requests // 5,
            )
            await measure(
                stack,
                workload,
                concurrency=64,
                stream=stream,
                max_tokens=max_tokens,
                count=arguments.requests,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=int, default=4000, help="requests per measurement at concurrency 64"
    )
    parser.add_argument("--soak", type=int, default=0, help="measure memory over this many requests instead")
    parser.add_argument("--traces", type=float, help="share of requests that are traced; none: no traces")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--hardware", default="instant", help="cost model of the simulated engine")
    arguments = parser.parse_args()
    print_header("Router cost, simulated engine with zero compute")
    settings = {
        "engine": "simulated",
        "simulated_hardware": arguments.hardware,
        "num_blocks": 65536,
        "model_name": "toy",
    }
    with trace_sink() as sink:
        traces = (
            {}
            if arguments.traces is None
            else {"otlp_endpoint": sink, "trace_sample_ratio": arguments.traces}
        )
        with local_stack(
            num_replicas=arguments.replicas,
            replica_settings=settings | traces,
            router_settings=traces,
            router_core=0,
            other_core=1,
        ) as stack:
            asyncio.run(run(arguments, stack))


if __name__ == "__main__":
    main()
