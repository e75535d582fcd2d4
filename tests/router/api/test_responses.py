"""OpenAI's Responses by the real client: whole answers and streams, reasoning, calls and errors."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError

from replicas.protocol.frames import FinishReason, PromptUsage, RequestKey, TokenDelta
from router.errors import GenerationFailed, Overloaded
from router.generation import Generation
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import Step, says
from tests.router.thinking_model import MODEL, catalog, token_ids

THINKS = "<think>\nShe wants the weather.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Århus"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
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


async def test_an_answer_has_its_text_its_usage_and_what_was_asked(
    server: HttpServer, openai: AsyncOpenAI
) -> None:
    answer = token_ids(HELLO)
    server.dispatcher.script = says(answer, num_cached_tokens=16, num_written_tokens=3)
    response = await openai.responses.create(
        **ASKED, instructions="Be kind.", metadata={"a": "b"}, temperature=0.5, prompt_cache_key="mine"
    )
    assert response.output_text == HELLO
    assert (response.status, response.object, response.model) == ("completed", "response", MODEL)
    assert response.id.startswith("resp_") and response.output[0].id.startswith("msg_")
    assert (response.instructions, response.metadata, response.temperature) == ("Be kind.", {"a": "b"}, 0.5)
    assert (response.prompt_cache_key, response.tool_choice, response.tools) == ("mine", "auto", [])
    usage = response.usage
    assert usage.input_tokens == len(server.dispatcher.generations[0].token_ids)
    assert usage.output_tokens == len(answer)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.input_tokens_details.cached_tokens, usage.input_tokens_details.cache_write_tokens) == (
        16,
        3,
    )
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert server.is_idle


async def test_the_events_of_a_text_come_in_their_order(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says(token_ids("Hello you"))
    events = await events_of(http)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    item_id = events[2]["item"]["id"]
    assert all(
        (event["item_id"], event["output_index"], event["content_index"], event["logprobs"])
        == (item_id, 0, 0, [])
        for event in deltas
    )
    assert "".join(event["delta"] for event in deltas) == "Hello you"
    part = {"type": "output_text", "text": "Hello you", "annotations": [], "logprobs": []}
    item = {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    assert events[2]["item"] == item | {"content": [], "status": "in_progress"}
    assert events[-2] == {
        "type": "response.output_item.done",
        "sequence_number": len(events) - 2,
        "output_index": 0,
        "item": item,
    }
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert (last["status"], last["output"]) == ("completed", [item])
    assert first["id"] == last["id"]


async def test_reasoning_text_and_calls_are_items_of_their_own(
    server: HttpServer, openai: AsyncOpenAI
) -> None:
    server.dispatcher.script = says(token_ids(THINKS + "Let me see.\n" + CALL + "\n" + OTHER))
    response = await openai.responses.create(
        **ASKED, tools=TOOLS, include=["reasoning.encrypted_content"], store=False
    )
    thought, said, *calls = response.output
    assert (thought.type, thought.content[0].text.strip()) == ("reasoning", "She wants the weather.")
    assert (said.type, said.content[0].text) == ("message", "Let me see.")
    assert [(call.type, call.name, call.arguments) for call in calls] == [
        ("function_call", "weather", '{"city": "Århus"}'),
        ("function_call", "time", "{}"),
    ]
    assert len({call.call_id for call in calls}) == 2
    assert len({item.id for item in response.output}) == 4
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert thought.encrypted_content


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
    chat = {
        "model": MODEL,
        "tools": [
            {"type": "function", "function": {key: tool[key] for key in ("name", "parameters", "strict")}}
            for tool in TOOLS
        ],
        "messages": [
            question,
            {
                "role": "assistant",
                "content": "Let me see.",
                "reasoning_content": items[0]["content"][0]["text"],
                "tool_calls": [
                    {
                        "id": items[-1]["call_id"],
                        "type": "function",
                        "function": {"name": "weather", "arguments": items[-1]["arguments"]},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": items[-1]["call_id"], "content": "Rain."},
        ],
    }
    await openai.chat.completions.create(**chat)
    assert server.dispatcher.generations[-1].token_ids == full.token_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_cut_off_is_incomplete(
    server: HttpServer, openai: AsyncOpenAI, stream: bool
) -> None:
    server.dispatcher.script = says(token_ids(HELLO), finish=FinishReason.LENGTH)
    answer = await openai.responses.create(**ASKED, max_output_tokens=3, stream=stream)
    if stream:
        *_, last = [event async for event in answer]
        assert last.type == "response.incomplete"
        answer = last.response
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert answer.usage.output_tokens == 3


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
        server.dispatcher.script = _in_pieces(tokens, cuts)
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


def _in_pieces(tokens: list[int], cuts: list[int]) -> Any:
    def script(generation: Generation) -> list[Step]:
        steps: list[Step] = []
        start = 0
        while start < len(tokens):
            size = cuts[len(steps) % len(cuts)]
            piece, start = tokens[start : start + size], start + size
            usage = None if steps else PromptUsage(len(generation.token_ids), 0, 0)
            finish = FinishReason.STOP if start >= len(tokens) else None
            steps.append([TokenDelta(RequestKey(1, 0), tuple(piece), finish_reason=finish, usage=usage)])
        return steps

    return script


async def test_log_probabilities_come_if_they_are_included(server: HttpServer, openai: AsyncOpenAI) -> None:
    tokens = token_ids("日本 x", end=False)
    server.dispatcher.script = says(tokens)
    response = await openai.responses.create(
        **ASKED, include=["message.output_text.logprobs"], top_logprobs=2
    )
    logprobs = response.output[0].content[0].logprobs
    assert len(logprobs) == len(tokens) and all(len(each.top_logprobs) == 2 for each in logprobs)
    stream = await openai.responses.create(
        **ASKED, include=["message.output_text.logprobs"], top_logprobs=2, stream=True
    )
    events = [event async for event in stream]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [each.token for event in deltas for each in event.logprobs] == [each.token for each in logprobs]
    assert events[-1].response.output[0].content[0].logprobs == logprobs


async def test_log_probabilities_in_a_stream_are_those_of_the_text(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids(THINKS + "Let me see.\n" + CALL))
    events = await events_of(http, tools=TOOLS, include=["message.output_text.logprobs"])
    (message,) = [item for item in events[-1]["response"]["output"] if item["type"] == "message"]
    logprobs = message["content"][0]["logprobs"]
    told = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [each for some in told for each in some] == logprobs
    text = "".join(each["token"] for each in logprobs)
    assert text.strip().endswith("Let me see.") and "weather" not in text


async def test_a_prewarm_computes_the_prompt_and_says_nothing(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids("never"), finish=FinishReason.LENGTH)
    options = {"prewarm": True, "ttl": "12h", "comparison_response_id": "resp_1"}
    answer = (await http.post("/v1/responses", json=ASKED | {"prompt_cache_options": options})).json()
    assert (answer["status"], answer["output"], answer["usage"]["output_tokens"]) == ("completed", [], 0)
    assert answer["prompt_cache_options"]["ttl"] == "12h"
    assert answer["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    (generation,) = server.dispatcher.generations
    assert generation.sampling.max_tokens == 1
    assert [lease.seconds for lease in generation.submit.leases] == [43_200]


async def test_breakpoints_are_kept_through_their_message(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids("Yes."))
    long = "What the handbook says of holidays. " * 8
    body = {
        "model": MODEL,
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": long, "prompt_cache_breakpoint": {"mode": "explicit"}}
                ],
            },
            {"role": "user", "content": long},
        ],
    }
    assert (await http.post("/v1/responses", json=body)).status_code == 200
    (generation,) = server.dispatcher.generations
    (lease,) = generation.submit.leases
    assert lease.seconds == 1800 and 0 < lease.end_block < len(generation.token_ids) // 16


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "computer_call"}]}, "input[0].call_id"),
        ({"input": [{"type": "input_text", "text": "x"}]}, "input[0].type"),
        ({"input": [{"type": "compaction_trigger"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"background": True}, "background"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"enable_response_messages": True}, "enable_response_messages"),
        ({"previous_input_messages": [{"role": "user", "content": "x"}]}, "previous_input_messages"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [42]}, "tools[0]"),
        ({"tool_choice": {"type": "function", "name": "nobody"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"include": ["everything"]}, "include[0]"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": 3}, "temperature"),
        ({"cache": "cache_1"}, "cache"),
        ({"truncation": "some"}, "truncation"),
    ],
)
async def test_what_is_wrong_is_named(
    server: HttpServer, http: httpx.AsyncClient, fields: dict[str, Any], parameter: str
) -> None:
    answer = await http.post("/v1/responses", json=ASKED | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == parameter
    assert server.dispatcher.generations == []


async def test_errors_are_the_clients_own(server: HttpServer, openai: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError):
        await openai.responses.create(model="nobody", input="x")
    with pytest.raises(BadRequestError) as long:
        await openai.responses.create(model=MODEL, input="x " * 9000)
    assert long.value.code == "context_length_exceeded" and long.value.param == "input"


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


async def test_what_a_developer_says_is_the_systems_where_a_template_has_no_developers(
    server: HttpServer, openai: AsyncOpenAI
) -> None:
    """Templates of Qwen's leave out messages with a role that they do not know."""
    server.dispatcher.script = says(token_ids("Yes."))
    for role in ("developer", "system"):
        said: Any = [{"role": role, "content": "Be kind."}, {"role": "user", "content": "Hello"}]
        await openai.responses.create(model=MODEL, input=said)
        await openai.chat.completions.create(model=MODEL, messages=said)
    prompts = [tuple(generation.token_ids) for generation in server.dispatcher.generations]
    assert len(set(prompts)) == 1
    assert "system\nBe kind." in catalog().get(MODEL).tokenizer.decode(prompts[0])
