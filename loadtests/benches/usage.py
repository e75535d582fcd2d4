"""Whether `/v1/usage` sums up to what the answers said and to what the engines counted, over two routers.

Two replicas of the toy model with host memory, disks and pulls between them, behind two router processes.
Requests in every dialect, whole and streamed, with several choices and prompts, with and without leases, come
from tenants with keys. In the first part everybody stays: answers and `/v1/usage` of both routers must be
equal to the token, and so must the engines in the second, where each prompt has one choice (an engine counts
the prompt of each choice, an answer counts it once). In the third a tenant of its own leaves in the middle of
its streams: all others' sums must still be those of their answers, and everybody's prompts those of the
engines. In the last a router is killed under load, and what is lost is counted.

    python -m loadtests.benches.usage [--requests 5000] [--concurrency 8]
"""

import argparse
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
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadtests.benches.accounting import CHUNK_TOKENS, LEAVE_SHARE, MODEL, PATIENCE_SECONDS, TIERS, settings
from loadtests.figures import print_header
from loadtests.stacks.key_file import write_key_file
from loadtests.stacks.local_stack import LocalStack, free_port, local_stack, python_command
from router.tenants.caller import Tenant

STAYING = ("acme", "beta")
LEAVING, OPERATOR = "leaver", "ops"
NUM_PREFIXES = 60
WORDS = "a story of the old mill by the river where nobody but the miller and his cat has been".split()
PARTS = ((0.2, 3, 0.0), (0.4, 1, 0.0), (0.4, 1, LEAVE_SHARE))
"""The share of the requests, the most choices, and the share of clients that leave."""
SETTLE_SECONDS = 4.0
"""For what clients that left have left behind, and for what routers write once a second."""
KILL_AFTER_SECONDS = 6.0
GEMINI = f"/v1beta/models/{MODEL}:"


class Load:
    """Asks in turn at both routers. `sums` are by tenant what its answers said."""

    def __init__(self, urls: Sequence[str], keys: dict[str, str], seed: int) -> None:
        self._urls, self._keys = urls, keys
        self._rng = random.Random(seed)
        self._prefixes = [self._words(20, 160) for _ in range(NUM_PREFIXES)]
        self._num_left = 0
        self.max_choices = 1
        self.sums: dict[str, Counter[str]] = {tenant: Counter() for tenant in (*STAYING, LEAVING)}
        self.answered_at: list[tuple[float, str]] = []

    async def run(self, num_requests: int, concurrency: int, leave_share: float) -> None:
        self._num_left = num_requests
        limits = httpx.Limits(max_connections=concurrency)
        async with (
            httpx.AsyncClient(timeout=PATIENCE_SECONDS, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(concurrency):
                group.create_task(self._work(client, leave_share))

    async def _work(self, client: httpx.AsyncClient, leave_share: float) -> None:
        while self._num_left > 0:
            self._num_left -= 1
            leaves = self._rng.random() < leave_share
            tenant = LEAVING if leaves else self._rng.choice(STAYING)
            path, body = self._request(stream=leaves or self._rng.random() < 0.5)
            url = self._urls[self._num_left % len(self._urls)]
            with suppress(httpx.TransportError):  # of a router that is killed
                await self._ask(client, url, path, body, tenant, leaves=leaves)

    def _words(self, least: int, most: int) -> str:
        return " ".join(self._rng.choice(WORDS) for _ in range(self._rng.randint(least, most)))

    def _request(self, *, stream: bool) -> tuple[str, dict[str, Any]]:
        rng = self._rng
        place = min(int(rng.expovariate(4 / NUM_PREFIXES)), NUM_PREFIXES - 1)
        text = f"{self._prefixes[place]} {self._words(1, 20)}"
        messages = [{"role": "user", "content": text}]
        limits = {"model": MODEL, "max_tokens": rng.randint(1, 8), "temperature": 0, "stream": stream}
        openai = {**limits, "stream_options": {"include_usage": True}} if stream else limits
        kept = {"prompt_cache_options": {"ttl": rng.choice(["5m", "1h"])}} if rng.random() < 0.3 else {}
        match rng.randrange(5):
            case 0:
                body = {**openai, **kept, "messages": messages, "n": rng.randint(1, self.max_choices)}
                return "/v1/chat/completions", body
            case 1:
                prompts = [text, f"{text} {self._words(1, 5)}"][: rng.randint(1, 2)]
                return "/v1/completions", {**openai, **kept, "prompt": prompts}
            case 2:
                mark = {"cache_control": {"type": "ephemeral"}} if rng.random() < 0.5 else {}
                return "/v1/messages", {**limits, **mark, "messages": messages}
            case 3:
                body = {"model": MODEL, "max_output_tokens": limits["max_tokens"], "stream": stream}
                return "/v1/responses", {**body, **kept, "input": text, "store": False}
        body = {
            "contents": [{"role": "user", "parts": [{"text": text}]}],
            "generationConfig": {"maxOutputTokens": limits["max_tokens"], "temperature": 0},
        }
        return GEMINI + ("streamGenerateContent?alt=sse" if stream else "generateContent"), body

    async def _ask(
        self,
        client: httpx.AsyncClient,
        url: str,
        path: str,
        body: dict[str, Any],
        tenant: str,
        *,
        leaves: bool,
    ) -> None:
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
    """The same numbers of every dialect's usage."""
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
        read = said[f"{given}_tokens_details"]["cached_tokens"]
    return Counter(requests=1, prompt_tokens=prompt, cached_tokens=read, output_tokens=output)


class Cluster:
    """What the parts count. `urls` are the routers'."""

    def __init__(self, stack: LocalStack, urls: Sequence[str], ports: Sequence[int], keys: dict[str, str]):
        self.stack, self.urls, self._ports, self.keys = stack, urls, ports, keys

    def used(self, url: str, tenant: str) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self.keys[OPERATOR]}"}
        answer = httpx.get(f"{url}/v1/usage?tenant={tenant}", headers=headers, timeout=60.0)
        total: dict[str, Any] = answer.raise_for_status().json()["total"]
        return total

    def engines(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for port in self._ports:
            text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60.0).text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    name = sample.name.removeprefix("replica_").removesuffix("_total")
                    if name == "cached_tokens_by_tier":
                        found[sample.labels["tier"]] += round(sample.value)
                    elif name in ("prompt_tokens", "cached_tokens", "generated_tokens"):
                        found[name] += round(sample.value)
        return found


def compared(cluster: Cluster, load: Load) -> tuple[bool, Counter[str]]:
    """Prints what answers and routers say. Returns whether it is the same, and what all have used."""
    are_equal = True
    everybody: Counter[str] = Counter()
    print("\n  tenant  number               answers   /v1/usage, both routers")
    for tenant in (*STAYING, LEAVING):
        first, second = (cluster.used(url, tenant) for url in cluster.urls)
        for name in ("requests", "prompt_tokens", "cached_tokens", "output_tokens"):
            said = load.sums[tenant][name]
            is_said = tenant in STAYING or name == "requests"
            are_equal &= first[name] == second[name] and (first[name] == said or not is_said)
            told = f"{said:,}" if is_said else "unknown"
            print(f"  {tenant:<7} {name:<16} {told:>11}   {first[name]:>11,} {second[name]:>11,}")
            everybody[name] += first[name]
        everybody.update(first["cached_tokens_by_tier"])
        everybody.update({"written": first["written_tokens"], "aborted": first["aborted"]})
    return are_equal, everybody


def compared_engines(engines: Counter[str], used: Counter[str], *, with_output: bool) -> bool:
    """Prints what was counted in one part, and tells whether it is the same."""
    are_equal = True
    print("  all, in this part             engines     /v1/usage")
    for name in ("prompt_tokens", "cached_tokens", *TIERS):
        print(f"  {name:<24} {engines[name]:>12,} {used[name]:>13,}")
        are_equal &= engines[name] == used[name]
    print(f"  {'output_tokens':<24} {engines['generated_tokens']:>12,} {used['output_tokens']:>13,}")
    are_equal &= engines["generated_tokens"] == used["output_tokens"] or not with_output
    print(f"  written {used['written']:,}; requests whose client left {used['aborted']:,}")
    return are_equal


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
    load = Load(cluster.urls, cluster.keys, num_requests)
    are_equal, used_before, engines_before = True, Counter[str](), Counter[str]()
    for share, load.max_choices, leave_share in PARTS:
        began = time.monotonic()
        await load.run(round(num_requests * share), concurrency, leave_share)
        seconds = time.monotonic() - began
        print(
            f"\n{num_requests * share:,.0f} requests of up to {load.max_choices} choices, of which"
            f" {leave_share:.0%} leave: {seconds:.0f} s"
        )
        await asyncio.sleep(SETTLE_SECONDS)
        is_equal, used = await asyncio.to_thread(compared, cluster, load)
        engines = await asyncio.to_thread(cluster.engines)
        are_equal &= is_equal
        if load.max_choices == 1:
            new, own = engines - engines_before, used - used_before
            are_equal &= compared_engines(new, own, with_output=not leave_share)
        used_before, engines_before = used, engines
    await kill_a_router(cluster, load, num_requests, concurrency)
    return are_equal


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=8)
    arguments = parser.parse_args()
    print_header(f"What {arguments.requests:,} requests have used, as answers, /v1/usage and engines say")
    ports = [free_port(), free_port()]
    with tempfile.TemporaryDirectory(prefix="kvasir-usage-") as folder:
        keys_file = Path(folder) / "keys.json"
        tenants = [Tenant(name=name) for name in (*STAYING, LEAVING, OPERATOR)]
        keys = write_key_file(keys_file, tenants, operators=(OPERATOR,))
        each = [settings(folder, number, port) for number, port in enumerate(ports)]
        router = {"index_stride": CHUNK_TOKENS, "keys_file": keys_file}
        with local_stack(replica_settings=each[0], router_settings=router) as stack:
            own = {"replica_id": "replica-1", **stack.shared, **each[1]}
            stack.start("replica-1", python_command("replicas", own))
            port = free_port()
            urls = [stack.url, f"http://127.0.0.1:{port}"]
            stack.start("router-1", python_command("router", {**stack.shared, **router, "port": port}))
            stack.wait_ready(2)
            stack.poll(lambda: _is_ready(urls[1]), "the second router")
            cluster = Cluster(stack, urls, ports, keys)
            are_equal = asyncio.run(measure(cluster, arguments.requests, arguments.concurrency))
    if not are_equal:
        sys.exit("they do not agree")


def _is_ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        answer = httpx.get(url + "/ready")
        return answer.status_code == 200 and bool(answer.json()["num_replicas"] == 2)
    return False


if __name__ == "__main__":
    main()
