"""Three tenants with a key each before a live cluster that has too much to do: who is served, and when.

Simulated engines, whose steps take as long as a large model's, behind one router. Each run sends at a fixed
pace, whatever comes back: every tenant its part, then the first ten times that, then all two and four
times as much as the fleet can carry.

    python -m loadtests.benches.overload [--seconds 30] [--capacity 2.5]
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from loadtests.figures import print_header
from loadtests.reports.fairness import fairness
from loadtests.reports.report import RequestRecord, Slo
from loadtests.simulation.summary import tenant_table
from loadtests.stacks.key_file import write_key_file
from loadtests.stacks.local_stack import local_stack
from router.tenants.caller import Tenant

TENANTS = ("red", "green", "blue")
FLOODER = "red"
NUM_SESSIONS = 8
SHARED_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 1024, 1024, 16
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run (default: 30)")
    parser.add_argument(
        "--capacity", type=float, default=2.5, help="requests a second that the fleet carries"
    )
    parser.add_argument("--slo", type=float, default=5.0, help="TTFT after which an answer is too late")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", type=float, default=0.25, help="the router's queue_target_seconds")
    arguments = parser.parse_args()
    print_header("overload")
    part = 0.7 * arguments.capacity / len(TENANTS)
    everybody = dict.fromkeys(TENANTS, part)
    flooded = {**everybody, FLOODER: 10 * part}
    twice, four_times = (
        dict.fromkeys(TENANTS, times * arguments.capacity / len(TENANTS)) for times in (2, 4)
    )
    with tempfile.TemporaryDirectory(prefix="kvasir-keys-") as folder:
        keys_file = Path(folder) / "keys.json"
        keys = write_key_file(keys_file, [Tenant(name=name, slo_seconds=arguments.slo) for name in TENANTS])
        for name, rates in (
            ("each its part, 0.7 in all", everybody),
            (f"{FLOODER} ten times its part", flooded),
            ("twice what the fleet carries", twice),
            ("four times that", four_times),
        ):
            settings = {"keys_file": keys_file, "queue_target_seconds": arguments.target}
            with local_stack(num_replicas=2, replica_settings=REPLICA, router_settings=settings) as stack:
                records = asyncio.run(_send_all(stack.url, keys, rates, arguments.seconds, arguments.seed))
            _print(name, records, Slo(arguments.slo), arguments.seconds)


async def _send_all(
    url: str, keys: Mapping[str, str], rates: Mapping[str, float], seconds: float, seed: int
) -> list[RequestRecord]:
    """Open loop: each request at its time."""
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
        model = (await client.get("/v1/models", headers=_key(keys[FLOODER]))).json()["data"][0]["id"]
        began, tasks = time.perf_counter(), []
        plan = sorted(
            (arrival, tenant, rng.randrange(NUM_SESSIONS), rng.randrange(10**6))
            for tenant, rate in rates.items()
            for arrival in _arrivals(rng, rate, seconds)
        )
        for arrival, tenant, session, number in plan:
            await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
            body = _body(model, tenant, session, number)
            tasks.append(
                asyncio.create_task(_send(client, keys[tenant], tenant, body, began + arrival, began))
            )
        return list(await asyncio.gather(*tasks))


def _arrivals(rng: random.Random, rate: float, seconds: float) -> list[float]:
    arrivals, now = [], rng.expovariate(rate)
    while now < seconds:
        arrivals.append(now)
        now += rng.expovariate(rate)
    return arrivals


def _body(model: str, tenant: str, session: int, number: int) -> dict[str, object]:
    shared, own = random.Random(f"{tenant}/{session}"), random.Random(number)
    prompt = [shared.randrange(10, 1000) for _ in range(SHARED_TOKENS)]
    prompt += [own.randrange(10, 1000) for _ in range(OWN_TOKENS)]
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _key(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


async def _send(
    client: httpx.AsyncClient, key: str, tenant: str, body: dict[str, object], due: float, began: float
) -> RequestRecord:
    ttft, cached, num_prompt, error = None, None, SHARED_TOKENS + OWN_TOKENS, None
    lateness = time.perf_counter() - due
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers=_key(key)) as answer:
            if answer.status_code != 200:
                error = f"refused ({answer.status_code})"
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event.get("choices") and ttft is None:
                    ttft = time.perf_counter() - due
                if event.get("usage"):
                    num_prompt = event["usage"]["prompt_tokens"]
                    cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    except httpx.HTTPError as problem:
        error = type(problem).__name__
    return RequestRecord(
        arrival_seconds=due - began,
        num_input_tokens=num_prompt,
        num_output_tokens=OUTPUT_TOKENS,
        ttft_seconds=ttft,
        e2e_seconds=time.perf_counter() - due,
        num_cached_tokens=cached,
        error=error,
        lateness_seconds=lateness,
        tenant=tenant,
    )


def _print(name: str, records: Sequence[RequestRecord], slo: Slo, seconds: float) -> None:
    found = fairness(records, slo)
    good = sum(slo.is_met(record) for record in records)
    errors = sorted({record.error for record in records if record.error is not None})
    late = sorted(record.lateness_seconds for record in records)[int(0.9 * len(records))]
    jain = "-" if found.jain is None else f"{found.jain:.3f}"
    print(
        f"\n{name}: {len(records) / seconds:.1f} requests/s, {good / seconds:.2f} good/s, Jain {jain}; ",
        end="",
    )
    print(f"the load generator's p90 lateness {1e3 * late:.0f} ms; {', '.join(errors) or 'no errors'}")
    print(tenant_table(found.tenants))


if __name__ == "__main__":
    main()
