"""Nothing of one tenant shows in any answer to another: by no route, header, error, id or count."""

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from replicas.protocol.cluster_secret import ClusterSecret
from router import caller
from router.features.named_caches.bounds import CacheBounds
from router.features.named_caches.named_caches import NamedCaches
from router.features.responses.record import ResponseBounds
from router.features.responses.store import ResponseStore
from router.features.usage.store import UsageStore
from tests.router import tiny_model
from tests.router.features.api_keys.some_keys import ACME, BETA, OPERATOR, bearer, some_keys
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says

MODEL = tiny_model.MODEL
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Acme's own words"}]}
CACHE = {"model": MODEL, "ttl": 600, "name": "acmes-handbook", "messages": CHAT["messages"]}
GEMINI_CACHE = {"model": f"models/{MODEL}", "ttl": "600s", "contents": [{"parts": [{"text": "Acme's"}]}]}
SHOWN = ("/v1/models", "/v1/caches", "/v1/usage", "/v1beta/cachedContents", "/v1beta/models")
OPEN = ("/", "/health", "/ready", "/version", "/openapi.json")
OPERATORS = ("/metrics", "/load", "/live/fleet", "/explain/v1/chat/completions")
VOLATILE = re.compile(rb"req_[0-9a-f]{24}|[0-9a-f]{32}|[0-9a-f]{24}")


@pytest.fixture
async def server(redis_url: str) -> AsyncIterator[HttpServer]:
    caches = NamedCaches(redis_url, ClusterSecret(tiny_model.SECRET), CacheBounds(num_caches=8))
    responses, usage = ResponseStore(None, ResponseBounds()), UsageStore(redis_url, 744)
    async with http_server(keys=some_keys(), caches=caches, responses=responses, usage=usage) as running:
        running.dispatcher.script = says([80, 81, 2], num_cached_tokens=3, num_written_tokens=2)
        yield running
    for store in (caches, responses, usage):
        await store.close()


@pytest.fixture
async def http(server: HttpServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        yield client


async def seen(
    http: httpx.AsyncClient, method: str, path: str, key: str = BETA, **more: Any
) -> tuple[Any, ...]:
    """All that an answer tells, but for the ids of requests."""
    answer = await http.request(method, path, headers=bearer(key), **more)
    headers = {name: value for name, value in answer.headers.items() if name not in ("date", "x-request-id")}
    headers = {name: value for name, value in headers.items() if name not in ("request-id", "content-length")}
    return answer.status_code, headers, VOLATILE.sub(b"ID", answer.content)


async def busy(http: httpx.AsyncClient) -> dict[str, str]:
    """Acme leaves something of every kind that is kept. Returns the ids."""
    ids = {}
    for path, name, body in (
        ("/v1/responses", "response", {"model": MODEL, "input": "Acme's own words"}),
        ("/v1/caches", "cache", CACHE),
        ("/v1beta/cachedContents", "content", GEMINI_CACHE),
    ):
        answer = await http.post(path, json=body, headers=bearer(ACME))
        assert answer.is_success, answer.text
        ids[name] = (answer.json().get("id") or answer.json()["name"]).rpartition("/")[2]
    await http.post("/v1/chat/completions", json=CHAT, headers=bearer(ACME))
    await http.post("/v1/chat/completions", json={"model": "acmes-own"}, headers=bearer(ACME))
    return ids


async def test_what_others_see_is_as_if_nobody_else_were_there(http: httpx.AsyncClient) -> None:
    before = [await seen(http, "GET", path) for path in (*SHOWN, *OPEN)]
    await busy(http)
    after = [await seen(http, "GET", path) for path in (*SHOWN, *OPEN)]
    assert before == after
    assert b"acme" not in b"".join(content for _, _, content in after).lower()
    assert b"handbook" in (await seen(http, "GET", "/v1/caches", ACME))[2], "its owner sees it"


async def test_anothers_id_is_answered_as_one_that_nobody_has(http: httpx.AsyncClient) -> None:
    ids = await busy(http)
    nobodys = {
        name: re.sub("[0-9a-f]{8,}", lambda found: "0" * len(found[0]), each) for name, each in ids.items()
    }
    assert all(ids[name] != nobodys[name] for name in ids)
    for known in (ids, nobodys):
        response, cache, content = known["response"], known["cache"], known["content"]
        known["asked"] = [  # type: ignore[assignment]
            await seen(http, "GET", f"/v1/responses/{response}"),
            await seen(http, "GET", f"/v1/responses/{response}/input_items"),
            await seen(http, "POST", f"/v1/responses/{response}/cancel"),
            await seen(http, "DELETE", f"/v1/responses/{response}"),
            await seen(
                http,
                "POST",
                "/v1/responses",
                json={"model": MODEL, "input": "Go on", "previous_response_id": response},
            ),
            await seen(http, "GET", f"/v1/caches/{cache}"),
            await seen(http, "PATCH", f"/v1/caches/{cache}", json={"ttl": 60}),
            await seen(http, "DELETE", f"/v1/caches/{cache}"),
            await seen(http, "GET", f"/v1/caches?after={cache}"),
            await seen(http, "POST", "/v1/chat/completions", json={**CHAT, "cache": cache}),
            await seen(http, "GET", f"/v1beta/cachedContents/{content}"),
            await seen(http, "DELETE", f"/v1beta/cachedContents/{content}"),
            await seen(
                http,
                "POST",
                f"/v1beta/models/{MODEL}:generateContent",
                json={
                    "cachedContent": f"cachedContents/{content}",
                    "contents": [{"parts": [{"text": "Go"}]}],
                },
            ),
        ]
    assert ids["asked"] == nobodys["asked"]
    statuses = [status for status, _, _ in ids["asked"]]  # type: ignore[misc]
    assert all(status in (400, 403, 404) for status in statuses), statuses
    for name, path in (("response", "/v1/responses/"), ("cache", "/v1/caches/")):
        kept = await http.get(path + ids[name], headers=bearer(ACME))
        assert kept.status_code == 200, "what was asked of it by another has changed nothing"


async def test_that_there_is_no_room_is_told_without_everybodys_numbers(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller, "DEFAULT_LEASE_SHARE", 1.0)
    for _ in range(8):
        assert (await http.post("/v1/caches", json=CACHE, headers=bearer(ACME))).status_code == 201
    status, _, content = await seen(http, "POST", "/v1/caches", json={**CACHE, "name": "mine"})
    assert status == 429
    assert not re.search(rb"\d", content.replace(b"caches_full", b"")), content


async def test_one_tenant_cannot_take_all_named_caches(http: httpx.AsyncClient) -> None:
    statuses = [
        (await http.post("/v1/caches", json=CACHE, headers=bearer(ACME))).status_code for _ in range(4)
    ]
    assert statuses == [201, 201, 429, 429]
    assert (await http.post("/v1/caches", json=CACHE, headers=bearer(BETA))).status_code == 201


@pytest.mark.parametrize("path", OPERATORS)
async def test_what_counts_everybody_is_for_operators(http: httpx.AsyncClient, path: str) -> None:
    statuses = [(await http.get(path, headers=bearer(key))).status_code for key in (BETA, OPERATOR)]
    assert statuses[0] == 403
    assert statuses[1] != 403
