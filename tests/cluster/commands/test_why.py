"""`kvasir why` as a tenant and as an operator run it: whose requests each is told of."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from cluster.cli import main
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


async def test_another_tenant_is_told_nothing(server: HttpServer, capsys: pytest.CaptureFixture[str]) -> None:
    answer = await asked(server)
    assert await why(server, BETA, answer, "--tenant", "acme") != 0
    assert capsys.readouterr().out == ""
