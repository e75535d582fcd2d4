"""Loads and tables of the bench `servers`: mixed chats, hits next to other routers, and CPU."""

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from loadtests.benches.harness import (
    WORDS,
    System,
    closed_loop,
    counters,
    in_turns,
    open_loop,
)
from loadtests.benches.peers import Server
from loadtests.figures import percentiles
from loadtests.stacks.vllm_server import MODEL
from loadtests.workloads import GENERATORS, Workload, first_requests, read_trace, shrink, without_longer_than
from loadtests.workloads.chat_bodies import ChatBodies

Body = dict[str, Any]

AT_ONCE = 8
CONTEXT = 2000
SCHEMA = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}


# Mixed chats.


async def at_once(bodies: Sequence[Body], num_clients: int, ask: Callable[[int, Body], Any]) -> None:
    left = iter(enumerate(bodies))

    async def work() -> None:
        for number, body in left:
            await ask(number, body)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(work())


def read_answer(answer: httpx.Response) -> tuple[list[str], int]:
    """Texts of the choices, and cached tokens. Raises an error for one that is not whole."""
    answer.raise_for_status()
    is_stream = answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n") if is_stream else [f"data: {answer.text}"]
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


def mixed_bodies(name: str, number: int, *, is_greedy: bool = False) -> Iterator[Body]:
    rng = random.Random(name)
    heads = [rng.choices(WORDS, k=rng.randint(40, 500)) for _ in range(60)]
    for _ in range(number):
        head = rng.choice(heads)
        if rng.random() < 0.4:
            head = head[: rng.randint(10, len(head))]
        question = " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))
        messages = [{"role": "system", "content": f"{name} {' '.join(head)}"}]
        body: Body = {"model": MODEL, "messages": [*messages, {"role": "user", "content": question}]}
        body |= {"max_tokens": rng.randint(1, 40), "temperature": 0 if is_greedy else rng.choice([0, 1])}
        if rng.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if rng.random() < 0.15 and not is_greedy:  # vLLM refuses several greedy choices
            body["n"] = 2
        if rng.random() < 0.1:
            form = {"name": "answer", "schema": SCHEMA}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        yield body


# Next to others.


def workloads_of(trace: Path | None, number: int) -> Iterator[tuple[str, Workload]]:
    sizes = {"prefix_tokens": 1200, "question_tokens": 240, "output_tokens": 16}
    yield "b2b", GENERATORS["b2b"](seed=1, num_requests=number, num_groups=20, **sizes)
    if trace is not None:
        recorded = without_longer_than(shrink(read_trace(trace, seed=1), 0.1), CONTEXT)
        yield trace.name.split(".")[0], first_requests(recorded, number)


def compare(
    systems: Sequence[System], servers: Sequence[Server], trace: Path | None, number: int, rate: float
) -> None:
    """The last system has engines of its own."""
    urls = [server.url for server in servers]
    for turn, (name, workload) in enumerate(workloads_of(trace, number)):
        print(
            f"\n{name}, {number} requests, {rate:g}/s\n\n| | hits | TTFT p50 / p90 ms | E2E p50 ms | errors |"
        )
        print("|---|---|---|---|---|")
        for system in in_turns(systems, turn):
            made = ChatBodies(MODEL, workload.block_tokens, seed=10 * turn + systems.index(system))
            # Greedy: with a seed, a prompt that takes several steps ends vLLM 0.32 on a CPU.
            chats = [json.loads(made.body(request)) | {"temperature": 0} for request in workload.requests]
            bodies = [json.dumps(chat).encode() for chat in chats]
            before = _served(urls)
            run = asyncio.run(open_loop(system, bodies, rate, random.Random(turn)))
            served = _served(urls) - before
            hits = served["hits"] / served["queries"] if system is not systems[-1] else run.hit_rate
            ttft = percentiles([1e3 * answer.ttft for answer in run.good])
            e2e = percentiles([1e3 * answer.e2e for answer in run.good])
            cells = f"{hits:.1%} | {ttft.p50:.0f} / {ttft.p90:.0f} | {e2e.p50:.0f}"
            print(f"| {system.name} | {cells} | {len(run.answers) - len(run.good)} |", flush=True)


def _served(urls: Sequence[str]) -> Counter[str]:
    kinds = ("hits", "queries")
    return Counter({kind: counters(urls, f"vllm:prefix_cache_{kind}_total").total() for kind in kinds})


def cpu_of(pids: Sequence[int]) -> float:
    """Seconds of processes and those that they started."""
    found = 0.0
    for pid in pids:
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            times = process.cpu_times()
            found += times.user + times.system
    return found


def cost(systems: Mapping[str, tuple[int, Mapping[str, Sequence[int]]]], number: int) -> None:
    """Prints CPU of each kind of process. `systems` are ports, and processes by kind."""
    for name, (port, kinds) in systems.items():
        spent: dict[int, dict[str, float]] = {}
        for num_tokens in (1, 129):
            bodies = []
            for body in mixed_bodies(f"cost {name} {num_tokens}", number, is_greedy=True):
                body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
                body |= {"n": 1, "max_tokens": num_tokens, "response_format": {"type": "text"}}
                bodies.append(json.dumps(body).encode())
            before = {kind: cpu_of(pids) for kind, pids in kinds.items()}
            run = asyncio.run(closed_loop(System(name, port, os.getpid()), bodies, AT_ONCE))
            spent[num_tokens] = {kind: cpu_of(pids) - before[kind] for kind, pids in kinds.items()}
            print(f"cost, {name}, {num_tokens} tokens: {len(run.good)} of {number} answered")
        for kind in kinds:
            request, token = spent[1][kind] / number, (spent[129][kind] - spent[1][kind]) / number / 128
            print(
                f"  {kind}: {1e3 * request:.1f} ms a request of one token, {1e6 * token:.0f} us a further one"
            )
