"""Measures the router's cost: added latency, requests per second and core.

The replica runs the simulated engine with a cost of zero, so all time is the router's and the transport's.
The router has core 0 to itself; replica, Redis and this client share core 1. Requests per second *per core*
are what the router's own CPU time allows (1 / CPU seconds per request), since on two cores the other
processes set the pace; the pace itself is printed beside it. *Added* latency is the difference of the medians
to the same prompts sent straight to the replica over gRPC, in the same run.

    python -m loadtests.benches.router
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from loadtests.benches.harness import WORDS, bench_options
from loadtests.figures import cpu_seconds, milliseconds, percentiles, print_header
from loadtests.load.streaming import Answer, Connection
from loadtests.stacks.local_stack import LocalStack, local_stack
from replicas.protocol.blocks import BlockHash, pack_token_ids
from replicas.protocol.call_tokens import Caller
from replicas.protocol.frames import SamplingParams, Submit
from router.fleet.replica_client import ReplicaClient


@dataclass(frozen=True, slots=True)
class PromptMix:
    """Chat prompts of about 1,000 tokens: `system_words` shared by a tenant, `user_words` never repeated."""

    name: str
    num_tenants: int
    system_words: int
    user_words: int


REPLICA = {
    "engine": "simulated",
    "simulated_hardware": "instant",
    "num_blocks": 65536,
    "model_name": "toy",
}
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
    """Return the same load without a router: TTFT and E2E of `count` requests over one gRPC stream."""
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
    stack: LocalStack, workload: PromptMix, concurrency: int, *, stream: bool, max_tokens: int, count: int
) -> None:
    requests = bodies(workload, count + count // 5, stream=stream, max_tokens=max_tokens, seed=concurrency)
    await closed_loop(stack, requests[count:], concurrency)
    before, started = cpu_seconds(stack.pid("router")), time.perf_counter()
    answers = await closed_loop(stack, requests[:count], concurrency)
    elapsed, busy = time.perf_counter() - started, cpu_seconds(stack.pid("router")) - before
    kind = f"{'stream' if stream else 'whole '} x {max_tokens:2d} tokens"
    prompt_tokens = sum(answer.usage.prompt_tokens or 0 for answer in answers) / len(answers)
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


async def run(num_requests: int, stack: LocalStack) -> None:
    for workload in WORKLOADS:
        for stream, max_tokens in ((False, 1), (False, 32), (True, 32)):
            for concurrency, count in ((1, num_requests // 5), (64, num_requests)):
                await measure(
                    stack,
                    workload,
                    concurrency=concurrency,
                    stream=stream,
                    max_tokens=max_tokens,
                    count=count,
                )


def main() -> None:
    options = bench_options(__doc__)
    options.add_argument("--requests", type=int, default=4000, help="per measurement at concurrency 64")
    arguments = options.parse_args()
    print_header("Router cost, simulated engine with zero compute")
    with local_stack(replica_settings=REPLICA, router_core=0, other_core=1) as stack:
        asyncio.run(run(arguments.requests, stack))


if __name__ == "__main__":
    main()
