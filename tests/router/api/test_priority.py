"""Who may go first: nobody by asking, unless the operator has allowed it."""

import httpx
import pytest

from tests.router import tiny_model
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says

BODIES = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}


async def priority_of(server: HttpServer, path: str, asked: int | None) -> int:
    server.dispatcher.script = says([65])
    body = {"model": tiny_model.MODEL, "priority": asked, **BODIES[path]}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        assert (await http.post(path, json=body)).status_code == 200
    return server.dispatcher.generations[-1].submit.priority


@pytest.mark.parametrize("path", BODIES)
async def test_a_clients_priority_is_ignored_without_a_word(path: str) -> None:
    async with http_server() as server:
        for asked in (-(2**31 - 1), -1, 5, None):
            assert await priority_of(server, path, asked) == 0


@pytest.mark.parametrize("path", BODIES)
async def test_it_counts_where_the_operator_has_allowed_it(path: str) -> None:
    async with http_server(client_priority=True) as server:
        assert await priority_of(server, path, -7) == -7
        assert await priority_of(server, path, None) == 0
