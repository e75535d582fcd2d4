"""Servers that take bodies and answer oddly: a client gets what it would get from the server itself."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loadtests.stacks.local_stack import LocalStack, local_stack
from tests.replicas.openai_engine.odd_server import ALIKE, CUT, ERRORS, INSIDE, KINDS, WHOLE, OddServer
from tests.replicas.remote_engine.stand_in import StandIn

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

KEY = 'a-"key"/of the server'


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, OddServer]]:
    servers = {"odd": OddServer("odd", key=KEY), "strict": OddServer("strict", takes_options=False)}
    yield servers
    for server in servers.values():
        server.close()


@pytest.fixture(scope="module")
def vllm() -> Iterator[StandIn]:
    server = StandIn()
    yield server
    server.close()


@pytest.fixture(scope="module")
def stack(
    servers: dict[str, OddServer], vllm: StandIn, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalStack]:
    """Two replicas at the first server, and one at each other."""
    key_file = tmp_path_factory.mktemp("keys") / "key"
    key_file.write_text(KEY)
    odd = {"engine": "openai", "engine_url": servers["odd"].url, "engine_key_file": key_file}
    strict = {"engine": "openai", "engine_url": servers["strict"].url}
    remote = {"engine": "remote", "engine_url": vllm.url}
    with local_stack(replica_settings=[odd, odd, strict, remote]) as stack:
        yield stack


def ask(url: str, word: str, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    prompt = (
        {"prompt": word} if path == "/v1/completions" else {"messages": [{"role": "user", "content": word}]}
    )
    body = {"model": "odd", "max_tokens": 4, **prompt, **fields}
    return httpx.post(url + path, json=body, timeout=60)


def said(answer: httpx.Response) -> list[Any]:
    """What each event says."""
    lines = re.sub("\r\n?", "\n", answer.text.removeprefix("\ufeff")).split("\n\n")
    found = []
    for event in lines:
        data = "".join(line[5:].strip() for line in event.split("\n") if line.startswith("data:"))
        if data:
            try:
                found.append(json.loads(data))
            except ValueError:
                found.append(data)
    return found


def is_usage(event: Any) -> bool:
    return isinstance(event, dict) and "usage" in event and not event.get("choices")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("word", [*ALIKE, *KINDS])
def test_a_stream_that_can_be_read_directly_can_be_read(
    stack: LocalStack, servers: dict[str, OddServer], word: str, path: str
) -> None:
    direct = said(ask(servers["odd"].url, word, path, stream=True))
    if "[DONE]" in direct:
        direct = direct[: direct.index("[DONE]") + 1]
    for options in ({}, {"stream_options": {"include_usage": True}}):
        before = len(servers["odd"].bodies)
        answer = ask(stack.url, word, path, stream=True, **options)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert said(answer) == [each for each in direct if options or not is_usage(each)]
        assert len(servers["odd"].bodies) == before + 1


@pytest.mark.parametrize("word", WHOLE)
def test_an_answer_that_can_be_read_directly_can_be_read(
    stack: LocalStack, servers: dict[str, OddServer], word: str
) -> None:
    answer = ask(stack.url, word)
    assert answer.status_code == 200, answer.text
    assert answer.content == ask(servers["odd"].url, word).content


@pytest.mark.parametrize("stream", [False, True])
def test_odd_messages_pass(stack: LocalStack, servers: dict[str, OddServer], stream: bool) -> None:
    answers = [ask(url, "hello", "/v1/messages", stream=stream) for url in (stack.url, servers["odd"].url)]
    assert answers[0].status_code == 200, answers[0].text
    if stream:
        assert said(answers[0]) == said(answers[1])[:-1]  # nothing follows message_stop
    else:
        assert answers[0].content == answers[1].content


@pytest.mark.parametrize("word", CUT)
def test_a_stream_that_is_cut_ends_with_an_error(stack: LocalStack, word: str) -> None:
    *words, last = said(ask(stack.url, word, stream=True))
    assert words and all("choices" in each for each in words)
    assert "could not be resumed" in last["error"]["message"]


@pytest.mark.parametrize("word", INSIDE)
def test_an_error_in_the_place_of_an_answer_is_that_error(
    stack: LocalStack, servers: dict[str, OddServer], word: str
) -> None:
    _, status, words = INSIDE[word]
    before = len(servers["odd"].bodies)
    answer = ask(stack.url, word, stream=True)
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, words)
    assert len(servers["odd"].bodies) == before + (4 if status == 500 else 1)


def test_an_error_later_is_that_error(stack: LocalStack, servers: dict[str, OddServer]) -> None:
    for path in ("/v1/chat/completions", "/v1/messages"):
        before = len(servers["odd"].bodies)
        through = ask(stack.url, "error-later", path, stream=True)
        direct = said(ask(servers["odd"].url, "error-later", path, stream=True))
        assert said(through) == [each for each in direct if each != "[DONE]"]
        assert len(servers["odd"].bodies) == before + 2
    assert "event: error\n" in through.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("word", ERRORS)
def test_a_servers_error_is_the_clients(
    stack: LocalStack, servers: dict[str, OddServer], word: str, stream: bool
) -> None:
    status, told, headers, most = ERRORS[word]
    before = len(servers["odd"].bodies)
    answer = ask(stack.url, word, stream=stream)
    assert answer.status_code == status
    assert len(servers["odd"].bodies) == before + most
    if isinstance(told, dict) and "error" in told:
        expected = json.loads(json.dumps(told).replace("KEY", "***"))
        assert answer.json() == expected
    else:
        words = json.dumps(told["detail"]) if isinstance(told, dict) else "502: '<html>Bad gateway'"
        assert words in answer.json()["error"]["message"]
    if "retry-after" in headers:
        assert answer.headers["retry-after"] == headers["retry-after"]
    if status in (429, 503, 529):
        assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("word", ["context", "limit", "full", "bug"])
def test_a_servers_error_has_the_shape_of_the_clients_api(stack: LocalStack, word: str) -> None:
    status, told, _, _ = ERRORS[word]
    assert isinstance(told, dict)
    answer = ask(stack.url, word, "/v1/messages")
    assert answer.status_code == status
    assert answer.json()["type"] == "error"
    assert told["error"]["message"] in answer.json()["error"]["message"]


def test_what_a_server_refuses_is_logged_without_its_key_or_the_clients_words(stack: LocalStack) -> None:
    ask(stack.url, "key")
    ask(stack.url, "context")
    logs = [(stack.run_directory / f"replica-{number}.log").read_text() for number in range(2)]
    refused = [line for log in logs for line in log.split("\n") if "the server refuses a request" in line]
    wrong_key = next(line for line in refused if "status=401" in line)
    assert "code='invalid_api_key'" in wrong_key and "words='Incorrect" in wrong_key
    assert "key: ***" in wrong_key and KEY not in "".join(logs) and "\x1b" not in "".join(logs)
    too_long = [line for line in refused if "status=400" in line]
    assert "code='context_length_exceeded'" in "".join(too_long) and "too long" not in "".join(logs)
    assert max(map(len, refused)) < 1000


def test_a_server_that_refuses_stream_options_streams(
    stack: LocalStack, servers: dict[str, OddServer]
) -> None:
    bodies = servers["strict"].bodies
    for number in range(2):
        answer = ask(stack.url, "good", stream=True, model="strict")
        assert answer.status_code == 200, answer.text
        assert said(answer)[-1] == "[DONE]" and not any(map(is_usage, said(answer)))
        assert "stream_options" not in bodies[-1]
        assert len(bodies) == 2 + number  # it is asked for usage once
    refused = ask(stack.url, "good", stream=True, model="strict", stream_options={"include_usage": True})
    assert refused.status_code == 422 and "stream_options" in refused.json()["error"]["message"]


def test_clients_are_told_the_servers_context(stack: LocalStack) -> None:
    models = httpx.get(f"{stack.url}/v1/models").json()["data"]
    assert {each["id"]: each["max_model_len"] for each in models} == {
        "odd": 8192,
        "strict": 8192,
        **dict.fromkeys(("served", "tuned"), 512),
    }
    assert httpx.get(f"{stack.url}/v1beta/models/odd").json()["inputTokenLimit"] == 8192
    theirs = httpx.get(f"{stack.url}/v1/models/odd", headers={"anthropic-version": "2023-06-01"}).json()
    assert theirs["max_input_tokens"] == 8192
    assert ask(stack.url, "x " * 8192 + "good").status_code == 200  # its bytes are more


@pytest.mark.parametrize(
    ("path", "answer_id"), [("/v1/chat/completions", "theirs"), ("/v1/messages", "msg_theirs")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_explained_by_its_servers_id(
    stack: LocalStack, path: str, answer_id: str, stream: bool
) -> None:
    asked = ask(stack.url, "good", path, stream=stream)
    found = httpx.get(f"{stack.url}/v1/cache/explain/{answer_id}").json()
    assert found["request_id"] == asked.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}),
        ("/v1beta/models/tuned:generateContent", {"contents": [{"parts": [{"text": "hello"}]}]}),
    ],
)
@pytest.mark.parametrize("status", [401, 404, 429, 501, 502, 529])
def test_an_error_of_a_server_that_takes_tokens_is_the_clients_too(
    stack: LocalStack, vllm: StandIn, path: str, body: dict[str, Any], status: int
) -> None:
    vllm.bodies.clear()
    vllm.error = (status, "The model `tuned` does not exist.", {"retry-after": "7"})
    sent = body if "contents" in body else {"model": "tuned", **body}
    answer = httpx.post(stack.url + path, json=sent, timeout=60)
    vllm.error = None
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == "The model `tuned` does not exist."
    assert answer.headers["retry-after"] == "7"
    assert len(vllm.bodies) == (4 if status == 502 else 1)
    refused = (stack.run_directory / "replica-3.log").read_text().split("\n")
    assert any(f"status={status}" in line and "does not exist" in line for line in refused)
