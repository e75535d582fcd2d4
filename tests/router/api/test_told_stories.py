"""What GET /v1/cache/explain/{id} says of requests that a scripted fleet has served."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from router.api.stories import SMALL_BYTES
from tests.router.http_server import HttpServer
from tests.router.scripted_dispatch import says
from tests.router.tiny_model import MODEL

OTHER = "of something else that nobody changes, and that goes on for a while. " * 5
LONG = "the quick brown fox jumps over the lazy dog and sleeps. " * 6


async def story_of(http: httpx.AsyncClient, *, num_blanks: int = 0, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"model": MODEL, "max_tokens": 1, **fields}) + " " * num_blanks
    answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    story: dict[str, Any] = {}
    for _ in range(100):
        story = (await http.get(f"/v1/cache/explain/{answer.json()['id']}")).json()
        if any(prompt["place"] is not None for prompt in story.get("prompts", ())):
            break
        await asyncio.sleep(0.02)
    assert story["answer_id"] == answer.json()["id"]
    assert story["request_id"] == answer.headers["x-request-id"]
    return story


async def test_the_place_is_told_of_the_prompt_that_was_changed(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says([20])
    await story_of(http, prompt=[OTHER, LONG + "two"])
    changed = LONG.replace("lazy", "busy", 3).replace("busy", "lazy", 2)
    told = (await story_of(http, prompt=[OTHER, changed + "two"]))["prompts"]
    assert [prompt["place"] and prompt["place"]["path"] for prompt in told] == [None, "prompt[1]"]


async def chat_story(http: httpx.AsyncClient, text: str, *, system: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    body = {"model": MODEL, "max_tokens": 1, "messages": messages}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    story: dict[str, Any] = (await http.get(f"/v1/cache/explain/{answer.json()['id']}")).json()
    return story["prompts"][0]  # type: ignore[no-any-return]


async def test_the_story_of_a_small_body_has_its_place_as_soon_as_it_is_told(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says([20])
    await chat_story(http, "one", system=LONG)
    told = await chat_story(http, "two", system=LONG.replace("lazy", "busy", 3).replace("busy", "lazy", 2))
    assert told["place"]["path"] == "messages[0].content"


async def test_of_a_prompt_that_was_all_read_no_place_is_looked_for(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says([20])
    await chat_story(http, "one", system=LONG)
    server.dispatcher.script = says([20], num_cached_tokens=10_000)
    told = await chat_story(http, "two", system=LONG)
    assert told["outcome"] == "hit"
    assert told["nearest"]["diverges_at"] is not None
    assert told["place"] is None


async def test_a_large_body_is_looked_through_beside_the_loop(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says([20])
    await story_of(http, prompt=LONG + "one")
    told = (await story_of(http, prompt=LONG + "two", num_blanks=SMALL_BYTES))["prompts"][0]
    assert told["place"]["path"] == "prompt"


async def test_an_id_of_nobody_is_not_found(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/cache/explain/cmpl-0")).status_code == 404


@pytest.mark.parametrize("with_usage", [True, False])
async def test_a_stream_says_at_its_end_what_has_changed_since_an_answer(
    server: HttpServer, http: httpx.AsyncClient, with_usage: bool
) -> None:
    server.dispatcher.script = says([20, 21])
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": LONG}], "n": 2}
    earlier = (await http.post("/v1/chat/completions", json=body)).json()["id"]
    body["messages"] = [{"role": "user", "content": LONG.replace("lazy", "busy", 1)}]
    body["prompt_cache_options"] = {"comparison_response_id": earlier}
    whole = (await http.post("/v1/chat/completions", json=body)).json()["prompt_cache_diagnostics"]
    assert whole["type"] != "comparison_response_not_found"
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    streamed = await http.post("/v1/chat/completions", json={**body, "stream": True, **options})
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    *others, last = chunks
    assert last["prompt_cache_diagnostics"] == whole
    assert (last["choices"] == []) is with_usage and bool(last.get("usage")) is with_usage
    assert all("prompt_cache_diagnostics" not in chunk for chunk in others)
