"""Leases on a whole path of real processes: OpenAI's client, router, gRPC, replica, host memory and disk."""

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from loadtests.stacks.local_stack import LocalStack, free_port, local_stack

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

WORDS = ("river", "stone", "lamp", "seven", "garden", "quiet", "engine", "paper")
METRICS_PORT = free_port()
LEASED = "Of what is kept for a day. " * 60


@pytest.fixture(scope="module")
def tiered_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """One replica of our own engine, with little memory below a small cache."""
    settings: dict[str, Any] = {
        "engine": "torch",
        "model_name": "toy",
        "num_threads": 1,
        "num_blocks": 160,
        "host_kv_bytes": 16 * 2**20,
        "disk_kv_bytes": 64 * 2**20,
        "metrics_port": METRICS_PORT,
        "kv_folder": str(tmp_path_factory.mktemp("kv")),
    }
    with local_stack(num_replicas=1, replica_settings=settings) as stack:
        yield stack


def ask(stack: LocalStack, text: str, **fields: Any) -> tuple[dict[str, Any], httpx.Headers]:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="toy", messages=[{"role": "user", "content": text}], max_tokens=2, **fields
        )
        usage = raw.parse().usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.model_dump(), raw.headers


def test_a_day_long_lease_is_granted_and_kept_while_others_pass_through(tiered_stack: LocalStack) -> None:
    rng = random.Random(4)
    details, headers = ask(tiered_stack, LEASED, prompt_cache_retention="24h")
    (lease,) = details["cache_leases"]
    assert lease["status"] == "granted" and lease["seconds"] == 86_400
    num_tokens = lease["tokens"]
    assert num_tokens >= 256 and num_tokens % 128 == 0
    assert headers["x-kvasir-cache-lease"] == f"granted; seconds=86400; tokens={num_tokens}"
    for _ in range(40):
        ask(tiered_stack, " ".join(rng.choices(WORDS, k=400)))
    details, headers = ask(tiered_stack, LEASED)
    assert "evicted_early_tokens" not in details and "x-kvasir-evicted-early-tokens" not in headers
    assert sample("replica_prefix_leases_granted_total") == 1
    assert sample("replica_prefix_leased_tokens") == num_tokens

    tiered_stack.kill("replica-0")
    tiered_stack.start("replica-0")
    tiered_stack.wait_ready(1)
    ask(tiered_stack, "Who is there?")
    assert sample("replica_prefix_leases_granted_total") == 0
    assert sample("replica_prefix_leased_tokens") == num_tokens


def sample(name: str) -> float:
    text = httpx.get(f"http://127.0.0.1:{METRICS_PORT}/metrics").text
    (value,) = [line.split()[1] for line in text.splitlines() if line.split()[0] == name]
    return float(value)


def test_what_cannot_be_kept_is_refused_aloud_and_served(tiered_stack: LocalStack) -> None:
    details, headers = ask(tiered_stack, "Hi", prompt_cache_options={"ttl": "30m"})
    assert details["cache_leases"] == [{"status": "refused", "reason": "no_whole_chunk"}]
    assert headers["x-kvasir-cache-lease"] == "refused; reason=no_whole_chunk"
