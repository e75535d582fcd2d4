"""Three tenants with a key each before a live cluster that has too much to do: who is served, and when.

Simulated engines, whose steps take as long as a large model's, behind one router. Each run sends at a fixed
pace, however slow the answers are: every tenant its part, then the first ten times that, then all two and
four times as much as the fleet can carry.

    python -m loadtests.benches.overload [--seconds 30] [--capacity 2.5]
"""

import asyncio
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from loadtests.benches.harness import bench_options
from loadtests.figures import print_header
from loadtests.load.replay import Endpoint, Replay
from loadtests.reports.fairness import fairness
from loadtests.reports.report import RequestRecord, Slo
from loadtests.simulation.summary import tenant_table
from loadtests.stacks.key_file import write_key_file
from loadtests.stacks.local_stack import LocalStack, local_stack
from loadtests.workloads import TraceRequest, Workload
from loadtests.workloads.prompts import Prompts
from router.caller import Tenant

TENANTS = ("red", "green", "blue")
FLOODER = "red"
NUM_SESSIONS = 8
BLOCK_TOKENS, OUTPUT_TOKENS = 1024, 16
"""A prompt is two blocks, of which requests of one session share the first."""
ANSWER_SECONDS = 120.0
REPLICA = {
    "engine": "simulated",
    "simulated_hardware": "h100x4-70b",
    "model_name": "toy",
    "num_blocks": 4096,
    "max_batched_tokens": 2048,
    "max_running": 32,
    "simulated_speed": 0.2,
}
"""Slow, so that few requests are too many: the load generator has the same cores."""


def workload(tenant: str, rate: float, seconds: float, seed: int) -> Workload:
    rng = random.Random(f"{tenant} {seed}")
    number, now = TENANTS.index(tenant), rng.expovariate(rate)
    requests: list[TraceRequest] = []
    while now < seconds:
        session = rng.randrange(NUM_SESSIONS)
        ids = (number << 32 | session, number << 32 | 1 << 16 | len(requests))
        requests.append(
            TraceRequest(now, 2 * BLOCK_TOKENS, OUTPUT_TOKENS, ids, tenant, f"{session}", tenant=tenant)
        )
        now += rng.expovariate(rate)
    return Workload(tenant, BLOCK_TOKENS, tuple(requests))


async def send_all(
    stack: LocalStack, keys: Mapping[str, str], rates: Mapping[str, float], seconds: float, seed: int
) -> list[RequestRecord]:
    replays = {
        tenant: Replay(
            Endpoint("127.0.0.1", stack.port, {"authorization": f"Bearer {keys[tenant]}"}),
            workload(tenant, rate, seconds, seed),
            Prompts("toy", BLOCK_TOKENS, seed, range(10, 1000)),
            timeout_seconds=ANSWER_SECONDS,
        )
        for tenant, rate in rates.items()
    }
    await asyncio.gather(*(replay.run() for replay in replays.values()))
    return [
        replace(record, tenant=tenant)
        for tenant, replay in replays.items()
        for record in replay.records.values()
    ]


def print_run(name: str, records: Sequence[RequestRecord], slo: Slo, seconds: float) -> None:
    found = fairness(records, slo)
    good = sum(slo.is_met(record) for record in records)
    errors = sorted({record.error for record in records if record.error is not None})
    late = sorted(record.lateness_seconds for record in records)[int(0.9 * len(records))]
    jain = "-" if found.jain is None else f"{found.jain:.3f}"
    print(
        f"\n{name}: {len(records) / seconds:.1f} requests/s, {good / seconds:.2f} good/s, Jain {jain};"
        f" sent {1e3 * late:.0f} ms late at p90; {', '.join(errors) or 'no errors'}"
    )
    print(tenant_table(found.tenants), flush=True)


def main() -> None:
    options = bench_options(__doc__)
    options.add_argument("--seconds", type=float, default=30.0, help="of each run (default: 30)")
    options.add_argument("--capacity", type=float, default=2.5, help="requests/s that the fleet carries")
    options.add_argument("--slo", type=float, default=5.0, help="TTFT after which an answer is too late")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--target", type=float, default=0.25, help="the router's queue_target_seconds")
    arguments = options.parse_args()
    print_header("overload")
    part = arguments.capacity / len(TENANTS)
    rates = {
        "each its part, 0.7 in all": dict.fromkeys(TENANTS, 0.7 * part),
        f"{FLOODER} ten times its part": {**dict.fromkeys(TENANTS, 0.7 * part), FLOODER: 7 * part},
        "twice what the fleet carries": dict.fromkeys(TENANTS, 2 * part),
        "four times that": dict.fromkeys(TENANTS, 4 * part),
    }
    with tempfile.TemporaryDirectory(prefix="kvasir-keys-") as folder:
        keys_file = Path(folder) / "keys.json"
        keys = write_key_file(keys_file, [Tenant(name=name, slo_seconds=arguments.slo) for name in TENANTS])
        settings = {"keys_file": keys_file, "queue_target_seconds": arguments.target}
        for name, each in rates.items():
            with local_stack(num_replicas=2, replica_settings=REPLICA, router_settings=settings) as stack:
                records = asyncio.run(send_all(stack, keys, each, arguments.seconds, arguments.seed))
            print_run(name, records, Slo(arguments.slo), arguments.seconds)


if __name__ == "__main__":
    main()
