"""What it takes to count what is used: memory of a router and of Redis for each key, and time for a request.

A ledger is filled with 100,000 keys of 10,000 tenants, written to a Redis of its own, and read again as one
tenant and as an operator would.

    python -m loadtests.benches.ledger [--keys 100000] [--tenants 10000]
"""

import argparse
import asyncio
import gc
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import redis

from loadtests.figures import print_header
from loadtests.stacks.local_stack import LocalStack
from loadtests.stacks.local_stack import _redis_command as redis_command
from replicas.protocol.blocks import BlockHash, pack_token_ids
from replicas.protocol.frames import PromptUsage, SamplingParams, Submit
from replicas.protocol.prefix_leases import LeaseAnswer, PrefixLease
from router.generation import Generation
from router.observation.served import ServedPrompt, ServedRequest
from router.tenants.amounts import amounts_of
from router.tenants.caller import Caller, Tenant
from router.tenants.ledger import HOUR_SECONDS, Ledger, Use
from router.tenants.usage_store import UsageStore
from router.tenants.usage_sums import UsageQuery

ROUNDS = 20_000


def a_request(caller: Caller) -> ServedRequest:
    leases = (PrefixLease(4, 300),)
    root = BlockHash(bytes(16))
    submit = Submit(0, pack_token_ids([1] * 100), SamplingParams(9), root=root, leases=leases)
    generation = Generation("toy_model", [1] * 100, submit, [], b"bucket", caller=caller)
    usage = PromptUsage(1000, 640, 320, num_slower_tier_tokens=64, leases=(LeaseAnswer(300, 960),))
    return ServedRequest(
        request_id="q",
        route="completions",
        model="toy_model",
        status=200,
        error=None,
        arrived_at=time.time(),
        prepared_seconds=None,
        first_token_seconds=None,
        ended_seconds=0.0,
        is_stream=False,
        caller=caller,
        prompts=(ServedPrompt(generation, None, usage, 100),),
    )


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


async def stored(url: str, ledger: Ledger, num_keys: int) -> None:
    store = UsageStore(url, 744, ledger=ledger)
    with redis.Redis.from_url(url, protocol=2) as client:
        before = int(client.info("memory")["used_memory"])
        began = time.perf_counter()
        await store.write()
        seconds = time.perf_counter() - began
        num_bytes = int(client.info("memory")["used_memory"]) - before
    print(f"Redis: {num_bytes / num_keys:.0f} bytes a key and hour; all written in {seconds:.1f} s")
    hour = int(time.time() // HOUR_SECONDS)
    reader = UsageStore(url, 744)
    for name, tenant, num_hours in (
        ("a tenant, a day", "tenant-5", 24),
        ("a tenant, a month", "tenant-5", 744),
    ):
        query = UsageQuery(hour + 1 - num_hours, hour + 1, tenant, by_key=True)
        began = time.perf_counter()
        groups = await reader.read(query)
        print(f"{name}: {len(groups)} rows in {1000 * (time.perf_counter() - began):.1f} ms")
    began = time.perf_counter()
    groups = await reader.read(UsageQuery(hour, hour + 1, None))
    print(f"all tenants, an hour: {len(groups):,} rows in {time.perf_counter() - began:.2f} s")
    await reader.close()
    await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--tenants", type=int, default=10_000)
    arguments = parser.parse_args()
    print_header(f"What {arguments.keys:,} keys of {arguments.tenants:,} tenants take")
    request = a_request(Caller(tenant=Tenant(name="acme"), key_id="0123456789ab"))
    ledger = Ledger()
    ledger.observe(request)
    each = min(timed(lambda: [ledger.observe(request) for _ in range(ROUNDS)]) for _ in range(5)) / ROUNDS
    print(f"a request: {1e6 * each:.1f} us, the least of 5 rounds")
    amounts, hour = amounts_of(request), int(time.time() // HOUR_SECONDS)
    names = [
        (f"tenant-{number % arguments.tenants}", Use(f"{number:012x}", "toy_model"))
        for number in range(arguments.keys)
    ]
    ledger = Ledger()
    gc.collect()
    tracemalloc.start()
    for tenant, use in names:
        ledger.add(hour, tenant, use, amounts)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"router: {num_bytes / arguments.keys:.0f} bytes a key and hour, its names not counted")
    with tempfile.TemporaryDirectory(prefix="kvasir-ledger-") as folder:
        stack = LocalStack(Path(folder), None, None)
        stack.start("redis", redis_command(stack.redis_port))
        try:
            stack.wait_redis()
            asyncio.run(stored(stack.redis_url, ledger, arguments.keys))
        finally:
            stack.stop()


if __name__ == "__main__":
    main()
