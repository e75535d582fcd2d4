"""Harness: what benches have in common: options, prompts, closed loops, turns, counters and tables.

Owns no figure: a bench says what is measured and which numbers are printed.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from loadtests.figures import cpu_seconds
from loadtests.load.streaming import Answer, Connection
from replicas.toy_model import toy_model_path

Run = TypeVar("Run")

CHAT = "/v1/chat/completions"
ANSWER_SECONDS = 60.0
"""An answer that takes longer has failed."""

WORDS = (
    "cache block prefix replica router prompt token answer question engine memory the a of to and in "
    "for with that this when which holds keeps reads writes sends finds waits serves long short first "
    "last next same other shared private recent old new fast slow large small"
).split()


def bench_options(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the bench's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def settings_of(pairs: Iterable[str]) -> dict[str, str]:
    """Settings that stand as NAME=VALUE on the command line."""
    return dict(pair.split("=", 1) for pair in pairs)


# Requests.


@dataclass(frozen=True, slots=True)
class System:
    """A server that is measured. `pid` is its process."""

    name: str
    port: int
    pid: int


@dataclass(frozen=True, slots=True)
class SystemRun:
    """One system's answers to a run's requests, in order; None for a failure."""

    answers: Sequence[Answer | None]
    seconds: float
    cpu_seconds: float

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if answer is not None]

    @property
    def hit_rate(self) -> float:
        prompt = sum(answer.usage.prompt_tokens or 0 for answer in self.good)
        return sum(answer.num_cached_tokens for answer in self.good) / prompt


class SharedPrefixes:
    """Streamed chats of the toy model under one system prompt a tenant.

    Runs have equal shape. The run's name begins each prompt, so every run begins cold.
    """

    def __init__(self, model: str, num_tenants: int, *, prefix_tokens: int, num_users: int) -> None:
        self._model, self._num_tenants, self._num_users = model, num_tenants, num_users
        tokenizer = Tokenizer.from_file(str(toy_model_path() / "tokenizer.json"))
        sample = random.Random(0).choices(WORDS, k=2000)
        self._num_words = int(prefix_tokens * len(sample) / len(tokenizer.encode(" ".join(sample)).ids))

    def bodies(self, run: str, num_requests: int, rng: random.Random) -> list[bytes]:
        """`rng` alone decides who asks when, so that runs of one seed have equal structure."""
        words = random.Random(run)
        systems = [
            f"{run} tenant {tenant} " + " ".join(words.choices(WORDS, k=self._num_words))
            for tenant in range(self._num_tenants)
        ]
        bodies = []
        for _ in range(num_requests):
            tenant, user = rng.randrange(self._num_tenants), rng.randrange(self._num_users)
            question = f"user {user} asks " + " ".join(words.choices(WORDS, k=30))
            bodies.append(self._body(systems[tenant], question, f"tenant-{tenant}-user-{user}"))
        return bodies

    def _body(self, system: str, question: str, user: str) -> bytes:
        body = {
            "model": self._model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "user": user,
        }
        return json.dumps(body).encode()


async def closed_loop(system: System, bodies: Sequence[bytes], num_connections: int) -> SystemRun:
    """Each connection sends its next chat when it has its last answer."""
    pool, left = _Pool(system.port), iter(enumerate(bodies))
    answers: list[Answer | None] = [None] * len(bodies)

    async def work() -> None:
        for number, body in left:
            answers[number] = await pool.ask(body)

    cpu, began = cpu_seconds(system.pid), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_connections):
            group.create_task(work())
    run = SystemRun(answers, time.perf_counter() - began, cpu_seconds(system.pid) - cpu)
    await pool.close()
    return run


async def open_loop(system: System, bodies: Sequence[bytes], rate: float, rng: random.Random) -> SystemRun:
    """Chats arrive at random (Poisson), and slow answers hold none of them up."""
    pool, due, tasks = _Pool(system.port), 0.0, []
    cpu, began = cpu_seconds(system.pid), time.perf_counter()
    for body in bodies:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
        tasks.append(asyncio.create_task(pool.ask(body)))
    answers = await asyncio.gather(*tasks)
    run = SystemRun(answers, time.perf_counter() - began, cpu_seconds(system.pid) - cpu)
    await pool.close()
    return run


class _Pool:
    """Keep-alive connections to one port, as many as are needed at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []

    async def ask(self, body: bytes) -> Answer | None:
        connection = self._idle.pop() if self._idle else Connection("127.0.0.1", self._port)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await connection.post(CHAT, body)
        except (OSError, EOFError, ValueError, TimeoutError):
            connection.abort()
            return None
        self._idle.append(connection)
        return answer if answer.status == 200 and answer.usage.prompt_tokens is not None else None

    async def close(self) -> None:
        for connection in self._idle:
            await connection.close()


# Figures.


def in_turns(systems: Sequence[System], round_number: int) -> list[System]:
    """All of them; the one that goes first changes from round to round."""
    first = round_number % len(systems)
    return [*systems[first:], *systems[:first]]


def print_rounds(
    runs: Mapping[str, Sequence[Run]],
    columns: Mapping[str, Callable[[Run], float]],
    against: str | None = None,
) -> None:
    """A row for each system: medians over its rounds, with the lowest and the highest.

    With `against`, also the median of the rounds' ratios to that system.
    """
    ratios = "" if against is None else f", times {against}"
    print(f"\n| median (lowest to highest){ratios} | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for name, rounds in runs.items():
        cells = []
        for value in columns.values():
            values = [value(run) for run in rounds]
            cell = f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
            if against is not None and name != against:
                theirs = [value(run) for run in runs[against]]
                times = [own / other for own, other in zip(values, theirs, strict=True) if other]
                cell += f", {statistics.median(times):.2f}" if times else ""
            cells.append(cell)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def counters(urls: Iterable[str], name: str, label: str = "", *, key: str = "") -> Counter[str]:
    """Return a counter of several processes' /metrics, summed by the values of `label`."""
    found: Counter[str] = Counter()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    for url in urls:
        answer = httpx.get(f"{url}/metrics", headers=headers, timeout=60.0).raise_for_status()
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                if sample.name == name:
                    found[sample.labels.get(label, "")] += round(sample.value)
    return found
