"""Servers that take no tokens, behind a router: bodies pass as read, answers as they are, to their cache."""

import json
import subprocess
from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest

from cluster.commands.explain import IN_BYTES
from loadtests.stacks.local_stack import LocalStack, local_stack
from tests.cluster.kvasir_command import COMMAND, wait_until
from tests.replicas.openai_engine.text_server import TextServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

WORDS = " ".join(f"w{number}" for number in range(200))


@pytest.fixture(scope="module")
def servers() -> Iterator[list[TextServer]]:
    servers = [TextServer(), TextServer()]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def stack(servers: list[TextServer]) -> Iterator[LocalStack]:
    settings = {"engine": "openai", "model_aliases": "gpt-4o"}
    replicas = [{**settings, "engine_url": server.url} for server in servers]
    with local_stack(replica_settings=replicas) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _without_faults(servers: list[TextServer]) -> None:
    for server in servers:
        server.fault = ""


def chat(text: str, **fields: object) -> dict[str, object]:
    return {"model": "wordy", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


def ask(stack: LocalStack, body: object, path: str = "/v1/chat/completions") -> httpx.Response:
    return httpx.post(stack.url + path, json=body, timeout=60)


def foretold(stack: LocalStack, text: str) -> int:
    """Tokens that the router believes to be cached where the prompt would go."""
    answer = ask(stack, chat(text), "/explain/v1/chat/completions")
    overlap: int = answer.json()["prompts"][0]["decision"]["overlap_tokens"]
    return overlap


def test_an_answer_is_its_servers_own(stack: LocalStack, servers: list[TextServer]) -> None:
    body = chat("hello", odd_field=[1])
    answer = ask(stack, body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["id"] == "theirs" and answer.json()["odd"] == [1, 2.5]
    sent = [json.loads(each) for server in servers for each in server.bodies]
    assert chat("hello") in sent  # what is not known is not sent


def test_a_prompt_finds_its_cache_again(stack: LocalStack) -> None:
    first = ask(stack, chat(WORDS))
    wait_until(lambda: foretold(stack, WORDS) > 500, lambda: "the prompt is not expected anywhere")
    for more in ("one", "two", "three"):
        again = ask(stack, chat(f"{WORDS} {more}"))
        assert again.headers["x-kvasir-replica"] == first.headers["x-kvasir-replica"]
        assert int(again.headers["x-kvasir-overlap-tokens"]) > 500
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 150


def test_another_name_is_answered_and_counts_are_said_to_be_bytes(stack: LocalStack) -> None:
    body = {**chat(WORDS), "model": "gpt-4o"}
    answer = ask(stack, body)
    assert answer.status_code == 200, answer.text
    why = httpx.get(f"{stack.url}/v1/cache/explain/{answer.json()['id']}", timeout=60).json()
    assert why["request_id"] == answer.headers["x-request-id"]
    shown = ask(stack, body, "/explain/v1/chat/completions").json()["prompts"][0]
    counted = [answer.headers["x-kvasir-unit"], why["unit"], shown["unit"]]
    assert (counted, why["model"]) == (["bytes"] * 3, "wordy")
    assert why["prompts"][0]["prompt_tokens"] == shown["num_tokens"] > len(WORDS)
    for command in ("explain", "where"):
        words = [*COMMAND, command, WORDS, "--url", stack.url, "--redis-url", stack.redis_url]
        ran = subprocess.run(words, capture_output=True, text=True, check=True)
        assert IN_BYTES in ran.stdout.splitlines()
    listed = httpx.get(f"{stack.url}/v1/models", timeout=60).json()["data"]
    assert [(each["id"], each["root"]) for each in listed][1:] == [("gpt-4o", "wordy")]


def test_openais_client_streams(stack: LocalStack) -> None:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", timeout=60) as client:
        stream = client.chat.completions.create(
            model="wordy", messages=[{"role": "user", "content": "hello"}], max_tokens=3, stream=True
        )
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "word0 word1 word2 "
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


def test_anthropics_client(stack: LocalStack) -> None:
    with anthropic.Anthropic(base_url=stack.url, api_key="x", timeout=60) as client:
        said = client.messages.create(
            model="wordy", max_tokens=5, messages=[{"role": "user", "content": "hello"}]
        )
    assert said.content[0].type == "text" and said.content[0].text == "hello"
    assert said.id == "theirs"


def test_a_body_that_the_servers_do_not_take_is_refused(stack: LocalStack) -> None:
    for path, body in (
        ("/v1/responses", {"model": "wordy", "input": "hello"}),
        ("/v1/completions", {"model": "wordy", "prompt": "hello"}),
        ("/v1/completions", {"model": "wordy", "prompt": [1, 2, 3]}),
    ):
        answer = ask(stack, body, path)
        assert answer.status_code == 400
        assert "takes bodies of chat and messages only" in answer.json()["error"]["message"]


def test_what_the_server_refuses_comes_in_the_clients_shape(
    stack: LocalStack, servers: list[TextServer]
) -> None:
    for server in servers:
        server.fault = "refuses"
    answer = ask(stack, chat("hello"))
    assert answer.status_code == 400
    assert "audio is not understood" in answer.json()["error"]["message"]


def test_a_stream_that_breaks_off_ends_with_an_error_and_is_not_resumed(
    stack: LocalStack, servers: list[TextServer]
) -> None:
    for server in servers:
        server.fault = "breaks off"
    answer = ask(stack, chat("hello", stream=True))
    events = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    assert [json.loads(event)["choices"][0]["delta"]["content"] for event in events[:2]] == [
        "word0 ",
        "word1 ",
    ]
    assert "could not be resumed" in json.loads(events[2])["error"]["message"]


def test_before_its_first_word_an_answer_is_tried_elsewhere(
    stack: LocalStack, servers: list[TextServer]
) -> None:
    servers[0].fault = "is full"
    for number in range(4):
        assert ask(stack, chat(f"once {number}")).status_code == 200
