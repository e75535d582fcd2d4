"""What an answer's form is to be reaches the replica as a grammar, or the client as a refusal with a name."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.answers.grammar_check import CheckedGrammar, WishedGrammar
from router.api.api_request import ApiRequest
from router.caller import CALLER, OPEN_CALLER, Caller, Tenant
from router.errors import InvalidRequest, RouterBusy
from router.large_bodies import grammar_checks
from router.large_bodies.grammar_checks import GrammarChecks, check
from router.large_bodies.jobs import Bounds
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


async def _worked_out(wished: WishedGrammar) -> CheckedGrammar:
    return check(wished)


async def test_a_checked_grammar_is_remembered_and_only_so_many_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_KNOWN", 2)
    worked_out: list[str] = []

    async def work_out(wished: WishedGrammar) -> CheckedGrammar:
        worked_out.append(wished.text)
        return check(wished)

    checks = GrammarChecks(work_out)
    for text in ("a", "b", "a", "c", "a", "b"):
        assert text in (await checks.checked(_wished(text))).text
    assert worked_out == [_wished(text).text for text in ("a", "b", "c", "b")]
    assert (await checks.checked(_wished("b"), namespace=("tenant:acme", None))).seconds > 0
    assert len(worked_out) == 5, "whose namespace it is counts"
    known = await checks.checked(_wished("b"), namespace=("tenant:acme", None))
    assert known.seconds == 0 and known.num_bytes > 0


async def test_a_flood_of_grammars_pushes_out_its_own_whatever_its_salts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_KNOWN", 4)
    checks = GrammarChecks(_worked_out)
    await checks.checked(_wished("quiet"), ("default", None), "10.0.0.1")
    for salt in range(8):
        await checks.checked(_wished("flood"), ("default", str(salt)), "10.0.0.2")
    again = await checks.checked(_wished("quiet"), ("default", None), "10.0.0.1")
    latest = await checks.checked(_wished("flood"), ("default", "7"), "10.0.0.2")
    assert again.seconds == latest.seconds == 0


async def test_a_request_without_a_key_takes_the_share_of_its_address(
    server: HttpServer, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: list[str] = []

    async def checked(self: GrammarChecks, wished: WishedGrammar, _: object, owner: str) -> CheckedGrammar:
        owners.append(owner)
        return check(wished)

    monkeypatch.setattr(GrammarChecks, "checked", checked)
    for body in (CHAT, PLAIN | {"prompt": "Hello"}):
        await grammars(server, http, body | {"guided_choice": ["yes", "no"]})
    assert owners == ["127.0.0.1"] * 2


def test_without_keys_addresses_take_turns_and_with_keys_tenants() -> None:
    keyed = Caller(tenant=Tenant(name="acme"), key_id="k1")
    for caller, address, owner in (
        (OPEN_CALLER, "10.0.0.1", "10.0.0.1"),
        (OPEN_CALLER, None, ""),
        (keyed, "10.0.0.1", "tenant:acme"),
    ):
        assert ApiRequest({CALLER: caller, "client": address and (address, 1)}).share_owner == owner


class Gate:
    """Grammars that are worked out once it is open."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.begun: list[str] = []

    async def work_out(self, wished: WishedGrammar) -> CheckedGrammar:
        self.begun.append(wished.text)
        await self.opened.wait()
        return CheckedGrammar(wished.text)


async def test_only_so_many_wait_and_whoever_leaves_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 2)
    gate = Gate()
    checks = GrammarChecks(gate.work_out)
    waiting = [asyncio.create_task(checks.checked(_wished(str(number)))) for number in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(RouterBusy):
        await checks.checked(_wished("one too many"))
    for leaving in (waiting[0], waiting[-1]):
        leaving.cancel()
        await asyncio.wait([leaving])
    another = asyncio.create_task(checks.checked(_wished("another")))
    await asyncio.sleep(0)
    gate.opened.set()
    assert len(await asyncio.gather(*waiting[1:-1], another)) == 3


async def test_a_tenant_that_floods_waits_behind_itself_and_nobody_else_does() -> None:
    gate = Gate()
    checks = GrammarChecks(gate.work_out)
    flood = [
        asyncio.create_task(checks.checked(_wished(f"f{number}"), owner="flood"))
        for number in range(2 * grammar_checks.MAX_WAITING)
    ]
    await asyncio.sleep(0)
    other = asyncio.create_task(checks.checked(_wished("other"), owner="other"))
    await asyncio.sleep(0)
    assert gate.begun == [_wished(text).text for text in ("f0", "f1", "other")]
    next_other = asyncio.create_task(checks.checked(_wished("next"), owner="other"))
    await asyncio.sleep(0)
    gate.opened.set()
    await asyncio.wait([other, next_other])
    assert gate.begun.index(_wished("next").text) <= 4
    answers = await asyncio.gather(*flood, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert all(isinstance(answer, RouterBusy) for answer in refused)
    assert len(refused) == grammar_checks.MAX_WAITING - 2 + 1


async def test_who_waits_too_long_is_told_that_the_router_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "WAIT_SECONDS", 0.01)
    gate = Gate()
    checks = GrammarChecks(gate.work_out)
    working = [asyncio.create_task(checks.checked(_wished(str(number)))) for number in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(RouterBusy) as caught:
        await checks.checked(_wished("late"))
    assert caught.value.retry_after_seconds > 0
    gate.opened.set()
    await asyncio.gather(*working)
    assert await checks.checked(_wished("later"))


async def test_a_grammar_that_is_refused_is_not_remembered() -> None:
    checks = GrammarChecks(_worked_out)
    wished = WishedGrammar('{"grammars": [{"name": "answer", "lark_grammar": "start: ("}]}', "regex")
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            await checks.checked(wished)


async def test_schemas_that_nothing_in_llguidance_bounds_are_refused_and_hold_nobody_up() -> None:
    async with (
        http_server(catalog=thinking_model.catalog(), bounds=Bounds(cpu_seconds=1.0)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
    ):
        divisor = CHAT | {"guided_json": {"type": "integer", "multipleOf": 99999937}}
        exploding = [
            asyncio.create_task(client.post("/v1/chat/completions", json=divisor | {"seed": number}))
            for number in range(3)
        ]
        for answer in await asyncio.gather(*exploding):
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "guided_json"
            assert "working it out takes more than 0.5 s" in answer.json()["error"]["message"]
        (grammar,) = await grammars(server, client, CHAT | {"guided_json": SCHEMA})
        assert "city" in grammar
