"""Bodies of the worst shapes on every route get a clear answer, and no work in the router itself."""

import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from loadtests.workloads.worst_bodies import (
    CHAT,
    COMPLETIONS,
    MESSAGE_TOKENS,
    MESSAGES,
    RESPONSES,
    SHAPES,
    WorstBody,
    worst_bodies,
)
from router.large_bodies import worker
from router.large_bodies.body_weight import MOST_BYTES
from router.prompt.quoting import Quoter
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from tests.router import tiny_model
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says

LARGE = [*worst_bodies(MOST_BYTES * 4 // 3, model="tiny")]
MOST_RETURNED_BYTES = 16 * 2**10
"""Of a prompt of 512 tokens, and the limits of a request's fields."""

MEDIUM = [*worst_bodies(20_000, model="tiny")]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many characters this process has tokenised, quoted and rendered, call by call."""
    lengths: list[int] = []

    def watch(owner: type, name: str, length_of: Callable[..., int]) -> None:
        original = getattr(owner, name)

        def watched(self: Any, *arguments: Any, **options: Any) -> Any:
            lengths.append(length_of(*arguments))
            return original(self, *arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    watch(Tokenizer, "encode", len)
    watch(Tokenizer, "decode", len)
    watch(Quoter, "is_needed", lambda value: len(repr(value)))
    watch(ChatTemplate, "render", lambda messages: len(repr(messages)))
    watch(ChatTemplate, "render_bounded", lambda messages: len(repr(messages)))
    return lengths


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes came back of each body that was prepared elsewhere."""
    sizes: list[int] = []
    receive = worker._receive

    async def watched(peer: socket.socket, length: int) -> bytes:
        sizes.append(length)
        return await receive(peer, length)

    monkeypatch.setattr(worker, "_receive", watched)
    return sizes


async def test_large_bodies_of_every_shape_get_a_clear_answer_and_no_work_here(
    seen: list[int], returned: list[int]
) -> None:
    async with http_server() as server, httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        server.dispatcher.script = says([tiny_model.END_OF_TURN])
        for body in LARGE:
            await _check(client, body)
            if body.route in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
                assert max(returned) < MOST_RETURNED_BYTES, (body.route, body.name)
            returned.clear()
        assert seen == []
        await server.wait_idle()
        statistics = server.context.worker
        assert (
            statistics.places.line.num_working,
            statistics.places.line.num_waiting,
            statistics.num_refused,
        ) == (0, 0, 0)
        assert statistics.num_done + statistics.num_ended == len(LARGE)


async def test_what_a_request_says_of_single_tokens_is_checked_once_for_all_its_prompts(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says([tiny_model.END_OF_TURN])
    bias = {str(token_id): 1.0 for token_id in range(300)}
    body = {"model": "tiny", "prompt": ["a", "b", "c"], "logit_bias": bias, "stop_token_ids": [*range(300)]}
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    samplings = [generation.sampling for generation in server.dispatcher.generations]
    assert len(samplings) == 3 and len(samplings[0].logit_bias) == len(samplings[0].stop_token_ids) == 300
    assert len({id(sampling.logit_bias) for sampling in samplings}) == 1
    assert len({id(sampling.stop_token_ids) for sampling in samplings}) == 1


async def test_what_is_done_here_for_a_smaller_body_is_bounded(seen: list[int]) -> None:
    async with http_server() as server, httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        server.dispatcher.script = says([tiny_model.END_OF_TURN])
        for body in MEDIUM:
            seen.clear()
            await _check(client, body)
            assert sum(seen) < 10 * len(body.content)


async def _check(client: httpx.AsyncClient, body: WorstBody) -> None:
    response = await client.post(body.route, content=body.content)
    assert response.status_code in (200, 400), (body.route, body.name, response.text[:300])
    if response.status_code == 400:
        error = json.loads(response.content)["error"]
        assert error["type"] == "invalid_request_error" and len(error["message"]) < 1000


def test_the_corpus_is_for_every_route_that_reads_a_body() -> None:
    ours = {CHAT, COMPLETIONS, RESPONSES, MESSAGES, MESSAGE_TOKENS, "/tokenize", "/detokenize"}
    assert SHAPES.keys() == ours
    for body in LARGE:
        assert MOST_BYTES < len(body.content) < 2 * MOST_BYTES, (body.route, body.name)


async def test_a_prompt_that_fits_is_never_refused_for_its_length(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    """The longest text that the context holds, with so much around it that it is prepared elsewhere."""
    server.dispatcher.script = says([tiny_model.END_OF_TURN])
    model = tiny_model.catalog().get("tiny")
    longest = max(range(len(model.tokenizer._token_bytes.with_special)), key=_length_of(model.tokenizer))  # type: ignore[union-attr]
    text = model.tokenizer.decode([longest]) * (tiny_model.CONTEXT_LENGTH - 1)
    ids = model.tokenizer.encode(text)
    for padding in ("", " " * MOST_BYTES):
        for prompt in (text, ids) if len(ids) < tiny_model.CONTEXT_LENGTH else (ids[:511],):
            body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1}) + padding
            assert (await http.post("/v1/completions", content=body)).status_code == 200


def _length_of(tokenizer: Tokenizer) -> Callable[[int], int]:
    return lambda token_id: len(tokenizer.token_text(token_id)[1])
