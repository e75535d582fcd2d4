"""Conversations that go on, with real engines behind a real router: each turn finds the one before cached."""

import time
from functools import partial
from typing import Any

import httpx
import pytest

from loadtests.stacks.local_stack import LocalStack
from tests.integration.observe import another_router, is_told, metrics_at, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

NUM_TURNS = 6
BLOCK_SIZE = 16
SETTLE_SECONDS = 0.4
"""For the replicas' announcements to reach the router."""

SYSTEM = "You are a patient assistant who explains how caches work. " * 4


@pytest.mark.parametrize("fixture", [pytest.param("toy_stack", marks=pytest.mark.slow), "simulated_stack"])
def test_each_turn_is_cached_up_to_the_last_block_of_the_turn_before(
    request: pytest.FixtureRequest, fixture: str
) -> None:
    stack: LocalStack = request.getfixturevalue(fixture)
    talk([stack.url])


@pytest.mark.parametrize("fixture", [pytest.param("toy_stack", marks=pytest.mark.slow), "simulated_stack"])
def test_so_it_is_where_turns_alternate_between_routers(request: pytest.FixtureRequest, fixture: str) -> None:
    stack: LocalStack = request.getfixturevalue(fixture)
    with another_router(stack, history_wait_seconds=10) as other:
        talk([other.url, stack.url])
        assert metrics_at(other.url)["router_history_wrong_total"] == 0


def talk(urls: list[str]) -> None:
    """At this temperature the toy model says what no tokenizer would write so: every turn drifts."""
    before = num_going_on(urls)
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"{SYSTEM} {len(urls)}"}]
    num_tokens = 0
    with httpx.Client(timeout=60) as client:
        for turn in range(NUM_TURNS):
            messages.append({"role": "user", "content": f"Question {turn}: what is a block?"})
            body = {
                "model": "toy",
                "messages": messages,
                "max_tokens": 40,
                "temperature": 1.5,
                "seed": turn,
                "stream": False,
            }
            url = urls[turn % len(urls)]
            answer = client.post(f"{url}/v1/chat/completions", json=body).json()
            usage = answer["usage"]
            num_cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert num_cached >= num_tokens - BLOCK_SIZE, f"turn {turn}: {usage}"
            num_tokens = usage["prompt_tokens"] + usage["completion_tokens"] - 1
            messages.append(answer["choices"][0]["message"])
            time.sleep(SETTLE_SECONDS)
            wait_until(partial(is_told, url), "the answer to be told to other routers")
    assert num_going_on(urls) - before == NUM_TURNS - 1


def num_going_on(urls: list[str]) -> float:
    """Prompts that go on from a conversation's earlier answers."""
    return sum(metrics_at(url)["router_history_prompts_total"] for url in urls)
