"""`kvasir why` as a tenant and as an operator run it: whose requests each is told of."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from cluster.cli import main
from cluster.commands.explain import IN_BYTES
from cluster.commands.why import program_lines, render
from tests.router.features.api_keys.some_keys import ACME, BETA, OPERATOR, bearer, some_keys
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says
from tests.router.tiny_model import MODEL

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "the quick brown fox jumps. " * 9}]}


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with http_server(keys=some_keys()) as running:
        running.dispatcher.script = says([80, 81, 2])
        yield running


async def asked(server: HttpServer) -> str:
    """A request of acme's."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=bearer(ACME))
    return str(answer.json()["id"])


async def why(server: HttpServer, key: str, *words: str) -> int:
    return await asyncio.to_thread(main, ["why", *words, "--url", server.url, "--api-key", key])


async def test_an_operator_is_told_of_a_tenants_request_by_the_tenants_name(
    server: HttpServer, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = await asked(server)
    assert await why(server, OPERATOR, answer, "--tenant", "acme") == 0
    assert capsys.readouterr().out.startswith(f"{answer}: {MODEL}, chat_completions\n")
    assert await why(server, OPERATOR, answer) != 0
    assert "--tenant" in capsys.readouterr().err
    assert await why(server, OPERATOR, answer, "--tenant", "a/../acme") != 0
    assert "404" in capsys.readouterr().err


async def test_what_the_engine_does_not_say_is_said(
    server: HttpServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.dispatcher.script = says([80, 2], num_cached_tokens=None)
    answer = await asked(server)
    assert await why(server, OPERATOR, answer, "--tenant", "acme") == 0
    assert "\n  unknown: the engine at replica-7 does not say how many of " in capsys.readouterr().out


async def test_another_tenant_is_told_nothing(server: HttpServer, capsys: pytest.CaptureFixture[str]) -> None:
    answer = await asked(server)
    assert await why(server, BETA, answer, "--tenant", "acme") != 0
    assert capsys.readouterr().out == ""


def test_the_size_of_large_blocks_and_the_unit_are_told() -> None:
    prompt = {
        **{"outcome": "miss", "replica": None, "block_size": 1056, "prompt_tokens": 300, "cached_tokens": 0},
        **{"cached_tokens_by_tier": {}, "lost_tokens": 0, "lost_ms": None, "nearest": None, "place": None},
        "spans": [{"cause": "below_a_block", "start": 0, "end": 300, "replica": None, "at": None}],
    }
    found = {"answer_id": "a", "request_id": None, "model": "m", "route": "completions", "error": None}
    said = "\n".join(render({**found, "prompts": [prompt]}))
    assert "tokens 1 to 300 do not fill a block of 1,056 tokens" in said and IN_BYTES not in said
    assert [*render({**found, "prompts": [prompt], "unit": "bytes"})][1] == f"  {IN_BYTES}"


PROGRAM = {
    **{"source": "codex", "field": "session-id", "session": "s-1", "agent": "reader"},
    **{"is_side_call": False, "turn": 1200, "home": "replica-1", "tokens_beyond_room": 0},
    **{"waited_seconds": 0.0, "programs_admitted": 0},
}


def test_the_program_of_a_request_is_shown_with_its_home_and_its_wait() -> None:
    def lines(**more: object) -> list[str]:
        return [line.strip() for line in program_lines(PROGRAM | more, "replica-1")]

    turn = 'turn 1,200 of program "s-1" of codex, by session-id'
    assert lines() == [f'{turn}, agent "reader"', "at its program's home, replica-1"]
    assert lines(agent=None, home=None, waited_seconds=12.34, programs_admitted=31) == [
        turn,
        "it had no home yet",
        "waited 12.3 s until its program might run: 31 programs had all the room",
    ]
    assert lines(home="replica-0")[1] == "it left its program's home, replica-0"
    assert lines(home="replica-0", tokens_beyond_room=12_345)[1].endswith(
        "live programs need 12,345 tokens more than it has room for"
    )
    assert lines(is_side_call=True) == [
        turn.replace("turn 1,200", "a call beside the turns") + ', agent "reader"'
    ]
