"""What was used, across the death of a router process: one that is killed loses what it has not written."""

import time
from collections.abc import Iterator

import httpx
import pytest

from loadtests.stacks.local_stack import LocalStack, free_port, local_stack, python_command
from router.features.usage.store import WRITE_SECONDS

REPLICA = {"engine": "simulated", "model_name": "toy", "num_blocks": 4096}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with local_stack(replica_settings=REPLICA) as running:
        yield running


def second_router(stack: LocalStack, name: str) -> str:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    stack.start(name, python_command("router", {**stack.shared, "port": port}))

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/ready").status_code == 200
        except httpx.HTTPError:
            return False

    stack.poll(is_ready, name)
    return url


def ask(url: str, num: int) -> int:
    """Returns the tokens of the prompts, as the answers say."""
    total = 0
    for _ in range(num):
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=60.0)
        total += answer.raise_for_status().json()["usage"]["prompt_tokens"]
    return total


def used(url: str) -> tuple[int, int]:
    total = httpx.get(f"{url}/v1/usage", timeout=60.0).raise_for_status().json()["total"]
    return total["requests"], total["prompt_tokens"]


@pytest.mark.timeout(120)
def test_a_killed_router_loses_what_it_has_not_written_and_no_more(stack: LocalStack) -> None:
    url = second_router(stack, "router-killed")
    before, tokens_before = used(stack.url)
    tokens = ask(url, 10)
    assert used(url) == (before + 10, tokens_before + tokens), "its own it knows at once"
    stack.poll(lambda: used(stack.url)[0] == before + 10, "what was written")
    ask(url, 3)
    stack.kill("router-killed")
    time.sleep(2 * WRITE_SECONDS)
    requests, prompt_tokens = used(stack.url)
    assert before + 10 <= requests <= before + 13
    assert prompt_tokens == tokens_before + tokens // 10 * (requests - before)


@pytest.mark.timeout(120)
def test_a_router_that_ends_in_order_loses_nothing(stack: LocalStack) -> None:
    url = second_router(stack, "router-ended")
    before, tokens_before = used(stack.url)
    tokens = ask(url, 7)
    assert stack.terminate("router-ended") == 0
    assert used(stack.url) == (before + 7, tokens_before + tokens)
