"""Responses that go on from stored ones, by the real client: the same prompt as all of it sent whole."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError

from replicas.protocol.cluster_secret import ClusterSecret
from router.features.responses.record import ResponseBounds
from router.features.responses.redis_responses import RedisResponses
from router.features.responses.splicing import page_of
from router.features.responses.store import ResponseStore
from router.large_bodies.body_weight import MOST_BYTES
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import NEVER, says
from tests.router.thinking_model import MODEL, catalog, token_ids

THINKS = "<think>\nShe wants the weather.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Århus"}}\n</tool_call>'
TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[ResponseStore]:
    bounds = ResponseBounds(num_bytes=2**20)
    kept = RedisResponses(redis_url, ClusterSecret(b"of the whole cluster"), bounds)
    made = ResponseStore(None if request.param == "memory" else kept, bounds)
    yield made
    await made.close()


@pytest.fixture
async def server(store: ResponseStore) -> AsyncIterator[HttpServer]:
    async with http_server(catalog=catalog(), responses=store) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chain_has_the_prompt_of_the_whole_conversation(
    server: HttpServer, openai: AsyncOpenAI, stream: bool
) -> None:
    whole: list[Any] = []
    previous_id = None
    result: dict[str, Any] = {"role": "user", "content": "How is the weather?"}
    for said in (THINKS + "Let me see.\n" + CALL, "Rain.", THINKS + "More rain."):
        server.dispatcher.script = says(token_ids(said))
        asked: Any = result["content"] if result.get("role") else [result]
        answer = await openai.responses.create(
            model=MODEL,
            tools=TOOLS,
            input=asked,
            instructions=f"Turn {len(whole)}.",
            previous_response_id=previous_id,
            stream=stream,
        )
        if stream:
            *_, last = [event async for event in answer]
            answer = last.response
        assert answer.previous_response_id == previous_id and answer.model_extra["store"] is True
        chained = server.dispatcher.generations[-1]
        whole.append(result)
        await openai.responses.create(
            model=MODEL,
            tools=TOOLS,
            input=whole,
            instructions=answer.instructions,
            store=False,
        )
        assert server.dispatcher.generations[-1].token_ids == chained.token_ids
        whole += [item.model_dump(exclude_none=True) for item in answer.output]
        previous_id = answer.id
        calls = [item for item in answer.output if item.type == "function_call"]
        result = {"role": "user", "content": "And tomorrow?"}
        if calls:
            result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "It rains."}
    assert server.is_idle


async def test_items_can_be_named_instead_of_sent(server: HttpServer, openai: AsyncOpenAI) -> None:
    server.dispatcher.script = says(token_ids("Fine."))
    first = await openai.responses.create(model=MODEL, input="One")
    question: Any = {"role": "user", "content": "One"}
    named: Any = {"type": "item_reference", "id": first.output[0].id}
    more: Any = {"role": "user", "content": "Two"}
    await openai.responses.create(model=MODEL, input=[question, named, more])
    await openai.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    _, by_name, by_chain = server.dispatcher.generations
    assert by_name.token_ids == by_chain.token_ids


async def test_what_is_not_to_be_stored_or_failed_or_is_too_large_is_not(
    server: HttpServer, openai: AsyncOpenAI, store: ResponseStore
) -> None:
    server.dispatcher.script = says(token_ids("Fine."))
    forgotten = await openai.responses.create(model=MODEL, input="One", store=False)
    with pytest.raises(BadRequestError) as gone:
        await openai.responses.create(model=MODEL, input="Two", previous_response_id=forgotten.id)
    assert (gone.value.code, gone.value.param) == ("previous_response_not_found", "previous_response_id")
    large = "x" * store.bounds.bytes_per_response
    answer = await openai.responses.create(model=MODEL, input="One", metadata={}, extra_body={"note": large})
    assert answer.model_extra["store"] is False
    assert store.num_kept == 0
    assert store.num_bytes == 0


async def test_a_long_chain_is_prepared_elsewhere_with_the_same_outcome(
    server: HttpServer, openai: AsyncOpenAI
) -> None:
    server.dispatcher.script = says(token_ids("Fine."))
    first = await openai.responses.create(model=MODEL, input="One")
    padding = {"note": " " * (MOST_BYTES + 1)}
    asked: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "input": "Two", "previous_response_id": first.id}
    answers = [await openai.responses.create(**asked, extra_body=extra) for extra in ({}, padding)]
    assert server.context.worker.num_done == 1
    _, here, elsewhere = server.dispatcher.generations
    assert here.token_ids == elsewhere.token_ids
    assert answers[0].output_text == answers[1].output_text == "Fine."
    assert answers[0].tools == answers[1].tools


async def test_an_error_names_items_by_where_the_client_has_sent_them(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids("Fine."))
    first = await http.post("/v1/responses", json={"model": MODEL, "input": "Hello"})
    wrong = {"model": MODEL, "input": [{"role": "user", "content": "x"}, {"role": "nobody", "content": "y"}]}
    errors = []
    for previous_id in (None, first.json()["id"]):
        answer = await http.post("/v1/responses", json={**wrong, "previous_response_id": previous_id})
        assert answer.status_code == 400
        errors.append(answer.json()["error"])
    assert errors[0] == errors[1]
    assert errors[0]["param"].startswith("input[1]")


async def test_nothing_is_left_of_an_answer_whose_client_has_gone(
    server: HttpServer, http: httpx.AsyncClient, store: ResponseStore
) -> None:
    script = says(token_ids("Fine."))
    server.dispatcher.script = lambda generation: [*script(generation)[:2], NEVER]
    body = {"model": MODEL, "input": "One", "stream": True}
    async with http.stream("POST", "/v1/responses", json=body) as answer:
        await anext(answer.aiter_bytes())
        assert store.num_bytes > 0
    await server.wait_idle()
    assert (store.num_bytes, store.num_kept) == (0, 0)


async def test_an_explanation_stores_nothing(
    server: HttpServer, http: httpx.AsyncClient, openai: AsyncOpenAI, store: ResponseStore
) -> None:
    server.dispatcher.script = says(token_ids("Fine."))
    first = await openai.responses.create(model=MODEL, input="One")
    body = {"model": MODEL, "input": "Two", "previous_response_id": first.id}
    answer = await http.post("/explain/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert store.num_kept == 1


async def test_a_count_is_that_of_the_prompt(server: HttpServer, openai: AsyncOpenAI) -> None:
    server.dispatcher.script = says(token_ids("Fine."))
    first = await openai.responses.create(model=MODEL, input="One")
    asked: dict[str, Any] = {"model": MODEL, "input": "Two", "previous_response_id": first.id}
    counted = await openai.responses.input_tokens.count(**asked)
    answer = await openai.responses.create(**asked)
    assert counted.input_tokens == answer.usage.input_tokens


async def test_a_field_with_escapes_or_of_the_wrong_type_is_no_way_around(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    for written in (r'"previous\u005fresponse_id":"resp_1"', '"previous_response_id":42'):
        body = '{"model":"' + MODEL + '","input":"x",' + written + "}"
        answer = await http.post("/v1/responses", content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "previous_response_id"


async def test_without_a_store_it_says_so(http: httpx.AsyncClient) -> None:
    async with (
        http_server(catalog=catalog()) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
    ):
        body = {"model": MODEL, "input": "x", "previous_response_id": "resp_" + "0" * 24}
        answer = await client.post("/v1/responses", json=body)
        assert answer.json()["error"]["code"] == "responses_not_stored"
        assert (await client.get("/v1/responses/resp_1")).status_code == 404


def test_items_are_listed_with_an_id_each() -> None:
    items = b'[{"role":"user","content":"a"},{"type":"reasoning","summary":[]},{"type":"odd","id":"x"}]'
    response_id = "resp_" + "0" * 24
    listed, has_more = page_of(items, response_id, limit=3, is_ascending=True, after=None)
    assert [str(item["id"])[:3] for item in listed] == ["msg", "rs_", "x"] and not has_more
    assert listed[0]["content"] == [{"type": "input_text", "text": "a"}]
    for place, item in enumerate(listed):
        after = str(item["id"])
        later, _ = page_of(items, response_id, limit=3, is_ascending=True, after=after)
        earlier, _ = page_of(items, response_id, limit=3, is_ascending=False, after=after)
        assert later == listed[place + 1 :] and earlier == listed[:place][::-1]
