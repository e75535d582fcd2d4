"""What an answer's form is to be reaches the replica as a grammar, or the client as a refusal with a name."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.api import grammar_checks
from router.api.grammar_checks import GrammarChecks, WishedGrammar
from router.errors import InvalidRequest, RouterBusy
from tests.router import thinking_model, tiny_model
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
PLAIN: dict[str, Any] = {"model": "tiny", "prompt": ["Hello", "The quick"]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
LARGE = {"unknown": [0] * 10_000}


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with http_server(catalog=thinking_model.catalog()) as running:
        yield running


async def grammars(server: HttpServer, http: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
    server.dispatcher.script = says([tiny_model.END_OF_TURN])
    server.dispatcher.generations.clear()
    route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = await http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return [generation.sampling.grammar for generation in server.dispatcher.generations]


@pytest.mark.parametrize("large", [{}, LARGE])
async def test_formats_and_tool_choices_reach_the_replica_by_either_way(
    server: HttpServer, http: httpx.AsyncClient, large: dict[str, Any]
) -> None:
    strict = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    for fields, words in (
        ({"response_format": strict}, ("city",)),
        ({"response_format": {"type": "json_object"}}, ("object",)),
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"regex": "[0-9]{3}"}, ("[0-9]{3}",)),
        ({"ebnf": 'root ::= "a" | "b"'}, ('\\"a\\"', '\\"b\\"')),
    ):
        for body in (CHAT, PLAIN):
            for grammar in await grammars(server, http, body | fields | large):
                assert json.loads(grammar)["grammars"]
                assert all(word in grammar for word in words)
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        (grammar,) = await grammars(server, http, CHAT | {"tools": [TOOL], "tool_choice": choice} | large)
        assert "weather" in grammar and "city" in grammar and "</think>" in grammar
    for free in ({}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}):
        assert await grammars(server, http, CHAT | free | large) == [""]
    assert await grammars(server, http, PLAIN | large) == ["", ""]
    prewarm = {"response_format": strict, "prompt_cache_options": {"prewarm": True}}
    assert await grammars(server, http, CHAT | prewarm | large) == [""]


@pytest.mark.parametrize("large", [{}, LARGE])
async def test_what_cannot_be_followed_is_refused_by_its_field(
    server: HttpServer, http: httpx.AsyncClient, large: dict[str, Any]
) -> None:
    broken = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    strict = {"type": "function", "function": {"name": "f", "strict": True, "parameters": broken}}
    cases: list[tuple[dict[str, Any], str]] = [
        (CHAT | {"guided_json": broken}, "guided_json"),
        (CHAT | {"structured_outputs": {"regex": "(["}}, "structured_outputs.regex"),
        (PLAIN | {"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
        (CHAT | {"tools": [TOOL, strict]}, "tools[1].function.parameters"),
        (CHAT | {"functions": [strict["function"]]}, "functions[0].parameters"),
    ]
    for body, parameter in cases:
        route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = await http.post(route, json=body | large)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter), answer.text
    assert server.dispatcher.generations == []
    assert server.is_idle


async def test_a_long_grammar_is_checked_where_large_bodies_are(
    server: HttpServer, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_CHARACTERS", 10)
    for body in (CHAT, PLAIN | {"prompt": "Hello"}):
        (grammar,) = await grammars(server, http, body | {"guided_choice": ["yes", "no"]})
        assert "yes" in grammar


def _wished(text: str) -> WishedGrammar:
    whole = {"name": "answer", "lark_grammar": f'start: "{text}"\n'}
    return WishedGrammar(json.dumps({"grammars": [whole]}), "regex")


async def test_a_checked_grammar_is_remembered_and_only_so_many_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_KNOWN", 2)
    checked: list[str] = []
    check = WishedGrammar.checked
    monkeypatch.setattr(WishedGrammar, "checked", lambda wished: checked.append(wished.text) or check(wished))
    checks = GrammarChecks()
    for text in ("a", "b", "a", "c", "a", "b"):
        assert text in await checks.checked(_wished(text))
    assert checked == [_wished(text).text for text in ("a", "b", "c", "b")]
    await checks.checked(_wished("b"), owner=("tenant:acme", None))
    assert len(checked) == 5, "whose it is counts"
    checks.close()


async def test_only_so_many_wait_and_whoever_leaves_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 4)
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(
        WishedGrammar,
        "checked",
        lambda wished: asyncio.run_coroutine_threadsafe(gate.wait(), loop).result() and wished.text,
    )
    checks = GrammarChecks()
    waiting = [asyncio.create_task(checks.checked(_wished(str(number)))) for number in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(RouterBusy):
        await checks.checked(_wished("one too many"))
    waiting[-1].cancel()
    await asyncio.wait(waiting[-1:])
    another = asyncio.create_task(checks.checked(_wished("another")))
    await asyncio.sleep(0)
    gate.set()
    assert len(await asyncio.gather(*waiting[:-1], another)) == 4
    checks.close()


async def test_a_grammar_that_is_refused_is_not_remembered() -> None:
    checks = GrammarChecks()
    wished = WishedGrammar('{"grammars": [{"name": "answer", "lark_grammar": "start: ("}]}', "regex")
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            await checks.checked(wished)
    checks.close()


async def test_every_dialect_is_told_of_a_schema_in_its_own_words(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    broken = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    function = {"name": "f", "strict": True}
    for route, body in (
        (
            "/v1/responses",
            {"input": "Hello", "tools": [{"type": "function", **function, "parameters": broken}]},
        ),
        (
            "/v1/messages",
            {
                "messages": CHAT["messages"],
                "max_tokens": 9,
                "tools": [{**function, "input_schema": broken}],
                "tool_choice": {"type": "tool", "name": "f"},
            },
        ),
    ):
        answer = await http.post(route, json={"model": "tiny"} | body)
        assert answer.status_code == 400, answer.text
        assert "tools[" not in answer.text and "Pointer '/nowhere' does not exist" in answer.text
    assert server.dispatcher.generations == []
