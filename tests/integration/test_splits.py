"""Prompts computed at one replica and decoded at another, on a whole path of real processes."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from openai import OpenAI

from cluster.commands.why import render
from loadtests.stacks.local_stack import LocalStack, local_stack
from tests.integration.observe import is_idle, metric, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

WORDS = ("river", "stone", "lamp", "seven", "garden", "quiet", "engine", "paper")
SETTINGS: dict[str, Any] = {
    "engine": "torch",
    "model_name": "toy",
    "num_threads": 1,
    "host_kv_bytes": 64 * 2**20,
    "pull_bytes_per_second": 5e8,
}
PREFILLER, DECODER = "replica-0", "replica-1"


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    roles = ("prefill", "decode")
    with local_stack(num_replicas=2, replica_settings=[{**SETTINGS, "role": role} for role in roles]) as one:
        for salt in ("cold", "warm"):  # speeds that were measured, and a link
            ask(one, prompt(400, salt), max_tokens=40)
        yield one


def prompt(num_words: int, seed: object) -> str:
    rng = random.Random(str(seed))
    return " ".join(rng.choices(WORDS, k=num_words))


Answer = tuple[str, Any, httpx.Headers]


def ask(stack: LocalStack, text: str, *, max_tokens: int = 24) -> Answer:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="toy",
            messages=[{"role": "user", "content": text}],
            max_tokens=max_tokens,
            seed=7,
            extra_body={"ignore_eos": True},
        )
        answer = raw.parse()
        return answer.choices[0].message.content or "", answer.usage, raw.headers


@contextmanager
def decoding(stack: LocalStack, num_streams: int = 12) -> Iterator[None]:
    """While others decode, a long prompt would delay them all."""
    is_over = threading.Event()

    def stream(number: int) -> None:
        while not is_over.is_set():
            ask(stack, f"Count, number {number}", max_tokens=200)

    threads = [threading.Thread(target=stream, args=(each,)) for each in range(num_streams)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: metric(stack, "router_replica_requests") >= num_streams / 2, "busy")
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def details_of(usage: Any) -> dict[str, Any]:
    details: dict[str, Any] = usage.prompt_tokens_details.model_dump()
    return details


def split_of(stack: LocalStack, name: str) -> tuple[str, Answer]:
    """Ask new prompts until one is split, and its KV comes in time: on a busy machine it may be late."""
    for number in range(20):
        text = prompt(500, f"{name} {number}")
        answer = ask(stack, text)
        assert answer[0]
        if "x-kvasir-computed-at" in answer[2] and "split_tokens" in details_of(answer[1]):
            return text, answer
    raise AssertionError("no prompt was split")


def test_a_prompt_is_computed_at_one_and_decoded_at_the_other(stack: LocalStack) -> None:
    with decoding(stack):
        text, (answer, usage, headers) = split_of(stack, "whole")
    assert headers["x-kvasir-computed-at"] == PREFILLER
    assert headers["x-kvasir-replica"] == DECODER
    details = details_of(usage)
    assert details["split_tokens"] > usage.prompt_tokens - 256
    # Only the template's beginning may have been there before.
    assert details["cached_tokens"] < 64 and details["pulled_cached_tokens"] == 0

    found = httpx.get(f"{stack.url}/v1/cache/explain/{headers['x-request-id']}").json()
    (explained,) = found["prompts"]
    split = explained["split"]
    assert (split["is_split"], split["prefiller"], split["decoder"]) == (True, PREFILLER, DECODER)
    assert 0 < split["split_ms"] < split["alone_ms"]
    assert explained["replica"] == PREFILLER
    (line,) = [line for line in render(found) if "decoded at" in line]
    assert f"computed at {PREFILLER} and decoded at {DECODER}" in line

    again, usage, headers = ask(stack, text)
    assert again == answer
    assert usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens - 256
    assert "split_tokens" not in details_of(usage)


@pytest.mark.parametrize("killed", [PREFILLER, DECODER])
def test_a_role_that_dies_in_the_middle_is_not_noticed(stack: LocalStack, killed: str) -> None:
    text = prompt(1500, f"killed {killed}")
    answers: list[str] = []
    with decoding(stack):
        asking = threading.Thread(target=lambda: answers.append(ask(stack, text)[0]))
        asking.start()
        time.sleep(0.2)
        stack.kill(killed)
        asking.join()
        stack.start(killed)
        stack.wait_ready(2)
    assert answers == [ask(stack, text)[0]]
    wait_until(lambda: is_idle(stack), "idle")
