"""Kvasir in front of two ordinary vLLM servers: exactness, hits next to other routers, CPU, and faults.

Starts the servers (toy model, one thread each, small caches, so that both evict), a replica without an engine
beside each, and a router. Parts, each with prompts of its own:

- `exact`: mixed chats, one at a time and then several at once: what the router expected of each prompt next
  to the cached tokens that the server reports.
- `peers`: the same requests through Kvasir, through the other routers in front of the same servers, and
  through Kvasir over two vLLM replicas of ours. Hits are the servers' own count.
- `cost`: CPU of the replica beside a server, per request and per token, next to a replica with its engine.
- `faults`: greedy chats, while one server is killed and started again and the other stands still for 10 s.
  Texts are compared with the server's own. Then the index is compared with what the servers' events say.

    python -m venv peers && peers/bin/pip install sglang-router==0.3.2 vllm-router==0.1.17
    python -m loadtests.benches.servers --peers peers/bin/python --trace toolagent_like_600s.jsonl.gz
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from loadtests.benches.harness import CHAT, System, bench_options, counters
from loadtests.benches.peers import Server, peer_commands, start_servers
from loadtests.benches.servers_compared import AT_ONCE, Body, Held, compare, cost, mixed_bodies
from loadtests.figures import print_header
from loadtests.stacks.local_stack import LocalStack, local_stack
from loadtests.stacks.vllm_server import BLOCK_SIZE, MODEL, REPLICA
from replicas.vllm_engine.environment import vllm_environment

SETTLE_SECONDS = 0.1
"""Events of a step may come after its answer."""
DOWN_SECONDS, STILL_SECONDS = 5.0, 10.0


def read_answer(answer: httpx.Response) -> tuple[list[str], int]:
    """Texts of the choices, and cached tokens. Raises an error for one that is not whole."""
    answer.raise_for_status()
    is_stream = answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n") if is_stream else [f"data: {answer.text}"]
    parts: dict[int, list[str]] = {}
    cached = None
    for line in lines:
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line[6:])
        for choice in chunk["choices"]:
            said = choice.get("delta") or choice.get("message") or {}
            parts.setdefault(choice["index"], []).append(said.get("content") or "")
        if chunk.get("usage"):
            cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
    if cached is None:
        raise ValueError(f"no usage in {answer.text[-300:]}")
    return ["".join(parts[index]) for index in sorted(parts)], cached


async def at_once(bodies: Sequence[Body], num_clients: int, ask: Callable[[int, Body], Any]) -> None:
    left = iter(enumerate(bodies))

    async def work() -> None:
        for number, body in left:
            await ask(number, body)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(work())


async def exact(stack: LocalStack, name: str, number: int, num_clients: int) -> None:
    """Prints how many expectations were right, and by how much the others were not."""
    differences: Counter[int] = Counter()
    errors: Counter[str] = Counter()
    num_cached = 0
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:

        async def ask(_: int, body: Body) -> None:
            nonlocal num_cached
            try:
                answer = await client.post(CHAT, json=body)
                cached = read_answer(answer)[1]
            except (httpx.HTTPError, ValueError, TypeError, KeyError) as error:
                errors[repr(error)[:200]] += 1
                return
            differences[cached - int(answer.headers["x-kvasir-overlap-tokens"])] += 1
            num_cached += cached
            if num_clients == 1:
                await asyncio.sleep(SETTLE_SECONDS)

        # With a seed, a prompt that takes several steps ends vLLM 0.32 on a CPU.
        bodies = list(mixed_bodies(name, number, is_greedy=num_clients > 1))
        await at_once(bodies, num_clients, ask)
    wrong = {tokens: times for tokens, times in sorted(differences.items()) if tokens}
    print(
        f"exact, {num_clients} at once: {differences[0]} of {number} as expected, {num_cached} cached tokens"
    )
    print(f"  cached less expected: {wrong or 'equal'}; errors: {dict(errors) or 'none'}", flush=True)


# Faults.


def signal_tree(pid: int, number: signal.Signals) -> None:
    process = psutil.Process(pid)
    for each in (*process.children(recursive=True), process):
        each.send_signal(number)


async def break_servers(own: LocalStack, servers: LocalStack, ended: asyncio.Event) -> None:
    """One fault after the other; replicas that have ended are started again, as a supervisor does."""

    async def supervise() -> None:
        while True:
            for name in ("replica-0", "replica-1"):
                if own.exit_status(name) is not None:
                    print(f"  {name} ended with {own.exit_status(name)} and is started again", flush=True)
                    own.start(name)
            await asyncio.sleep(0.5)

    supervision = asyncio.create_task(supervise())
    await asyncio.sleep(STILL_SECONDS)
    print("  killing a server", flush=True)
    signal_tree(servers.pid("vllm-0"), signal.SIGKILL)
    await asyncio.to_thread(servers.kill, "vllm-0")
    await asyncio.sleep(DOWN_SECONDS)
    servers.start("vllm-0")
    began = time.monotonic()
    await asyncio.to_thread(own.wait_ready, 2)
    print(f"  both serve again {time.monotonic() - began:.0f} s after the start", flush=True)
    await asyncio.sleep(STILL_SECONDS)
    print("  stopping the other", flush=True)
    signal_tree(servers.pid("vllm-1"), signal.SIGSTOP)
    await asyncio.sleep(STILL_SECONDS)
    signal_tree(servers.pid("vllm-1"), signal.SIGCONT)
    await asyncio.sleep(2 * STILL_SECONDS)
    await asyncio.to_thread(own.wait_ready, 2)
    ended.set()
    supervision.cancel()


async def faults(own: LocalStack, servers: LocalStack, url: str, held: Sequence[Held], number: int) -> None:
    bodies = list(mixed_bodies("faults", number, is_greedy=True))
    ended, counted, texts = asyncio.Event(), Counter[str](), dict[int, list[str]]()
    async with httpx.AsyncClient(timeout=300) as client:

        async def direct(at: int, body: Body) -> None:
            texts[at] = read_answer(await client.post(url + CHAT, json=body))[0]

        async def ask(_: int, body: Body) -> None:
            while not ended.is_set():
                at = random.randrange(number)
                try:
                    found = read_answer(await client.post(own.url + CHAT, json=bodies[at]))[0]
                except (httpx.HTTPError, ValueError, TypeError, KeyError) as error:
                    counted[f"error {error!r}"[:200]] += 1
                    continue
                kind = " with a schema" if "response_format" in bodies[at] else ""
                counted[("right" if found == texts[at] else "wrong") + kind] += 1

        await at_once(bodies, 2, direct)
        async with asyncio.TaskGroup() as group:
            group.create_task(break_servers(own, servers, ended))
            group.create_task(at_once(bodies[:AT_ONCE], AT_ONCE, ask))
    print(f"faults: {dict(counted)}")
    await asyncio.sleep(10 * SETTLE_SECONDS)
    print_index(own, held)


def print_index(own: LocalStack, held: Sequence[Held]) -> None:
    entries = counters([own.url], "router_index_entries").total()
    blocks = [each.num_blocks for each in held]
    print(f"  index: {entries} blocks, servers hold {sum(blocks)} {blocks}", flush=True)


def main() -> None:
    options = bench_options(__doc__)
    parts = ["exact", "peers", "cost", "faults"]
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
        each = [
            {"engine": "remote", "engine_url": server.url, "model_name": MODEL, "index_stride": BLOCK_SIZE}
            for server in servers
        ]
        own = stacks.enter_context(local_stack(replica_settings=each))
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
        asyncio.run(exact(own, "one by one", number, 1))
        asyncio.run(exact(own, "at once", number, AT_ONCE))
        print(f"  evicted: {sum(each.num_removed for each in held)}")
        time.sleep(10 * SETTLE_SECONDS)
        print_index(own, held)
    if {"peers", "cost"} & set(arguments.parts):
        settings = {**REPLICA, "kv_cache_bytes": arguments.cache_mib * 2**20}
        inside = stacks.enter_context(local_stack(num_replicas=2, replica_settings=settings))
        replicas = ("replica-0", "replica-1")
        if "peers" in arguments.parts:
            systems = [System("Kvasir", own.port, own.pid("router"))]
            for name, command, port in peer_commands(arguments.peers, servers):
                started.start(name, command)
                started.wait_answers(f"http://127.0.0.1:{port}/health")
                systems.append(System(name, port, started.pid(name)))
            systems.append(System("Kvasir, own replicas", inside.port, inside.pid("router")))
            compare(systems, servers, arguments.trace, number // 8, arguments.rate)
        if "cost" in arguments.parts:
            beside = {"replicas": [own.pid(each) for each in replicas]}
            beside["servers"] = [started.pid(f"vllm-{at}") for at in range(len(servers))]
            engines = {"replicas with engines": [inside.pid(each) for each in replicas]}
            cost({"servers": (own.port, beside), "own": (inside.port, engines)}, number // 10)
        inside.stop()
    if "faults" in arguments.parts:
        asyncio.run(faults(own, started, servers[1].url, held, number // 5))


if __name__ == "__main__":
    main()
