"""Programs over a real socket: what agents' requests are named, and what operators are told of them."""

import time
from typing import Any

import httpx
import pytest

from replicas.protocol.status import ReplicaId
from router.caller import DEFAULT_TENANT
from router.programs.book import STRANGE_IN_A_ROW, ProgramBook, Used
from router.programs.name import ProgramName
from router.programs.pauses import Pause
from tests.router.http_server import http_server
from tests.router.scripted_dispatch import says
from tests.router.tiny_model import MODEL

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
FUNCTION = {"name": "read", "parameters": SCHEMA}
MESSAGES = [{"role": "user", "content": "Fix it."}]
CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
RESPONSES = {"model": MODEL, "input": "Fix it.", "max_output_tokens": 16}
CHATS, ANTHROPIC, CODEX = "/v1/chat/completions", "/v1/messages", "/v1/responses"

AGENTS = [
    (
        *(ANTHROPIC, {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, CHAT),
        [{"name": "read", "input_schema": SCHEMA}],
        ProgramName("claude-code", "x-claude-code-session-id", "s", "a", ""),
    ),
    (
        *(CODEX, {"session-id": "s", "thread-id": "s"}, RESPONSES, [{"type": "function", **FUNCTION}]),
        ProgramName("codex", "session-id", "s"),
    ),
    (
        *(CHATS, {"x-session-affinity": "s", "x-parent-session-id": "p"}, CHAT, CHAT_TOOLS),
        ProgramName("opencode", "x-session-affinity", "s", "", "", "p"),
    ),
    (
        *(CHATS, {"x-kvasir-program": "s"}, CHAT, CHAT_TOOLS),
        ProgramName("kvasir", "x-kvasir-program", "s"),
    ),
]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("path", "headers", "body", "tools", "name"), AGENTS)
async def test_the_request_of_an_agent_is_a_turn_of_its_program(
    path: str,
    headers: dict[str, str],
    body: dict[str, Any],
    tools: list[Any],
    name: ProgramName,
    is_streamed: bool,
) -> None:
    async with http_server(programs=ProgramBook()) as server:
        server.dispatcher.script = says([65, 66])
        async with httpx.AsyncClient(base_url=server.url, timeout=60, headers=headers) as client:
            for offered in ({"tools": tools}, {}):
                answer = await client.post(path, json={**body, "stream": is_streamed, **offered})
                assert answer.status_code == 200, answer.text
            two = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 2}
            assert (await client.post("/v1/completions", json=two)).status_code == 200
        turn, beside, *unnamed = (each.program for each in server.dispatcher.generations)
        assert turn == name
        assert beside is not None and beside.is_side == (name.source != "kvasir")
        assert unnamed == [None, None]
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            metrics = (await client.get("/metrics")).text
        assert f'router_programs_named_total{{source="{name.source}"}} 2.0' in metrics


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


async def test_the_book_has_how_a_turn_ended_and_a_router_without_one_names_nothing() -> None:
    book, name = ProgramBook(), ProgramName("kvasir", "x-kvasir-program", "s")
    headers = {"x-kvasir-program": "s"}
    async with http_server(programs=book) as server, http_server(off=("programs",)) as without:
        async with httpx.AsyncClient(timeout=60, headers=headers) as client:
            for each in (server, without):
                each.dispatcher.script = says([65, 66])
                assert (await client.post(each.url + CHATS, json=CHAT)).status_code == 200
            turn = book.begin(MODEL, DEFAULT_TENANT, name, 9, [], time.monotonic())
            book.end(turn, time.monotonic())
            assert turn.program.pause is Pause.UNKNOWN
            await client.post(server.url + CHATS, json=CHAT)
            await server.wait_idle()
            assert "router_programs" not in (await client.get(without.url + "/metrics")).text
            assert (await client.get(without.url + "/live/programs")).status_code == 404
        assert [each.program for each in without.dispatcher.generations] == [None]
        assert turn.program.pause is Pause.USER
