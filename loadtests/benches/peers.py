"""Kvasir next to SGLang's and vLLM's routers, over vLLM replicas of equal settings on one machine.

Two vLLM replicas behind Kvasir's router, and two of vLLM's own OpenAI servers behind each of the other
routers in turn. Tenants with a system prompt of about 1,500 tokens each, 5 users per tenant, other
questions every time: by default more prefixes than one cache holds, and about as many as both do; with
`--cache-mib 40` only as many as both hold without copies. First an open loop
(Poisson arrivals, never held up by slow answers), then a closed one for the highest rate. Every run has
prompts of its own, so each begins cold; systems take turns, and who goes first rotates.

The other routers live in an environment of their own:

    python -m venv peers && peers/bin/pip install sglang-router==0.3.2 vllm-router==0.1.17
    python -m loadtests.benches.peers --peers peers/bin/python
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import httpx
from tokenizers import Tokenizer

from loadtests.benches.router import WORDS
from loadtests.figures import cpu_seconds, percentiles, print_header
from loadtests.load.streaming import Answer, Connection
from loadtests.stacks.local_stack import LocalStack, free_port, local_stack
from replicas.toy_model import toy_model_path
from replicas.vllm_engine.environment import vllm_environment

NUM_USERS = 5
PREFIX_TOKENS = 1500
OUTPUT_TOKENS = 16
BLOCK_SIZE = 32
MODEL = "toy_model"
CLOSED_CONCURRENCY = 8
NUM_SERVERS = 2

REPLICA: Mapping[str, object] = {
    "engine": "vllm",
    "model_name": MODEL,
    "block_size": BLOCK_SIZE,
    "max_batched_tokens": 2048,
    "max_running": 256,
    "num_threads": 1,
}


@dataclass(frozen=True, slots=True)
class System:
    """A router that can be asked. `pid` is its process."""

    name: str
    port: int
    pid: int


@dataclass(frozen=True, slots=True)
class Server:
    """One of vLLM's own OpenAI servers, with the ports of its KV events."""

    url: str
    events_port: int
    replay_port: int


@dataclass(frozen=True, slots=True)
class SystemRun:
    """What one system did with one run's requests; an answer is None where it failed."""

    answers: Sequence[Answer | None]
    seconds: float
    router_cpu_seconds: float

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if answer is not None]

    @property
    def hit_rate(self) -> float:
        prompt = sum(int(str(answer.usage["prompt_tokens"])) for answer in self.good)
        return sum(answer.num_cached_tokens for answer in self.good) / prompt


class RunPrompts:
    """Requests of equal shape, run by run; the run's number is the first thing in each prompt."""

    def __init__(self, num_tenants: int) -> None:
        self._num_tenants = num_tenants
        rng = random.Random(0)
        tokenizer = Tokenizer.from_file(str(toy_model_path() / "tokenizer.json"))
        sample = rng.choices(WORDS, k=2000)
        self._num_words = int(PREFIX_TOKENS * len(sample) / len(tokenizer.encode(" ".join(sample)).ids))

    def bodies(self, run: str, num_requests: int, rng: random.Random) -> list[bytes]:
        """`rng` alone decides who asks when, so that runs of one seed have equal structure."""
        words = random.Random(run)
        systems = [
            f"{run} tenant {tenant} " + " ".join(words.choices(WORDS, k=self._num_words))
            for tenant in range(self._num_tenants)
        ]
        bodies = []
        for _ in range(num_requests):
            tenant, user = rng.randrange(self._num_tenants), rng.randrange(NUM_USERS)
            question = f"user {user} asks " + " ".join(words.choices(WORDS, k=30))
            bodies.append(_body(systems[tenant], question, f"tenant-{tenant}-user-{user}"))
        return bodies


def _body(system: str, question: str, user: str) -> bytes:
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": user,
    }
    return json.dumps(body).encode()


class Client:
    """Keep-alive connections to one port, as many as are needed at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []

    async def ask(self, body: bytes) -> Answer | None:
        connection = self._idle.pop() if self._idle else Connection("127.0.0.1", self._port)
        try:
            async with asyncio.timeout(60):
                answer = await connection.post("/v1/chat/completions", body)
        except (OSError, EOFError, ValueError, TimeoutError):
            await connection.close()
            return None
        self._idle.append(connection)
        return answer if answer.status == 200 and "prompt_tokens" in answer.usage else None

    async def close(self) -> None:
        for connection in self._idle:
            await connection.close()


async def open_loop(system: System, bodies: Sequence[bytes], rate: float, rng: random.Random) -> SystemRun:
    client = Client(system.port)
    cpu = cpu_seconds(system.pid)
    began = time.perf_counter()
    tasks = []
    due = 0.0
    for body in bodies:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
        tasks.append(asyncio.create_task(client.ask(body)))
    answers = await asyncio.gather(*tasks)
    run = SystemRun(answers, time.perf_counter() - began, cpu_seconds(system.pid) - cpu)
    await client.close()
    return run


async def closed_loop(system: System, bodies: Sequence[bytes]) -> SystemRun:
    client = Client(system.port)
    cpu = cpu_seconds(system.pid)
    left = iter(bodies)

    async def work() -> list[Answer | None]:
        return [await client.ask(body) for body in left]

    began = time.perf_counter()
    parts = await asyncio.gather(*(work() for _ in range(CLOSED_CONCURRENCY)))
    run = SystemRun(
        [answer for part in parts for answer in part],
        time.perf_counter() - began,
        cpu_seconds(system.pid) - cpu,
    )
    await client.close()
    return run


def start_servers(stack: LocalStack, cache_bytes: int) -> list[Server]:
    servers = []
    for number in range(NUM_SERVERS):
        port, events_port, replay_port = free_port(), free_port(), free_port()
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events_port}",
            "replay_endpoint": f"tcp://*:{replay_port}",
        }
        # Hashes in events as vLLM sends them by default, which is what other routers expect.
        command = ["env", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=1"]
        command += [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(toy_model_path()), "--served-model-name", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
        command += ["--block-size", str(BLOCK_SIZE), "--kv-cache-memory-bytes", str(cache_bytes)]
        command += ["--max-num-batched-tokens", "2048", "--max-num-seqs", "256"]
        command += ["--distributed-executor-backend", "uni", "--generation-config", "vllm"]
        # Rendering is what vllm-router's kv_aware asks a server for, to know a prompt's tokens.
        command += ["--enable-scale-out"]
        command += ["--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)]
        stack.start(f"vllm-{number}", command)
        servers.append(Server(f"http://127.0.0.1:{port}", events_port, replay_port))
    for server in servers:
        _wait_healthy(stack, server.url)
    return servers


def peer_commands(python: str, servers: Sequence[Server]) -> Iterator[tuple[str, list[str], int]]:
    """Name, command and port of each router; all but the policy is left at its default."""
    urls = [server.url for server in servers]
    port = free_port()
    sglang = [python, "-m", "sglang_router.launch_router", "--port", str(port), "--worker-urls", *urls]
    sglang += ["--policy", "cache_aware", "--prometheus-port", str(free_port()), "--log-level", "warn"]
    yield "sglang-router cache_aware", sglang, port
    for policy in ("cache_aware", "kv_aware"):
        port = free_port()
        command = [python, "-m", "vllm_router.launch_router", "--port", str(port), "--worker-urls", *urls]
        command += ["--policy", policy, "--prometheus-port", str(free_port()), "--log-level", "warning"]
        command += ["--worker-startup-check-interval", "1"]
        if policy == "kv_aware":
            for server in servers:
                command += ["--kv-event-source", f"{server.url}=tcp://127.0.0.1:{server.events_port}"]
                command += ["--kv-event-replay-source", f"{server.url}=tcp://127.0.0.1:{server.replay_port}"]
            command += ["--kv-event-block-size", str(BLOCK_SIZE), "--kv-event-model", MODEL]
        yield f"vllm-router {policy}", command, port


def _wait_healthy(stack: LocalStack, url: str) -> None:
    def healthy() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(url + "/health").status_code == 200
        return False

    stack.poll(healthy, url)


COLUMNS: Mapping[str, Callable[[SystemRun, SystemRun], float]] = {
    "hit rate %": lambda run, _: 100 * run.hit_rate,
    "TTFT p50 ms": lambda run, _: 1e3 * percentiles([answer.ttft for answer in run.good]).p50,
    "TTFT p90 ms": lambda run, _: 1e3 * percentiles([answer.ttft for answer in run.good]).p90,
    "E2E p50 ms": lambda run, _: 1e3 * percentiles([answer.e2e for answer in run.good]).p50,
    "errors": lambda run, closed: len(run.answers) - len(run.good) + len(closed.answers) - len(closed.good),
    "router CPU s / 1000": lambda run, _: 1e3 * run.router_cpu_seconds / len(run.answers),
    "closed loop requests/s": lambda _, closed: len(closed.good) / closed.seconds,
    "closed loop hit rate %": lambda _, closed: 100 * closed.hit_rate,
}


def compare(
    systems: Sequence[System], prompts: RunPrompts, num_rounds: int, num_requests: int, rate: float
) -> None:
    runs: dict[str, list[tuple[SystemRun, SystemRun]]] = {system.name: [] for system in systems}
    for system in systems:
        asyncio.run(closed_loop(system, prompts.bodies(f"warm {system.name}", 20, random.Random(0))))
    for number in range(num_rounds):
        first = number % len(systems)
        for system in [*systems[first:], *systems[:first]]:
            rng = random.Random(number)
            bodies = prompts.bodies(f"{number} open {system.name}", num_requests, rng)
            opened = asyncio.run(open_loop(system, bodies, rate, rng))
            bodies = prompts.bodies(f"{number} closed {system.name}", num_requests // 2, rng)
            closed = asyncio.run(closed_loop(system, bodies))
            runs[system.name].append((opened, closed))
            figures = "  ".join(f"{name} {value(opened, closed):.1f}" for name, value in COLUMNS.items())
            print(f"  round {number} {system.name:26} {figures}", flush=True)
    print(f"\n| median of {num_rounds} rounds (lowest to highest) | {' | '.join(COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for name, pairs in runs.items():
        cells = []
        for value in COLUMNS.values():
            values = [value(*pair) for pair in pairs]
            cells.append(f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})")
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", required=True, help="Python of the environment with the other routers")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=300, help="per run and system")
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second of the open loop")
    parser.add_argument("--tenants", type=int, default=40)
    parser.add_argument("--cache-mib", type=int, default=64, help="KV cache of each replica")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of our replicas")
    arguments = parser.parse_args()
    os.environ.update(vllm_environment(1))  # for vLLM's servers; replicas set the same for themselves
    print_header("Routers over two vLLM replicas: toy model, one thread per engine")
    cache_bytes = arguments.cache_mib * 2**20
    settings = {
        **REPLICA,
        "kv_cache_bytes": cache_bytes,
        **dict(pair.split("=", 1) for pair in arguments.set),
    }
    with local_stack(num_replicas=NUM_SERVERS, replica_settings=settings) as stack:
        systems = [System("Kvasir", stack.port, stack.pid("router"))]
        for name, command, port in peer_commands(arguments.peers, start_servers(stack, cache_bytes)):
            stack.start(name, command)
            _wait_healthy(stack, f"http://127.0.0.1:{port}")
            systems.append(System(name, port, stack.pid(name)))
        prompts = RunPrompts(arguments.tenants)
        compare(systems, prompts, arguments.rounds, arguments.requests, arguments.rate)


if __name__ == "__main__":
    main()
