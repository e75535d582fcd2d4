"""Reasoning and tool calls on their way from tokens to a chat's answer."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from replicas.protocol.frames import FinishReason
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import in_batches, says
from tests.router.thinking_model import CALL, MODEL, OTHER, THINKS, catalog, token_ids

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "time")
]
ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "How is the weather?"}]}


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with http_server(catalog=catalog()) as running:
        yield running


async def whole(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/chat/completions", json=ASKED | fields)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


async def test_a_stream_joined_is_the_whole_answer(
    server: HttpServer, http: httpx.AsyncClient, openai: AsyncOpenAI
) -> None:
    server.dispatcher.script = says(token_ids(THINKS + "Let me see.\n" + CALL + "\n" + OTHER))
    expected = (await whole(http, tools=TOOLS, n=2))["choices"]
    stream = await openai.chat.completions.create(**ASKED, tools=TOOLS, n=2, stream=True)
    joined: list[dict[str, Any]] = [{"content": "", "reasoning": "", "calls": [], "end": None} for _ in "12"]
    async for chunk in stream:
        for choice in chunk.choices:
            of, delta = joined[choice.index], choice.delta
            of["content"] += delta.content or ""
            of["reasoning"] += (delta.model_extra or {}).get("reasoning_content", "")
            of["end"] = choice.finish_reason or of["end"]
            for call in delta.tool_calls or ():
                if call.id:
                    assert call.index == len(of["calls"])
                    of["calls"].append([call.function.name, ""])
                of["calls"][call.index][1] += call.function.arguments
    for choice, of in zip(expected, joined, strict=True):
        message = choice["message"]
        assert of["content"] == message["content"]
        assert of["reasoning"] == message["reasoning_content"]
        assert of["calls"] == [
            [call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]
        ]
        assert of["end"] == choice["finish_reason"] == "tool_calls"


async def test_of_calls_that_begin_within_reasoning_there_may_be_only_one(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids(f"<think>Hm.\n{CALL}\n{OTHER}"))
    for is_parallel, names in ((True, ["weather", "time"]), (False, ["weather"])):
        (choice,) = (await whole(http, tools=TOOLS, parallel_tool_calls=is_parallel))["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == names
        assert choice["message"]["reasoning_content"] == "Hm."
        assert choice["finish_reason"] == "tool_calls"


async def test_a_turn_with_one_call_is_gone_on_from(server: HttpServer, http: httpx.AsyncClient) -> None:
    said = token_ids(THINKS + CALL)
    server.dispatcher.script = says(said)
    first = await whole(http, tools=TOOLS, parallel_tool_calls=False)
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Rain."}
    turns = [*ASKED["messages"], {**message, "reasoning_content": None}, result]
    await whole(http, tools=TOOLS, parallel_tool_calls=False, messages=turns)
    before, after = (generation.token_ids for generation in server.dispatcher.generations)
    assert list(after[: len(before) + len(said)]) == [*before, *said]
    assert not server.dispatcher.aborted


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_before_the_engine_has_told_leaves_what_was_cached_unknown(
    server: HttpServer, http: httpx.AsyncClient, *, stream: bool
) -> None:
    server.dispatcher.script = says(token_ids("One. Two. Three."), num_cached_tokens=16, usage_at=-1)
    fields = {"stream": stream, "stop": "Two"}
    answer = await http.post("/v1/chat/completions", json=ASKED | fields)
    assert answer.status_code == 200 and "Three" not in answer.text
    found = await http.get(f"/v1/cache/explain/{answer.headers['x-request-id']}")
    (prompt,) = found.json()["prompts"]
    assert (prompt["cause"], prompt["cached_tokens"]) == ("not_reported", None)
    told = await http.post("/v1/chat/completions", json=ASKED)
    assert told.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


async def streamed(http: httpx.AsyncClient, **fields: Any) -> tuple[str, str, str | None]:
    """Reasoning, content, and why it ended."""
    answer = await http.post("/v1/chat/completions", json=ASKED | fields | {"stream": True})
    assert answer.status_code == 200, answer.text
    reasoning, content, end = "", "", None
    for frame in answer.text.split("\n\n")[:-2]:
        (choice,) = json.loads(frame.removeprefix("data: "))["choices"]
        reasoning += choice["delta"].get("reasoning_content") or ""
        content += choice["delta"].get("content") or ""
        end = choice["finish_reason"] or end
    return reasoning, content, end


STOPPED_ANSWERS = (
    # what is said behind the reasoning, the stop strings, the text that is answered, whether they end it
    ("It rains.\n\nA lot.", ["\n\n"], "It rains.", True),
    ("It rains.", ["\n\n"], "It rains.", False),
    ("It rains.", ["wants", "</think>", "ther.\n</think>\n\nIt", "\n\nIt"], "It rains.", False),
    ("She rains.", ["She"], "", True),
    ("   \n It rains.\n", [" ", "\n"], "It", True),
    ("\n", ["\n"], "", False),
    ("", ["\n\n", "wants"], "", False),
    ("Use <think> here", ["<think"], "Use ", True),
)


@pytest.mark.parametrize(("said", "stop", "answered", "ends"), STOPPED_ANSWERS)
@pytest.mark.parametrize("with_tools", [False, True])
async def test_stop_strings_count_from_the_answers_first_character(
    server: HttpServer,
    http: httpx.AsyncClient,
    said: str,
    stop: list[str],
    answered: str,
    ends: bool,
    with_tools: bool,
) -> None:
    server.dispatcher.script = says(token_ids(THINKS + said))
    fields = {"stop": stop, **({"tools": TOOLS} if with_tools else {})}
    (choice,) = (await whole(http, **fields))["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "She wants the weather."
    assert message["content"] == answered
    assert (choice["matched_stop"] in stop) == ends
    assert bool(server.dispatcher.aborted) == ends
    expected = ("She wants the weather.", answered, choice["finish_reason"])
    assert await streamed(http, **fields) == expected
    server.dispatcher.script = in_batches(token_ids(THINKS + said), [1000])
    assert await streamed(http, **fields) == expected


async def test_reasoning_that_is_cut_off_says_all_of_itself_whatever_the_stop_strings(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    thinks = "<think>\nOne. Two. STO"
    server.dispatcher.script = says(token_ids(thinks, end=False), finish=FinishReason.LENGTH)
    (choice,) = (await whole(http, stop=["Two", "STOP", "STO"]))["choices"]
    assert choice["message"]["reasoning_content"] == "One. Two. STO"
    assert (choice["finish_reason"], choice["matched_stop"]) == ("length", None)


async def test_a_stop_token_ends_an_answer_that_is_in_its_reasoning(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    *thinks, stop = token_ids("<think>\nOne. Two. Three", end=False)
    server.dispatcher.script = says([*thinks, stop])
    (choice,) = (await whole(http, stop_token_ids=[stop]))["choices"]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", stop)
    assert "One. Two." in choice["message"]["reasoning_content"] and not choice["message"]["content"]


async def test_a_stop_string_counts_in_a_call_and_one_that_it_cuts_is_not_to_be_run(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids(THINKS + CALL))
    for stop, reason in (("</tool_call>", "tool_calls"), ("Århus", "stop"), ("weather.", "tool_calls")):
        (choice,) = (await whole(http, tools=TOOLS, stop=stop))["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
        assert choice["finish_reason"] == reason
