"""How long a client wants to wait for its answer to begin, on every dialect; and who may go first."""

from typing import Any

import httpx
import pytest

from router.errors import TooLate
from tests.router.http_server import HttpServer, http_server
from tests.router.quiet_fleet import QuietFleet
from tests.router.scripted_dispatch import says

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
PLAIN = {"model": "tiny", "prompt": "a"}
RESPONSE = {"model": "tiny", "input": "a"}
MESSAGE = {**CHAT, "max_tokens": 5}
CONTENTS = {"contents": [{"parts": [{"text": "a"}]}]}
WITH_FIELD = [("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN), ("/v1/responses", RESPONSE)]
ALL = [
    *WITH_FIELD,
    ("/v1/messages", MESSAGE),
    ("/v1beta/models/tiny:generateContent", CONTENTS),
]


async def post(
    server: HttpServer, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> httpx.Response:
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        return await client.post(path, json=body, headers=headers)


@pytest.mark.parametrize(("path", "body"), WITH_FIELD)
async def test_the_field_is_the_timeout_and_the_header_only_shortens_it(
    path: str, body: dict[str, Any]
) -> None:
    async with http_server(QuietFleet()) as server:
        server.dispatcher.script = says([80])
        for field, header, wanted in (
            (2.5, None, 2.5),
            (2.5, "4", 2.5),
            (2.5, "1.5", 1.5),
            (None, None, None),
        ):
            sent = body if field is None else {**body, "timeout": field}
            answer = await post(server, path, sent, None if header is None else {"x-kvasir-timeout": header})
            assert answer.status_code == 200, answer.text
            assert server.dispatcher.generations[-1].timeout_seconds == wanted


@pytest.mark.parametrize(("path", "body"), ALL)
async def test_the_header_is_one_on_every_dialect(path: str, body: dict[str, Any]) -> None:
    async with http_server(QuietFleet()) as server:
        server.dispatcher.script = says([80])
        answer = await post(server, path, body, {"x-kvasir-timeout": "0.25"})
        assert answer.status_code == 200, answer.text
        assert server.dispatcher.generations[-1].timeout_seconds == 0.25
        for wrong in ("0", "-1", "nan", "inf", "soon", "1e9", ""):
            answer = await post(server, path, body, {"x-kvasir-timeout": wrong})
            assert answer.status_code == 400, wrong
            assert "x-kvasir-timeout" in answer.text
        assert len(server.dispatcher.generations) == 1


async def test_who_cannot_be_served_in_time_is_told_when_to_come_back() -> None:
    async with http_server(QuietFleet()) as server:
        server.dispatcher.script = lambda _: [TooLate("too late", retry_after_seconds=12.3)]
        answer = await post(server, "/v1/chat/completions", CHAT)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "13")
        assert answer.json()["error"]["code"] == "too_late"


async def priority_of(server: HttpServer, path: str, body: dict[str, Any], asked: int | None) -> int:
    server.dispatcher.script = says([65])
    assert (await post(server, path, {**body, "priority": asked})).status_code == 200
    return server.dispatcher.generations[-1].submit.priority


@pytest.mark.parametrize(("path", "body"), WITH_FIELD[:2])
async def test_a_clients_priority_is_ignored_without_a_word(path: str, body: dict[str, Any]) -> None:
    async with http_server() as server:
        for asked in (-(2**31 - 1), -1, 5, None):
            assert await priority_of(server, path, body, asked) == 0


@pytest.mark.parametrize(("path", "body"), WITH_FIELD[:2])
async def test_it_counts_where_the_operator_has_allowed_it(path: str, body: dict[str, Any]) -> None:
    async with http_server(client_priority=True) as server:
        assert await priority_of(server, path, body, -7) == -7
        assert await priority_of(server, path, body, None) == 0
