"""Whether answers, routers, `/v1/usage` and engines count the same tokens over a mixed load.

Two replicas of the toy model with host memory, disks and pulls between them stand behind two routers. Prompts
begin with one of many prefixes, more than the devices and host memories hold. Requests come in every dialect,
whole and streamed, with several choices and prompts, with and without leases, from tenants with keys.

- Part 1: every client stays. Answers and `/v1/usage` of both routers must be equal to the token.
- Part 2: each prompt has one choice, since an engine counts the prompt of each choice and an answer counts it
  once. The metrics of routers and engines must be equal as well, tier by tier. The causes of misses must add
  up to every token that was not read.
- Part 3: a tenant of its own leaves in the middle of its streams. The other tenants' sums must still be those
  of their answers, and the sums of all tenants those of the engines.
- At the end a router is killed under load, and the bench prints what no router has counted.

The exit status is 1 if two counts differ.

    python -m loadtests.benches.accounting [--requests 5000] [--concurrency 8]
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from loadtests.benches.harness import WORDS, bench_options, counters
from loadtests.figures import print_header
from loadtests.stacks.key_file import write_key_file
from loadtests.stacks.local_stack import LocalStack, free_port, local_stack, python_command
from router.caller import Tenant

MODEL = "toy_model"
TIERS = ("device", "host", "disk")
TOKEN_BYTES = 2560
CHUNK_TOKENS = 32
CHUNK_BYTES = 4096 + CHUNK_TOKENS * TOKEN_BYTES
STAYING = ("acme", "beta")
LEAVING, OPERATOR = "leaver", "ops"
NUM_PREFIXES = 120
PREFIX_WORDS = 40, 450
ANSWER_SECONDS = 300.0
SETTLE_SECONDS = 4.0
"""For what clients that left have left behind, and for what routers write once a second."""
KILL_AFTER_SECONDS = 6.0
GEMINI = f"/v1beta/models/{MODEL}:"


class Part(NamedTuple):
    """Its share of the requests, the most choices of a prompt, and the share of clients that leave."""

    share: float
    max_choices: int
    leave_share: float


PARTS = (Part(0.2, 3, 0.0), Part(0.4, 1, 0.0), Part(0.4, 1, 0.1))


class Load:
    """Asks in turn at both routers. `sums` are by tenant what its answers said."""

    def __init__(self, urls: Sequence[str], keys: dict[str, str], seed: int) -> None:
        self._urls, self._keys = urls, keys
        self._rng = random.Random(seed)
        self._prefixes = [self._words(*PREFIX_WORDS) for _ in range(NUM_PREFIXES)]
        self._num_left = 0
        self.max_choices = 1
        self.sums: dict[str, Counter[str]] = {tenant: Counter() for tenant in (*STAYING, LEAVING)}
        self.answered_at: list[tuple[float, str]] = []

    async def run(self, num_requests: int, concurrency: int, leave_share: float) -> None:
        self._num_left = num_requests
        limits = httpx.Limits(max_connections=concurrency)
        async with (
            httpx.AsyncClient(timeout=ANSWER_SECONDS, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(concurrency):
                group.create_task(self._work(client, leave_share))

    async def _work(self, client: httpx.AsyncClient, leave_share: float) -> None:
        while self._num_left > 0:
            self._num_left -= 1
            leaves = self._rng.random() < leave_share
            tenant = LEAVING if leaves else self._rng.choice(STAYING)
            url = self._urls[self._num_left % len(self._urls)]
            with suppress(httpx.TransportError):  # of a router that is killed
                await self._ask(client, url, tenant, leaves=leaves)

    def _words(self, least: int, most: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(least, most)))

    def _request(self, *, stream: bool) -> tuple[str, dict[str, Any]]:
        rng = self._rng
        place = min(int(rng.expovariate(4 / NUM_PREFIXES)), NUM_PREFIXES - 1)
        text = f"{self._prefixes[place]} {self._words(1, 20)}"
        messages = [{"role": "user", "content": text}]
        limits = {"model": MODEL, "max_tokens": rng.randint(1, 8), "temperature": 0, "stream": stream}
        openai = {**limits, "stream_options": {"include_usage": True}} if stream else limits
        lease = {"prompt_cache_options": {"ttl": rng.choice(["5m", "1h"])}} if rng.random() < 0.3 else {}
        match rng.randrange(5):
            case 0:
                body = {**openai, **lease, "messages": messages, "n": rng.randint(1, self.max_choices)}
                return "/v1/chat/completions", body
            case 1:
                prompts = [text, f"{text} {self._words(1, 5)}"][: rng.randint(1, 2)]
                return "/v1/completions", {**openai, **lease, "prompt": prompts}
            case 2:
                mark = {"cache_control": {"type": "ephemeral"}} if rng.random() < 0.5 else {}
                return "/v1/messages", {**limits, **mark, "messages": messages}
            case 3:
                body = {"model": MODEL, "max_output_tokens": limits["max_tokens"], "stream": stream}
                return "/v1/responses", {**body, **lease, "input": text, "store": False}
        body = {
            "contents": [{"role": "user", "parts": [{"text": text}]}],
            "generationConfig": {"maxOutputTokens": limits["max_tokens"], "temperature": 0},
        }
        return GEMINI + ("streamGenerateContent?alt=sse" if stream else "generateContent"), body

    async def _ask(self, client: httpx.AsyncClient, url: str, tenant: str, *, leaves: bool) -> None:
        path, body = self._request(stream=leaves or self._rng.random() < 0.5)
        headers = {"authorization": f"Bearer {self._keys[tenant]}"}
        async with client.stream("POST", url + path, json=body, headers=headers) as answer:
            if answer.status_code != 200:
                await answer.aread()
                raise AssertionError(f"{path} answers {answer.status_code}: {answer.text[:300]}")
            last: dict[str, Any] = {}
            if not answer.headers["content-type"].startswith("text/event-stream"):
                last = json.loads(await answer.aread())
            else:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    if leaves:
                        self.sums[tenant]["requests"] += 1
                        return
                    event = json.loads(line[6:])
                    event = event.get("response", event)
                    if event.get("usage") or event.get("usageMetadata"):
                        last = event
        self.sums[tenant].update(counted(last))
        self.answered_at.append((time.monotonic(), url))


def counted(answer: dict[str, Any]) -> Counter[str]:
    """Return the same numbers of every dialect's usage."""
    said = answer.get("usageMetadata") or answer["usage"]
    if "promptTokenCount" in said:
        prompt, read = said["promptTokenCount"], said["cachedContentTokenCount"]
        output = said["candidatesTokenCount"] + said["thoughtsTokenCount"]
    elif "cache_read_input_tokens" in said:
        read, output = said["cache_read_input_tokens"], said["output_tokens"]
        prompt = said["input_tokens"] + said["cache_creation_input_tokens"] + read
    else:
        given, made = ("input", "output") if "input_tokens" in said else ("prompt", "completion")
        prompt, output = said[f"{given}_tokens"], said[f"{made}_tokens"]
        details = said[f"{given}_tokens_details"]
        read = details["cached_tokens"]
        by_tier = [details[f"{tier}_cached_tokens"] for tier in TIERS if f"{tier}_cached_tokens" in details]
        if by_tier and sum(by_tier) != read:
            raise AssertionError(f"an answer does not agree with itself: {details}")
    return Counter(requests=1, prompt_tokens=prompt, cached_tokens=read, output_tokens=output)


class Cluster:
    """The parts that count. `urls` are the routers'."""

    def __init__(self, stack: LocalStack, urls: Sequence[str], ports: Sequence[int], keys: dict[str, str]):
        self.stack, self.urls, self.keys = stack, urls, keys
        self._replicas = [f"http://127.0.0.1:{port}" for port in ports]

    def used(self, url: str, tenant: str) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self.keys[OPERATOR]}"}
        answer = httpx.get(f"{url}/v1/usage?tenant={tenant}", headers=headers, timeout=60.0)
        total: dict[str, Any] = answer.raise_for_status().json()["total"]
        return total

    def engines(self) -> Counter[str]:
        found = counters(self._replicas, "replica_cached_tokens_by_tier_total", "tier")
        for name in ("prompt", "cached", "generated"):
            found[f"{name}_tokens"] = counters(self._replicas, f"replica_{name}_tokens_total").total()
        return found

    def routers(self) -> Counter[str]:
        """Their metrics. What was missed is the sum over all causes."""
        key = self.keys[OPERATOR]
        found = counters(self.urls, "router_cached_tokens_by_tier_total", "tier", key=key)
        found["prompt_tokens"] = counters(self.urls, "router_prompt_tokens_total", key=key).total()
        found["missed"] = counters(self.urls, "router_missed_tokens_total", key=key).total()
        return found


class Checks:
    """Prints what is compared, and remembers whether all was equal."""

    def __init__(self) -> None:
        self.are_equal = True

    def tenants(self, cluster: Cluster, load: Load) -> Counter[str]:
        """Compare the answers' and routers' counts by tenant; returns the total usage."""
        everybody: Counter[str] = Counter()
        print("\n  tenant  number               answers   /v1/usage, both routers")
        for tenant in (*STAYING, LEAVING):
            first, second = (cluster.used(url, tenant) for url in cluster.urls)
            for name in ("requests", "prompt_tokens", "cached_tokens", "output_tokens"):
                said = load.sums[tenant][name]
                is_said = tenant in STAYING or name == "requests"
                self.are_equal &= first[name] == second[name] and (first[name] == said or not is_said)
                told = f"{said:,}" if is_said else "unknown"
                print(f"  {tenant:<7} {name:<16} {told:>11}   {first[name]:>11,} {second[name]:>11,}")
                everybody[name] += first[name]
            everybody.update(first["cached_tokens_by_tier"])
            everybody.update({"written": first["written_tokens"], "aborted": first["aborted"]})
        return everybody

    def engines(
        self, engines: Counter[str], routers: Counter[str], used: Counter[str], *, with_output: bool
    ) -> None:
        """Compare the engines' counts in one part."""
        print("  all, in this part             engines       routers     /v1/usage")
        for name in ("prompt_tokens", *TIERS):
            print(f"  {name:<24} {engines[name]:>12,} {routers[name]:>13,} {used[name]:>13,}")
            self.are_equal &= engines[name] == routers[name] == used[name]
        for name, of_engines in (("cached_tokens", "cached_tokens"), ("output_tokens", "generated_tokens")):
            print(f"  {name:<24} {engines[of_engines]:>12,} {'':>13} {used[name]:>13,}")
            is_compared = name == "cached_tokens" or with_output
            self.are_equal &= engines[of_engines] == used[name] or not is_compared
        print(f"  {routers['missed']:,} missed by cause, {engines['cached_tokens']:,} read")
        self.are_equal &= routers["missed"] + engines["cached_tokens"] == engines["prompt_tokens"]
        print(f"  written {used['written']:,}; requests whose client left {used['aborted']:,}")


async def kill_a_router(cluster: Cluster, load: Load, num_requests: int, concurrency: int) -> None:
    """Under load, and print what was counted nowhere."""
    running = asyncio.create_task(load.run(num_requests, concurrency, 0.0))
    await asyncio.sleep(KILL_AFTER_SECONDS)
    killed = time.monotonic()
    cluster.stack.kill("router-1")
    await asyncio.wait([running], timeout=KILL_AFTER_SECONDS)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    await asyncio.sleep(SETTLE_SECONDS)
    used = Counter[str]()
    for tenant in STAYING:
        total = await asyncio.to_thread(cluster.used, cluster.urls[0], tenant)
        used.update({name: total[name] for name in ("requests", "prompt_tokens")})
        used["unfinished"] += total["errors"] + total["aborted"]
    said = load.sums[STAYING[0]] + load.sums[STAYING[1]]
    last = sum(killed - at < 1.0 for at, url in load.answered_at if url == cluster.urls[1] and at <= killed)
    finished = used["requests"] - used["unfinished"]
    print(
        f"\n  one router killed: of {said['requests']:,} answered requests {said['requests'] - finished:,}"
        f" are counted nowhere; it had answered {last:,} in its last second"
    )


async def measure(cluster: Cluster, num_requests: int, concurrency: int) -> bool:
    load, checks = Load(cluster.urls, cluster.keys, num_requests), Checks()
    before = [Counter[str](), Counter[str](), Counter[str]()]
    for part in PARTS:
        began, load.max_choices = time.monotonic(), part.max_choices
        await load.run(round(num_requests * part.share), concurrency, part.leave_share)
        print(
            f"\n{num_requests * part.share:,.0f} requests of up to {part.max_choices} choices, of which"
            f" {part.leave_share:.0%} leave: {time.monotonic() - began:.0f} s"
        )
        await asyncio.sleep(SETTLE_SECONDS)
        used = await asyncio.to_thread(checks.tenants, cluster, load)
        now = [await asyncio.to_thread(cluster.engines), await asyncio.to_thread(cluster.routers), used]
        if part.max_choices == 1:
            own = [later - earlier for later, earlier in zip(now, before, strict=True)]
            checks.engines(*own, with_output=not part.leave_share)
        before = now
    await kill_a_router(cluster, load, num_requests, concurrency)
    return checks.are_equal


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


def main() -> None:
    options = bench_options(__doc__)
    options.add_argument("--requests", type=int, default=5000)
    options.add_argument("--concurrency", type=int, default=8)
    arguments = options.parse_args()
    print_header(f"What {arguments.requests:,} requests have used, as answers, routers and engines say")
    ports = [free_port(), free_port()]
    with tempfile.TemporaryDirectory(prefix="kvasir-accounting-") as folder:
        keys_file = Path(folder) / "keys.json"
        tenants = [Tenant(name=name) for name in (*STAYING, LEAVING, OPERATOR)]
        keys = write_key_file(keys_file, tenants, operators=(OPERATOR,))
        each = [settings(folder, number, port) for number, port in enumerate(ports)]
        router = {"index_stride": CHUNK_TOKENS, "keys_file": keys_file}
        with local_stack(replica_settings=each, router_settings=router) as stack:
            port = free_port()
            stack.start("router-1", python_command("router", {**stack.shared, **router, "port": port}))
            urls = [stack.url, f"http://127.0.0.1:{port}"]
            stack.wait_ready(2, urls[1])
            cluster = Cluster(stack, urls, ports, keys)
            are_equal = asyncio.run(measure(cluster, arguments.requests, arguments.concurrency))
    if not are_equal:
        sys.exit("they do not agree")


if __name__ == "__main__":
    main()
