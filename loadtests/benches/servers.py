"""Kvasir in front of two ordinary vLLM servers: exactness, hits next to other routers, and CPU.

Starts the servers (toy model, one thread each, small caches, so that both evict), a replica without an engine
beside each, and a router. Parts, each with prompts of its own:

- `exact`: mixed chats, one at a time and then several at once: what the router expected of each prompt next
  to the cached tokens that the server reports.
- `peers`: the same requests through Kvasir, through the other routers in front of the same servers, and
  through Kvasir over two vLLM replicas of ours. Hits are the servers' own count.
- `cost`: CPU of the replica beside a server, per request and per token, next to a replica with its engine.

    python -m venv peers && peers/bin/pip install smg==1.13.0 vllm-router==0.1.17
    python -m loadtests.benches.servers --peers peers/bin/python --trace toolagent_like_600s.jsonl.gz
"""

import asyncio
import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from loadtests.benches.harness import CHAT, System, bench_options
from loadtests.benches.peers import Server, peer_commands, start_servers
from loadtests.benches.servers_compared import (
    AT_ONCE,
    Body,
    at_once,
    compare,
    cost,
    mixed_bodies,
    read_answer,
)
from loadtests.benches.servers_held import Held, lines_of, print_index, root_of, until_equal
from loadtests.figures import print_header
from loadtests.stacks.local_stack import LocalStack, local_stack
from loadtests.stacks.vllm_server import BLOCK_SIZE, MODEL, REPLICA
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.vllm_engine.environment import vllm_environment

SETTLE_SECONDS = 0.1
"""Events of a step may come after its answer. One at a time, the next prompt waits for all of them."""


class Asked(NamedTuple):
    """A prompt whose cached tokens were not those expected. Times are of the monotonic clock."""

    number: int
    body: Body
    replica: str
    expected: int
    cached: int
    sent: float
    ended: float


async def exact(own: LocalStack, held: Sequence[Held], name: str, number: int, num_clients: int) -> None:
    """Prints how many expectations were right, by how much the others were not, and why."""
    differences: Counter[int] = Counter()
    errors: Counter[str] = Counter()
    wrong: list[Asked] = []
    late: list[float] = []
    num_cached = 0
    # With a seed, a prompt that takes several steps ends vLLM 0.32 on a CPU.
    bodies = list(mixed_bodies(name, number, is_greedy=num_clients > 1))
    async with httpx.AsyncClient(base_url=own.url, timeout=120) as client:

        async def ask(at: int, body: Body) -> None:
            nonlocal num_cached
            sent = time.monotonic()
            try:
                answer = await client.post(CHAT, json=body)
                cached = read_answer(answer)[1]
            except (httpx.HTTPError, ValueError, TypeError, KeyError) as error:
                errors[repr(error)[:200]] += 1
                return
            expected = int(answer.headers["x-kvasir-overlap-tokens"])
            differences[cached - expected] += 1
            num_cached += cached
            if cached != expected:
                replica = answer.headers["x-kvasir-replica"]
                wrong.append(Asked(at, body, replica, expected, cached, sent, time.monotonic()))
            if num_clients == 1:
                await asyncio.sleep(SETTLE_SECONDS)
                late.append((await asyncio.to_thread(until_equal, own, held))[0])

        await at_once(bodies, num_clients, ask)
        print(
            f"exact, {num_clients} at once: {differences[0]} of {number} as expected,"
            f" {num_cached} cached tokens; errors: {dict(errors) or 'none'}"
        )
        if any(late):
            print(f"  events were late after {sum(map(bool, late))} answers, by {max(late):.2f} s at most")
        for asked in wrong:
            await explain(client, root_of(own), held[int(asked.replica[-1])], asked)


async def explain(client: httpx.AsyncClient, root: BlockHash, held: Held, asked: Asked) -> None:
    """Print the history of the blocks that were cached and not expected, or the other way round."""
    chat = {"model": MODEL, "messages": asked.body["messages"]}
    tokens = (await client.post("/tokenize", json=chat)).json()["tokens"]
    first, end = sorted((asked.expected // BLOCK_SIZE, asked.cached // BLOCK_SIZE))
    names = hash_blocks(root, tokens, BLOCK_SIZE)[first:end]
    print(
        f"  request {asked.number}, n {asked.body.get('n', 1)}, {asked.replica}: expected {asked.expected},"
        f" cached {asked.cached} of {len(tokens)} tokens; answered after {asked.ended - asked.sent:.3f} s"
    )
    print("\n".join(lines_of(held, names, first, asked.sent)), flush=True)


def main() -> None:
    options = bench_options(__doc__)
    parts = ["exact", "peers", "cost"]
    options.add_argument("--parts", nargs="*", default=parts, choices=parts)
    options.add_argument("--peers", help="Python of the environment with the other routers")
    options.add_argument("--trace", type=Path, help="a recorded trace for the part peers, besides b2b")
    options.add_argument("--requests", type=int, default=1000, help="of the part exact; others take shares")
    options.add_argument("--rate", type=float, default=4.0, help="requests per second of the part peers")
    options.add_argument("--cache-mib", type=int, default=24, help="KV cache of each server")
    arguments = options.parse_args()
    os.environ.update(vllm_environment(1))
    print_header("In front of two vLLM servers: toy model, one thread per engine")
    with tempfile.TemporaryDirectory(prefix="servers-") as folder, contextlib.ExitStack() as stacks:
        started = LocalStack(Path(folder), None, None)
        stacks.callback(started.stop)
        servers = start_servers(started, arguments.cache_mib * 2**20)
        held = [Held(server) for server in servers]
        beside = {"engine": "remote", "model_name": MODEL, "index_stride": BLOCK_SIZE}
        each = [{**beside, "engine_url": server.url} for server in servers]
        router = {"index_stride": BLOCK_SIZE}  # else it foretells shared beginnings in strides
        own = stacks.enter_context(local_stack(replica_settings=each, router_settings=router))
        measure(arguments, stacks, started, own, servers, held)


def measure(
    arguments: Any,
    stacks: contextlib.ExitStack,
    started: LocalStack,
    own: LocalStack,
    servers: Sequence[Server],
    held: Sequence[Held],
) -> None:
    number = arguments.requests
    if "exact" in arguments.parts:
        asyncio.run(exact(own, held, "one by one", number, 1))
        asyncio.run(exact(own, held, "at once", number, AT_ONCE))
        print(f"  evicted: {sum(each.num_removed for each in held)}")
        print_index(own, held)
    if {"peers", "cost"} & set(arguments.parts):
        settings = {**REPLICA, "kv_cache_bytes": arguments.cache_mib * 2**20}
        inside = stacks.enter_context(local_stack(num_replicas=2, replica_settings=settings))
        replicas = ("replica-0", "replica-1")
        if "peers" in arguments.parts:
            systems = [System("Kvasir", own.port, own.pid("router"))]
            for name, command, port in peer_commands(arguments.peers, servers):
                started.start(name, command)
                started.wait_answers(f"http://127.0.0.1:{port}/v1/models")
                systems.append(System(name, port, started.pid(name)))
            systems.append(System("Kvasir, own replicas", inside.port, inside.pid("router")))
            compare(systems, servers, arguments.trace, number // 8, arguments.rate)
        if "cost" in arguments.parts:
            beside = {"replicas": [own.pid(each) for each in replicas]}
            beside["servers"] = [started.pid(f"vllm-{at}") for at in range(len(servers))]
            engines = {"replicas with engines": [inside.pid(each) for each in replicas]}
            cost({"servers": (own.port, beside), "own": (inside.port, engines)}, number // 10)
        inside.stop()


if __name__ == "__main__":
    main()
