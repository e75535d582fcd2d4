"""Kvasir next to SMG and vLLM's router, over vLLM replicas of equal settings on one machine.

Two vLLM replicas behind Kvasir's router, and two of vLLM's own OpenAI servers behind each of the other
routers in turn. Tenants with a system prompt of about 1,500 tokens each, 5 users per tenant, other
questions every time: by default more prefixes than one cache holds, and about as many as both do; with
`--cache-mib 40` only as many as both hold without copies. First an open loop
(Poisson arrivals, never held up by slow answers), then a closed one for the highest rate. Every run has
prompts of its own, so each begins cold; systems take turns, and who goes first rotates.

The other routers live in an environment of their own:

    python -m venv peers && peers/bin/pip install smg==1.13.0 vllm-router==0.1.17
    python -m loadtests.benches.peers --peers peers/bin/python
"""

import asyncio
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from loadtests.benches.harness import (
    SharedPrefixes,
    System,
    SystemRun,
    bench_options,
    closed_loop,
    in_turns,
    open_loop,
    print_rounds,
    settings_of,
)
from loadtests.figures import percentiles, print_header
from loadtests.stacks.local_stack import LocalStack, free_port, local_stack
from loadtests.stacks.vllm_server import BLOCK_SIZE, MODEL, REPLICA, vllm_server_command
from replicas.vllm_engine.environment import vllm_environment

NUM_SERVERS = 2
NUM_CONNECTIONS = 8

Round = tuple[SystemRun, SystemRun]
"""The open loop and the closed one."""

COLUMNS: Mapping[str, Callable[[Round], float]] = {
    "hit rate %": lambda runs: 100 * runs[0].hit_rate,
    "TTFT p50 ms": lambda runs: 1e3 * percentiles([answer.ttft for answer in runs[0].good]).p50,
    "TTFT p90 ms": lambda runs: 1e3 * percentiles([answer.ttft for answer in runs[0].good]).p90,
    "E2E p50 ms": lambda runs: 1e3 * percentiles([answer.e2e for answer in runs[0].good]).p50,
    "errors": lambda runs: sum(len(run.answers) - len(run.good) for run in runs),
    "router CPU s / 1000": lambda runs: 1e3 * runs[0].cpu_seconds / len(runs[0].answers),
    "closed loop requests/s": lambda runs: len(runs[1].good) / runs[1].seconds,
    "closed loop hit rate %": lambda runs: 100 * runs[1].hit_rate,
}


@dataclass(frozen=True, slots=True)
class Server:
    """One of vLLM's own OpenAI servers, with the ports of its KV events."""

    url: str
    events_port: int
    replay_port: int


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
        command = ["env", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=1", *vllm_server_command(port, cache_bytes)]
        # Rendering is what vllm-router's kv_aware asks a server for, to know a prompt's tokens.
        command += ["--enable-scale-out", "--kv-events-config", json.dumps(events)]
        stack.start(f"vllm-{number}", command)
        servers.append(Server(f"http://127.0.0.1:{port}", events_port, replay_port))
    for server in servers:
        stack.wait_answers(server.url + "/health")
    return servers


def peer_commands(python: str, servers: Sequence[Server]) -> Iterator[tuple[str, list[str], int]]:
    """Name, command and port of each router; all but the policy is left at its default.

    SMG is healthy before it knows a server, so wait for its models.
    """
    urls = [server.url for server in servers]
    port = free_port()
    smg = [python, "-m", "smg.launch_router", "--port", str(port), "--worker-urls", *urls]
    smg += ["--policy", "cache_aware", "--prometheus-port", str(free_port()), "--log-level", "warn"]
    smg += ["--worker-startup-check-interval", "1"]
    yield "smg cache_aware", smg, port
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


def compare(
    systems: Sequence[System], prompts: SharedPrefixes, num_rounds: int, num_requests: int, rate: float
) -> None:
    rounds: dict[str, list[Round]] = {system.name: [] for system in systems}
    for system in systems:
        bodies = prompts.bodies(f"warm {system.name}", 20, random.Random(0))
        asyncio.run(closed_loop(system, bodies, NUM_CONNECTIONS))
    for number in range(num_rounds):
        for system in in_turns(systems, number):
            rng = random.Random(number)
            bodies = prompts.bodies(f"{number} open {system.name}", num_requests, rng)
            opened = asyncio.run(open_loop(system, bodies, rate, rng))
            bodies = prompts.bodies(f"{number} closed {system.name}", num_requests // 2, rng)
            closed = asyncio.run(closed_loop(system, bodies, NUM_CONNECTIONS))
            rounds[system.name].append((opened, closed))
            figures = "  ".join(f"{name} {value((opened, closed)):.1f}" for name, value in COLUMNS.items())
            print(f"  round {number} {system.name:26} {figures}", flush=True)
    print_rounds(rounds, COLUMNS)


def main() -> None:
    options = bench_options(__doc__)
    options.add_argument("--peers", required=True, help="Python of the environment with the other routers")
    options.add_argument("--rounds", type=int, default=4)
    options.add_argument("--requests", type=int, default=300, help="per run and system")
    options.add_argument("--rate", type=float, default=12.0, help="requests per second of the open loop")
    options.add_argument("--tenants", type=int, default=40)
    options.add_argument("--cache-mib", type=int, default=64, help="KV cache of each replica")
    options.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of our replicas"
    )
    arguments = options.parse_args()
    os.environ.update(vllm_environment(1))  # for vLLM's servers; replicas set the same for themselves
    print_header("Routers over two vLLM replicas: toy model, one thread per engine")
    cache_bytes = arguments.cache_mib * 2**20
    settings = {**REPLICA, "kv_cache_bytes": cache_bytes, **settings_of(arguments.set)}
    with local_stack(num_replicas=NUM_SERVERS, replica_settings=settings) as stack:
        systems = [System("Kvasir", stack.port, stack.pid("router"))]
        for name, command, port in peer_commands(arguments.peers, start_servers(stack, cache_bytes)):
            stack.start(name, command)
            stack.wait_answers(f"http://127.0.0.1:{port}/v1/models")
            systems.append(System(name, port, stack.pid(name)))
        prompts = SharedPrefixes(MODEL, arguments.tenants, prefix_tokens=1500, num_users=5)
        compare(systems, prompts, arguments.rounds, arguments.requests, arguments.rate)


if __name__ == "__main__":
    main()
