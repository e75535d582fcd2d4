"""A model's sampling defaults hold in every dialect where the client has no word, and nowhere else."""

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from replicas.protocol.frames import SamplingParams
from replicas.protocol.sampling_defaults import PARAMETERS, SamplingDefaults
from replicas.protocol.status import ReplicaId
from router.prompt.catalog import ModelCatalog
from tests.router import tiny_model
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says

DEFAULTS = SamplingDefaults(0.25, 0.5, 7, 0.125, 1.5, 0.75, -0.5, max_new_tokens=40)
LEAST = SamplingDefaults()
"""Those of a server, which has its own."""
R0, R1 = ReplicaId("r0"), ReplicaId("r1")
TURN = [{"role": "user", "content": "Hello"}]
CONTENTS = [{"role": "user", "parts": [{"text": "Hello"}]}]
RESPONSES = "/v1/responses"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
GEMINI = "/v1beta/models/tiny:generateContent"
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": TURN},
    COMPLETIONS: {"model": "tiny", "prompt": "Hello"},
    RESPONSES: {"model": "tiny", "input": "Hello"},
    MESSAGES: {"model": "tiny", "messages": TURN, "max_tokens": 60},
    GEMINI: {"contents": CONTENTS},
}


@asynccontextmanager
async def serving(defaults: SamplingDefaults | None) -> AsyncIterator[tuple[HttpServer, httpx.AsyncClient]]:
    catalog = ModelCatalog(tiny_model.SECRET)
    catalog.add(replace(tiny_model.card(), sampling_defaults=defaults), tiny_model.bundle())
    async with (
        http_server(catalog=catalog) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
    ):
        server.dispatcher.script = says([5, tiny_model.END_OF_TURN])
        yield server, client


async def sampled(
    server: HttpServer, client: httpx.AsyncClient, path: str, **fields: Any
) -> tuple[SamplingParams, dict[str, Any]]:
    if path == GEMINI and fields:
        names = {
            "temperature": "temperature",
            "top_p": "topP",
            "top_k": "topK",
            "max_tokens": "maxOutputTokens",
        }
        fields = {"generationConfig": {names[name]: value for name, value in fields.items()}}
    if path == RESPONSES and "max_tokens" in fields:
        fields["max_output_tokens"] = fields.pop("max_tokens")
    answer = await client.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    return server.dispatcher.generations[-1].sampling, answer.json()


def shape(sampling: SamplingParams) -> dict[str, float]:
    return {name: getattr(sampling, name) for name in PARAMETERS}


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_wins_over_the_model_and_the_model_over_the_api(path: str) -> None:
    async with serving(DEFAULTS) as (server, client):
        sampling, answer = await sampled(server, client, path)
        assert shape(sampling) == {name: getattr(DEFAULTS, name) for name in PARAMETERS}
        assert sampling.unsaid == ()
        assert sampling.max_tokens == {COMPLETIONS: 16, MESSAGES: 60}.get(path, 40)
        if path == RESPONSES:
            assert (answer["temperature"], answer["top_p"]) == (0.25, 0.5)
        said = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 99}
        sampling, answer = await sampled(server, client, path, **said)
        assert shape(sampling) == shape(sampling) | {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.125,
        }
        assert sampling.max_tokens == 99
        if path == RESPONSES:
            assert (answer["temperature"], answer["top_p"]) == (1.0, 1.0)
        sampling, _ = await sampled(server, client, path, temperature=0)
        assert (sampling.temperature, sampling.top_k) == (0.0, 7)
        if path != GEMINI:  # refuses it
            assert (await sampled(server, client, path, top_p=0))[0].top_k == 1


@pytest.mark.parametrize("path", BODIES)
async def test_what_neither_client_nor_model_say_is_neutral_and_left_to_a_server(path: str) -> None:
    neutral = SamplingParams(max_tokens=1)
    async with serving(LEAST) as (server, client):
        sampling, answer = await sampled(server, client, path, temperature=1.0)
        assert shape(sampling) == shape(neutral)
        assert sampling.unsaid == PARAMETERS[1:]
        if path == RESPONSES:
            assert (answer["temperature"], answer["top_p"]) == (1.0, None)
    async with serving(None) as (server, client):
        sampling, answer = await sampled(server, client, path)
        assert (shape(sampling), sampling.unsaid) == (shape(neutral), ())
        if path == RESPONSES:
            assert (answer["temperature"], answer["top_p"]) == (1.0, 1.0)


async def test_a_length_of_the_model_is_within_the_context_and_never_a_reason_to_refuse() -> None:
    async with serving(SamplingDefaults(max_new_tokens=10_000)) as (server, client):
        sampling, _ = await sampled(server, client, "/v1/chat/completions")
        generation = server.dispatcher.generations[-1]
        assert sampling.max_tokens == tiny_model.CONTEXT_LENGTH - len(generation.token_ids)
    async with serving(SamplingDefaults(max_new_tokens=3)) as (server, client):
        assert (await sampled(server, client, COMPLETIONS))[0].max_tokens == 3
        assert (await sampled(server, client, "/v1/chat/completions", min_tokens=9))[0].max_tokens == 9
        assert (await sampled(server, client, COMPLETIONS, max_tokens=0, echo=True))[0].max_tokens == 1


async def test_where_models_are_listed_their_defaults_are_told_and_adapters_have_them() -> None:
    async with serving(DEFAULTS) as (server, client):
        card = replace(
            server.context.catalog.get("tiny").card, adapters=(tiny_model.ADAPTER,), aliases=("gpt",)
        )
        server.context.catalog.set_cards("tiny", [(R0, card)])
        listed = (await client.get("/v1/models")).json()
        assert [openai["id"] for openai in listed["data"]] == ["tiny", "gpt", tiny_model.ADAPTER.name]
        for openai, gemini in zip(listed["data"], listed["models"], strict=True):
            assert openai["sampling_defaults"] == dict(DEFAULTS.given())
            assert gemini["name"] == f"models/{openai['id']}"
            assert (gemini["temperature"], gemini["topP"], gemini["topK"]) == (0.25, 0.5, 7)
        assert (await client.get("/v1/models/tiny")).json()["sampling_defaults"]["max_new_tokens"] == 40
    for nothing in (None, LEAST):
        async with serving(nothing) as (_, client):
            (model,) = (await client.get("/v1/models")).json()["data"]
            assert "sampling_defaults" not in model


def test_the_newest_replica_says_how_its_model_samples() -> None:
    catalog = ModelCatalog(tiny_model.SECRET)
    card = tiny_model.card()
    newer = replace(card, sampling_defaults=DEFAULTS, adapters=(tiny_model.ADAPTER,), aliases=("gpt",))
    catalog.add(card, tiny_model.bundle(), created=7)
    before = catalog.get("tiny")
    catalog.set_cards("tiny", [(R0, card)])
    assert catalog.get("tiny") is before
    catalog.set_cards("tiny", [(R0, card), (R1, newer)])
    names = ("tiny", "gpt", tiny_model.ADAPTER.name)
    for name in names:
        model = catalog.get(name).within("a tenant").bounded(100)
        assert (model.card.sampling_defaults, model.created, model.card.context_length) == (DEFAULTS, 7, 100)
    after = catalog.get("tiny")
    assert after.root("a tenant") == before.root("a tenant")
    prompt = random.Random(1).randbytes(64 * 4)
    assert after.block_hashes(after.root(), prompt) == before.block_hashes(before.root(), prompt)
    catalog.set_cards("tiny", [])
    assert catalog.get("tiny") is after
    catalog.set_cards("tiny", [(R1, newer), (R0, card)])
    for name in names:
        assert catalog.get(name).card.sampling_defaults is None
