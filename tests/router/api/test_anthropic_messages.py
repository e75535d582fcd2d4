"""Anthropic's Messages over HTTP: its events, whole answers, usage, errors, counts and models."""

import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anthropic
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicas.protocol.frames import FinishReason
from router.api.anthropic.body import read_message
from router.api.chat_prompt import render_chat
from router.errors import GenerationFailed, NoReplicaAvailable, Overloaded
from router.generation import Generation
from router.prompt.catalog import ModelCatalog
from tests.router import tiny_model
from tests.router.api.anthropic_client import (
    ASKED,
    CALL,
    HOUR,
    MINUTES,
    OTHER,
    THINKS,
    TOOLS,
    VERSION,
    comparable,
    events,
    joined,
    whole,
)
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import Script, Step, says
from tests.router.thinking_model import CONTEXT_LENGTH, MODEL, catalog, token_ids


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with http_server(catalog=catalog()) as running:
        yield running


async def test_a_stream_of_text_event_by_event(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says(token_ids("The dog"), num_cached_tokens=16, num_written_tokens=16)
    first, *rest = await events(http)
    message = first["message"]
    (prompt,) = server.dispatcher.generations
    usage = {
        "input_tokens": len(prompt.token_ids) - 16,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "output_tokens": 0,
    }
    assert message == {
        "id": message["id"],
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    assert rest == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "The"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": " dog"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": usage | {"output_tokens": 3, "output_tokens_details": {"thinking_tokens": 0}},
        },
        {"type": "message_stop"},
    ]


async def test_thinking_text_and_calls_are_blocks_in_their_order(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids(THINKS + "Let me see.\n" + CALL + "\n" + OTHER))
    answer = await whole(http, tools=TOOLS, thinking={"type": "adaptive"})
    assert comparable(answer)["content"] == [
        {"type": "thinking", "thinking": "She wants the weather.", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "", "name": "weather", "input": {"city": "Århus"}},
        {"type": "tool_use", "id": "", "name": "time", "input": {}},
    ]
    assert len({block.get("id") for block in answer["content"]}) == 3
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 5
    assert comparable(joined(await events(http, tools=TOOLS, thinking={"type": "adaptive"}))) == comparable(
        answer
    )


async def test_thinking_may_stay_unsaid(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says(token_ids(THINKS + "Warm."))
    thinking = {"type": "adaptive", "display": "omitted"}
    answer = await whole(http, thinking=thinking)
    assert comparable(answer)["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert comparable(joined(await events(http, thinking=thinking))) == comparable(answer)


BEGUN = '<tool_call>\n{"name": "weather", "arguments": {"days": 12, "city": "År'
BROKEN = BEGUN.replace('"År', "Århus}}\n</tool_call>")
_pieces = st.sampled_from(
    ["The fox. ", "日本 ", "<tool_call>", "{", "\n", " ", CALL, OTHER, BEGUN, BROKEN, "STOP", "ST"]
)


def cut(ids: Sequence[int], cuts: Sequence[int], finish: FinishReason) -> Script:
    """The tokens in batches of these sizes, over and over."""

    def script(generation: Generation) -> Sequence[Step]:
        (first, *_) = says([0], num_cached_tokens=16, num_written_tokens=32)(generation)
        (delta,) = first  # type: ignore[misc]
        steps: list[Step] = []
        position = 0
        while position < len(ids):
            size = cuts[len(steps) % len(cuts)]
            is_last = position + size >= len(ids)
            steps.append(
                [
                    type(delta)(
                        delta.key,
                        tuple(ids[position : position + size]),
                        finish_reason=finish if is_last else None,
                        usage=delta.usage if not steps else None,
                    )
                ]
            )
            position += size
        return steps

    return script


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    thinks=st.booleans(),
    pieces=st.lists(_pieces, max_size=6),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    fields=st.sampled_from([{}, {"stop_sequences": ["STOP"]}, {"tools": TOOLS}])
    | st.just({"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
)
async def test_a_stream_joined_is_the_whole_answer_however_it_is_cut(
    server: HttpServer,
    http: httpx.AsyncClient,
    thinks: bool,
    pieces: list[str],
    cuts: list[int],
    finish: FinishReason,
    fields: dict[str, Any],
) -> None:
    ids = token_ids(THINKS * thinks + "".join(pieces), end=finish is FinishReason.STOP) or [300]
    server.dispatcher.script = cut(ids, [1], finish)
    expected = comparable(await whole(http, **fields))
    server.dispatcher.script = cut(ids, cuts, finish)
    again = comparable(await whole(http, **fields))
    streamed = comparable(joined(await events(http, **fields)))
    is_ended_here = "tool_choice" in fields or expected["stop_reason"] in ("stop_sequence", "tool_use")
    if not is_ended_here:  # by the batch
        assert again == expected
    assert {**again, "usage": None} == {**expected, "usage": None} == {**streamed, "usage": None}
    assert streamed["usage"] == again["usage"]
    if "stop_sequences" in fields and "STOP" in "".join(pieces) and finish is FinishReason.STOP:
        assert (again["stop_reason"], again["stop_sequence"]) == ("stop_sequence", "STOP")
        assert "STOP" not in "".join(block.get("text", "") for block in again["content"])


async def test_why_an_answer_ends(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says(token_ids("The fox"), finish=FinishReason.LENGTH)
    assert (await whole(http, max_tokens=2))["stop_reason"] == "max_tokens"
    beyond = await whole(http, max_tokens=CONTEXT_LENGTH)
    assert beyond["stop_reason"] == "model_context_window_exceeded"
    *_, generation = server.dispatcher.generations
    assert generation.sampling.max_tokens == CONTEXT_LENGTH - len(generation.token_ids)
    server.dispatcher.script = says(token_ids("The quick fox"))
    answer = await whole(http, stop_sequences=[" fox", "quick"])
    server.dispatcher.script = says(token_ids(CALL))
    cut = await whole(http, tools=TOOLS, stop_sequences=["Århus"])
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", "Århus")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "quick")
    assert answer["content"] == [{"type": "text", "text": "The "}]


async def test_stop_sequences_count_from_the_answers_first_character(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids(THINKS + "It rains.\n\nA lot."))
    asked: dict[str, Any] = {"thinking": {"type": "adaptive"}, "stop_sequences": ["\n\n", "weather"]}
    for answer in (await whole(http, **asked), joined(await events(http, **asked))):
        thinking, text = answer["content"]
        assert (thinking["thinking"], text["text"]) == ("She wants the weather.", "It rains.")
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "\n\n")


async def test_an_answer_that_is_begun_goes_on_from_there(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids("42)."))
    begun = {"role": "assistant", "content": "The answer is ("}
    answer = await whole(http, messages=[*ASKED["messages"], begun])
    (generation,) = server.dispatcher.generations
    prompt = server.context.catalog.get(MODEL).tokenizer.decode(generation.token_ids)
    assert prompt.endswith("The answer is (") and answer["content"] == [{"type": "text", "text": "42)."}]


async def test_instructions_in_the_middle_are_the_users_where_a_template_takes_none() -> None:
    strict = tiny_model.TEMPLATE.replace(
        "{%- for message in messages %}",
        "{%- for message in messages %}{%- if message.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{%- endif %}",
    )
    models = ModelCatalog(tiny_model.SECRET)
    models.add(tiny_model.card(), tiny_model.bundle(strict))
    messages = [*ASKED["messages"], {"role": "system", "content": "New rules."}]
    async with http_server(catalog=models) as server, httpx.AsyncClient(base_url=server.url) as http:
        server.dispatcher.script = says([tiny_model.END_OF_TURN])
        await whole(http, max_tokens=5, system="Be brief.", messages=messages)
        (generation,) = server.dispatcher.generations
        prompt = models.get(MODEL).tokenizer.decode(generation.token_ids)
        assert "<|im_start|>user\nNew rules.<|im_end|>" in prompt


async def test_a_conversation_has_the_same_tokens_as_in_other_dialects(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids("Yes."))
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Århus"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "21 degrees"}
    await whole(
        http,
        system="Be brief.",
        tools=TOOLS,
        messages=[
            *ASKED["messages"],
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "A tool.", "signature": "s"}, call],
            },
            {"role": "user", "content": [result]},
        ],
        thinking={"type": "adaptive"},
    )
    function = {"name": "weather", "arguments": '{"city": "Århus"}'}
    chat = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "Be brief."},
            *ASKED["messages"],
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "A tool.",
                "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "toolu_1", "content": "21 degrees"},
        ],
        "tools": [
            {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}}
            for tool in TOOLS
        ],
    }
    answer = await http.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 200, answer.text
    messages, other = server.dispatcher.generations
    assert messages.token_ids == other.token_ids


async def test_a_large_body_is_answered_as_a_small_one(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says(token_ids(THINKS + "So. " + CALL), num_written_tokens=64)
    fields = {
        "system": [{"type": "text", "text": "Be brief. " * 20, "cache_control": HOUR}],
        "tools": TOOLS,
        "thinking": {"type": "adaptive", "display": "omitted"},
    }
    small = await whole(http, **fields)
    large = await whole(http, **fields, metadata={"much": list(range(5000))})
    assert comparable(small) == comparable(large)
    first, second = server.dispatcher.generations
    assert first.token_ids == second.token_ids and first.submit.leases == second.submit.leases
    assert server.context.worker.num_done == 1


async def test_tokens_are_counted_as_they_are_run(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says(token_ids("Yes."))
    fields: dict[str, Any] = {"system": "Be brief.", "tools": TOOLS, "cache_control": MINUTES}
    await whole(http, **fields)
    asked = {name: value for name, value in ASKED.items() if name != "max_tokens"} | fields
    (generation,) = server.dispatcher.generations
    for body in (asked, asked | {"metadata": {"much": list(range(5000))}}):
        counted = await http.post("/v1/messages/count_tokens?beta=true", json=body)
        assert counted.headers["request-id"].startswith("req_")
        assert counted.json() == {"input_tokens": len(generation.token_ids)}
    assert server.context.worker.num_done == 1
    refused = await http.post("/v1/messages/count_tokens", json=asked | {"model": "nobody"})
    assert refused.status_code == 404
    assert refused.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("full", retry_after_seconds=3), 429, "rate_limit_error"),
        (NoReplicaAvailable("none", retry_after_seconds=3), 529, "overloaded_error"),
        (GenerationFailed("broken"), 500, "api_error"),
        (RuntimeError("our own"), 500, "api_error"),
    ],
)
async def test_what_goes_wrong_before_and_in_the_middle_of_a_stream(
    server: HttpServer, http: httpx.AsyncClient, error: Exception, status: int, kind: str
) -> None:
    server.dispatcher.script = lambda generation: [error]
    refused = await http.post("/v1/messages", json=ASKED)
    assert refused.status_code == status
    body = refused.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == refused.headers["request-id"] == refused.headers["x-request-id"]
    assert ("retry-after" in refused.headers) == (status in (429, 529))

    begun = says(token_ids("The fox"))
    server.dispatcher.script = lambda generation: [*begun(generation)[:1], error]
    answer = await http.post("/v1/messages", json=ASKED | {"stream": True})
    assert answer.status_code == 200
    named, data = answer.text.removesuffix("\n\n").split("\n\n")[-1].split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert named == "event: error" and event["type"] == "error" and event["error"]["type"] == kind
    await server.wait_idle()


async def test_refusals_by_the_way_are_in_its_shape_too(server: HttpServer, http: httpx.AsyncClient) -> None:
    expected = [
        (await http.get("/v1/messages"), 405, "invalid_request_error", "Not allowed"),
        (await http.get("/v1/messages/batches"), 404, "not_found_error", "Unknown request URL"),
        (await http.get("/v1/messages/count_tokens"), 405, "invalid_request_error", "Not allowed"),
        (
            await http.post("/v1/messages", content=b"{"),
            400,
            "invalid_request_error",
            "The request body is no",
        ),
        (
            await http.post("/v1/messages", content="x", headers={"content-type": "text/plain"}),
            415,
            "invalid_request_error",
            "Unsupported content type",
        ),
        (
            await http.post("/v1/messages", json=ASKED | {"model": "x"}),
            404,
            "not_found_error",
            "model: The mod",
        ),
        (await http.get("/v1/models/x", headers=VERSION), 404, "not_found_error", "model: The model 'x'"),
    ]
    for answer, status, kind, begins in expected:
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["type"] == kind and error["message"].startswith(begins), error
        assert answer.json()["request_id"] == answer.headers["request-id"]
    other = await http.get("/v1/models/x")
    assert other.json()["error"]["code"] == "model_not_found"


async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_know(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    counted = {**ASKED, "messages": [{"role": "user", "content": " the" * CONTEXT_LENGTH}]}
    more = "the " * (3 * CONTEXT_LENGTH)
    values = [1] * 5000  # so many that it is prepared elsewhere
    for other, exactly in [({}, True), ({"system": more}, False), ({"metadata": {"a": values}}, True)]:
        body = counted | other
        answer = await http.post("/v1/messages", json=body)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        told = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", message)
        assert told is not None, message
        assert int(told[2]) == CONTEXT_LENGTH < int(told[1])
        if exactly:
            model = server.context.catalog.get(MODEL)
            chat = render_chat(model, read_message(json.dumps(counted).encode(), 1))
            assert int(told[1]) == len(model.tokenizer.encode(chat.text))


async def test_a_body_that_is_too_large() -> None:
    async with http_server(max_body_bytes=2000) as small, httpx.AsyncClient(base_url=small.url) as http:
        answer = await http.post("/v1/messages", json=ASKED | {"system": "x" * 3000})
        assert answer.status_code == 413 and answer.json()["error"]["type"] == "request_too_large"


async def test_models_for_clients_of_this_dialect(http: httpx.AsyncClient) -> None:
    async with http_server() as tiny, httpx.AsyncClient(base_url=tiny.url, headers=VERSION) as client:
        page = (await client.get("/v1/models")).json()
        names = [model["id"] for model in page["data"]]
        assert names == [tiny_model.MODEL, "untemplated", tiny_model.ALIAS, tiny_model.ADAPTER.name]
        assert (page["has_more"], page["first_id"], page["last_id"]) == (False, names[0], names[-1])
        one = (await client.get(f"/v1/models/{tiny_model.MODEL}")).json()
        assert one == page["data"][0]
        assert (one["type"], one["max_input_tokens"]) == ("model", tiny_model.CONTEXT_LENGTH)
        for query, expected, more in [
            ("limit=2", names[:2], True),
            (f"limit=2&after_id={names[1]}", names[2:], False),
            (f"limit=1&before_id={names[2]}", names[1:2], True),
        ]:
            page = (await client.get(f"/v1/models?{query}")).json()
            assert ([model["id"] for model in page["data"]], page["has_more"]) == (expected, more)
        for query in ("limit=0", "limit=x", "limit=1001", "after_id=nobody"):
            refused = await client.get(f"/v1/models?{query}")
            assert refused.status_code == 400
            assert refused.json()["error"]["message"].startswith(query.split("=")[0] + ": ")
        assert (await client.head("/")).status_code == 200
    plain = (await http.get("/v1/models")).json()
    assert plain["object"] == "list"


@pytest.mark.parametrize(
    ("written", "is_read"),
    [
        ('{"text": "\\ud800"}', True),
        ('{"number": 123456789012345678901234567890}', True),
        ('{"number": NaN}', False),
    ],
)
async def test_arguments_are_answered_as_the_model_wrote_them(
    server: HttpServer, http: httpx.AsyncClient, written: str, is_read: bool
) -> None:
    call = CALL.replace('{"city": "Århus"}', written)
    server.dispatcher.script = says(token_ids(THINKS + call))
    answer = await whole(http, tools=TOOLS)
    assert answer["content"][-1]["input"] == (json.loads(written) if is_read else {})


@pytest.mark.parametrize(
    ("written", "finish", "reason"),
    [
        ('{"days": 12, "city": "År', FinishReason.LENGTH, "max_tokens"),
        ('{"days": 12, "city": Århus}}\n</tool_call>', FinishReason.STOP, "end_turn"),
        ('{"days": 12, "city": "the "old" one"}}\n</tool_call>', FinishReason.STOP, "end_turn"),
    ],
)
async def test_a_call_that_breaks_off_is_for_anthropics_sdk_the_same_whole_and_streamed(
    server: HttpServer, written: str, finish: FinishReason, reason: str
) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": ' + written
    server.dispatcher.script = says(token_ids(call, end=finish is FinishReason.STOP), finish=finish)
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        answer = await client.messages.create(**ASKED, tools=TOOLS)
        async with client.messages.stream(**ASKED, tools=TOOLS) as stream:
            streamed = await stream.get_final_message()
    for message in (answer, streamed):
        used = next(block for block in message.content if block.type == "tool_use")
        assert used.input == {"days": 12} | ({"city": "the "} if "old" in written else {})
        assert message.stop_reason == reason


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_runner_of_tools_goes_on_without_threads(server: HttpServer, stream: bool) -> None:
    """It asks for a thread first, and sends whole conversations once it is told that there are none."""
    says_in_turn = [CALL, "It is sunny.", "Still sunny."]

    def script(generation: Generation) -> Sequence[Step]:
        return says(token_ids(says_in_turn[len(server.dispatcher.generations) - 1]))(generation)

    server.dispatcher.script = script
    asked: list[str] = []

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "sunny"

    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(**ASKED, tools=[weather], stream=stream)
        said = [await turn.get_final_message() if stream else turn async for turn in runner]
        assert asked == ["Århus"]
        assert [message.stop_reason for message in said] == ["tool_use", "end_turn"]
        assert said[-1].content[0].text == "It is sunny."
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.beta.messages.create(
                **ASKED, thread={"type": "continue", "previous_message_id": said[-1].id}, stream=stream
            )
    assert caught.value.error_code == "thread_unsupported_request"
    assert caught.value.type == "invalid_request_error" and "thread" in caught.value.message


async def test_errors_have_details_only_where_their_clients_have_a_name_for_them(
    http: httpx.AsyncClient,
) -> None:
    for fields in ({"n": 2}, {"messages": []}, {"model": "x"}):
        answer = await http.post("/v1/messages", json=ASKED | fields)
        assert set(answer.json()["error"]) == {"type", "message"}
