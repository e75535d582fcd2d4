"""An answer whose replica dies in the middle is what it would have been: its reasoning, its calls, its form.

The model's words are a script's, at the pace of a GPU; where a form was asked for, the grammar goes on, too.
"""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from loadtests.stacks.local_stack import LocalStack, local_stack
from tests.integration.observe import MODEL, is_idle, wait_until
from tests.talking_model import make_talking_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

LETTER = " ".join(f"line {number} of the letter," for number in range(40))
THOUGHT = "A letter, then."
CALL = f'<tool_call>\n{{"name": "send", "arguments": {{"text": "{LETTER}"}}}}\n</tool_call>'
WORDS = {
    "Write it.": f"<think>\n{THOUGHT}\n</think>\n\n{CALL}",
    "Send it.": CALL,
    "Form it.": json.dumps({"text": LETTER}),
}
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "letter", "schema": SCHEMA, "strict": True}}
SEND = {"name": "send", "description": "Sends a letter.", "parameters": SCHEMA}
NUM_EVENTS_BEFORE = 30


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("talking")
    script = folder / "words.json"
    script.write_text(json.dumps([{"when": when, "say": say} for when, say in WORDS.items()]), "utf-8")
    settings = {
        "engine": "simulated",
        "simulated_script": script,
        "model": make_talking_model(folder / "talking"),
        "model_name": MODEL,
        "num_blocks": 4096,
    }
    with local_stack(num_replicas=2, replica_settings=settings) as running:
        yield running


class Accident:
    """Kills the replica that answers after so many events, once."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self.victim = ""
        self._num_seen = 0

    def seen(self) -> None:
        self._num_seen += 1
        if self._num_seen == NUM_EVENTS_BEFORE:
            self._stack.kill(self.victim)

    def is_over(self) -> bool:
        return self._num_seen > NUM_EVENTS_BEFORE


def chat(client: openai.OpenAI, accident: Accident, words: str, **more: Any) -> dict[str, str]:
    """All that was said, by the kind of it."""
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": words}], stream=True, **more
    )
    accident.victim = raw.headers["x-kvasir-replica"]
    said = {"content": "", "reasoning": "", "name": "", "arguments": "", "finish": ""}
    for chunk in raw.parse():
        accident.seen()
        for choice in chunk.choices:
            said["content"] += choice.delta.content or ""
            said["reasoning"] += (choice.delta.model_extra or {}).get("reasoning_content") or ""
            said["finish"] += choice.finish_reason or ""
            for call in choice.delta.tool_calls or ():
                assert call.index == 0 and call.function is not None
                said["name"] += call.function.name or ""
                said["arguments"] += call.function.arguments or ""
    return said


def responses(client: openai.OpenAI, accident: Accident, words: str, **more: Any) -> dict[str, str]:
    raw = client.responses.with_raw_response.create(model=MODEL, input=words, stream=True, **more)
    accident.victim = raw.headers["x-kvasir-replica"]
    said = {"arguments": "", "finish": ""}
    for event in raw.parse():
        accident.seen()
        if event.type == "response.function_call_arguments.delta":
            said["arguments"] += event.delta
        if event.type == "response.completed":
            [call] = [item for item in event.response.output if item.type == "function_call"]
            assert call.arguments == said["arguments"]
            said["finish"] = call.name
    return said


@pytest.fixture
def accident(stack: LocalStack) -> Iterator[Accident]:
    happens = Accident(stack)
    yield happens
    assert happens.is_over(), "the answer had ended before its replica was killed"
    stack.start(happens.victim)
    stack.wait_ready(2)
    wait_until(lambda: is_idle(stack), "everything given back")


@pytest.fixture
def client(stack: LocalStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_reasoning_and_a_call_go_on(client: openai.OpenAI, accident: Accident) -> None:
    said = chat(client, accident, "Write it.", tools=[{"type": "function", "function": SEND}])
    assert said["reasoning"].strip() == THOUGHT and not said["content"].strip()
    assert (said["name"], said["finish"]) == ("send", "tool_calls")
    assert json.loads(said["arguments"]) == {"text": LETTER}


def test_a_call_that_has_to_be_goes_on_under_its_grammar(client: openai.OpenAI, accident: Accident) -> None:
    tools = [{"type": "function", "function": SEND}]
    said = chat(client, accident, "Send it.", tools=tools, tool_choice="required")
    assert (said["name"], said["finish"]) == ("send", "tool_calls")
    assert json.loads(said["arguments"]) == {"text": LETTER}


def test_a_form_goes_on_under_its_grammar(client: openai.OpenAI, accident: Accident) -> None:
    said = chat(client, accident, "Form it.", response_format=FORM)
    assert json.loads(said["content"]) == {"text": LETTER} and said["finish"] == "stop"


def test_a_call_in_responses_goes_on(client: openai.OpenAI, accident: Accident) -> None:
    said = responses(client, accident, "Send it.", tools=[{"type": "function", **SEND, "strict": True}])
    assert said["finish"] == "send" and json.loads(said["arguments"]) == {"text": LETTER}
