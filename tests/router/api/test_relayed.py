"""What a server of bodies is sent: what was read of a client's body, within what its sender may."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from replicas.openai_engine.bodies import body_to_send
from replicas.protocol.frames import BodyForm
from router.caller import Caller, Limits, Right, Tenant
from router.errors import KeyFault
from router.limits.admission import demand_of
from router.prompt.catalog import ModelCatalog
from tests.router import tiny_model
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says

TOLD_CONTEXT = 400
PASSED = (
    "verbosity",
    "keep_alive",
    "stream_options.odd",
    "tools.web_search_20250305",
    "kv_transfer_params",
    "vllm_xargs",
    "priority",
    "cache_salt",
)
"""The last four are no fields to list: two are refused all the same, and two are sent as they count."""

ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "completion": ("/v1/completions", {"prompt": "hi", "max_tokens": 16}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}),
}
NOT_READ: dict[str, Any] = {
    **{
        "MAX_TOKENS": 10**5,
        "Messages": [],
        "Prompt": "other",
        "MODEL": "other",
        "bootstrap_host": "10.0.0.1",
    },
    **{"cache_prompt": False, "data_parallel_rank": 3, "id_slot": 0, "lora": [{"id": 0}], "models": ["dear"]},
    **{"n_cmpl": 8, "n_probs": 10**5, "provider": {"order": ["x"]}, "request_id": "x", "verbose": True},
    **{"service_tier": "priority", "store": True, "mcp_servers": [{"url": "http://10.0.0.1"}]},
}


class ByContext:
    """Keys that are the number of tokens of their context, with a right to priorities behind a "p"."""

    def find(self, key: str, now: float) -> Caller | KeyFault:
        limits = Limits(max_context=int(key.strip("p")))
        rights = frozenset({Right.PRIORITY} if key.endswith("p") else ())
        return Caller(tenant=Tenant(name="acme"), key_id="k", limits=limits, rights=rights)


def relayed_catalog() -> ModelCatalog:
    made = ModelCatalog(tiny_model.SECRET)
    card = tiny_model.card(context_length=2**20)
    made.add(
        replace(card, takes_bodies=tuple(BodyForm), told_context=TOLD_CONTEXT),
        tiny_model.bundle(),
    )
    return made


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with http_server(catalog=relayed_catalog(), keys=ByContext(), pass_fields=list(PASSED)) as running:
        running.dispatcher.script = says([80])
        yield running


async def sent_for(server: HttpServer, kind: str, body: object, key: str = "1000000") -> dict[str, Any]:
    """What a server is sent by a replica, but for the model's name."""
    path, _ = ROUTES[kind]
    content = body if isinstance(body, str) else json.dumps(body)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        answer = await http.post(path, content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    body = body_to_send(BodyForm(kind), server.dispatcher.generations[-1].submit.body, "served").content
    sent = json.loads(body, object_pairs_hook=_without_doubles)
    assert isinstance(sent, dict)
    return {name: value for name, value in sent.items() if name != "model"}


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize("padding", [0, 300_000], ids=["light", "large"])
@pytest.mark.parametrize("kind", ROUTES)
async def test_what_was_not_read_is_sent_only_where_it_is_listed(
    server: HttpServer, kind: str, padding: int
) -> None:
    text = "hi" + " " * padding
    asked = json.loads(json.dumps(ROUTES[kind][1]).replace('"hi"', json.dumps(text)))
    known = {**asked, "temperature": 0.5, "seed": 7, "stream": True}
    body = {"model": tiny_model.MODEL, **known, **NOT_READ, "verbosity": "low", "keep_alive": 0}
    body |= {
        "priority": -100,
        "cache_salt": "mine",
        "stream_options": {"include_usage": True, "odd": 1, "o": 2},
    }
    options = {"include_usage": True, "odd": 1}
    expected = {**known, "verbosity": "low", "keep_alive": 0, "stream_options": options}
    if kind == "messages":
        del body["stream_options"], expected["stream_options"]
    assert await sent_for(server, kind, body) == expected
    assert (await sent_for(server, kind, body, "1000000p"))["priority"] == -100


@pytest.mark.parametrize("name", ["kv_transfer_params", "kv\\u005ftransfer_params", "vllm_xargs"])
@pytest.mark.parametrize("kind", ROUTES)
async def test_fields_of_servers_alone_are_refused_whatever_is_listed(
    server: HttpServer, kind: str, name: str
) -> None:
    path, asked = ROUTES[kind]
    body = json.dumps({"model": tiny_model.MODEL, **asked})[:-1] + f', "{name}": {{"remote_host": "a"}}}}'
    headers = {"authorization": "Bearer 1000000", "content-type": "application/json"}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        answer = await http.post(path, content=body, headers=headers)
    assert answer.status_code == 400 and "is not supported" in answer.text
    assert not server.dispatcher.generations


@pytest.mark.parametrize("kind", ROUTES)
async def test_of_two_fields_with_a_name_that_is_sent_which_was_read(server: HttpServer, kind: str) -> None:
    asked = ROUTES[kind][1]
    prompt = next(name for name in asked if name != "max_tokens")
    body = json.dumps({"model": tiny_model.MODEL, **asked})
    doubled = f'{{"{prompt}":[],"max_tokens":100000,"n":16,{body[1:-1]},"max_tokens":3,"n":1}}'
    sent = await sent_for(server, kind, doubled)
    assert sent == {prompt: asked[prompt], "max_tokens": 3, **({} if kind == "messages" else {"n": 1})}


async def test_names_inside_messages_and_tools_are_those_that_were_read(server: HttpServer) -> None:
    schema = {"type": "object", "properties": {"City": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"City":"X"}'}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "c", "content": "sunny"})
    odd = json.loads(json.dumps({"messages": messages, "tools": [tool]}))
    odd["messages"][0] |= {"Content": "another prompt", "conten\u017f": "x", "CONTENT": "x"}
    odd["tools"][0]["function"]["Name"] = "g"
    sent = await sent_for(server, "chat", {"model": tiny_model.MODEL, **odd, "max_tokens": 3})
    assert sent == {"messages": messages, "tools": [tool], "max_tokens": 3}


async def test_tools_that_run_at_the_server_are_sent_only_where_they_are_listed(server: HttpServer) -> None:
    own = {"name": "f", "input_schema": {"type": "object", "properties": {"Path": {}}}}
    listed = {"type": "web_search_20250305", "name": "web_search"}
    others = [{"type": "web_fetch_20250910", "name": "web_fetch"}, {"type": "mcp_toolset", "name": "x"}]
    addition = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": others[0]}}
    content = [{"type": "text", "text": "hi"}]
    base = {"model": tiny_model.MODEL, "max_tokens": 5}
    asked = {**base, "messages": [{"role": "user", "content": [*content, addition]}]}
    choice = {"tool_choice": {"type": "auto"}}
    sent = await sent_for(server, "messages", {**asked, **choice, "tools": [own, *others, listed]})
    expected = {"max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    assert sent == {**expected, **choice, "tools": [own, listed]}
    assert await sent_for(server, "messages", {**asked, **choice, "tools": others}) == expected


@pytest.mark.parametrize(
    ("kind", "asked", "key", "sent"),
    [
        ("chat", {}, "200", {"max_tokens": None, "max_completion_tokens": None}),
        ("chat", {"max_tokens": None}, "200", {"max_tokens": None, "max_completion_tokens": None}),
        ("chat", {}, str(TOLD_CONTEXT), {}),  # the server bounds it by itself
        ("chat", {"max_tokens": 9}, "200", {"max_tokens": 9}),
        (
            "chat",
            {"max_completion_tokens": 9, "max_tokens": 10**5},
            "200",
            {"max_completion_tokens": 9, "max_tokens": 9},
        ),
        (
            "chat",
            {"prompt_cache_options": {"prewarm": True}},
            "400",
            {"max_completion_tokens": 1, "max_tokens": 1},
        ),
        ("completion", {"max_tokens": None}, "100000", {"max_tokens": 16}),
        ("completion", {"max_tokens": 0}, "200", {"max_tokens": 0}),
        ("messages", {"max_tokens": 10**5}, "200", {"max_tokens": None}),
        ("messages", {"max_tokens": 9}, "200", {"max_tokens": 9}),
        ("messages", {"max_tokens": 0}, "200", {"max_tokens": 0}),
    ],
)
async def test_an_answer_has_no_more_tokens_than_its_tenant_has_left(
    server: HttpServer, kind: str, asked: dict[str, Any], key: str, sent: dict[str, int | None]
) -> None:
    """None is what is left."""
    body = {"model": tiny_model.MODEL, **ROUTES[kind][1], **asked}
    found = await sent_for(server, kind, body, key)
    generation = server.dispatcher.generations[-1]
    left = 200 - len(generation.token_ids)
    lengths = {name: value for name, value in found.items() if name.startswith("max_")}
    assert lengths == {name: left if value is None else value for name, value in sent.items()}


async def test_every_choice_counts(server: HttpServer) -> None:
    await sent_for(server, "chat", {"model": tiny_model.MODEL, **ROUTES["chat"][1], "n": 7, "max_tokens": 2})
    (generation,) = server.dispatcher.generations[-1:]
    assert (generation.num_choices, demand_of([generation]).num_sequences) == (1, 7)


async def test_a_body_that_cannot_be_sent_on_is_refused(server: HttpServer) -> None:
    path, asked = ROUTES["chat"]
    deep: list[Any] = []
    for _ in range(400):
        deep = [deep]
    message = {"role": "user", "content": "hi", "odd": deep}
    body = {"model": tiny_model.MODEL, **asked, "messages": [message]}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        for content, words in (
            (
                json.dumps({**body, "messages": asked["messages"], "truncate_prompt_tokens": 1}),
                "whole prompts",
            ),
            (json.dumps(body)[:-1] + ',"verbosity":1e999}', "cannot be sent on"),
        ):
            answer = await http.post(path, content=content, headers={"authorization": "Bearer 100000"})
            assert answer.status_code == 400 and words in answer.json()["error"]["message"]
