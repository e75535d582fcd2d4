"""A model of windows and full attention behind a router: what the router foretells, vLLM finds."""

import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loadtests.stacks.local_stack import LocalStack, local_stack

pytestmark = [pytest.mark.vllm, pytest.mark.cluster]

INDEX_SECONDS = 0.5
"""Longer than an event takes from a replica to the router."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    from replicas.toy_model.make_hybrid_model import write_hybrid_model

    model = tmp_path_factory.mktemp("model") / "gpt-oss"
    write_hybrid_model("gpt_oss", model)
    settings: dict[str, Any] = {
        "engine": "vllm",
        "model": str(model),
        "num_blocks": 200,
        "context_length": 2048,
        "max_batched_tokens": 512,
        "max_running": 16,
    }
    with local_stack(num_replicas=1, replica_settings=settings) as running:
        yield running


def test_a_shared_beginning_is_foretold_where_it_can_be_resumed(stack: LocalStack) -> None:
    rng = random.Random(0)
    shared = [rng.randrange(10, 1000) for _ in range(1000)]
    with httpx.Client(base_url=stack.url, timeout=120) as client:
        name = client.get("/v1/models").json()["data"][0]["id"]

        def ask(prompt: list[int]) -> tuple[int, int]:
            body = {"model": name, "prompt": prompt, "max_tokens": 2, "temperature": 0}
            answer = client.post("/v1/completions", json=body)
            answer.raise_for_status()
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            time.sleep(INDEX_SECONDS)
            return int(answer.headers["x-kvasir-overlap-tokens"]), cached

        served = [ask(shared + [1100 + place] * 100) for place in range(4)]
        again = ask(shared + [1103] * 100)
    assert served == [(0, 0), (0, 0), (992, 992), (992, 992)]
    assert again == (1088, 1088)
