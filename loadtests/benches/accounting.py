"""Whether requests, router and engines count the same cached tokens, tier by tier, over a mixed load.

Two replicas of the toy model with host memory, disks and pulls between them, behind one router. Prompts begin
with one of many prefixes, more than the devices and host memories hold; some ask for leases. In the first
half everybody stays, and the sums over their answers are compared with the counters of the router and of the
engines. In the second a tenth of the clients leave in the middle of the answer, of whose prompts only router
and engines know; these two are compared. And what was not read has its causes: all of them together, and what
was read, are all tokens of prompts that the engines had. Equal to the token, or this ends with an error.

    python -m loadtests.benches.accounting [--requests 5000] [--concurrency 8]
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadtests.figures import print_header
from loadtests.stacks.local_stack import LocalStack, free_port, local_stack, python_command

MODEL = "toy_model"
TIERS = ("device", "host", "disk")
TOKEN_BYTES = 2560
CHUNK_TOKENS = 32
CHUNK_BYTES = 4096 + CHUNK_TOKENS * TOKEN_BYTES
NUM_PREFIXES = 120
PREFIX_TOKENS = (64, 700)
OWN_TOKENS = (1, 60)
LEAVE_SHARE = 0.1
LEASES = (None, None, None, None, {"ttl": "5m"}, {"ttl": "1h"})
SETTLE_SECONDS = 2.0
PATIENCE_SECONDS = 300.0


@dataclass(slots=True)
class Sums:
    by_tier: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    leases: Counter[str] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_pulled_tokens: int = 0

    def take(self, usage: dict[str, Any]) -> None:
        details = usage["prompt_tokens_details"]
        tiers = {tier: details.get(f"{tier}_cached_tokens", 0) for tier in TIERS}
        if sum(tiers.values()) != details["cached_tokens"]:
            raise AssertionError(f"an answer does not agree with itself: {details}")
        self.by_tier.update(tiers)
        self.num_prompt_tokens += usage["prompt_tokens"]
        self.num_pulled_tokens += details.get("pulled_cached_tokens", 0)
        for lease in details.get("cache_leases", ()):
            self.leases[str(lease.get("reason", lease["status"]))] += 1


class Load:
    def __init__(self, url: str, num_requests: int) -> None:
        self._url = f"{url}/v1/completions"
        self._rng = random.Random(num_requests)
        self._num_left = 0
        self._leave_share = 0.0
        self._prefixes = [self._tokens(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
        self.sums = Sums()

    async def run(self, num_requests: int, concurrency: int, leave_share: float) -> None:
        """Returns when all has been counted, as far as that ends."""
        self._num_left, self._leave_share = num_requests, leave_share
        limits = httpx.Limits(max_connections=concurrency)
        async with (
            httpx.AsyncClient(timeout=PATIENCE_SECONDS, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(concurrency):
                group.create_task(self._work(client))
        await asyncio.sleep(SETTLE_SECONDS)

    def _tokens(self, bounds: tuple[int, int]) -> list[int]:
        return [self._rng.randrange(3, 500) for _ in range(self._rng.randint(*bounds))]

    def _body(self) -> dict[str, Any]:
        place = min(int(self._rng.expovariate(4 / NUM_PREFIXES)), NUM_PREFIXES - 1)
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": self._prefixes[place] + self._tokens(OWN_TOKENS),
            "max_tokens": self._rng.randint(1, 8),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        lease = self._rng.choice(LEASES)
        return body if lease is None else {**body, "prompt_cache_options": lease}

    async def _work(self, client: httpx.AsyncClient) -> None:
        while self._num_left > 0:
            self._num_left -= 1
            await self._ask(client, self._body(), leaves=self._rng.random() < self._leave_share)

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any], *, leaves: bool) -> None:
        async with client.stream("POST", self._url, json=body) as answer:
            if answer.status_code != 200:
                self.sums.outcomes[f"answered by {answer.status_code}"] += 1
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if leaves:
                    self.sums.outcomes["left in the middle"] += 1
                    return
                usage = json.loads(line[6:]).get("usage")
                if usage is not None:
                    self.sums.take(usage)
                    self.sums.outcomes["answered"] += 1


def counters(url: str, name: str, label: str = "tier") -> Counter[str]:
    text = httpx.get(url, timeout=60.0).text
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels.get(label, "")] += round(sample.value)
    return found


def settings(folder: str, number: int, metrics_port: int) -> dict[str, Any]:
    return {
        "engine": "torch",
        "device": "cpu",
        "model_name": MODEL,
        "num_threads": 1,
        "num_blocks": 260,
        "context_length": 1024,
        "chunk_tokens": CHUNK_TOKENS,
        "index_stride": CHUNK_TOKENS,
        "host_kv_bytes": 300 * CHUNK_BYTES,
        "disk_kv_bytes": 1200 * CHUNK_BYTES,
        "pull_bytes_per_second": 1e9,
        "kv_folder": f"{folder}/kv-{number}",
        "metrics_port": metrics_port,
    }


async def measure(stack: LocalStack, ports: Sequence[int], num_requests: int, concurrency: int) -> bool:
    load, are_equal = Load(stack.url, num_requests), True
    for leave_share in (0.0, LEAVE_SHARE):
        await load.run(num_requests // 2, concurrency, leave_share)
        sums = load.sums
        router = counters(f"{stack.url}/metrics", "router_cached_tokens_by_tier_total")
        engines: Counter[str] = Counter()
        for port in ports:
            engines += counters(f"http://127.0.0.1:{port}/metrics", "replica_cached_tokens_by_tier_total")
        print("\n  " + ", ".join(f"{count:,} {what}" for what, count in sums.outcomes.items()))
        print("  leases: " + ", ".join(f"{count:,} {what}" for what, count in sums.leases.items()))
        print(f"  {sums.num_prompt_tokens:,} tokens of prompts, {sums.num_pulled_tokens:,} of them pulled")
        print("             answers       router      engines")
        for tier in TIERS:
            print(f"  {tier:<7} {sums.by_tier[tier]:>11,}   {router[tier]:>10,}   {engines[tier]:>10,}")
            are_equal &= router[tier] == engines[tier]
            are_equal &= sums.by_tier[tier] == router[tier] or leave_share > 0
        missed = counters(f"{stack.url}/metrics", "router_missed_tokens_total", "cause")
        prompts = counters(f"{stack.url}/metrics", "router_prompt_tokens_total", "")
        print("  missed: " + ", ".join(f"{num:,} {cause}" for cause, num in missed.most_common() if num))
        print(f"  {missed.total():,} missed, {engines.total():,} read, {prompts.total():,} in prompts")
        are_equal &= missed.total() + engines.total() == prompts.total()
        are_equal &= prompts.total() == sums.num_prompt_tokens or leave_share > 0
    return are_equal


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=8)
    arguments = parser.parse_args()
    print_header(f"What {arguments.requests:,} requests count, and what router and engines do")
    ports = [free_port(), free_port()]
    with tempfile.TemporaryDirectory(prefix="kvasir-accounting-") as folder:
        each = [settings(folder, number, port) for number, port in enumerate(ports)]
        with local_stack(replica_settings=each[0], router_settings={"index_stride": CHUNK_TOKENS}) as stack:
            own = {"replica_id": "replica-1", **stack.shared, **each[1]}
            stack.start("replica-1", python_command("replicas", own))
            stack.wait_ready(2)
            are_equal = asyncio.run(measure(stack, ports, arguments.requests, arguments.concurrency))
    if not are_equal:
        sys.exit("they do not agree")


if __name__ == "__main__":
    main()
