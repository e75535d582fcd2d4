"""The routes that generate nothing, and what no route answers."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from replicas.protocol.status import ReplicaId
from router.api.json_body import with_fields
from router.caller import Caller, Limits, Tenant
from router.errors import KeyFault
from router.large_bodies.body_weight import MOST_BYTES
from router.prompt.catalog import ModelCatalog
from router.prompt.chains import BLOCKS_PER_RUN, BYTES_PER_RUN
from tests.router import tiny_model
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says


class ByContext:
    """Keys that are the number of tokens of their context."""

    def find(self, key: str, now: float) -> Caller | KeyFault:
        return Caller(tenant=Tenant(name="acme"), key_id="k", limits=Limits(max_context=int(key)))


async def test_an_adapter_is_a_model_with_a_parent(http: httpx.AsyncClient) -> None:
    found = (await http.get("/v1/models/tiny-sql")).json()
    assert (found["id"], found["root"], found["parent"]) == ("tiny-sql", "tiny", "tiny")
    assert found["max_model_len"] == tiny_model.CONTEXT_LENGTH
    tokens = [
        (await http.post("/tokenize", json={"model": name, "prompt": "Hello"})).json()["tokens"]
        for name in ("tiny", "tiny-sql")
    ]
    assert tokens[0] == tokens[1]
    # It is served by the replicas of its model, which are counted once.
    assert set((await http.get("/ready")).json()["models"]) == {"tiny", "untemplated"}


ASKED = "Hello. " * 4
CHAT = {"messages": [{"role": "user", "content": ASKED}], "max_tokens": 20}
GEMINI = {"contents": [{"parts": [{"text": ASKED}]}], "generationConfig": {"maxOutputTokens": 20}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": ASKED, "max_tokens": 20},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {"input": ASKED, "max_output_tokens": 20},
    "/v1/responses/input_tokens": {"input": ASKED},
    "/v1beta/models/{name}:generateContent": GEMINI,
    "/v1beta/models/{name}:countTokens": {"contents": GEMINI["contents"]},
    "/tokenize": {"prompt": ASKED},
    "/detokenize": {"tokens": [80, 81]},
}


@pytest.mark.parametrize("path", BODIES)
async def test_another_name_of_a_model_is_that_model_in_every_dialect(path: str) -> None:
    """Also if its body is prepared beside the event loop, and if the key has less context than the model."""
    small = json.dumps(BODIES[path]).encode()
    large = with_fields(small, b'"unknown": "%b"' % (b" " * MOST_BYTES))
    async with http_server(keys=ByContext()) as server, httpx.AsyncClient(base_url=server.url) as http:
        server.dispatcher.script = says([80, 81, 2], num_cached_tokens=3)

        async def asked(name: str, body: bytes, key: str) -> tuple[int, list[bytes], dict[str, Any]]:
            named = with_fields(body, b'"model": "%b"' % name.encode())
            headers = {"authorization": f"Bearer {key}"}
            answer = await http.post(path.format(name=name), content=named, headers=headers, timeout=60)
            roots = [each.submit.root for each in server.dispatcher.generations]
            server.dispatcher.generations.clear()
            said = {field: value for field, value in answer.json().items() if field not in VOLATILE}
            return answer.status_code, roots, said

        for body in (small, large):
            for key, bounds in (("4000", False), ("20", True)):
                by_its_own, by_another = [
                    await asked(name, body, key) for name in (tiny_model.MODEL, tiny_model.ALIAS)
                ]
                assert by_its_own == by_another
                assert by_another[0] == (400 if bounds and path not in UNBOUNDED else 200)
                assert tiny_model.ALIAS not in str(by_another)
        scraped = (await http.get("/metrics", headers={"authorization": "Bearer 1"})).text
    assert tiny_model.ALIAS not in scraped


@pytest.mark.parametrize("path", BODIES)
async def test_while_no_model_is_known_a_large_body_is_answered_as_a_small_one(path: str) -> None:
    small = with_fields(json.dumps(BODIES[path]).encode(), b'"model": "tiny"')
    large = with_fields(small, b'"unknown": "%b"' % (b" " * MOST_BYTES))
    async with (
        http_server(catalog=ModelCatalog(tiny_model.SECRET)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as http,
    ):
        answers = [await http.post(path.format(name="tiny"), content=body) for body in (small, large)]
        assert server.context.worker._process is None
    for answer in answers:
        assert answer.status_code == (529 if "messages" in path else 503)
        assert "No replica is known yet" in answer.text
    assert answers[0].headers["retry-after"] == answers[1].headers["retry-after"]
    told = [{**answer.json(), "request_id": None} for answer in answers]
    assert told[0] == told[1]


UNBOUNDED = ("/v1/messages/count_tokens", "/v1beta/models/{name}:countTokens", "/tokenize", "/detokenize")
VOLATILE = ("id", "request_id", "responseId", "created", "created_at", "completed_at", "output", "error")


async def test_another_name_is_listed_as_vllm_lists_it(http: httpx.AsyncClient) -> None:
    found = (await http.get(f"/v1/models/{tiny_model.ALIAS}")).json()
    assert (found["id"], found["root"], found["parent"]) == (tiny_model.ALIAS, "tiny", None)
    assert found["name"] == f"models/{tiny_model.ALIAS}"
    listed = (await http.get("/v1beta/models")).json()["models"]
    names = ["tiny", "untemplated", tiny_model.ALIAS, "tiny-sql"]
    assert [model["name"].removeprefix("models/") for model in listed] == names
    for body in (CHAT, {**CHAT, "unknown": " " * MOST_BYTES}):
        refused = await http.post("/v1/chat/completions", json={**body, "model": "gpt-5"})
        assert refused.status_code == 404
        assert refused.json()["error"]["message"].endswith(f"Served here: {', '.join(names)}.")
    assert set((await http.get("/ready")).json()["models"]) == {"tiny", "untemplated"}


async def test_health_is_the_process_and_ready_is_the_fleet(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    assert (await http.get("/health")).status_code == 200
    ready = await http.get("/ready")
    assert (ready.status_code, ready.json()["num_replicas"]) == (200, 1)
    server.context.num_replicas = lambda model: 0
    assert (await http.get("/ready")).status_code == 503
    assert (await http.get("/health")).status_code == 200


async def test_tokenize_and_detokenize_are_inverse(http: httpx.AsyncClient) -> None:
    text = "Hello wörld 日本"
    body = {"model": "tiny", "prompt": text, "return_token_strs": True}
    tokens = (await http.post("/tokenize", json=body)).json()
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), tiny_model.CONTEXT_LENGTH)
    assert len(tokens["token_strs"]) == tokens["count"]
    back = await http.post("/detokenize", json={"model": "tiny", "tokens": tokens["tokens"]})
    assert back.json() == {"prompt": text}


async def test_tokenize_renders_a_chat_as_the_chat_route_does(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says([2])
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    await http.post("/v1/chat/completions", json=body)
    tokens = (await http.post("/tokenize", json=body)).json()["tokens"]
    assert tokens == list(server.dispatcher.generations[0].token_ids)


async def test_without_a_model_name_tokenize_needs_a_single_model(http: httpx.AsyncClient) -> None:
    """Whatever else that one is called, and whatever adapters it has."""
    bodies = [{"prompt": "Hello"}, {"prompt": "Hello", "unknown": " " * MOST_BYTES}]
    catalog = ModelCatalog(tiny_model.SECRET)
    catalog.add(tiny_model.card(), tiny_model.bundle())
    card = replace(tiny_model.card(), aliases=(tiny_model.ALIAS,), adapters=(tiny_model.ADAPTER,))
    catalog.set_cards(tiny_model.MODEL, [(ReplicaId("r0"), card)])
    async with http_server(catalog=catalog) as single:
        for body in bodies:
            answer = await http.post("/tokenize", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
            assert (await http.post(f"{single.url}/tokenize", json=body)).status_code == 200


async def test_metrics_count_requests_tokens_and_decisions_with_closed_labels(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says([80, 2], num_cached_tokens=16, num_cross_user_tokens=5)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    adapted = chat | {"model": "tiny-sql"}
    wrong = chat | {"n": 0, "model": tiny_model.ALIAS}
    for body in (chat, chat | {"stream": True}, chat | {"model": "made up"}, wrong, adapted):
        await http.post("/v1/chat/completions", json=body)
    text = (await http.get("/metrics")).text
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["router_requests_total", "200", "chat_completions", "tiny"] == 2
    assert samples["router_requests_total", "404", "chat_completions", "unknown"] == 1
    assert samples["router_requests_total", "400", "chat_completions", "tiny"] == 1
    assert samples["router_cross_user_cached_tokens_total", "tiny-sql"] == 5
    assert samples["router_decisions_total", "0", "overlap", "tiny"] == 2
    assert samples[("router_in_flight",)] == 0
    assert "made up" not in text


async def test_metrics_say_how_many_blocks_of_prompts_had_been_hashed_before(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    async def counted() -> dict[str, float]:
        text = (await http.get("/metrics")).text
        found = (family for family in text_string_to_metric_families(text) if "hash_cache" in family.name)
        return {sample.name: sample.value for family in found for sample in family.samples}

    server.dispatcher.script = says([80, 2])
    prompt = [1] * (BLOCKS_PER_RUN * tiny_model.BLOCK_SIZE)
    before = await counted()
    for _ in range(3):
        answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
    gained = {name: value - before[name] for name, value in (await counted()).items()}
    assert gained == {
        "router_hash_cache_misses_total": BLOCKS_PER_RUN,
        "router_hash_cache_hits_total": 2 * BLOCKS_PER_RUN,
        "router_hash_cache_bytes": BYTES_PER_RUN,
    }
