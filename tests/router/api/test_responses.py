"""OpenAI's Responses by the real client: whole answers and streams, reasoning, calls and errors."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import APIError, AsyncOpenAI

from replicas.protocol.frames import FinishReason
from router.errors import GenerationFailed, Overloaded
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import in_batches, says
from tests.router.thinking_model import CALL, MODEL, OTHER, THINKS, catalog, token_ids

TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False}
    for name in ("weather", "time")
]
ASKED: dict[str, Any] = {"model": MODEL, "input": "How is the weather?"}
HELLO = "Héllo 👩‍👩‍👧, the quick 日本 fox"
VOLATILE = ("id", "item_id", "call_id", "created_at", "completed_at", "encrypted_content")


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with http_server(catalog=catalog()) as running:
        yield running


def bare(value: Any) -> Any:
    """Without what differs between two answers to one question."""
    if isinstance(value, dict):
        return {key: bare(each) for key, each in value.items() if key not in VOLATILE}
    return [bare(each) for each in value] if isinstance(value, list) else value


async def events_of(http: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await http.post("/v1/responses", json=ASKED | {"stream": True} | fields)
    assert answer.status_code == 200, answer.text
    events = []
    for frame in answer.text.strip().split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_what_was_answered_can_be_sent_back(server: HttpServer, openai: AsyncOpenAI) -> None:
    """Also by clients that give back only what was encrypted of the reasoning."""
    server.dispatcher.script = says(token_ids(THINKS + "Let me see.\n" + CALL))
    response = await openai.responses.create(**ASKED, tools=TOOLS, include=["reasoning.encrypted_content"])
    items = [item.model_dump(exclude_none=True) for item in response.output]
    result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "Rain."}
    less = [{key: value for key, value in items[0].items() if key != "content"}, *items[1:]]
    question = {"role": "user", "content": ASKED["input"]}
    for sent in (items, less):
        await openai.responses.create(model=MODEL, tools=TOOLS, input=[question, *sent, result])
    _, full, other = server.dispatcher.generations
    assert full.token_ids == other.token_ids
    text = catalog().get(MODEL).tokenizer.decode(full.token_ids)
    assert "<think>\nShe wants the weather.\n</think>" in text and "Rain." in text


@pytest.mark.parametrize("kept", [4, 12, 24, -6, -1])
async def test_whatever_is_cut_off_is_incomplete_in_a_stream_as_in_the_whole(
    server: HttpServer, http: httpx.AsyncClient, kept: int
) -> None:
    """Above all a call, which nobody is to act upon."""
    tokens = token_ids(THINKS + CALL, end=False)[:kept]
    server.dispatcher.script = says(tokens, finish=FinishReason.LENGTH)
    whole = (await http.post("/v1/responses", json=ASKED | {"tools": TOOLS})).json()
    events = await events_of(http, tools=TOOLS)
    assert bare(events[-1]["response"]) == bare(whole)
    assert whole["status"] == whole["output"][-1]["status"] == "incomplete"
    assert all(item["status"] == "completed" for item in whole["output"][:-1])


async def test_functions_in_a_namespace_are_offered_and_called_by_name(
    server: HttpServer, openai: AsyncOpenAI
) -> None:
    spaces = [
        {"type": "namespace", "name": space, "description": "Some.", "tools": [TOOLS[0], other]}
        for space, other in (("sky", TOOLS[1]), ("sea", {"type": "custom", "name": "free"}))
    ]
    server.dispatcher.script = says(
        token_ids(CALL.replace("weather", "sea.weather") + "\n" + OTHER, end=True)
    )
    response = await openai.responses.create(**ASKED, tools=[*spaces, {"type": "web_search"}])
    assert [(call.namespace, call.name) for call in response.output] == [("sea", "weather"), ("sky", "time")]
    assert [tool.type for tool in response.tools] == ["namespace", "namespace", "web_search"]
    back = [item.model_dump(exclude_none=True) for item in response.output]
    await openai.responses.create(model=MODEL, input=[*back, {"role": "user", "content": "?"}], tools=spaces)
    text = catalog().get(MODEL).tokenizer.decode(server.dispatcher.generations[-1].token_ids)
    assert text.count('"name": "sea.weather"') == 2 and text.count('"name": "time"') == 2


@settings(max_examples=25, deadline=None, database=None)
@given(st.data())
def _draw(data: st.DataObject) -> None:
    DRAWN.append(
        (
            data.draw(st.booleans()),
            data.draw(st.sampled_from(["", "Let me see.", HELLO])),
            data.draw(st.lists(st.sampled_from([CALL, OTHER, "And more."]), max_size=4)),
            data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8)),
        )
    )


DRAWN: list[tuple[bool, str, list[str], list[int]]] = []


async def test_a_stream_comes_to_the_whole_answer_however_it_is_cut(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    DRAWN.clear()
    _draw()
    for thinks, said, calls, cuts in DRAWN:
        tokens = token_ids(THINKS * thinks + "\n".join([said, *calls]))
        server.dispatcher.script = in_batches(tokens, cuts)
        whole = await http.post("/v1/responses", json=ASKED | {"tools": TOOLS})
        events = await events_of(http, tools=TOOLS)
        assert bare(events[-1]["response"]) == bare(whole.json())
        items: dict[int, str] = {}
        for event in events:
            if event["type"].endswith(".delta"):
                items[event["output_index"]] = items.get(event["output_index"], "") + event["delta"]
        assert [items.get(index, "") for index in range(len(whole.json()["output"]))] == [
            item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            for item in whole.json()["output"]
        ]


async def test_a_stream_that_fails_says_so_in_both_ways(server: HttpServer, http: httpx.AsyncClient) -> None:
    """With the event of the API, and with the failed response that Codex reads."""
    first = says(token_ids("Hello"))
    for error, code, words in (
        (GenerationFailed("Its replica died."), "server_error", "Its replica died."),
        (
            Overloaded("Too much at once.", retry_after_seconds=1.5),
            "rate_limit_exceeded",
            "Too much at once. Please try again in 2s.",
        ),
    ):
        server.dispatcher.script = lambda generation, error=error: [*first(generation)[:2], error]
        events = await events_of(http)
        told, failed = events[-2:]
        assert (told["type"], told["message"]) == ("error", words)
        assert failed["type"] == "response.failed"
        assert failed["response"]["status"] == "failed"
        assert failed["response"]["error"] == {"code": code, "message": words}


async def test_the_librarys_stream_helper_and_parser_work(server: HttpServer, openai: AsyncOpenAI) -> None:
    server.dispatcher.script = says(token_ids(HELLO))
    async with openai.responses.stream(**ASKED) as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        final = await stream.get_final_response()
    assert text == final.output_text == HELLO


async def test_a_client_that_raises_at_an_error_raises(server: HttpServer, openai: AsyncOpenAI) -> None:
    server.dispatcher.script = lambda generation: [GenerationFailed("It died.")]
    with pytest.raises(APIError):
        await openai.responses.create(**ASKED, stream=True)
