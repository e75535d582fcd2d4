"""Who is let in by which header, and that nothing of one tenant is another's."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.router import tiny_model
from tests.router.features.api_keys.some_keys import ACME, BETA, GAMMA, OPERATOR, bearer, some_keys
from tests.router.http_server import HttpServer, http_server

CHAT = {"model": tiny_model.MODEL, "messages": [{"role": "user", "content": "How are you?"}], "max_tokens": 2}
ANTHROPIC = {**CHAT, "max_tokens": 2}
GEMINI = {"contents": [{"parts": [{"text": "How are you?"}]}]}
GEMINI_PATH = f"/v1beta/models/{tiny_model.MODEL}:generateContent"


@pytest.fixture
async def gated() -> AsyncIterator[HttpServer]:
    async with http_server(keys=some_keys()) as running:
        yield running


@pytest.fixture
async def client(gated: HttpServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gated.url, timeout=60) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v1/chat/completions", CHAT, bearer(ACME)),
        ("/v1/chat/completions", CHAT, {"authorization": f"bearer  {ACME}"}),
        ("/v1/messages", ANTHROPIC, {"x-api-key": ACME}),
        ("/v1/messages", ANTHROPIC, bearer(ACME)),
        (GEMINI_PATH, GEMINI, {"x-goog-api-key": ACME}),
        (GEMINI_PATH, GEMINI, bearer(ACME)),
        ("/tokenize", {"model": tiny_model.MODEL, "prompt": "a"}, bearer(ACME)),
    ],
)
async def test_each_dialect_has_its_header(
    client: httpx.AsyncClient, path: str, body: object, headers: dict[str, str]
) -> None:
    assert (await client.post(path, json=body, headers=headers)).status_code == 200


@pytest.mark.parametrize("before", ["/docs", "/docs/x", "/health", "/explain", "/openapi.json", "/"])
@pytest.mark.parametrize("path", [GEMINI_PATH, "/v1/chat/completions", "/v1/messages", "/tokenize"])
async def test_what_is_open_opens_nothing_behind_it(
    client: httpx.AsyncClient, gated: HttpServer, before: str, path: str
) -> None:
    url = httpx.URL(str(client.base_url), path=before + path)
    assert (await client.post(url, json=CHAT)).status_code == 401
    assert not gated.dispatcher.generations
    assert (await client.post(url, json=CHAT, headers=bearer(OPERATOR))).status_code in (200, 400, 404)
    assert not gated.dispatcher.generations


async def roots_of(
    client: httpx.AsyncClient, gated: HttpServer, *asked: tuple[str, dict[str, str]]
) -> list[bytes]:
    for key, headers in asked:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={**bearer(key), **headers})
        assert answer.status_code == 200, answer.text
    return [generation.submit.root for generation in gated.dispatcher.generations]


async def test_two_tenants_share_no_root_and_those_of_a_group_do(
    client: httpx.AsyncClient, gated: HttpServer
) -> None:
    alone = {"x-kvasir-cache-group": "none"}
    attic = {"x-kvasir-cache-group": "attic"}
    acme, beta, gamma, alone_root, attic_root = await roots_of(
        client, gated, (ACME, {}), (BETA, {}), (GAMMA, {}), (GAMMA, alone), (GAMMA, attic)
    )
    assert beta == gamma
    assert len({acme, beta, alone_root, attic_root}) == 4
    foreign = {**bearer(ACME), "x-kvasir-cache-group": "lab"}
    refused = await client.post("/v1/chat/completions", json=CHAT, headers=foreign)
    assert refused.status_code == 403


async def test_a_user_of_two_tenants_is_two_users(client: httpx.AsyncClient, gated: HttpServer) -> None:
    for key in (BETA, GAMMA, BETA):
        await client.post("/v1/chat/completions", json={**CHAT, "user": "ada"}, headers=bearer(key))
    first, other, again = (generation.submit.user for generation in gated.dispatcher.generations)
    assert first == again != other


async def test_what_is_encoded_for_one_is_not_found_by_another(
    client: httpx.AsyncClient, gated: HttpServer
) -> None:
    cache = gated.context.catalog.get(tiny_model.MODEL).tokenizer.cache
    body = {"model": tiny_model.MODEL, "prompt": json.dumps("a text that nobody has sent before " * 20)}
    num_misses = []
    for key, path in ((ACME, "/tokenize"), (BETA, "/tokenize"), (ACME, "/tokenize"), (BETA, "/tokenize")):
        before = cache.num_misses
        assert (await client.post(path, json=body, headers=bearer(key))).status_code == 200
        num_misses.append(cache.num_misses - before)
    assert num_misses[0] == num_misses[1] > 0
    assert num_misses[2] == num_misses[3] == 0
