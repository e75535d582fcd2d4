"""vLLM behind Kvasir, and the same requests against vLLM's own OpenAI server.

200 chats over 20 shared prefixes of about 1,500 tokens, streamed, 16 tokens each, in a closed loop of 2.
Every round has prefixes of its own, so each begins cold. The model is the toy model, one thread per engine.
One replica stands behind a router, another with its engine in a process of its own behind another router, and
beside them one vLLM server, all on the same machine at the same time. They take the same requests in turns,
and the one that goes first changes from round to round.

    python -m loadtests.benches.vllm
"""

import asyncio
import os
import random
from collections.abc import Callable, Mapping, Sequence

from loadtests.benches.harness import (
    SharedPrefixes,
    System,
    SystemRun,
    bench_options,
    closed_loop,
    counters,
    in_turns,
    print_rounds,
)
from loadtests.figures import percentiles, print_header
from loadtests.load.streaming import Answer
from loadtests.stacks.local_stack import free_port, local_stack
from loadtests.stacks.vllm_server import MODEL, REPLICA, vllm_server_command
from replicas.vllm_engine.environment import vllm_environment

NUM_PREFIXES, NUM_REQUESTS = 20, 200
PREFIX_TOKENS = 1500
NUM_CONNECTIONS = 2
CACHE_BYTES = 128 * 2**20


def is_hit(answer: Answer) -> bool:
    return answer.num_cached_tokens > PREFIX_TOKENS // 2


COLUMNS: Mapping[str, Callable[[SystemRun], float]] = {
    "misses": lambda run: sum(not is_hit(answer) for answer in run.good),
    "TTFT of misses p50 ms": lambda run: _p50([each.ttft for each in run.good if not is_hit(each)]),
    "TTFT of hits p50 ms": lambda run: _p50([each.ttft for each in run.good if is_hit(each)]),
    "E2E p50 ms": lambda run: _p50([each.e2e for each in run.good]),
    "requests/s": lambda run: len(run.good) / run.seconds,
    "errors": lambda run: len(run.answers) - len(run.good),
}


def _p50(seconds: Sequence[float]) -> float:
    return 1e3 * percentiles(seconds).p50


def compare(systems: Sequence[System], num_rounds: int) -> None:
    """The last system is vLLM's own server."""
    prompts = SharedPrefixes(MODEL, NUM_PREFIXES, prefix_tokens=PREFIX_TOKENS, num_users=2)
    runs: dict[str, list[SystemRun]] = {system.name: [] for system in systems}
    for system in systems:
        asyncio.run(closed_loop(system, prompts.bodies("warm", 20, random.Random(0)), NUM_CONNECTIONS))
    url = f"http://127.0.0.1:{systems[-1].port}"
    before = counters([url], "vllm:prefix_cache_hits_total").total()
    for number in range(num_rounds):
        bodies = prompts.bodies(f"round {number}", NUM_REQUESTS, random.Random(number))
        for system in in_turns(systems, number):
            runs[system.name].append(asyncio.run(closed_loop(system, bodies, NUM_CONNECTIONS)))
    found = counters([url], "vllm:prefix_cache_hits_total").total() - before
    print_rounds(runs, COLUMNS, against=systems[-1].name)
    for name, rounds in runs.items():
        print(f"  {name}: {sum(answer.num_cached_tokens for run in rounds for answer in run.good):,} cached")
    print(f"  vLLM's own counters: {found:,} cached")


def main() -> None:
    options = bench_options(__doc__)
    options.add_argument("--rounds", type=int, default=6)
    arguments = options.parse_args()
    os.environ.update(vllm_environment(1))  # for vLLM's server; replicas set the same for themselves
    print_header("vLLM behind Kvasir and on its own: toy model, one thread per engine")
    settings = {**REPLICA, "kv_cache_bytes": CACHE_BYTES}
    with (
        local_stack(replica_settings={**settings, "engine_process": False}) as thread,
        local_stack(replica_settings={**settings, "engine_process": True}) as process,
    ):
        port = free_port()
        thread.start("vllm", vllm_server_command(port, CACHE_BYTES))
        thread.wait_answers(f"http://127.0.0.1:{port}/health")
        systems = [
            System("Kvasir", thread.port, thread.pid("router")),
            System("Kvasir, engine process", process.port, process.pid("router")),
            System("vLLM", port, thread.pid("vllm")),
        ]
        compare(systems, arguments.rounds)


if __name__ == "__main__":
    main()
