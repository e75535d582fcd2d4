"""A model of windows and full attention behind a router: what the router foretells, vLLM finds."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.cli import main
from loadtests.stacks.local_stack import LocalStack, local_stack

pytestmark = [pytest.mark.vllm, pytest.mark.cluster]

BLOCK_SIZE = 32
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


class Asker:
    """Asks the router, and waits until it has heard what the replica keeps."""

    def __init__(self, stack: LocalStack, client: httpx.Client) -> None:
        self.client = client
        self.name = client.get("/v1/models").json()["data"][0]["id"]
        self.places = ["--url", stack.url, "--redis-url", stack.redis_url]

    def ask(self, route: str, **fields: Any) -> httpx.Response:
        body = {"model": self.name, "max_tokens": 2, "temperature": 0, **fields}
        answer = self.client.post(f"/v1/{route}", json=body)
        answer.raise_for_status()
        time.sleep(INDEX_SECONDS)
        return answer

    def spans(self, answer: httpx.Response) -> list[tuple[str, int]]:
        """Return why its tokens were not read."""
        explained = self.client.get(f"/v1/cache/explain/{answer.json()['id']}").json()
        return [(span["cause"], span["end"]) for span in explained["prompts"][0]["spans"]]


@pytest.fixture
def asker(stack: LocalStack) -> Iterator[Asker]:
    with httpx.Client(base_url=stack.url, timeout=120) as client:
        yield Asker(stack, client)


def read(answer: httpx.Response) -> tuple[int, int]:
    """What the router foretold, and what was read from cache."""
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(answer.headers["x-kvasir-overlap-tokens"]), cached


def test_a_shared_beginning_is_foretold_shown_and_explained(
    asker: Asker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(0)
    shared = [rng.randrange(10, 1000) for _ in range(1000)]
    answers, shown, file = [], [], tmp_path / "request.json"
    for place in range(4):
        prompt = shared + [1100 + place] * 100
        file.write_text(json.dumps({"model": asker.name, "prompt": prompt}))
        assert main(["where", "--file", str(file), "--json", *asker.places]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        shown.append((found["num_resumed_tokens"], found["num_tokens"]))
        answers.append(asker.ask("completions", prompt=prompt))
    assert [read(answer) for answer in answers] == [(0, 0), (0, 0), (992, 992), (992, 992)]
    assert shown == [(0, 0), (0, 896), (992, 992), (992, 992)]
    new = [("never_cached", 1088), ("below_a_block", 1100)]
    assert [asker.spans(answer) for answer in answers] == [new, [("not_resumable", 992), *new], new, new]
    assert read(asker.ask("completions", prompt=prompt)) == (1088, 1088)


def test_a_chat_resumes_at_the_end_of_its_last_prompt(asker: Asker) -> None:
    rng = random.Random(1)

    def words(count: int) -> str:
        return " ".join(rng.choices(("river", "stone", "lamp", "seven", "garden", "quiet"), k=count))

    messages = [{"role": "user", "content": words(400)}]
    sizes, found = [1], []
    for _ in range(4):
        answer = asker.ask("chat/completions", messages=messages, max_tokens=80, ignore_eos=True)
        usage = answer.json()["usage"]
        found.append(read(answer))
        sizes.append(usage["prompt_tokens"])
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": words(20)}]
    ends = [(size - 1) // BLOCK_SIZE * BLOCK_SIZE for size in sizes[:4]]
    assert found == [(end, end) for end in ends]
