"""A model whose `generation_config.json` makes it greedy answers alike each time, by every dialect."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtests.stacks.local_stack import LocalStack, local_stack
from replicas.toy_model import checkpoint_directory

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

MODEL = "toy"
WORDS = "q7 Zx,, vbn (the"
"""The model has no habit of going on from there."""
TURN = [{"role": "user", "content": WORDS}]
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": TURN},
    "/v1/completions": {"model": MODEL, "prompt": WORDS},
    "/v1/responses": {"model": MODEL, "input": WORDS},
    "/v1/messages": {"model": MODEL, "messages": TURN, "max_tokens": 12},
    f"/v1beta/models/{MODEL}:generateContent": {"contents": [{"parts": [{"text": WORDS}]}]},
}


def text_of(answer: dict[str, Any]) -> str:
    """The words of an answer, by whatever dialect."""
    if "choices" in answer:
        (choice,) = answer["choices"]
        found = choice["text"] if "text" in choice else choice["message"]["content"]
    elif "candidates" in answer:
        found = answer["candidates"][0]["content"]["parts"][0]["text"]
    else:
        found = (answer["content"] if "content" in answer else answer["output"][0]["content"])[0]["text"]
    assert found
    return str(found)


@pytest.fixture(scope="module", params=["torch", pytest.param("vllm", marks=pytest.mark.vllm)])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder: Path = tmp_path_factory.mktemp("model") / MODEL
    shutil.copytree(checkpoint_directory(None), folder)
    path = folder / "generation_config.json"
    fields = json.loads(path.read_text("utf-8")) | {"temperature": 0.0, "top_k": 1, "max_new_tokens": 12}
    path.write_text(json.dumps(fields), "utf-8")
    settings = {"engine": request.param, "model": folder, "num_blocks": 128}
    with local_stack(num_replicas=2, replica_settings=settings) as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
def test_answers_are_alike_unless_the_client_says_otherwise(stack: LocalStack, path: str) -> None:
    with httpx.Client(base_url=stack.url, timeout=60) as client:

        def ask(**fields: Any) -> str:
            answer = client.post(path, json={**BODIES[path], **fields})
            assert answer.status_code == 200, answer.text
            return text_of(answer.json())

        assert len({ask() for _ in range(4)}) == 1
        said = {"temperature": 1.0, "top_k": 0}
        if "generateContent" in path:
            said = {"generationConfig": {"temperature": 1.0, "topK": 0}}
        assert len({ask(**said) for _ in range(4)}) > 1


def test_the_models_length_ends_an_answer_and_the_clients_wins(stack: LocalStack) -> None:
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        body = {**BODIES["/v1/chat/completions"], "ignore_eos": True}
        for fields, expected in (({}, 12), ({"max_tokens": 20}, 20)):
            answer = client.post("/v1/chat/completions", json={**body, **fields}).json()
            assert answer["usage"]["completion_tokens"] == expected
        (model,) = client.get("/v1/models").json()["data"]
        assert model["sampling_defaults"] == {"temperature": 0.0, "top_k": 1, "max_new_tokens": 12}
