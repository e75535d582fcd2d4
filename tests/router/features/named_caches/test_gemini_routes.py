"""…/cachedContents, and requests that begin with one, over real sockets and a real Redis."""

import itertools
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.protocol.prefix_leases import LeaseAnswer, PrefixLease
from router.api.gemini.body import read_gemini
from router.errors import RouterError
from router.features.named_caches.bounds import CacheBounds
from router.features.named_caches.gemini_body import (
    cached_content_change,
    gemini_cache_use,
    new_cached_content,
    with_cached_content,
)
from router.features.named_caches.named_caches import NamedCaches
from tests.router.api.test_gemini import TOOLS
from tests.router.features.named_caches.test_routes import SECRET, keeps
from tests.router.http_server import HttpServer, http_server
from tests.router.thinking_model import MODEL, catalog

CACHES = "/v1beta/cachedContents"
GENERATE = f"/v1beta/models/{MODEL}:generateContent"
DOCUMENT = {"role": "user", "parts": [{"text": "The quick brown fox jumps, and Århus sleeps. " * 3}]}
QUESTION = {"role": "user", "parts": [{"text": "Why?"}]}
SYSTEM = {"parts": [{"text": "Be brief."}]}


def field_of(answer: httpx.Response) -> str | None:
    """Return the field that a refusal in Gemini's shape names."""
    error = answer.json()["error"]
    assert (error["code"], answer.headers["content-type"]) == (answer.status_code, "application/json")
    violations = [each for detail in error.get("details", ()) for each in detail.get("fieldViolations", ())]
    assert all(each["description"] == error["message"] for each in violations)
    return str(violations[0]["field"]) if violations else None


@pytest.fixture
async def server(redis_url: str) -> AsyncIterator[HttpServer]:
    caches = NamedCaches(redis_url, SECRET, CacheBounds(num_caches=5, bytes_per_cache=10_000))
    async with http_server(caches=caches, catalog=catalog()) as running:
        running.dispatcher.script = keeps(LeaseAnswer(60, 32))
        yield running
    await caches.close()


async def create(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post(CACHES, json={"model": f"models/{MODEL}", **fields})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def seconds(cache: dict[str, Any], since: str = "updateTime") -> float:
    return (
        datetime.fromisoformat(cache["expireTime"]) - datetime.fromisoformat(cache[since])
    ).total_seconds()


async def test_a_request_that_names_one_is_the_request_that_brings_it(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    made = await create(
        http, contents=[DOCUMENT], systemInstruction=SYSTEM, tools=TOOLS, ttl="60s", displayName="fox ☂"
    )
    (warming,) = server.dispatcher.generations
    num_tokens = len(warming.token_ids)
    assert warming.sampling.max_tokens == 1
    assert warming.submit.leases == (PrefixLease(num_tokens // 16, 60),)
    assert (made["model"], made["displayName"]) == (f"models/{MODEL}", "fox ☂")
    assert made["usageMetadata"] == {"totalTokenCount": num_tokens}
    assert seconds(made) == 60 and made["name"].startswith("cachedContents/")
    for name in ("cachedContent", "cached_content"):
        answer = await http.post(GENERATE, json={name: made["name"], "contents": QUESTION})
        assert answer.status_code == 200, answer.text
    sent = {"contents": [DOCUMENT, QUESTION], "system_instruction": SYSTEM, "tools": TOOLS}
    assert (await http.post(GENERATE, json=sent)).status_code == 200
    _, used, spelled, whole = server.dispatcher.generations
    assert used.token_ids == spelled.token_ids == whole.token_ids
    assert used.token_ids[: num_tokens - 1] == warming.token_ids[:-1]
    assert used.submit.leases[-1].end_block == num_tokens // 16 and not whole.submit.leases
    assert server.is_idle


async def test_caches_are_listed_read_extended_and_deleted(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    first = await create(http, contents=DOCUMENT)
    assert seconds(first) == 3600 and "displayName" not in first
    until = datetime.now(UTC) + timedelta(minutes=5)
    second = await create(http, system_instruction=SYSTEM, expire_time=until.isoformat())
    assert 298 < seconds(second, "createTime") <= 300
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Not Gemini's."}]}
    other = (await http.post("/v1/caches", json=chat)).json()
    assert other["object"] == "cache"
    page = (await http.get(CACHES, params={"pageSize": 1})).json()
    assert page["cachedContents"] == [second]
    rest = await http.get("/v1/cachedContents", params={"pageToken": page["nextPageToken"]})
    assert rest.json() == {"cachedContents": [first]}
    path = f"/v1beta/{first['name']}"
    assert (await http.get(path)).json() == first
    longer = await http.patch(path, params={"updateMask": "ttl"}, json={"ttl": "7200.5s"})
    assert longer.status_code == 200 and seconds(longer.json()) == 7201
    assert (await http.delete(path)).json() == {}
    for method, where in (
        ("GET", path),
        ("DELETE", path),
        ("PATCH", path),
        ("GET", f"{CACHES}/{other['id']}"),
    ):
        answer = await http.request(method, where, json={"ttl": "5s"} if method == "PATCH" else None)
        assert (answer.status_code, field_of(answer)) == (404, "name")
        assert answer.json()["error"]["status"] == "NOT_FOUND"
    assert (await http.get(f"/v1/caches/{other['id']}")).json() == other
    assert server.is_idle


async def test_what_cannot_be_is_said_with_its_field(server: HttpServer, http: httpx.AsyncClient) -> None:
    made = await create(http, contents=DOCUMENT, cacheSalt="s")
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Not Gemini's."}]}
    other = (await http.post("/v1/caches", json=chat)).json()["id"]
    made_path, wrong = f"/v1beta/{made['name']}", {"model": MODEL, "contents": DOCUMENT}
    use = {"contents": QUESTION, "cachedContent": made["name"]}
    refused: list[tuple[str, str, dict[str, Any], int, str]] = [
        *(
            ("POST", CACHES, body, status, field)
            for body, status, field in (
                ({"contents": DOCUMENT}, 400, "model"),
                ({"model": MODEL, "contents": [], "tools": []}, 400, "contents"),
                ({"model": MODEL, "contents": [{"role": "x"}]}, 400, "contents[0].role"),
                ({**wrong, "ttl": "1h"}, 400, "ttl"),
                ({**wrong, "ttl": "86401s"}, 400, "ttl"),
                ({**wrong, "expireTime": "2020-01-01"}, 400, "expireTime"),
                ({**wrong, "expireTime": "2020-01-01T00:00:00Z"}, 400, "expireTime"),
                ({**wrong, "ttl": "9s", "expireTime": "x"}, 400, "expireTime"),
                ({**wrong, "displayName": "\n"}, 400, "displayName"),
                ({**wrong, "kmsKeyName": "k"}, 400, "kmsKeyName"),
                ({**wrong, "contents": [DOCUMENT] * 90}, 400, "contents"),
                ({**wrong, "model": "nobody"}, 404, "model"),
            )
        ),
        ("PATCH", made_path, {}, 400, "ttl"),
        ("POST", GENERATE, use, 400, "cachedContent"),
        ("POST", GENERATE, {**use, "cachedContent": other}, 400, "cachedContent"),
        ("POST", GENERATE, {**use, "cachedContent": "cachedContents/x"}, 404, "cachedContent"),
        ("POST", GENERATE, {**use, "cachedContent": 3}, 400, "cachedContent"),
        *(
            ("POST", GENERATE, {**use, "cacheSalt": "s", name: value}, 400, name)
            for name, value in (("systemInstruction", SYSTEM), ("tools", TOOLS), ("toolConfig", {"x": 1}))
        ),
        ("GET", f"{CACHES}?pageSize=many", {}, 400, "pageSize"),
    ]
    num_generations = len(server.dispatcher.generations)
    for method, path, body, status, field in refused:
        answer = await http.request(method, path, json=None if method == "GET" else body)
        assert (answer.status_code, field_of(answer)) == (status, field), (path, body, answer.text)
    escaped = b'{"contents": [], "cached\\u0043ontent": "x"}'
    assert field_of(await http.post(GENERATE, content=escaped)) == "cachedContent"
    assert len(server.dispatcher.generations) == num_generations
    assert server.is_idle


TEXTS = st.text(max_size=8)
CONTENT = st.fixed_dictionaries(
    {"parts": st.lists(st.fixed_dictionaries({"text": TEXTS}), max_size=2)},
    optional={"role": st.sampled_from(["user", "model"])},
)
CONTENTS = st.lists(CONTENT, max_size=3) | CONTENT


@given(CONTENTS.filter(bool), CONTENTS | st.none(), st.booleans())
def test_beginning_and_question_are_read_as_if_sent_together(first: Any, then: Any, snake: bool) -> None:
    name = "cached_content" if snake else "cachedContent"
    _, _, content = new_cached_content(json.dumps({"model": "m", "contents": first}).encode(), 0.0, 10_000)
    body = json.dumps({"contents": then, name: "cachedContents/x", "model": "m"}).encode()
    use = gemini_cache_use(body)
    assert use is not None and use.cached_content == "cachedContents/x"
    listed = [each if isinstance(each, list) else [each] for each in (first, then) if each is not None]
    whole = json.dumps({"model": "m", "contents": list(itertools.chain(*listed))}).encode()
    assert read_gemini(with_cached_content(body, use, content, 10_000), 1) == read_gemini(whole, 1)


@given(
    st.dictionaries(
        st.sampled_from(["model", "contents", "ttl", "expireTime", "expire_time", "displayName", "tools"]),
        st.none()
        | st.integers()
        | st.text()
        | st.sampled_from(["5s", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z"]),
    )
)
def test_nothing_but_a_refusal_comes_of_any_wish(fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    for read in (
        lambda: new_cached_content(body, 1.8e9, 100),
        lambda: cached_content_change(body, 1.8e9),
        lambda: gemini_cache_use(body),
    ):
        try:
            read()
        except RouterError:
            continue
