"""A vLLM that is told to end, and one that goes on with what it had leased, in real processes."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from loadtests.stacks import local_stack as stacks
from loadtests.stacks.local_stack import LocalStack, local_stack
from replicas.media.probes import probe_png

pytestmark = [pytest.mark.vllm, pytest.mark.cluster]

STAYS, LEAVES = "replica-0", "replica-1"
TEXT = "The cat that sails asks the dog that sings for the long way home. " * 30
DRAIN_SECONDS = 120.0


def with_picture(story: str, colour: bytes = b"\xff\0\0") -> list[dict[str, Any]]:
    """The same text, with a picture in its middle."""
    half = len(story) // 2
    url = "data:image/png;base64," + base64.b64encode(probe_png(300, 200, colour)).decode()
    return [
        {"type": "text", "text": story[:half]},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": story[half:]},
    ]


@pytest.fixture(scope="module")
def stack(image_model: Path) -> Iterator[LocalStack]:
    settings: dict[str, Any] = {
        "engine": "vllm",
        "model": str(image_model),
        "model_name": "toy",
        "context_length": 2048,
        "num_blocks": 64,
        "max_batched_tokens": 256,
        "max_running": 16,
        "host_kv_bytes": 64 << 20,
        "pull_bytes_per_second": 1e9,
        "drain_seconds": DRAIN_SECONDS,
    }
    with local_stack(num_replicas=2, replica_settings=settings) as running:
        yield running


def ask(client: openai.OpenAI, prompt: Any, **fields: Any) -> tuple[str, str, dict[str, Any]]:
    """Who answered, what, and what of the prompt was cached."""
    raw = client.chat.completions.with_raw_response.create(
        model="toy",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=8,
        temperature=0,
        extra_body=fields,
    )
    completion = raw.parse()
    assert completion.usage is not None and completion.usage.prompt_tokens_details is not None
    details = completion.usage.prompt_tokens_details.model_dump()
    return raw.headers["x-kvasir-replica"], completion.choices[0].message.content or "", details


def test_what_a_vllm_had_leased_is_served_from_the_host_memory_of_another(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "STOP_SECONDS", 2 * DRAIN_SECONDS)
    with openai.OpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        leased: list[tuple[Any, str, int]] = []
        story = ""
        for kind, make in (("Story", str), ("Picture", with_picture)):
            for number in range(100):
                story = f"{kind} {number}. {TEXT}"
                prompt = make(story)
                replica, expected, details = ask(client, prompt, prompt_cache_options={"ttl": "30m"})
                if replica == LEAVES:
                    break
            assert replica == LEAVES
            (lease,) = details["cache_leases"]
            assert lease["status"] == "granted" and lease["tokens"] >= 256
            leased.append((prompt, expected, lease["tokens"]))
        assert stack.terminate(LEAVES) == 0
        stack.wait_ready(1)
        for prompt, expected, num_tokens in leased:
            replica, answer, details = ask(client, prompt)
            assert (replica, answer) == (STAYS, expected)
            assert details["cached_tokens"] == details["host_cached_tokens"] == num_tokens, stack.logs()
            assert "evicted_early_tokens" not in details
        _, other, details = ask(client, with_picture(story, b"\0\0\xff"))
        assert other != expected
        assert 0 < details["cached_tokens"] < num_tokens, "as far as the picture"
