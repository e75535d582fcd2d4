"""Requests of real dialects, over a socket and through a gateway: which program each is a turn of."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest

from replicas.protocol.status import ReplicaId
from router.caller import DEFAULT_TENANT
from router.generation import Generation
from router.programs.book import STRANGE_IN_A_ROW, ProgramBook, Used
from router.programs.name import ProgramName
from router.programs.pauses import Pause
from tests.router.http_server import http_server
from tests.router.picker.conftest import A, picking_fleet
from tests.router.scripted_dispatch import Step, says
from tests.router.tiny_model import MODEL

S = "0b5f7f0e-3c5e-4a59-9a0a-8f5a3a1f2b1c"
SCHEMA = {"type": "object"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "How are you?"}], "max_tokens": 2}
CHAT_TOOLS = CHAT | {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}
CLAUDE_TOOLS = CHAT | {"tools": [{"name": "f", "input_schema": SCHEMA}]}
RESPONSE: Mapping[str, Any] = {
    **{"model": "tiny", "input": "How are you?", "max_output_tokens": 16, "store": False},
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
}
USER = json.dumps({"device_id": "d", "session_id": S})
CLAUDE = {"X-Claude-Code-Session-Id": S, "anthropic-version": "2023-06-01"}
CODEX = {"session-id": S, "thread-id": S, "x-codex-turn-metadata": json.dumps({"request_kind": "turn"})}
OPENCODE = {"x-session-affinity": "ses_2", "X-Session-Id": "ses_2", "x-parent-session-id": "ses_1"}
OWN = {"x-kvasir-program": "p", "x-kvasir-agent": "a"}
COMPLETION = {"model": "tiny", "prompt": "x", "max_tokens": 2}

CASES = [
    ("/v1/messages", CLAUDE, CLAUDE_TOOLS, ProgramName("claude-code", "x-claude-code-session-id", S)),
    ("/v1/messages", CLAUDE, CHAT, ProgramName("claude-code", "x-claude-code-session-id", S, is_side=True)),
    (
        "/v1/messages",
        {},
        CLAUDE_TOOLS | {"metadata": {"user_id": USER}},
        ProgramName("claude-code", "metadata.user_id", S),
    ),
    ("/v1/responses", CODEX, RESPONSE, ProgramName("codex", "session-id", S)),
    (
        "/v1/responses",
        {},
        {**RESPONSE, "prompt_cache_key": S},
        ProgramName("prompt_cache_key", "prompt_cache_key", S),
    ),
    (
        "/v1/chat/completions",
        OPENCODE,
        CHAT_TOOLS,
        ProgramName("opencode", "x-session-affinity", "ses_2", "", "", "ses_1"),
    ),
    ("/v1/chat/completions", {}, CHAT, None),
    ("/v1/completions", OWN, COMPLETION, ProgramName("kvasir", "x-kvasir-program", "p", "a", "")),
]
SEVERAL = ("/v1/completions", OWN, COMPLETION | {"prompt": ["x", "y"]}, None)


@pytest.mark.parametrize(("path", "headers", "body", "expected"), [*CASES, SEVERAL])
@pytest.mark.parametrize("off", [(), ("programs",)])
async def test_a_request_is_dispatched_under_its_programs_name(
    path: str,
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    expected: ProgramName | None,
    off: tuple[str, ...],
) -> None:
    seen: list[ProgramName | None] = []

    def answer(generation: Generation) -> Sequence[Step]:
        seen.append(generation.program)
        return says([65, 66])(generation)

    async with http_server(off=off) as server, httpx.AsyncClient(base_url=server.url) as client:
        server.dispatcher.script = answer
        assert (await client.post(path, headers=headers, json=body)).status_code == 200
        told = (await client.get("/live/programs")).status_code
    assert seen[0] == (None if off else expected)
    assert told == (404 if off else 200)


@pytest.mark.parametrize(("path", "headers", "body", "expected"), CASES)
async def test_a_gateways_request_is_picked_under_its_programs_name(
    path: str, headers: Mapping[str, str], body: Mapping[str, Any], expected: ProgramName | None
) -> None:
    async with picking_fleet() as picking:
        picking.join("a", A)
        lower = {name.lower(): value for name, value in headers.items()}
        async with picking.gateway.ask(path, body, headers=lower) as asked:
            await asked.until_decided()
            await asked.answers({":status": "200", "content-type": "application/json"}, b'{"id":"x"}')
        await picking.until_idle()
        assert picking.ended.served[0].prompts[0].generation.program == expected


async def test_salts_keep_programs_apart() -> None:
    names: list[ProgramName | None] = []

    def answer(generation: Generation) -> Sequence[Step]:
        names.append(generation.program)
        return says([65])(generation)

    async with http_server() as server, httpx.AsyncClient(base_url=server.url) as client:
        server.dispatcher.script = answer
        for salt in ({}, {"cache_salt": "one"}, {"cache_salt": "two"}, {"cache_salt": "one"}):
            await client.post("/v1/chat/completions", headers=OWN, json=CHAT | salt)
    keys = [name.key("m", "t") for name in names if name is not None]
    assert len(keys) == 4 and len(set(keys)) == 3 and keys[1] == keys[3]


async def test_operators_are_told_of_each_program_unless_nobody_may_look() -> None:
    book, name = ProgramBook(), ProgramName("codex", "session-id", "s", "a", "", salt="5a")
    now = time.monotonic()
    for agent in range(3):
        turn = book.begin(MODEL, "acme", name, 100 + agent, [], now - 50)
        book.routed(turn, ReplicaId("replica-3"), now - 40)
        book.end(turn, now - 30)
    program = turn.program
    book.admit(program, 102, now)
    book.waits(program, now - 20)
    program.used = Used(900, 800, 70)
    program.num_strange = STRANGE_IN_A_ROW
    async with (
        http_server(programs=book) as server,
        http_server(programs=book, admin_access="nobody") as closed,
        httpx.AsyncClient(timeout=60) as client,
    ):
        assert (await client.get(closed.url + "/live/programs")).status_code == 403
        found = (await client.get(server.url + "/live/programs")).json()
    (told,) = found["programs"]
    assert found["num_programs"] == 1
    assert told.pop("waits_seconds") == pytest.approx(20, abs=10)
    assert told.pop("paused_seconds") == pytest.approx(30, abs=10)
    assert told == {
        **{"tenant": "acme", "model": MODEL, "source": "codex", "session": "s", "agent": "a"},
        **{"state": "waiting", "may_run": True, "home": "replica-3", "tokens": 102, "turns": 3},
        **{"attained_seconds": 30.0, "is_shared_name": True, "salt": "5a"},
        **{"prompt_tokens": 900, "cached_tokens": 800, "output_tokens": 70},
    }


async def test_the_book_has_how_a_turn_ended() -> None:
    book, name = ProgramBook(), ProgramName("kvasir", "x-kvasir-program", "s")
    headers = {"x-kvasir-program": "s"}
    async with (
        http_server(programs=book) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60, headers=headers) as client,
    ):
        server.dispatcher.script = says([65, 66])
        turn = book.begin(MODEL, DEFAULT_TENANT, name, 9, [], time.monotonic())
        book.end(turn, time.monotonic())
        assert turn.program.pause is Pause.UNKNOWN
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        await server.wait_idle()
        assert 'router_programs_named_total{source="kvasir"} 1.0' in (await client.get("/metrics")).text
    assert turn.program.pause is Pause.USER
