"""Conversations of every dialect whose turns alternate between two real routers, of which one is killed in
between: each turn finds the one before cached. The replica's words are a script's, with thoughts, calls."""

import itertools
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from loadtests.stacks.local_stack import LocalStack, local_stack
from tests.integration.conftest import PATIENT
from tests.integration.observe import another_router, is_told, metrics_at, wait_until
from tests.router.api.test_dialects_go_on import CALLS, CLIENTS, NUM_TURNS
from tests.router.thinking_model import MODEL
from tests.talking_model import make_talking_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

BLOCK_SIZE = 16
AT_ONCE = ("chat", "messages", "responses by id")
WORDS = {
    "</tool_response>": "<think>\nThat is what I had to know.\n</think>\n\n  It is  12.\n",
    **{
        f"Question {turn},": f"<think>\nThought {turn}\n</think>\n\n"
        + (CALLS if turn % 3 == 1 else "Well.\n")
        for turn in range(NUM_TURNS)
    },
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("talking")
    script = folder / "words.json"
    script.write_text(json.dumps([{"when": when, "say": say} for when, say in WORDS.items()]), "utf-8")
    settings = {
        "engine": "simulated",
        "simulated_hardware": "instant",
        "simulated_script": script,
        "model": make_talking_model(folder / "talking"),
        "model_name": MODEL,
        "block_size": BLOCK_SIZE,
        "num_blocks": 4096,
    }
    with local_stack(replica_settings=settings, router_settings=PATIENT) as running:
        yield running


def tokens_of(answer: dict[str, Any]) -> tuple[int, int, int]:
    """Of its prompt, of what was said, and those that were cached, in any dialect."""
    if "usageMetadata" in answer:
        usage = answer["usageMetadata"]
        said = usage["candidatesTokenCount"] + usage.get("thoughtsTokenCount", 0)
        return usage["promptTokenCount"], said, usage.get("cachedContentTokenCount", 0)
    usage = answer["usage"]
    if "prompt_tokens" in usage:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], usage["completion_tokens"], cached
    if "cache_read_input_tokens" in usage:
        cached, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        return usage["input_tokens"] + cached + written, usage["output_tokens"], cached
    return usage["input_tokens"], usage["output_tokens"], usage["input_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in AT_ONCE else pytest.mark.slow) for name in CLIENTS]
)
async def test_each_turn_is_cached_to_within_a_block_of_the_end_of_the_one_before(
    stack: LocalStack, name: str
) -> None:
    usages: list[tuple[int, int, int]] = []
    client = CLIENTS[name]()
    with another_router(stack, **PATIENT) as other:
        for turn in range(NUM_TURNS):
            if turn == NUM_TURNS // 2:
                other.kill()
            url = (stack.url, other.url)[turn % 2]
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:

                async def keep(response: httpx.Response) -> None:
                    await response.aread()
                    usages.append(tokens_of(response.json()))

                http.event_hooks = {"response": [keep]}
                if turn % 3 == 2:
                    await client.tell_results(http)
                else:
                    await client.ask(http, f"Question {turn}, with <|im_end|> in it")
            wait_until(partial(is_told, url), "the answer to be told to other routers")
        looks = metrics_at(other.url)["router_history_lookups_total"]
    assert len(usages) == NUM_TURNS
    for (num_prompt, num_output, _), (_, _, num_cached) in itertools.pairwise(usages):
        assert num_cached > num_prompt + num_output - 1 - BLOCK_SIZE, usages
    assert looks > 0
