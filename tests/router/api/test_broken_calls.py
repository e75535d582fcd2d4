"""Conversations with calls whose arguments are no JSON object go on by every dialect, with every template.

Models write such calls: cut off by their length, with quotes that are not escaped, as a list.
"""

import functools
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from replicas.protocol.frames import FinishReason
from router.features.history.feature import HistoryOutcome
from router.features.responses.record import ResponseBounds
from router.features.responses.store import ResponseStore
from router.prompt.catalog import ModelCatalog
from tests.router import chat_templates, tiny_model
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says

MODEL = tiny_model.MODEL
TEMPLATES = {
    name: getattr(chat_templates, name)
    for name in ("QWEN_3", "QWEN_3_CODER", "QWEN_35", "GLM_46", "MINIMAX_M2", "HERMES", "LLAMA_31")
}
TEXTS = {
    "cut": '{"city": "Aarh',
    "quotes": '{"city": "the "best" of all"}',
    "list": '["Aarhus"]',
    "null": "null",
    "two objects": '{"city": "Aarhus"}{"city": "Rome"}',
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
QUESTION = "Is it warm?"


@functools.cache
def catalog(template: str) -> ModelCatalog:
    made = ModelCatalog(tiny_model.SECRET)
    made.add(tiny_model.card(context_length=4096), tiny_model.bundle(TEMPLATES[template]))
    return made


@pytest.fixture(params=TEMPLATES)
def template(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
async def server(template: str) -> AsyncIterator[HttpServer]:
    responses = ResponseStore(None, ResponseBounds(num_bytes=2**20))
    async with http_server(catalog=catalog(template), responses=responses) as running:
        yield running
    await responses.close()


def _chat(arguments: Any) -> tuple[str, dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "That is no JSON."},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    return "/v1/chat/completions", {"model": MODEL, "messages": messages, "tools": tools}


def _responses(arguments: Any) -> tuple[str, dict[str, Any]]:
    items = [
        {"role": "user", "content": QUESTION},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": "That is no JSON."},
    ]
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    return "/v1/responses", {"model": MODEL, "input": items, "tools": tools}


def _messages(arguments: Any) -> tuple[str, dict[str, Any]]:
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "That is no JSON.", "is_error": True}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    return "/v1/messages", {"model": MODEL, "max_tokens": 512, "messages": messages, "tools": tools}


def _gemini(arguments: Any) -> tuple[str, dict[str, Any]]:
    response = {"name": "weather", "response": {"error": "That is no JSON."}}
    contents = [
        {"role": "user", "parts": [{"text": QUESTION}]},
        {"role": "model", "parts": [{"functionCall": {"name": "weather", "args": arguments}}]},
        {"role": "user", "parts": [{"functionResponse": response}]},
    ]
    tools = [{"functionDeclarations": [{"name": "weather", "parametersJsonSchema": SCHEMA}]}]
    return f"/v1beta/models/{MODEL}:generateContent", {"contents": contents, "tools": tools}


DIALECTS = {"chat": _chat, "responses": _responses, "messages": _messages, "gemini": _gemini}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_arguments_that_are_no_object_are_shown_as_they_are(
    server: HttpServer, http: httpx.AsyncClient, template: str, dialect: str
) -> None:
    tokenizer = catalog(template).get(MODEL).tokenizer
    for text in TEXTS.values():
        forms = [text, [text], None] if text == TEXTS["list"] else [text]
        for arguments in forms:
            path, body = DIALECTS[dialect](arguments)
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, (arguments, answer.text)
            prompt = tokenizer.decode(server.dispatcher.generations[-1].token_ids)
            assert QUESTION in prompt
            shown = arguments if isinstance(arguments, str) and text != "null" else ""
            assert shown in prompt or json.dumps(shown)[1:-1] in prompt


BEGUN = {
    "QWEN_35": "<tool_call>\n<function=weather>\n<parameter=city>\nthe best",
    "QWEN_3": '<tool_call>\n{"name": "weather", "arguments": {"city": "the best',
}


def said_by(template: str, text: str, finish: FinishReason) -> list[int]:
    """The answer's tokens. Qwen 3.5's template has opened its reasoning."""
    tokens = catalog(template).get(MODEL).tokenizer.encode("hm</think>" * (template == "QWEN_35") + text)
    return tokens + [tiny_model.END_OF_TURN] * (finish is FinishReason.STOP)


@pytest.mark.parametrize("template", BEGUN, indirect=True)
@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.STOP])
@pytest.mark.parametrize("way", ["chat", "responses", "responses by id"])
async def test_an_answer_that_breaks_off_in_a_call_is_gone_on_from(
    server: HttpServer, http: httpx.AsyncClient, template: str, way: str, finish: FinishReason
) -> None:
    output = said_by(template, BEGUN[template], finish)
    server.dispatcher.script = says(output, finish=finish)
    is_whole = finish is FinishReason.STOP and template == "QWEN_35"
    arguments = '{"city": "the best' + '"}' * is_whole
    path, body = DIALECTS[way.split()[0]]("{}")
    history = body.get("messages") or body["input"]
    del history[1:]
    answer = (await http.post(path, json=body)).json()
    first = server.dispatcher.generations[-1].token_ids
    if way == "chat":
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert call["function"]["arguments"] == arguments
        history += [message, {"role": "tool", "tool_call_id": call["id"], "content": "No."}]
    else:
        (call,) = (item for item in answer["output"] if item["type"] == "function_call")
        assert (call["arguments"], call["status"]) == (arguments, "completed" if is_whole else "incomplete")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "No."}
        if way == "responses":
            history += [*answer["output"], result]
        else:
            body = {**body, "input": [result], "previous_response_id": answer["id"]}
    again = await http.post(path, json=body)
    assert again.status_code == 200, again.text
    prompt = server.dispatcher.generations[-1].token_ids
    end = [] if finish is FinishReason.STOP else [tiny_model.END_OF_TURN]
    expected = [*first, *output, *end]
    assert list(prompt[: len(expected)]) == expected
    assert server.history.num_prompts[HistoryOutcome.DRIFTED] == 1


BROKEN = {
    "QWEN_35": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "QWEN_3": '<tool_call>\n{"name": "weather", "arguments": {"city": "the "best" of all"}}\n</tool_call>',
}


@pytest.mark.parametrize("template", BROKEN, indirect=True)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_call_whose_arguments_are_no_json_is_not_finished(
    server: HttpServer, http: httpx.AsyncClient, template: str, dialect: str
) -> None:
    server.dispatcher.script = says(said_by(template, BROKEN[template], FinishReason.STOP))
    path, body = DIALECTS[dialect]("{}")
    whole = (await http.post(path, json=body)).text
    if dialect == "gemini":
        path = path.replace("generateContent", "streamGenerateContent?alt=sse")
    streamed = (await http.post(path, json=body | {"stream": True} if dialect != "gemini" else body)).text
    for text in (whole, streamed):
        match dialect:
            case "chat":
                assert '"finish_reason":"stop"' in text and '"finish_reason":"tool_calls"' not in text
            case "responses":
                assert '"status":"incomplete"' in text
                assert not re.search('"type":"function_call",[^}]*"status":"completed"', text)
            case "messages":
                assert '"stop_reason":"end_turn"' in text and '"stop_reason":"tool_use"' not in text
            case "gemini":
                assert '"finishReason":"MALFORMED_FUNCTION_CALL"' in text and "functionCall" not in text
