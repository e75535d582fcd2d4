"""Whatever a client sends: the right status, OpenAI's shape, the field by name, and nothing left running."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from router.errors import ContextLengthExceeded, GenerationFailed, NoReplicaAvailable, Overloaded
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import NEVER

HELLO = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": HELLO}
PLAIN: dict[str, Any] = {"model": "tiny", "prompt": "Hello"}
DEEP = b"[" * 100_000 + b"]" * 100_000
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

RAW = [
    (b"  ", "invalid_json", None),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}', "invalid_json", None),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_json", None),
    (b'{"model": "tiny", "temperature": 1e999}', "invalid_type", "temperature"),
    (b'{"model": "tiny", "seed": ' + b"9" * 5000 + b"}", "invalid_type", "seed"),
    (
        b'{"model": "tiny", "messages": [{"role": "user", "content": ' + DEEP + b"}]}",
        "invalid_json",
        None,
    ),
]

CHANGES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"model": "untemplated"}, "invalid_value", "messages"),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, "invalid_value", "messages"),
    ({"max_completion_tokens": 10**30}, "context_length_exceeded", "messages"),
    ({"messages": [*HELLO] * 513}, "context_length_exceeded", "messages"),
    ({"logit_bias": {str(number): 1 for number in range(5000)}}, "invalid_value", "logit_bias"),
    ({"tools": [TOOL] * 513}, "context_length_exceeded", "messages"),
    ({"tools": [TOOL] * 1025}, "invalid_value", "tools"),
    ({"user": "x" * 4097}, "invalid_value", "user"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [CALL] * 513}]},
        "context_length_exceeded",
        "messages",
    ),
]

CASES = [*RAW, *((json.dumps(CHAT | change).encode(), *case) for change, *case in CHANGES)]


@pytest.mark.parametrize(("body", "code", "parameter"), CASES)
async def test_a_wrong_body_is_refused_and_the_field_named(
    server: HttpServer, http: httpx.AsyncClient, body: bytes, code: str, parameter: str | None
) -> None:
    answer = await http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] == "invalid_request_error"
    assert (error["code"], error["param"]) == (code, parameter), error["message"]
    assert answer.headers["x-request-id"]
    assert server.dispatcher.generations == [] and server.is_idle


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "has_retry_after"),
    [
        (Overloaded("Busy.", retry_after_seconds=2.2), 429, "rate_limit_exceeded", True),
        (NoReplicaAvailable("None."), 503, "no_replica_available", True),
        (GenerationFailed("Broken."), 500, "generation_failed", False),
        (ContextLengthExceeded("Long.", parameter="messages"), 400, "context_length_exceeded", False),
        (RuntimeError("a secret"), 500, None, False),
    ],
)
async def test_failures_before_the_first_token_have_a_status(
    server: HttpServer,
    http: httpx.AsyncClient,
    error: Exception,
    status: int,
    code: str | None,
    has_retry_after: bool,
    stream: bool,
) -> None:
    server.dispatcher.script = lambda generation: [error]
    answer = await http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in answer.headers) == has_retry_after
    assert "secret" not in answer.text
    assert server.is_idle


async def test_requests_beyond_the_limit_in_flight_are_told_to_come_back() -> None:
    async with (
        http_server(max_in_flight=1) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as http,
    ):
        server.dispatcher.script = lambda generation: [NEVER]
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(http.post("/v1/chat/completions", json=CHAT))
            await server.dispatcher.has_started.wait()
            answer = await http.post("/v1/chat/completions", json=CHAT)
            first.cancel()
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        await server.wait_idle()


async def test_a_request_counts_as_its_sequences_and_tokens(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = lambda generation: [NEVER]
    body = PLAIN | {"prompt": [[1, 2, 3]] * 4, "n": 3, "max_tokens": 10}
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(http.post("/v1/completions", json=body))
        await server.dispatcher.has_started.wait()
        statistics = server.context.admission
        assert (statistics.num_sequences, statistics.num_tokens) == (12, 4 * 3 + 12 * 10)
        asked.cancel()
    await server.wait_idle()
    statistics = server.context.admission
    assert (statistics.num_sequences, statistics.num_tokens, statistics.num_refused) == (0, 0, 0)


@pytest.mark.parametrize("limit", [{"max_sequences": 20}, {"max_tokens_in_flight": 300}])
async def test_sequences_and_tokens_beyond_the_limit_are_told_when_to_come_back(
    limit: dict[str, int],
) -> None:
    async with (
        http_server(**limit) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as http,
    ):
        server.dispatcher.script = lambda generation: [NEVER]
        wide = PLAIN | {"prompt": ["Hello"] * 4, "n": 4, "max_tokens": 10}
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(http.post("/v1/completions", json=wide))
            await server.dispatcher.has_started.wait()
            answer = await http.post("/v1/completions", json=wide)
            first.cancel()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert server.context.admission.num_refused == 1
        await server.wait_idle()


async def test_a_request_that_no_waiting_would_help_is_a_bad_request() -> None:
    async with (
        http_server(max_sequences=20) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as http,
    ):
        answer = await http.post("/v1/completions", json=PLAIN | {"prompt": ["Hello"] * 3, "n": 16})
        assert answer.status_code == 400
        assert "48 sequences" in answer.json()["error"]["message"]
        assert "retry-after" not in answer.headers


async def test_all_wrong_keys_of_logit_bias_are_named(http: httpx.AsyncClient) -> None:
    body = CHAT | {
        "logit_bias": {"bad1": 1, "5": 1, "bad2": 1} | {f"worse{number}": 1 for number in range(50)}
    }
    error = (await http.post("/v1/chat/completions", json=body)).json()["error"]
    assert "'bad1', 'bad2', 'worse0'" in error["message"]
    assert "'5'" not in error["message"] and len(error["message"]) < 200
