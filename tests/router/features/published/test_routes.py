"""/v1/published over real sockets and a real Redis, and what it does to the chains of two tenants."""

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from replicas.media.probes import probe_png
from replicas.process.plain_redis import plain_redis
from replicas.protocol.blocks import PublishedBeginning, hash_blocks
from replicas.protocol.cluster_secret import ClusterSecret
from replicas.protocol.image_rules import written_rule
from router.features.published.feature import Published
from router.features.published.prefixes import MAX_PREFIXES, PUBLISHED_NAMESPACE, PublishedPrefixes
from router.features.published.store import KEY, PublishedStore
from router.prompt.catalog import ModelCatalog
from tests.redis_server import RedisServer
from tests.router import tiny_model
from tests.router.explain.image_prompts import RULE, TEMPLATE
from tests.router.features.api_keys.some_keys import ACME, BETA, OPERATOR, bearer, some_keys
from tests.router.http_server import HttpServer, http_server

SECRET = ClusterSecret(tiny_model.SECRET)
BLOCK = 16
BEGINNING = [{"role": "system", "content": "The quick brown fox jumps, and Århus sleeps. " * 3}]
QUESTION = {"role": "user", "content": "Hello again ☂, and again, and once more"}


@pytest.fixture
async def server(redis_url: str) -> AsyncIterator[HttpServer]:
    store = PublishedStore(redis_url, SECRET)
    async with http_server(keys=some_keys(), published=store) as running:
        yield running
    await store.close()


def published_store(server: HttpServer) -> PublishedStore:
    (found,) = [each.store for each in server.context.features if isinstance(each, Published)]
    assert found is not None
    return found


async def publish(http: httpx.AsyncClient, key: str = OPERATOR, **fields: Any) -> httpx.Response:
    body = {"model": tiny_model.MODEL, **(fields or {"messages": BEGINNING})}
    return await http.post("/v1/published", json=body, headers=bearer(key))


async def test_two_tenants_share_what_is_published_and_nothing_behind_it(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    published = (await publish(http)).json()
    num_blocks = published["tokens"] // BLOCK
    assert published["tokens"] == num_blocks * BLOCK >= 2 * BLOCK
    body = {"model": tiny_model.MODEL, "messages": [*BEGINNING, QUESTION], "max_tokens": 1}
    for key, more in ((ACME, {}), (BETA, {}), (ACME, {"cache_salt": "s"})):
        asked = await http.post("/v1/chat/completions", json={**body, **more}, headers=bearer(key))
        assert asked.status_code == 200
    acme, beta, salted = server.dispatcher.generations
    model = tiny_model.catalog().get(tiny_model.MODEL)
    beginning = PublishedBeginning(model.root(PUBLISHED_NAMESPACE), num_blocks)
    assert acme.submit.published == beta.submit.published == beginning
    assert acme.block_hashes[:num_blocks] == beta.block_hashes[:num_blocks]
    assert len(acme.block_hashes) > num_blocks
    assert not set(acme.block_hashes[num_blocks:]) & set(beta.block_hashes[num_blocks:])
    for generation in (acme, beta):
        submit = generation.submit
        assert generation.block_hashes == hash_blocks(
            submit.root, generation.token_ids, BLOCK, published=submit.published
        )
    assert salted.submit.published is None and not set(salted.block_hashes) & set(acme.block_hashes)


async def test_only_an_operator_publishes_and_everyone_sees_what_is(http: httpx.AsyncClient) -> None:
    refused = await publish(http, ACME)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "insufficient_permissions"
    made = (await publish(http, messages=BEGINNING, name="house rules")).json()
    listed = (await http.get("/v1/published", headers=bearer(ACME))).json()["data"]
    assert listed == [made] and made["name"] == "house rules"
    path = f"/v1/published/{made['id']}"
    assert (await http.delete(path, headers=bearer(BETA))).status_code == 403
    assert (await http.delete(path, headers=bearer(OPERATOR))).json()["deleted"]
    assert (await http.delete(path, headers=bearer(OPERATOR))).status_code == 404
    assert (await http.get("/v1/published", headers=bearer(ACME))).json()["data"] == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": "short"}, "does not fill a block"),
        ({"prompt": ["a" * 200, "b" * 200]}, "prompt"),
        ({"messages": BEGINNING, "name": "x" * 201}, "A name has at most"),
        ({"messages": 5}, "messages"),
        ({"name": 5}, "name"),
    ],
)
async def test_what_cannot_be_published_is_refused(
    http: httpx.AsyncClient, fields: dict[str, Any], words: str
) -> None:
    refused = await publish(http, **fields)
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]
    assert (await http.get("/v1/published", headers=bearer(ACME))).json()["data"] == []


async def test_the_same_is_published_once_and_there_are_only_so_many(http: httpx.AsyncClient) -> None:
    made = await asyncio.gather(*(publish(http) for _ in range(4)))
    assert sorted(answer.status_code for answer in made) == [201, 400, 400, 400]
    for number in range(MAX_PREFIXES - 1):
        answer = await publish(http, prompt=f"prefix number {number} of many, " * 4)
        assert answer.status_code == 201, answer.text
    assert "may be no more" in (await publish(http, prompt="one too many " * 9)).json()["error"]["message"]


async def test_another_router_follows_and_what_is_not_ours_is_passed_over(
    http: httpx.AsyncClient, redis_url: str, shared_redis: RedisServer
) -> None:
    store = PublishedStore(redis_url, SECRET)
    followed = store.prefixes
    made = (await publish(http)).json()
    await store._look()
    assert [prefix.prefix_id for prefix in followed.all()] == [made["id"]]
    await store._redis.set(KEY, b"\x01" + bytes(60))
    await store._look()
    assert not len(followed)
    await store.close()


async def test_while_redis_is_away_nothing_is_published_and_the_last_known_go_on(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    await publish(http)
    store = published_store(server)
    redis, store._redis = store._redis, plain_redis("redis://127.0.0.1:1/0")
    await redis.aclose()
    assert (await publish(http, prompt="something else " * 9)).status_code == 503
    assert len((await http.get("/v1/published", headers=bearer(ACME))).json()["data"]) == 1


def test_the_longest_beginning_counts() -> None:
    from router.features.published.prefixes import PublishedPrefix

    short, long = bytes(4 * BLOCK), bytes(8 * BLOCK)
    prefixes = PublishedPrefixes(
        PublishedPrefix(name, "m", packed, 0.0) for name, packed in (("a", short), ("b", long), ("c", short))
    )
    assert prefixes.num_blocks("m", bytes(12 * BLOCK), BLOCK) == 2
    assert prefixes.num_blocks("m", bytes(7 * BLOCK), BLOCK) == 1
    assert prefixes.num_blocks("m", b"\1" + bytes(12 * BLOCK), BLOCK) == 0
    assert prefixes.num_blocks("other", bytes(12 * BLOCK), BLOCK) == 0


async def test_what_has_an_image_in_it_is_not_published(redis_url: str) -> None:
    catalog = ModelCatalog(tiny_model.SECRET)
    catalog.add(replace(tiny_model.card(), image_rule=written_rule(RULE)), tiny_model.bundle(TEMPLATE))
    picture = base64.b64encode(probe_png(32, 16, b"\1\2\3")).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    store = PublishedStore(redis_url, SECRET)
    async with http_server(keys=some_keys(), catalog=catalog, published=store) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            beginning = [*BEGINNING, {"role": "user", "content": [part]}]
            refused = await publish(client, messages=beginning)
            assert refused.status_code == 400 and "none can be published" in refused.text
            assert (await publish(client)).status_code == 201
        await store.close()
