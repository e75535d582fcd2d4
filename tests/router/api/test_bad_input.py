"""Whatever a client sends: the right status, OpenAI's shape, the field by name, and nothing left running."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from router.errors import ContextLengthExceeded, GenerationFailed, NoReplicaAvailable, Overloaded
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import NEVER, says

HELLO = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": HELLO}
PLAIN: dict[str, Any] = {"model": "tiny", "prompt": "Hello"}
DEEP = b"[" * 100_000 + b"]" * 100_000
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]

RAW = [
    (b"", "invalid_json", None),
    (b"  ", "invalid_json", None),
    (b"{", "invalid_json", None),
    (b"[]", "invalid_type", None),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}', "invalid_json", None),
    (b'{"model": "\xff"}', "invalid_json", None),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_json", None),
    (b'{"model": "tiny", "temperature": NaN}', "invalid_json", None),
    (b'{"model": "tiny", "temperature": 1e999}', "invalid_type", "temperature"),
    (b'{"model": "tiny", "seed": ' + b"9" * 5000 + b"}", "invalid_type", "seed"),
    (
        b'{"model": "tiny", "messages": [{"role": "user", "content": ' + DEEP + b"}]}",
        "invalid_json",
        None,
    ),
    (b'{"model": "tiny"}', "missing_required_parameter", "messages"),
    (b'{"messages": []}', "missing_required_parameter", "model"),
    (b'{"model": 3, "messages": []}', "invalid_type", "model"),
]

CHAT_CHANGES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"model": "nobody"}, "model_not_found", "model"),
    ({"model": "untemplated"}, "invalid_value", "messages"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": "Hello"}, "invalid_type", "messages"),
    ({"messages": ["Hello"]}, "invalid_type", "messages[0]"),
    ({"messages": [*HELLO, {"content": "x"}]}, "missing_required_parameter", "messages[1].role"),
    ({"messages": [*HELLO, {"role": 3, "content": "x"}]}, "invalid_type", "messages[1].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "invalid_type", "messages[0].content"),
    ({"messages": [{"role": "user", "content": [3]}]}, "invalid_type", "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": IMAGE}]},
        "unsupported_value",
        "messages[0].content[0].image_url",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "invalid_type",
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": "y"}]},
        "invalid_type",
        "messages[0].tool_calls",
    ),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, "invalid_value", "messages"),
    ({"max_completion_tokens": 10**30}, "context_length_exceeded", "messages"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"max_completion_tokens": 0}, "invalid_value", "max_completion_tokens"),
    ({"max_tokens": 2.5}, "invalid_type", "max_tokens"),
    ({"max_tokens": True}, "invalid_type", "max_tokens"),
    ({"min_tokens": -1}, "invalid_value", "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "invalid_value", "min_tokens"),
    ({"temperature": -0.1}, "invalid_value", "temperature"),
    ({"temperature": 2.1}, "invalid_value", "temperature"),
    ({"temperature": "hot"}, "invalid_type", "temperature"),
    ({"top_p": 1.1}, "invalid_value", "top_p"),
    ({"top_k": -2}, "invalid_value", "top_k"),
    ({"top_k": 2**32}, "invalid_value", "top_k"),
    ({"min_p": 1.1}, "invalid_value", "min_p"),
    ({"presence_penalty": 2.1}, "invalid_value", "presence_penalty"),
    ({"frequency_penalty": -2.1}, "invalid_value", "frequency_penalty"),
    ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    ({"priority": 10**400}, "invalid_value", "priority"),
    ({"n": 0}, "invalid_value", "n"),
    ({"n": 17}, "invalid_value", "n"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "invalid_value", "stop"),
    ({"stop": ""}, "invalid_value", "stop"),
    ({"stop": [3]}, "invalid_type", "stop[0]"),
    ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"logprobs": 3}, "invalid_type", "logprobs"),
    ({"logit_bias": {"99999": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {str(number): 1 for number in range(5000)}}, "invalid_value", "logit_bias"),
    ({"tools": [TOOL] * 513}, "context_length_exceeded", "messages"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [CALL] * 513}]},
        "context_length_exceeded",
        "messages",
    ),
    ({"stop_token_ids": [99999]}, "invalid_value", "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"cache_salt": ""}, "invalid_value", "cache_salt"),
    ({"cache_salt": "x" * 129}, "invalid_value", "cache_salt"),
    *(({"cache_salt": f"a{character}"}, "invalid_value", "cache_salt") for character in "@/\\\0"),
    ({"tool_choice": "often"}, "invalid_value", "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "invalid_value", "tool_choice"),
    ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs"),
]

PLAIN_CHANGES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": None}, "invalid_type", "prompt"),
    ({"prompt": ""}, "invalid_value", "prompt"),
    ({"prompt": []}, "invalid_value", "prompt"),
    ({"prompt": [[]]}, "invalid_value", "prompt"),
    ({"prompt": ["a", 3]}, "invalid_type", "prompt"),
    ({"prompt": [3, "a"]}, "invalid_type", "prompt"),
    ({"prompt": [True]}, "invalid_type", "prompt"),
    ({"prompt": [-1]}, "invalid_value", "prompt"),
    ({"prompt": [10**30]}, "invalid_value", "prompt"),
    ({"prompt": ["a"] * 129}, "invalid_value", "prompt"),
    ({"logprobs": 6}, "invalid_value", "logprobs"),
    ({"echo": True, "logprobs": 1}, "unsupported_value", "echo"),
    ({"suffix": "x"}, "unsupported_value", "suffix"),
    ({"best_of": 2}, "unsupported_value", "best_of"),
]


CASES = [
    *(("chat/completions", *case) for case in RAW),
    *(("chat/completions", json.dumps(CHAT | change).encode(), *case) for change, *case in CHAT_CHANGES),
    *(("completions", json.dumps(PLAIN | change).encode(), *case) for change, *case in PLAIN_CHANGES),
]


@pytest.mark.parametrize(("path", "body", "code", "parameter"), CASES)
async def test_a_wrong_body_is_refused_and_the_field_named(
    server: HttpServer, http: httpx.AsyncClient, path: str, body: bytes, code: str, parameter: str | None
) -> None:
    answer = await http.post(f"/v1/{path}", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == (404 if code == "model_not_found" else 400), answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] == "invalid_request_error"
    assert (error["code"], error["param"]) == (code, parameter), error["message"]
    assert answer.headers["x-request-id"]
    assert server.dispatcher.generations == [] and server.is_idle


@pytest.mark.parametrize(
    "change",
    [
        {"stop": None, "temperature": None, "n": None, "stream": None, "logit_bias": None, "user": "u"},
        {"tool_choice": "none", "tools": [], "response_format": {"type": "text"}, "store": True},
        {"temperature": 0, "top_p": 1, "top_k": -1, "seed": 10**30, "n": 2, "metadata": {"a": "b"}},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": []}, *HELLO]},
        {"messages": [{"role": "function", "name": "f", "content": "x"}], "top_p": 0},
        {"messages": [{"role": "developer", "content": "x"}, *HELLO], "reasoning_effort": "high"},
    ],
)
async def test_what_is_allowed_or_unknown_is_accepted(
    server: HttpServer, http: httpx.AsyncClient, change: dict[str, Any]
) -> None:
    server.dispatcher.script = says([2])
    answer = await http.post("/v1/chat/completions", json=CHAT | change)
    assert answer.status_code == 200, answer.text


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
