"""Measures a router's CPU per request, next to another state of it and to SMG and vLLM's router.

Every system answers the same chats of about 1,000 tokens with one shared system prompt, streamed and whole.
Each connection sends its next request when its last is answered. With many connections the replica lacks room
and Kvasir's queue holds some requests; with few all go at once. The share held is beside the figures. With
few, a frame has tokens for few requests, so each costs more. Engines take steps of some milliseconds and give
every request one token per step, as real ones do: an engine without cost lets a busy router find several
tokens at once. Kvasir's is the simulated engine; behind the other routers, which speak HTTP, is a server with
the same steps. All are up all the time and take turns in short bursts, in rotating order. `--checkout` adds
another state of this repository. Ratios are medians over bursts that followed each other.

    python -m venv peers && peers/bin/pip install smg==1.13.0 vllm-router==0.1.17
    python -m loadtests.benches.door --peers peers/bin/python --checkout before=../kvasir-before
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from loadtests.benches.router import PromptMix, bodies
from loadtests.figures import print_header
from loadtests.load.streaming import Connection
from loadtests.stacks.local_stack import LocalStack, free_port, local_stack

MODEL = "toy"
OUTPUT_TOKENS = 32
LOADS = {"over capacity": 64, "below capacity": 8}
"""Connections."""
WORKLOAD = PromptMix("one shared system prompt", 1, 800, 190)
HARDWARE = "h100-8b"
STEP_SECONDS = 0.0126
"""Seconds of that hardware's step of 64 requests."""

REPLICA = {
    "engine": "simulated",
    "simulated_hardware": HARDWARE,
    "num_blocks": 65536,
    "model_name": MODEL,
}


@dataclass(frozen=True, slots=True)
class System:
    """A router that can be asked. `pid` is its process."""

    name: str
    port: int
    pid: int


# What stands behind the other routers.


class StepServer:
    """OpenAI's chats without a model: with each step every request that is open gets a token."""

    def __init__(self) -> None:
        self._open: list[asyncio.Queue[None]] = []

    async def step(self) -> None:
        while True:
            await asyncio.sleep(STEP_SECONDS)
            for steps in self._open:
                steps.put_nowait(None)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                _, has_body, rest = head.partition("content-length: ")
                body = await reader.readexactly(int(rest.split("\r\n")[0])) if has_body else b""
                if head.startswith("post"):
                    await self._answer(writer, json.loads(body))
                else:
                    _write_whole(writer, {"data": [{"id": MODEL, "object": "model"}], "status": "ok"})
                await writer.drain()
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        steps: asyncio.Queue[None] = asyncio.Queue()
        self._open.append(steps)
        head = {"id": "chatcmpl-0123456789abcdef", "created": 1, "model": MODEL}
        usage = {"prompt_tokens": 1000, "completion_tokens": OUTPUT_TOKENS, "total_tokens": 1032}
        if body.get("stream"):
            kind = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\n" + kind)
            for number in range(OUTPUT_TOKENS):
                await steps.get()
                finish = "length" if number == OUTPUT_TOKENS - 1 else None
                choice = {
                    "index": 0,
                    "delta": {"content": " word"},
                    "logprobs": None,
                    "finish_reason": finish,
                }
                _write_event(writer, {**head, "object": "chat.completion.chunk", "choices": [choice]})
            _write_event(writer, {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        else:
            for _ in range(OUTPUT_TOKENS):
                await steps.get()
            message = {"role": "assistant", "content": " word" * OUTPUT_TOKENS}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            _write_whole(writer, {**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        self._open.remove(steps)


def _write_event(writer: asyncio.StreamWriter, content: dict[str, object]) -> None:
    event = b"data: " + json.dumps(content).encode() + b"\n\n"
    writer.write(b"%x\r\n%s\r\n" % (len(event), event))


def _write_whole(writer: asyncio.StreamWriter, content: dict[str, object]) -> None:
    body = json.dumps(content).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)


async def serve_steps(port: int) -> None:
    server = StepServer()
    async with await asyncio.start_server(server.serve, "127.0.0.1", port), asyncio.TaskGroup() as tasks:
        tasks.create_task(server.step())


# Who is compared.


def peer_commands(python: str, url: str) -> Iterator[tuple[str, list[str], int]]:
    """Name, command and port of each router."""
    for name, module in (("smg", "smg"), ("vllm-router", "vllm_router")):
        port = free_port()
        command = [python, "-m", f"{module}.launch_router", "--port", str(port), "--worker-urls", url]
        command += ["--policy", "cache_aware", "--prometheus-port", str(free_port())]
        command += ["--worker-startup-check-interval", "1", "--log-level"]
        yield name, [*command, "warn" if name == "smg" else "warning"], port


def start_peers(stack: LocalStack, python: str) -> Iterator[System]:
    backend = free_port()
    stack.start("steps", [sys.executable, "-m", "loadtests.benches.door", "--serve", str(backend)])
    _wait_models(stack, backend)
    for name, command, port in peer_commands(python, f"http://127.0.0.1:{backend}"):
        stack.start(name, command)
        _wait_models(stack, port)
        yield System(name, port, stack.pid(name))


def _wait_models(stack: LocalStack, port: int) -> None:
    """A router may be healthy before it knows a server."""
    stack.wait_answers(f"http://127.0.0.1:{port}/v1/models")


# What is measured.


@dataclass(frozen=True, slots=True)
class Cost:
    """A burst's router CPU in microseconds per request, and how many of its requests were held."""

    microseconds: float
    num_held: int


async def burst(system: System, requests: Sequence[bytes], num_connections: int) -> Cost:
    queue = iter(requests)

    async def client() -> None:
        connection = Connection("127.0.0.1", system.port)
        for body in queue:
            answer = await connection.post("/v1/chat/completions", body)
            if answer.status != 200 or not answer.is_whole:
                raise RuntimeError(f"{system.name} answered {answer.status}, whole: {answer.is_whole}")
        await connection.close()

    num_held, before = held_so_far(system), cpu_seconds(system.pid)
    async with asyncio.TaskGroup() as group:
        for _ in range(num_connections):
            group.create_task(client())
    seconds = cpu_seconds(system.pid) - before
    return Cost(seconds / len(requests) * 1e6, held_so_far(system) - num_held)


def cpu_seconds(pid: int) -> float:
    """In user space and in the kernel, of all threads, to the microsecond: bursts are short. For Linux."""
    return time.clock_gettime((~pid << 3) | 2)  # how clock_getres(2) names another process's clock


def held_so_far(system: System) -> int:
    """By Kvasir's own count; 0 of what counts none."""
    with contextlib.suppress(httpx.HTTPError):
        for line in httpx.get(f"http://127.0.0.1:{system.port}/metrics").text.splitlines():
            if line.startswith("router_queue_held_total "):
                return int(float(line.split()[1]))
    return 0


def compare(
    systems: Sequence[System], load: str, num_rounds: int, num_requests: int, *, stream: bool
) -> None:
    """No two bursts of one system send the same prompts: sent again, all of them would be read from cache."""
    found: dict[str, list[Cost]] = {system.name: [] for system in systems}
    for number in range(-1, num_rounds):  # the first round warms up
        seed = 1000 * list(LOADS).index(load) + 500 * stream + 1 + number
        requests = bodies(WORKLOAD, num_requests, stream=stream, max_tokens=OUTPUT_TOKENS, seed=seed)
        first = number % len(systems)
        for system in [*systems[first:], *systems[:first]]:
            cost = asyncio.run(burst(system, requests, LOADS[load]))
            if number >= 0:
                found[system.name].append(cost)
    kind = "streamed" if stream else "whole"
    print(f"\n{kind}, {load} ({LOADS[load]} connections): router CPU, us a request\n")
    heads = ["", f"median of {num_rounds} bursts (lowest to highest)", "held"]
    heads += [f"times {system.name}" for system in systems]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name, costs in found.items():
        own = [cost.microseconds for cost in costs]
        ratios = [f"{_ratio(costs, others):.2f}" for others in found.values()]
        spread = f"{statistics.median(own):.0f} ({min(own):.0f} to {max(own):.0f})"
        held = sum(cost.num_held for cost in costs) / num_requests / num_rounds
        print(f"| {name} | {spread} | {held:.0%} | {' | '.join(ratios)} |", flush=True)


def _ratio(costs: Sequence[Cost], others: Sequence[Cost]) -> float:
    return statistics.median(
        one.microseconds / other.microseconds for one, other in zip(costs, others, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", help="Python of the environment with the other routers")
    parser.add_argument("--checkout", nargs="*", default=[], metavar="NAME=PATH")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=500, help="per burst over capacity; a third below")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve_steps(arguments.serve))
        return
    print_header("Router CPU per request")
    with contextlib.ExitStack() as stacks:
        own = stacks.enter_context(local_stack(replica_settings=REPLICA))
        systems = [System("Kvasir", own.port, own.pid("router"))]
        for pair in arguments.checkout:
            name, _, path = pair.partition("=")
            stack = stacks.enter_context(local_stack(replica_settings=REPLICA, checkout=Path(path).resolve()))
            systems.append(System(name, stack.port, stack.pid("router")))
        if arguments.peers:
            systems += start_peers(own, arguments.peers)
        for load, num_requests in zip(LOADS, (arguments.requests, arguments.requests // 3), strict=True):
            for stream in (True, False):
                compare(systems, load, arguments.rounds, num_requests, stream=stream)


if __name__ == "__main__":
    main()
