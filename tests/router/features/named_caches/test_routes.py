"""/v1/caches, and requests that begin with a named cache, over real sockets and a real Redis."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI

from replicas.protocol.cluster_secret import ClusterSecret
from replicas.protocol.frames import PromptUsage, RequestKey, TokenDelta
from replicas.protocol.prefix_leases import LeaseAnswer, LeaseRefusal, PrefixLease
from router.errors import ErrorKind, GenerationFailed, NoReplicaAvailable
from router.features.named_caches import making
from router.features.named_caches.bounds import CacheBounds
from router.features.named_caches.named_caches import NamedCaches
from router.features.usage.amounts import Amount, amounts_of
from router.generation import Generation
from router.served import ServedRequest
from tests.redis_server import RedisServer
from tests.router import tiny_model
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import NEVER, Script, Step, says

END = tiny_model.END_OF_TURN
SECRET = ClusterSecret(tiny_model.SECRET)
BEGINNING = [{"role": "system", "content": "The quick brown fox jumps, and Århus sleeps. " * 2}]
QUESTION = {"role": "user", "content": "Hello again ☂"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
UNKNOWN = "cache_" + "0" * 32


def keeps(answer: LeaseAnswer) -> Script:
    """One token; the request's last lease gets this answer, others are refused."""

    def script(generation: Generation) -> Sequence[Step]:
        ((delta, *rest),) = says([END])(generation)
        assert isinstance(delta, TokenDelta) and delta.usage is not None
        others = len(generation.submit.leases) - 1
        leases = (LeaseAnswer(refusal=LeaseRefusal.BUDGET),) * others + (answer,)
        usage = msgspec.structs.replace(delta.usage, leases=leases)
        return [[msgspec.structs.replace(delta, usage=usage), *rest]]

    return script


@pytest.fixture
async def server(redis_url: str) -> AsyncIterator[HttpServer]:
    bounds = CacheBounds(num_caches=5, bytes_per_cache=10_000)
    caches = NamedCaches(redis_url, SECRET, bounds, clock=lambda: 0.0)  # what was read stays fresh
    async with http_server(caches=caches) as running:
        running.dispatcher.script = keeps(LeaseAnswer(60, 32))
        yield running
    await caches.close()


async def create(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/caches", json={"model": "tiny", **fields})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def test_creating_one_has_a_replica_compute_it_and_says_what_it_says(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    made = await create(http, messages=BEGINNING, ttl=60, name="Größe ☂")
    (generation,) = server.dispatcher.generations
    assert generation.sampling.max_tokens == 1
    assert generation.submit.leases == (PrefixLease(len(generation.token_ids) // 16, 60),)
    assert made["lease"] == {"status": "granted", "seconds": 60, "tokens": 32}
    assert made["tokens"] == len(generation.token_ids) > 32
    assert (made["object"], made["name"], made["kind"], made["ttl"]) == ("cache", "Größe ☂", "chat", 60)
    assert made["expires_at"] - made["created_at"] == 60
    assert (await http.get(f"/v1/caches/{made['id']}")).json() == made
    listed = (await http.get("/v1/caches")).json()
    assert listed["data"] == [made] and (listed["first_id"], listed["has_more"]) == (made["id"], False)
    text = server.context.metrics.render().decode()
    assert 'router_requests_total{model="tiny",route="caches",code="200"} 1' in text
    assert 'router_prefix_leases_total{model="tiny",outcome="granted"} 1' in text


async def test_a_chat_that_names_one_is_the_chat_with_its_messages_first(
    server: HttpServer, http: httpx.AsyncClient, openai: AsyncOpenAI
) -> None:
    made = await create(http, messages=BEGINNING, tools=TOOLS, ttl=60)
    await openai.chat.completions.create(
        model="tiny", messages=[*BEGINNING, QUESTION], tools=TOOLS, extra_body={"seed": 1}
    )
    raw = await openai.chat.completions.with_raw_response.create(
        model="tiny", messages=[QUESTION], extra_body={"cache": made["id"]}, prompt_cache_retention="24h"
    )
    warmed, whole, named = server.dispatcher.generations
    assert named.token_ids == whole.token_ids and named.block_hashes == whole.block_hashes
    assert list(whole.token_ids[: made["tokens"]]) == list(warmed.token_ids)
    own, of_cache = named.submit.leases
    assert own == PrefixLease(len(whole.token_ids) // 16, 86_400)
    assert of_cache.end_block == made["tokens"] // 16 and 50 <= of_cache.seconds <= 60
    assert raw.headers.get_list("x-kvasir-cache-lease")[1] == "granted; seconds=60; tokens=32"
    text = server.context.metrics.render().decode()
    assert 'router_named_cache_uses_total{source="memory"} 1' in text
    assert "router_named_caches_created_total 1" in text


@pytest.mark.parametrize(
    ("beginning", "then", "whole"),
    [
        ("Hello Århus ☂, ", 'what is "it"?', 'Hello Århus ☂, what is "it"?'),
        ("Hello ", "", "Hello "),
        ([5, 6, 7] * 20, [8, 9], [5, 6, 7] * 20 + [8, 9]),
        ([5, 6, 7], [], [5, 6, 7]),
        ("Hello", None, "Hello"),
    ],
)
async def test_a_completion_goes_on_where_its_cache_ends(
    server: HttpServer, http: httpx.AsyncClient, beginning: Any, then: Any, whole: Any
) -> None:
    made = await create(http, prompt=beginning)
    fields = {"model": "tiny", "max_tokens": 1}
    sent = {} if then is None else {"prompt": then}
    for body in ({**fields, "prompt": whole}, {**fields, **sent, "cache": made["id"]}):
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    _, plain, named = server.dispatcher.generations
    assert named.token_ids == plain.token_ids


async def test_a_body_that_is_prepared_beside_the_loop_begins_with_it_too(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    made = await create(http, messages=BEGINNING, unknown=[[0]] * 10_000)
    body = {"model": "tiny", "messages": [QUESTION], "cache": made["id"], "unknown": [0] * 10_000}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    warmed, named = server.dispatcher.generations
    assert list(named.token_ids[: len(warmed.token_ids)]) == list(warmed.token_ids)
    assert len(named.submit.leases) == 1


async def test_an_explanation_is_of_the_whole_prompt(server: HttpServer, http: httpx.AsyncClient) -> None:
    made = await create(http, messages=BEGINNING)
    body = {"model": "tiny", "messages": [QUESTION], "cache": made["id"]}
    answer = await http.post("/explain/v1/chat/completions", json=body)
    assert answer.json()["prompts"][0]["num_tokens"] > made["tokens"]


@pytest.mark.parametrize(
    ("use", "code"),
    [
        ({"functions": [{"name": "look"}]}, "cache_of_other_tools"),
        ({"cache": 7}, "invalid_type"),
        ({"messages": "Hello"}, "invalid_type"),
        ({"messages": [{"role": "nobody", "content": ""}]}, "invalid_value"),
    ],
)
async def test_a_request_that_it_is_not_the_beginning_of_is_refused(
    http: httpx.AsyncClient, openai: AsyncOpenAI, use: dict[str, Any], code: str
) -> None:
    made = await create(http, messages=BEGINNING)
    body = {"model": "tiny", "messages": [QUESTION], "cache": made["id"], **use}
    answer = await http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [5, 6], 7])
async def test_a_text_goes_with_one_text(http: httpx.AsyncClient, prompt: Any) -> None:
    made = await create(http, prompt="Hello")
    body = {"model": "tiny", "prompt": prompt, "cache": made["id"]}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] in ("prompt", "cache")
    chat = {"model": "tiny", "messages": [QUESTION], "cache": made["id"]}
    answer = await http.post("/v1/chat/completions", json=chat)
    assert answer.json()["error"]["code"] == "cache_of_other_kind"


async def test_a_field_that_is_hidden_by_escapes_is_not_passed_over(http: httpx.AsyncClient) -> None:
    text = json.dumps({"model": "tiny", "messages": [QUESTION], "cache": UNKNOWN})
    hidden = text.replace('"cache"', '"c\\u0061che"')
    answer = await http.post("/v1/chat/completions", content=hidden)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache"


@pytest.mark.parametrize(
    ("fields", "parameter", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": {}}, "messages", "invalid_type"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": ["a"]}, "prompt", "invalid_type"),
        ({"prompt": 7}, "prompt", "invalid_type"),
        ({"prompt": [10**6]}, "prompt", "invalid_value"),
        ({"prompt": "Hello", "tools": TOOLS}, "tools", "unsupported_value"),
        ({"prompt": "Hello", "ttl": "5m"}, "ttl", "invalid_type"),
        ({"prompt": "Hello", "ttl": 10**30}, "ttl", None),
        ({"prompt": "Hello", "name": ""}, "name", "invalid_value"),
        ({"prompt": "Hello", "name": "a\nb"}, "name", "invalid_value"),
        ({"prompt": "Hello", "cache_salt": "@"}, "cache_salt", "invalid_value"),
        ({"prompt": "Hello world. " * 600}, "prompt", "context_length_exceeded"),
    ],
)
async def test_what_cannot_be_one_is_refused_and_nothing_is_kept(
    server: HttpServer, http: httpx.AsyncClient, fields: dict[str, Any], parameter: str, code: str | None
) -> None:
    answer = await http.post("/v1/caches", json={"model": "tiny", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, parameter), error
    assert code is None or error["code"] == code
    assert (await http.get("/v1/caches")).json()["data"] == [] and not server.dispatcher.generations


@pytest.mark.parametrize(
    ("script", "lease"),
    [
        (keeps(LeaseAnswer(refusal=LeaseRefusal.NO_TIER)), {"status": "refused", "reason": "no_tier"}),
        (says([END]), {"status": "refused", "reason": "no_answer"}),
        (lambda _: [NoReplicaAvailable("later")], {"status": "refused", "reason": "not_warmed"}),
    ],
)
async def test_one_whose_kv_nobody_keeps_is_a_name_all_the_same(
    server: HttpServer, http: httpx.AsyncClient, openai: AsyncOpenAI, script: Script, lease: dict[str, Any]
) -> None:
    server.dispatcher.script = script
    made = await create(http, messages=BEGINNING)
    assert made["lease"] == lease
    assert (await http.get(f"/v1/caches/{made['id']}")).json() == made
    server.dispatcher.script = says([END])
    await openai.chat.completions.create(model="tiny", messages=[], extra_body={"cache": made["id"]})


async def test_extending_one_asks_for_its_lease_again(server: HttpServer, http: httpx.AsyncClient) -> None:
    made = await create(http, messages=BEGINNING, ttl=60)
    server.dispatcher.script = keeps(LeaseAnswer(refusal=LeaseRefusal.BUDGET))
    answer = await http.patch(f"/v1/caches/{made['id']}", json={"ttl": 7200})
    changed = answer.json()
    assert (changed["ttl"], changed["lease"]) == (7200, {"status": "refused", "reason": "budget"})
    assert changed["expires_at"] >= made["created_at"] + 7200
    first, again = server.dispatcher.generations
    assert again.token_ids == first.token_ids
    assert again.submit.leases == (PrefixLease(len(first.token_ids) // 16, 7200),)
    renamed = (await http.patch(f"/v1/caches/{made['id']}", json={"name": "more"})).json()
    assert renamed == {**changed, "name": "more"} and len(server.dispatcher.generations) == 2


async def test_no_more_than_there_is_room_for(http: httpx.AsyncClient) -> None:
    for number in range(5):
        await create(http, prompt=f"Number {number}")
    full = await http.post("/v1/caches", json={"model": "tiny", "prompt": "Hello"})
    assert (full.status_code, full.json()["error"]["code"]) == (429, "caches_full")
    assert full.headers["retry-after"]


async def test_without_redis_creating_one_is_a_503_and_using_one_works(own_redis: RedisServer) -> None:
    caches = NamedCaches(own_redis.url, SECRET)
    async with http_server(caches=caches) as server, httpx.AsyncClient(base_url=server.url) as http:
        server.dispatcher.script = says([END])
        made = await create(http, messages=BEGINNING)
        own_redis.kill()
        answer = await http.post("/v1/caches", json={"model": "tiny", "messages": BEGINNING})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "caches_unavailable")
        assert answer.headers["retry-after"]
        body = {"model": "tiny", "messages": [QUESTION], "cache": made["id"]}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        body["cache"] = UNKNOWN
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 503
    await caches.close()


async def test_without_a_cluster_secret_there_are_none() -> None:
    async with http_server() as server, httpx.AsyncClient(base_url=server.url) as http:
        server.dispatcher.script = says([END])
        for answer in (
            await http.get("/v1/caches"),
            await http.post("/v1/caches", json={"model": "tiny", "prompt": "Hello"}),
            await http.post("/v1/completions", json={"model": "tiny", "prompt": "", "cache": UNKNOWN}),
        ):
            assert answer.json()["error"]["code"] == "caches_not_available"
            assert "secret_file" in answer.json()["error"]["message"]
        body = {"model": "tiny", "prompt": "Hello", "cache": None}
        assert (await http.post("/v1/completions", json=body)).status_code == 200


@pytest.fixture
async def served(server: HttpServer) -> list[ServedRequest]:
    """What those who watch were told."""
    told: list[ServedRequest] = []
    server.context.hooks.ended.append(lambda request, served: told.append(served))
    return told


def one_token(generation: Generation) -> TokenDelta:
    """As a replica says it that has computed the prompt and has not ended."""
    usage = PromptUsage(len(generation.token_ids), 16, 32)
    return TokenDelta(RequestKey(1, 0), (5,), usage=usage)


async def test_what_a_replica_computed_of_a_warming_that_failed_is_accounted(
    server: HttpServer, http: httpx.AsyncClient, served: list[ServedRequest]
) -> None:
    server.dispatcher.script = lambda asked: [[one_token(asked)], GenerationFailed("It died.")]
    made = await create(http, messages=BEGINNING)
    assert made["lease"] == {"status": "refused", "reason": "not_warmed"}
    (told,) = served
    (prompt,) = told.prompts
    assert (told.status, told.error, told.error_kind) == (500, "GenerationFailed", ErrorKind.FAILED)
    assert prompt.usage == PromptUsage(made["tokens"], 16, 32) and prompt.decision is not None
    assert prompt.num_output_tokens == prompt.num_silent_tokens == 1
    assert amounts_of(told)[Amount.WRITTEN] == 32 and amounts_of(told)[Amount.ERRORS] == 1


async def test_a_warming_that_takes_too_long_is_accounted_as_far_as_it_came(
    server: HttpServer, http: httpx.AsyncClient, served: list[ServedRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "WARM_SECONDS", 0.05)
    server.dispatcher.script = lambda asked: [[one_token(asked)], NEVER]
    made = await create(http, messages=BEGINNING)
    assert made["lease"] == {"status": "refused", "reason": "not_warmed"}
    (told,) = served
    assert (told.status, told.error) == (504, "TimeoutError") and told.prompts[0].usage is not None
    assert server.is_idle


async def test_a_warming_is_stamped_when_it_begins(
    server: HttpServer, http: httpx.AsyncClient, served: list[ServedRequest]
) -> None:
    slow = asyncio.Event()
    server.dispatcher.script = lambda asked: [slow, *keeps(LeaseAnswer(60, 32))(asked)]
    creating = asyncio.create_task(create(http, messages=BEGINNING))
    await server.dispatcher.has_started.wait()
    has_begun = time.time()
    slow.set()
    await creating
    (told,) = served
    assert told.arrived_at <= has_begun
