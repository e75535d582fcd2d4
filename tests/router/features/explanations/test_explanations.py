"""What GET /v1/cache/explain/{id} says of requests that a scripted fleet has served."""

import asyncio
import json
from random import Random
from typing import Any

import httpx
import pytest

from cluster.commands.why import render
from router.api.logged_prompts import LoggedModel, logged_prompts
from router.explain.linting.linter import Linter
from router.explain.linting.log_lines import read_line
from router.features.explanations.place_search import SMALL_BYTES, Allowance
from router.prompt.catalog import ModelCatalog
from tests.router import tiny_model
from tests.router.explain.broken_prompts import broken
from tests.router.explain.conversations import TEMPLATES
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says
from tests.router.tiny_model import MODEL

OTHER = "of something else that nobody changes, and that goes on for a while. " * 5
LONG = "the quick brown fox jumps over the lazy dog and sleeps. " * 6


async def explanation_of(http: httpx.AsyncClient, *, num_blanks: int = 0, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"model": MODEL, "max_tokens": 1, **fields}) + " " * num_blanks
    answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    explanation: dict[str, Any] = {}
    for _ in range(100):
        explanation = (await http.get(f"/v1/cache/explain/{answer.json()['id']}")).json()
        if any(prompt["place"] is not None for prompt in explanation.get("prompts", ())):
            break
        await asyncio.sleep(0.02)
    assert explanation["answer_id"] == answer.json()["id"]
    assert explanation["request_id"] == answer.headers["x-request-id"]
    return explanation


async def test_the_place_is_told_of_the_prompt_that_was_changed(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says([20])
    await explanation_of(http, prompt=[OTHER, LONG + "two"])
    changed = LONG.replace("lazy", "busy", 3).replace("busy", "lazy", 2)
    told = (await explanation_of(http, prompt=[OTHER, changed + "two"]))["prompts"]
    assert [prompt["place"] and prompt["place"]["path"] for prompt in told] == [None, "prompt[1]"]


async def chat_explanation(http: httpx.AsyncClient, text: str, *, system: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    body = {"model": MODEL, "max_tokens": 1, "messages": messages}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    explanation: dict[str, Any] = (await http.get(f"/v1/cache/explain/{answer.json()['id']}")).json()
    return explanation["prompts"][0]  # type: ignore[no-any-return]


async def test_the_story_of_a_small_body_has_its_place_as_soon_as_it_is_told(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says([20])
    await chat_explanation(http, "one", system=LONG)
    told = await chat_explanation(
        http, "two", system=LONG.replace("lazy", "busy", 3).replace("busy", "lazy", 2)
    )
    assert told["place"]["path"] == "messages[0].content"


async def test_of_a_prompt_that_was_all_read_no_place_is_looked_for(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says([20])
    await chat_explanation(http, "one", system=LONG)
    server.dispatcher.script = says([20], num_cached_tokens=10_000)
    told = await chat_explanation(http, "two", system=LONG)
    assert told["outcome"] == "hit"
    assert told["nearest"]["diverges_at"] is not None
    assert told["place"] is None


async def test_a_prompt_that_lost_nothing_is_compared_when_its_explanation_is_asked_for(
    server: HttpServer, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "system", "content": LONG}, {"role": "user", "content": "one"}]
    body = {"model": MODEL, "max_tokens": 1, "messages": messages}
    server.dispatcher.script = says([20])
    first = (await http.post("/v1/chat/completions", json=body)).json()["id"]
    server.dispatcher.script = says([20], num_cached_tokens=10_000)
    with monkeypatch.context() as patch:
        patch.setattr(server.explanations.memory, "nearest", None)
        patch.setattr(server.explanations.memory, "repeats", None)
        asked = (await http.post("/v1/chat/completions", json=body)).json()["id"]
        patch.undo()
    server.dispatcher.script = says([20])
    await http.post("/v1/chat/completions", json=body)
    told = [(await http.get(f"/v1/cache/explain/{asked}")).json() for _ in range(2)]
    assert told[0] == told[1]
    (prompt,) = told[0]["prompts"]
    assert (prompt["nearest"]["answer_id"], prompt["nearest"]["diverges_at"]) == (first, None)


async def test_a_large_body_is_looked_through_beside_the_loop(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says([20])
    await explanation_of(http, prompt=LONG + "one")
    told = (await explanation_of(http, prompt=LONG + "two", num_blanks=SMALL_BYTES))["prompts"][0]
    assert told["place"]["path"] == "prompt"


LARGE = 32_768
PROMISED = 32
"""What the scripted index promises of each prompt."""

TEMPLATED = tiny_model.bundle(TEMPLATES["qwen25"])


def large_model() -> ModelCatalog:
    made = ModelCatalog(tiny_model.SECRET)
    made.add(tiny_model.card(context_length=LARGE), TEMPLATED)
    return made


def by_lint(bodies: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """What of each prompt could be read from cache, and what is lost to a change."""
    linter, found = Linter(), []
    for number, body in enumerate(bodies):
        line = read_line(json.dumps(body).encode())
        (prompt,) = logged_prompts(LoggedModel.of(TEMPLATED), line, number, tiny_model.BLOCK_SIZE)
        num_cached, broken_at = linter.take(prompt)
        found.append((num_cached, 0 if broken_at is None else broken_at.num_lost_tokens))
    return found


def documents() -> list[dict[str, Any]]:
    """Which begin alike and end alike, and have nothing else in common."""
    texts = [[f"{rng.getrandbits(40):x}" for _ in range(90)] for rng in map(Random, range(4))]
    asked = [
        [
            {"role": "system", "content": "Answer from this. " + ". ".join(words)},
            {"role": "user", "content": "What is it about?"},
        ]
        for words in texts
    ]
    return [{"model": MODEL, "messages": messages} for messages in asked]


def timed(*, is_plain: bool) -> list[dict[str, Any]]:
    """Prompts that differ in a time near their beginning, and have no piece in common."""
    texts = [
        f"{OTHER[:60]} at 10:{minute} on a day that is over, {LONG.replace('. ', ', ')}"
        for minute in (11, 12)
    ]
    if is_plain:
        return [{"model": MODEL, "prompt": text} for text in texts]
    asked = [
        [{"role": "system", "content": text}, {"role": "user", "content": f"Question {number}?"}]
        for number, text in enumerate(texts)
    ]
    return [{"model": MODEL, "messages": messages} for messages in asked]


@pytest.mark.parametrize(
    "way", ["documents", "plain", "sentence", "tool_word", "key_order", "trimmed_result", "compacted"]
)
async def test_header_story_metric_and_lint_say_the_same_of_what_a_change_has_cost(way: str) -> None:
    if way == "documents":
        bodies = documents()
    elif way in ("plain", "sentence"):
        bodies = timed(is_plain=way == "plain")
    else:
        made = broken(way, "chat", Random(way), num_tools=2, num_turns=4)
        bodies = [{**made.before, "model": MODEL}, {**made.after, "model": MODEL}]
    expected = by_lint(bodies)
    assert (expected[-1][1] > 0) == (way != "documents")
    lost = 0
    async with http_server(catalog=large_model()) as server, httpx.AsyncClient(base_url=server.url) as http:
        for body, (num_cached, num_lost) in zip(bodies, expected, strict=True):
            server.dispatcher.script = says([20], num_cached_tokens=max(num_cached, PROMISED))
            path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            answer = await http.post(path, json={**body, "max_tokens": 1})
            assert answer.status_code == 200, answer.text
            (explanation,) = (await http.get(f"/v1/cache/explain/{answer.json()['id']}")).json()["prompts"]
            spans = [one for one in explanation["spans"] if one["cause"] == "prefix_changed"]
            assert sum(one["end"] - one["start"] for one in spans) == explanation["lost_tokens"] == num_lost
            assert f"; lost={num_lost}; cause={explanation['cause']}" in answer.headers["x-kvasir-cache"]
            assert (explanation["cause"] == "prefix_changed") == (num_lost > 0)
            lost += num_lost
        metrics = (await http.get("/metrics")).text
    name = f'router_missed_tokens_total{{model="{MODEL}",cause="prefix_changed"}}'
    assert float(metrics.split(f"\n{name} ")[1].split()[0]) == lost


async def test_tools_that_are_left_out_are_the_place_that_is_told() -> None:
    """Coding agents do so where they ask for a summary."""
    made = broken("compacted", "chat", Random(1), num_tools=2, num_turns=4).before
    summarised = {"messages": [*made["messages"], {"role": "user", "content": "Sum it up."}]}
    async with http_server(catalog=large_model()) as server, httpx.AsyncClient(base_url=server.url) as http:
        server.dispatcher.script = says([20], num_cached_tokens=PROMISED)
        for body in (made, summarised):
            answer = await http.post("/v1/chat/completions", json={**body, "model": MODEL, "max_tokens": 1})
            assert answer.status_code == 200, answer.text
        (told,) = (await http.get(f"/v1/cache/explain/{answer.json()['id']}")).json()["prompts"]
    assert told["lost_tokens"] and told["nearest"]["changed"] == ["tools"]
    assert (told["place"]["path"], told["place"]["is_certain"]) == ("tools", True)


async def test_a_loss_is_divided_over_the_causes_of_its_parts() -> None:
    """What was known of it is not there any more, and behind that something has changed."""
    made = broken("trimmed_result", "chat", Random(1), num_tools=2, num_turns=4)
    async with http_server(catalog=large_model()) as server, httpx.AsyncClient(base_url=server.url) as http:
        server.dispatcher.script = says([20], num_cached_tokens=PROMISED)
        for body in (made.before, made.after):
            answer = await http.post("/v1/chat/completions", json={**body, "model": MODEL, "max_tokens": 1})
            explanation = (await http.get(f"/v1/cache/explain/{answer.json()['id']}")).json()
    (prompt,) = explanation["prompts"]
    parts: dict[str, int] = {}
    for span in prompt["spans"]:
        parts[span["cause"]] = parts.get(span["cause"], 0) + span["end"] - span["start"]
    changed, unknown = parts["prefix_changed"], parts["unknown"]
    assert prompt["lost_tokens"] == changed + unknown
    said = answer.headers["x-kvasir-cache"]
    first, second = sorted([("unknown", unknown), ("prefix_changed", changed)], key=lambda each: -each[1])
    assert said == (
        f"partial; cached={PROMISED}; lost={changed + unknown}; cause={first[0]}"
        f"; {first[0]}={first[1]}; {second[0]}={second[1]}"
    )
    words = list(render(explanation))
    assert words[-1].startswith(f"  lost: {changed + unknown:,} tokens")
    assert words[-1].endswith(f"; {first[1]:,} {first[0]}, {second[1]:,} {second[0]}")


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


def test_time_is_spent_as_it_passes_and_little_of_it_is_saved_up() -> None:
    now = 0.0
    allowance = Allowance(0.5, 2.0, lambda: now)
    for passed in (2.0, 1000.0):
        allowance.spend(2.0)
        assert not allowance.is_left()
        now += passed
        assert allowance.is_left()
    allowance.spend(2.0)
    assert not allowance.is_left()
