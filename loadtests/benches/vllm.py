"""vLLM behind Kvasir, and the same requests against vLLM's own OpenAI server.

200 requests over 20 shared prefixes of about 1,500 tokens, each asked by 2 users x 5 questions, in a
shuffled order, streamed, 16 tokens each, in a closed loop of 2. Every round has prefixes of its own, so
each begins cold. The model is the toy model, one thread per engine.

First two replicas behind the router, and vLLM's own cache counters next to the usage in our answers. Then
one replica behind a router, another with its engine in a process of its own behind another router, and one
vLLM server, on the same machine at the same time, which take the same requests in turns; who goes first
goes round.

    python -m loadtests.benches.vllm [--part two|one]
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import httpx
from tokenizers import Tokenizer

from loadtests.benches.router import WORDS
from loadtests.figures import percentiles, print_header
from loadtests.load.streaming import Answer, Connection
from loadtests.stacks.local_stack import LocalStack, free_port, local_stack
from loadtests.stacks.vllm_replica import engine_counters, read_counters
from replicas.toy_model import toy_model_path
from replicas.vllm_engine.environment import vllm_environment

NUM_PREFIXES, NUM_USERS, NUM_QUESTIONS = 20, 2, 5
PREFIX_TOKENS = 1500
CONCURRENCY = 2
BLOCK_SIZE = 32
CACHE_BYTES = 128 * 2**20
MAX_BATCHED_TOKENS, MAX_RUNNING = 2048, 256
MODEL = "toy_model"

REPLICA: Mapping[str, object] = {
    "engine": "vllm",
    "model_name": MODEL,
    "block_size": BLOCK_SIZE,
    "kv_cache_bytes": CACHE_BYTES,
    "max_batched_tokens": MAX_BATCHED_TOKENS,
    "max_running": MAX_RUNNING,
    "num_threads": 1,
}


@dataclass(frozen=True, slots=True)
class Round:
    """The answers to one round, in the order of the requests."""

    answers: Sequence[Answer]
    seconds: float

    @property
    def num_cached_tokens(self) -> int:
        return sum(answer.num_cached_tokens for answer in self.answers)

    @property
    def prompt_lengths(self) -> list[int]:
        return [int(str(answer.usage["prompt_tokens"])) for answer in self.answers]

    @property
    def hits(self) -> list[Answer]:
        return [answer for answer in self.answers if _is_hit(answer)]

    @property
    def misses(self) -> list[Answer]:
        return [answer for answer in self.answers if not _is_hit(answer)]


def _is_hit(answer: Answer) -> bool:
    return answer.num_cached_tokens > PREFIX_TOKENS // 2


def bodies(seed: int) -> list[bytes]:
    """One round's requests, in their order."""
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_file(str(toy_model_path() / "tokenizer.json"))
    sample = rng.choices(WORDS, k=2000)
    num_words = int(PREFIX_TOKENS * len(sample) / len(tokenizer.encode(" ".join(sample)).ids))
    made = []
    for _ in range(NUM_PREFIXES):
        system = " ".join(rng.choices(WORDS, k=num_words))
        for number in range(NUM_USERS * NUM_QUESTIONS):
            question = f"user {number % NUM_USERS} asks " + " ".join(rng.choices(WORDS, k=30))
            made.append(_body(system, question))
    rng.shuffle(made)
    return made


def _body(system: str, question: str) -> bytes:
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


async def ask(port: int, requests: Sequence[bytes]) -> Round:
    """All of them, `CONCURRENCY` at a time."""
    answers: dict[int, Answer] = {}
    numbered = iter(enumerate(requests))

    async def client() -> None:
        connection = Connection("127.0.0.1", port)
        for number, body in numbered:
            answers[number] = await connection.post("/v1/chat/completions", body)
            assert answers[number].status == 200, answers[number]
        await connection.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
    seconds = time.perf_counter() - began
    return Round([answers[number] for number in range(len(requests))], seconds)


def two_replicas(num_rounds: int) -> None:
    names = ("replica-0", "replica-1")
    # In a thread: the counters are read in the replica's own process.
    settings = {**REPLICA, "engine_args": "disable_log_stats=false", "engine_process": False}
    module = "loadtests.stacks.vllm_replica"
    with local_stack(num_replicas=2, replica_settings=settings, replica_module=module) as stack:
        asyncio.run(ask(stack.port, bodies(1)[:20]))
        before = [engine_counters(stack, name) for name in names]
        rounds = [asyncio.run(ask(stack.port, bodies(100 + number))) for number in range(num_rounds)]
        after = [engine_counters(stack, name) for name in names]
    print(f"\n### two replicas behind the router, {num_rounds} rounds of {len(rounds[0].answers)} requests")
    for number, done in enumerate(rounds):
        print(
            f"  round {number}: {sum(done.prompt_lengths)} prompt tokens, {done.num_cached_tokens} cached, "
            f"{len(done.misses)} misses, {_shares(done)}, {done.seconds:.2f} s"
        )
    queried, found = (sum(b[i] - a[i] for a, b in zip(before, after, strict=True)) for i in (0, 1))
    print(
        f"  usage: {sum(sum(done.prompt_lengths) for done in rounds)} prompt tokens, "
        f"{sum(done.num_cached_tokens for done in rounds)} cached; "
        f"vLLM's own counters: {queried} looked up, {found} found"
    )
    _print_times("two replicas", rounds)


def _shares(done: Round) -> str:
    replicas = [answer.headers["x-kvasir-replica"] for answer in done.answers]
    return " and ".join(f"{replicas.count(name)} on {name}" for name in sorted(set(replicas)))


THREAD, PROCESS, VLLM = "Kvasir", "Kvasir, engine process", "vLLM"


def against_vllm(num_rounds: int) -> None:
    with (
        local_stack(num_replicas=1, replica_settings={**REPLICA, "engine_process": False}) as thread,
        local_stack(num_replicas=1, replica_settings={**REPLICA, "engine_process": True}) as process,
    ):
        port = free_port()
        _start_vllm(thread, port)
        ports = {THREAD: thread.port, PROCESS: process.port, VLLM: port}
        for each in ports.values():
            asyncio.run(ask(each, bodies(1)[:20]))
        before = read_counters(port)
        rounds: dict[str, list[Round]] = {name: [] for name in ports}
        for number in range(num_rounds):
            requests = bodies(200 + number)
            first = number % len(ports)
            for name in [*ports][first:] + [*ports][:first]:
                rounds[name].append(asyncio.run(ask(ports[name], requests)))
        after = read_counters(port)
    theirs = rounds.pop(VLLM)
    lengths_equal = all(
        our.prompt_lengths == their.prompt_lengths
        for ours in rounds.values()
        for our, their in zip(ours, theirs, strict=True)
    )
    print(f"\n### one replica behind the router and one vLLM server, {num_rounds} rounds in turns")
    print(f"  prompts of equal length in tokens on all sides: {'yes' if lengths_equal else 'NO'}")
    for name, done in {**rounds, VLLM: theirs}.items():
        cached = sum(each.num_cached_tokens for each in done)
        print(f"  {name}: {cached} cached tokens, {sum(len(each.misses) for each in done)} misses (usage)")
    print(f"  vLLM's own counters: {after[0] - before[0]} looked up, {after[1] - before[1]} found")
    for name, done in {**rounds, VLLM: theirs}.items():
        _print_times(name, done)
    for name, ours in rounds.items():
        _print_ratios(name, ours, theirs)


def _start_vllm(stack: LocalStack, port: int) -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(toy_model_path())]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--block-size", str(BLOCK_SIZE), "--kv-cache-memory-bytes", str(CACHE_BYTES)]
    command += ["--max-num-batched-tokens", str(MAX_BATCHED_TOKENS), "--max-num-seqs", str(MAX_RUNNING)]
    command += ["--distributed-executor-backend", "uni", "--generation-config", "vllm"]
    command += ["--enable-prompt-tokens-details"]
    stack.start("vllm", command)

    def healthy() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        return False

    stack.poll(healthy, "vLLM's server")


TIMES: Mapping[str, Callable[[Round], list[float]]] = {
    "TTFT of misses": lambda done: [answer.ttft for answer in done.misses],
    "TTFT of hits": lambda done: [answer.ttft for answer in done.hits],
    "E2E": lambda done: [answer.e2e for answer in done.answers],
}


def _print_times(name: str, rounds: Sequence[Round]) -> None:
    print(f"  {name}:")
    for what, times in TIMES.items():
        found = percentiles([seconds for done in rounds for seconds in times(done)])
        medians = " ".join(f"{statistics.median(times(done)) * 1e3:.1f}" for done in rounds)
        print(
            f"    {what:15} p50 {found.p50 * 1e3:7.1f} ms  p90 {found.p90 * 1e3:7.1f} ms  "
            f"({found.num_samples} answers; p50 by round {medians})"
        )
    rates = [len(done.answers) / done.seconds for done in rounds]
    print(f"    requests/s      {statistics.median(rates):.1f} (by round {_list(rates)})")


def _print_ratios(name: str, ours: Sequence[Round], theirs: Sequence[Round]) -> None:
    print(f"  {name} / vLLM, median of the rounds' ratios of medians (by round):")
    for what, times in TIMES.items():
        pairs = zip(ours, theirs, strict=True)
        ratios = [statistics.median(times(our)) / statistics.median(times(their)) for our, their in pairs]
        print(f"    {what:15} {statistics.median(ratios):.2f} ({_list(ratios, 2)})")


def _list(values: Sequence[float], digits: int = 1) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--part", choices=("two", "one"), help="one of the two parts only")
    arguments = parser.parse_args()
    os.environ.update(vllm_environment(1))  # for vLLM's server; replicas set the same for themselves
    print_header("vLLM behind Kvasir and on its own: toy model, one thread per engine")
    if arguments.part != "one":
        two_replicas(max(1, arguments.rounds // 2))
    if arguments.part != "two":
        against_vllm(arguments.rounds)


if __name__ == "__main__":
    main()
