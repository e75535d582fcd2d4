"""What operators are told of any tenant's requests, by the tenant's name, and who is told nothing."""

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.router.features.api_keys.some_keys import ACME, BETA, OPERATOR, bearer, some_keys
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says
from tests.router.tiny_model import MODEL

WORDS = "the quick brown fox jumps over the lazy dog and sleeps. " * 6
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": WORDS}]}


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with http_server(keys=some_keys()) as running:
        running.dispatcher.script = says([80, 81, 2])
        yield running


async def test_an_operator_is_told_what_the_tenant_itself_is_told_without_text(
    http: httpx.AsyncClient,
) -> None:
    await http.post("/v1/chat/completions", json=CHAT, headers=bearer(ACME))
    changed = {**CHAT, "messages": [{"role": "user", "content": WORDS.replace("lazy", "busy", 1)}]}
    answer = (await http.post("/v1/chat/completions", json=changed, headers=bearer(ACME))).json()["id"]
    told = await http.get(f"/explain/tenants/acme/{answer}", headers=bearer(OPERATOR))
    assert told.status_code == 200, told.text
    (prompt,) = told.json()["prompts"]
    assert told.json()["answer_id"] == answer and prompt["cause"]
    assert prompt["place"]["path"] == "messages[0].content"
    assert not any(word in told.text for word in ("quick", "lazy", "busy"))


@pytest.mark.parametrize(
    ("tenant", "key", "status"),
    [("acme", BETA, 403), ("acme", ACME, 403), ("beta", OPERATOR, 404), ("nobody", OPERATOR, 404)],
)
async def test_others_and_other_names_are_told_nothing(
    http: httpx.AsyncClient, tenant: str, key: str, status: int
) -> None:
    answer = (await http.post("/v1/chat/completions", json=CHAT, headers=bearer(ACME))).json()["id"]
    told = await http.get(f"/explain/tenants/{tenant}/{answer}", headers=bearer(key))
    assert told.status_code == status, told.text
    known = await http.get("/explain/tenants/acme/unknown", headers=bearer(OPERATOR))
    assert known.status_code == 404
    if status == 404:
        assert told.text.replace(answer, "unknown") == known.text


async def test_who_may_not_see_the_page_is_told_nothing_either() -> None:
    async with http_server(admin_access="nobody") as server, httpx.AsyncClient(base_url=server.url) as http:
        answer = (await http.post("/v1/chat/completions", json=CHAT)).json()["id"]
        assert (await http.get(f"/explain/tenants/default/{answer}")).status_code == 403
