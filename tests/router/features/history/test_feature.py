"""Chats that go on: each turn's prompt begins with the tokens of the turn before, as they were generated."""

import json
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest

from replicas.protocol.frames import FinishReason
from router.api.api_request import ApiRequest
from router.api.chat_prompt import encode_chat, encoded_prompt, render_chat
from router.api.chat_request import ChatRequest, KeepThrough
from router.api.conversation import encoded_history, encoded_tail
from router.api.prepare import PreparedChat
from router.caller import OPEN_CALLER
from router.features.history.feature import HistoryOutcome
from router.history.tool_gaps import LEAST_GAPS, LEAST_SECONDS
from tests.router import tiny_model
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says
from tests.router.thinking_model import CONTEXT_LENGTH, MODEL, catalog, token_ids

CALL = '<tool_call>\n{"name":"weather",  "arguments": {"days":2, "city": "Århus"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
PADDING = "word " * 60_000
"""Makes a body that is prepared in a process of its own, of a system text that the template leaves out."""


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with http_server(catalog=catalog()) as running:
        yield running


async def said(
    http: httpx.AsyncClient, messages: list[dict[str, Any]], *, is_stream: bool = False, **fields: Any
) -> dict[str, Any]:
    """The answer's message, as a client puts it together and sends it back."""
    body = {"model": MODEL, "messages": messages, "tools": TOOLS, "stream": is_stream, **fields}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not is_stream:
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        message.pop("reasoning_content", None)
        return message
    content, calls = "", []
    for line in answer.text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    calls.append({"id": call["id"], "type": "function", "function": call["function"]})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def outcomes(server: HttpServer) -> dict[str, int]:
    return {str(outcome): count for outcome, count in server.history.num_prompts.items() if count}


@pytest.mark.parametrize("is_call", [False, True])
async def test_the_last_piece_of_its_reasoning_is_enough_to_go_on(
    server: HttpServer, http: httpx.AsyncClient, is_call: bool
) -> None:
    """What openai-node's stream helper sends back of it."""
    output = token_ids("<think>\nShe asks how I am.\n</think>\n\n" + (CALL if is_call else "Fine."))
    server.dispatcher.script = says(output)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How are you?"}]
    answer = await http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": messages, "tools": TOOLS, "stream": True}
    )
    frames = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
    pieces = [frame["choices"][0]["delta"].get("reasoning_content") for frame in frames]
    last = [piece for piece in pieces if piece][-1]
    message = await said(http, messages, is_stream=True)
    prompt = server.dispatcher.generations[-1].token_ids
    await said(http, [*messages, {**message, "reasoning_content": last}, *messages])
    assert server.dispatcher.generations[-1].token_ids[: len(prompt) + len(output)] == [*prompt, *output]
    assert outcomes(server) == {HistoryOutcome.DRIFTED: 1}
    await said(http, [*messages, {**message, "reasoning_content": "!"}, *messages])
    assert outcomes(server) == {HistoryOutcome.DRIFTED: 1, HistoryOutcome.RETOLD: 1}


async def test_what_the_template_writes_alike_goes_on_exactly(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids("Fine."))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How are you?"}]
    messages += [await said(http, messages), {"role": "user", "content": "And now?"}]
    await said(http, messages)
    assert outcomes(server) == {HistoryOutcome.EXACT: 1}


async def test_another_answer_or_another_question_is_not_known(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids("<think>Hm</think>Fine."))
    asked: list[dict[str, Any]] = [{"role": "user", "content": "How are you?"}]
    answer = await said(http, asked)
    other = {"role": "user", "content": "And now?"}
    plain = [*asked, {**answer, "content": "Well."}, other]
    for messages, fields in (
        (plain, {}),
        ([{**asked[0], "content": "Who are you?"}, answer, other], {}),
        ([*asked, answer, other], {"tools": None}),
        ([*asked, answer, other], {"cache_salt": "another tenant"}),
    ):
        await said(http, messages, **fields)
        prompt = server.dispatcher.generations[-1].token_ids
        assert "Hm" not in catalog().get(MODEL).tokenizer.decode(prompt)
    assert outcomes(server) == {HistoryOutcome.UNKNOWN: 4}
    await said(http, [*asked, answer, other])
    assert outcomes(server) == {HistoryOutcome.UNKNOWN: 4, HistoryOutcome.DRIFTED: 1}


async def test_each_choice_is_remembered(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says(token_ids("<think>Hm</think>Fine."))
    asked = [{"role": "user", "content": "How are you?"}]
    await said(http, asked, n=2)
    assert server.history.num_records == 1  # both say the same
    answer = {"role": "assistant", "content": "Fine."}
    await said(http, [*asked, answer, asked[0]])
    assert outcomes(server) == {HistoryOutcome.DRIFTED: 1}


@pytest.mark.parametrize(
    ("answer", "finish", "fields"),
    [
        ("<think>Hm</think>One. Two.", FinishReason.STOP, {"stop": "Two"}),
        ("<think>Hm</think>" + CALL + CALL, FinishReason.STOP, {"parallel_tool_calls": False}),
        ("<think>Hm", FinishReason.LENGTH, {}),
        ("<think>Hm</think>Fine.", FinishReason.STOP, {"ignore_eos": True}),
        ("<think>Hm</think>Fine.", FinishReason.STOP, {"add_generation_prompt": False}),
    ],
)
async def test_what_was_cut_short_or_cannot_be_sent_back_is_not_remembered(
    server: HttpServer, http: httpx.AsyncClient, answer: str, finish: FinishReason, fields: dict[str, Any]
) -> None:
    server.dispatcher.script = says(token_ids(answer, end=finish is FinishReason.STOP), finish=finish)
    await said(http, [{"role": "user", "content": "How are you?"}], **fields)
    assert server.history.num_records == 0


async def test_an_answer_that_ran_into_its_length_goes_on_behind_the_end_of_its_turn(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    output = token_ids("<think>Hm</think>Fine, but", end=False)
    server.dispatcher.script = says(output, finish=FinishReason.LENGTH)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How are you?"}]
    answer = await said(http, messages)
    first = server.dispatcher.generations[-1].token_ids
    await said(http, [*messages, answer, {"role": "user", "content": "Go on."}])
    prompt = server.dispatcher.generations[-1].token_ids
    assert prompt[: len(first) + len(output) + 1] == [*first, *output, tiny_model.END_OF_TURN]
    assert prompt[len(first) + len(output) + 1] != tiny_model.END_OF_TURN


async def test_without_room_for_an_answer_the_template_has_its_way(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    thought = "thought " * (CONTEXT_LENGTH // 2)
    output = token_ids(f"<think>{thought}</think>Fine.")[-CONTEXT_LENGTH * 7 // 8 :]
    server.dispatcher.script = says([*token_ids("<think>", end=False), *output])
    asked = [{"role": "user", "content": "How are you?"}]
    messages = [*asked, await said(http, asked), *asked]
    await said(http, messages, max_tokens=CONTEXT_LENGTH // 4)
    assert len(server.dispatcher.generations[-1].token_ids) < 300
    await said(http, messages)
    assert len(server.dispatcher.generations[-1].token_ids) < 300
    assert outcomes(server) == {HistoryOutcome.REFUSED: 2}
    server.dispatcher.script = says(token_ids("Fine."))
    await said(http, messages, max_tokens=16)
    assert outcomes(server) == {HistoryOutcome.REFUSED: 2, HistoryOutcome.DRIFTED: 1}


async def test_large_bodies_go_on_as_well(server: HttpServer, http: httpx.AsyncClient) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How are you?"}]
    large = {"tools": None, "metadata": {"padding": PADDING}}
    before: list[int] = []
    for turn in range(3):
        output = token_ids(f"<think>Thought {turn}</think>Answer {turn}.")
        server.dispatcher.script = says(output)
        answer = await said(http, messages, **large)
        prompt = server.dispatcher.generations[-1].token_ids
        assert prompt[: len(before)] == before
        before = [*prompt, *output]
        messages += [answer, {"role": "user", "content": "And now?"}]
    assert server.context.worker.num_done == 3
    assert outcomes(server) == {HistoryOutcome.DRIFTED: 2}


async def test_a_wish_to_keep_reaches_through_the_same_message(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids("<think>" + "Hm. " * 40 + "</think>Fine."))
    asked: list[dict[str, Any]] = [{"role": "user", "content": "How are you?"}]
    answer = {"role": "assistant", "content": (await said(http, asked, tools=None))["content"]}
    model = catalog().get(MODEL)
    request = ChatRequest(
        model=MODEL,
        messages=[*asked, answer, {"role": "user", "content": "And now?"}],
        keeps=[KeepThrough(60, place) for place in (0, 2, None)],
    )
    chat = render_chat(model, request)
    shown = encode_chat(model, request, chat)
    plain = encoded_prompt(model, request, chat, shown, shown.token_ids)
    plain = msgspec.structs.replace(plain, history=encoded_history(request))
    asked_again = SimpleNamespace(caller=OPEN_CALLER, state={})
    prepared = PreparedChat(request, plain, plain.ids(), partial(encoded_tail, model, chat))
    encoded = (await server.history.encoded(cast("ApiRequest", asked_again), model, prepared)).prompt
    first, last, whole = [keep.num_tokens for keep in encoded.keeps]
    assert first is not None and last is not None and whole is None
    assert len(encoded.ids()) > len(plain.ids())
    assert model.tokenizer.decode(encoded.ids()[:first]).endswith("How are you?")
    assert model.tokenizer.decode(encoded.ids()[:last]).endswith("And now?")


async def test_a_room_of_no_bytes_remembers_nothing() -> None:
    async with (
        http_server(catalog=catalog(), history_bytes=0) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as http,
    ):
        server.dispatcher.script = says(token_ids("<think>Hm</think>Fine."))
        asked: list[dict[str, Any]] = [{"role": "user", "content": "How are you?"}]
        await said(http, [*asked, await said(http, asked), *asked])
        assert outcomes(server) == {}
        assert server.history.num_records == 0


def shown_prompt(server: HttpServer) -> str:
    return catalog().get(MODEL).tokenizer.decode(server.dispatcher.generations[-1].token_ids)


@pytest.mark.parametrize("fields", [{}, {"metadata": {"padding": PADDING}}], ids=["small", "large"])
async def test_other_reasoning_than_was_generated_has_its_way(
    server: HttpServer, http: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    server.dispatcher.script = says(token_ids("<think>Hm</think>Fine."))
    asked: list[dict[str, Any]] = [{"role": "user", "content": "How are you?"}]
    answer = await said(http, asked, tools=None, **fields)
    then = {"role": "user", "content": "And now?"}
    for reasoning, stays in ((" Hm\n", True), ("", True), ("Aha", False)):
        told = {**answer, "reasoning_content": reasoning}
        await said(http, [*asked, told, then], tools=None, **fields)
        assert ("Hm" in shown_prompt(server)) is stays
    assert outcomes(server) == {HistoryOutcome.DRIFTED: 2, HistoryOutcome.RETOLD: 1}


async def test_a_conversation_that_was_retold_goes_on_from_what_came_of_that(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How are you?"}]
    before: list[int] = []
    for turn, reasoning in enumerate(("Aha", "Second")):
        output = token_ids(f"<think>{('First', 'Second')[turn]}</think>Fine {turn}.")
        server.dispatcher.script = says(output)
        answer = await said(http, messages)
        before = [*server.dispatcher.generations[-1].token_ids, *output]
        messages += [{**answer, "reasoning_content": reasoning}, {"role": "user", "content": f"Then {turn}?"}]
    await said(http, messages)
    assert server.dispatcher.generations[-1].token_ids[: len(before)] == before
    assert "First" not in shown_prompt(server) and "Second" in shown_prompt(server)
    assert outcomes(server) == {HistoryOutcome.RETOLD: 1, HistoryOutcome.DRIFTED: 1}


async def agent(http: httpx.AsyncClient, *, turns: int, **fields: Any) -> dict[str, Any]:
    """An agent whose model calls a tool in every turn."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather? " * 8}]
    answer: dict[str, Any] = {}
    for _ in range(turns):
        body = {"model": MODEL, "messages": messages, "tools": TOOLS} | fields
        response = await http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        message = answer["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Fine."}
        messages += [message, result]
    return answer


@pytest.mark.parametrize(("seconds", "parallel"), [(300, True), (300, False), (0, True)])
async def test_a_tenants_prompts_are_kept_once_its_tools_are_known(seconds: int, parallel: bool) -> None:
    async with http_server(catalog=catalog(), tool_gap_seconds=seconds) as server:
        server.dispatcher.script = says(token_ids(CALL))
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            answer = await agent(http, turns=10, parallel_tool_calls=parallel)
            leases = [generation.submit.leases for generation in server.dispatcher.generations]
            assert not any(leases[: LEAST_GAPS + 1])
            if not seconds:
                assert not any(leases)
                return
            (lease,) = leases[-1]
            num_tokens = len(server.dispatcher.generations[-1].token_ids)
            assert lease == (num_tokens // tiny_model.BLOCK_SIZE, LEAST_SECONDS)
            assert "cache_leases" not in answer["usage"]["prompt_tokens_details"]

            # What a client wishes goes before it.
            wished = await agent(http, turns=1, prompt_cache_retention="24h")
            (lease,) = server.dispatcher.generations[-1].submit.leases
            assert lease.seconds == 86_400
            assert len(wished["usage"]["prompt_tokens_details"]["cache_leases"]) == 1

            # Without tools there is nothing to wait for, and another tenant has taught nothing.
            await http.post(
                "/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
            )
            assert not server.dispatcher.generations[-1].submit.leases
            await agent(http, turns=1, cache_salt="another")
            assert not server.dispatcher.generations[-1].submit.leases
