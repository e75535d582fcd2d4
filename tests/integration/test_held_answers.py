"""A replica is killed in the middle of an answer that is held to a schema. Real processes."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from loadtests.stacks.local_stack import LocalStack, local_stack
from tests.integration.observe import is_idle, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 20},
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "number": {"type": "integer", "minimum": 0, "maximum": 99},
                    "done": {"type": "boolean"},
                },
                "required": ["number", "done"],
                "additionalProperties": False,
            },
            "minItems": 12,
            "maxItems": 16,
        },
    },
    "required": ["title", "steps"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=[pytest.param("torch", marks=pytest.mark.slow), "simulated"])
def stack(request: pytest.FixtureRequest) -> Iterator[LocalStack]:
    settings = {"engine": request.param, "model_name": "toy", "num_blocks": 1024, "num_threads": 1}
    with local_stack(num_replicas=2, replica_settings=settings) as running:
        yield running


def pieces(stack: LocalStack, kill_after: int | None = None) -> tuple[list[str], str]:
    """What is streamed, and the replica that began it."""
    with openai.OpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="toy",
            messages=[{"role": "user", "content": "What is to be done?"}],
            max_tokens=900,
            seed=11,
            temperature=1.0,
            stream=True,
            response_format={"type": "json_schema", "json_schema": {"name": "plan", "schema": SCHEMA}},
        )
        replica_id = raw.headers["x-kvasir-replica"]
        said: list[str] = []
        for chunk in raw.parse():
            if not chunk.choices:
                continue
            said.append(chunk.choices[0].delta.content or "")
            if len(said) == kill_after:
                stack.kill(replica_id)
            if chunk.choices[0].finish_reason is not None:
                assert chunk.choices[0].finish_reason == "stop"
    return said, replica_id


def test_a_replica_killed_in_mid_answer_changes_nothing_of_what_is_held(stack: LocalStack) -> None:
    whole, _ = pieces(stack)
    jsonschema.validate(json.loads("".join(whole)), SCHEMA)
    assert len(whole) > 40
    said, victim = pieces(stack, kill_after=len(whole) // 3)
    assert "".join(said) == "".join(whole)
    stack.start(victim)
    stack.wait_ready(2)
    wait_until(lambda: is_idle(stack), "everything given back")


def test_an_answer_that_takes_its_grammar_too_far_is_cut_off(stack: LocalStack) -> None:
    with openai.OpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        for _ in range(2):
            answer = client.chat.completions.create(
                model="toy",
                messages=[{"role": "user", "content": "What is to be done?"}],
                max_tokens=300,
                extra_body={"regex": "(((a{1,100}){1,100}){1,100}){1,100}", "min_tokens": 300},
            )
            assert answer.choices[0].finish_reason == "length"
            assert set(answer.choices[0].message.content or "") == {"a"}
            assert answer.usage is not None and answer.usage.completion_tokens < 100
