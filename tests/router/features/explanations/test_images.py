"""What operators and users are told of a prompt with images: how many, how many of their tokens were cached,
and which image is another one. Never a picture.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from cluster.commands.why import render
from replicas.media.probes import probe_png
from replicas.protocol.image_rules import written_rule
from replicas.protocol.images import ImageFormat, ImageSize
from router.prompt.catalog import ModelCatalog
from tests.router import tiny_model
from tests.router.explain.image_prompts import RULE, TEMPLATE
from tests.router.http_server import HttpServer, http_server
from tests.router.quiet_fleet import QuietFleet
from tests.router.scripted_dispatch import says

RED, GREEN, BLUE = (probe_png(32, 16, colour) for colour in (b"\xff\0\0", b"\0\xff\0", b"\0\0\xff"))
NUM_IMAGE_TOKENS = RULE.num_tokens(ImageSize(ImageFormat.PNG, 32, 16))


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    catalog = ModelCatalog(tiny_model.SECRET)
    catalog.add(replace(tiny_model.card(), image_rule=written_rule(RULE)), tiny_model.bundle(TEMPLATE))
    async with http_server(QuietFleet(), catalog=catalog) as running:
        running.dispatcher.script = says([20])
        yield running


def _coded(image: bytes) -> str:
    return base64.b64encode(image).decode()


def _chat(images: Sequence[bytes]) -> tuple[str, dict[str, Any]]:
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_coded(image)}"}}
        for image in images
    ]
    return "/v1/chat/completions", {"messages": _turns([{"type": "text", "text": "Look."}, *parts])}


def _turns(last: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation about the first image, and then about all."""
    return [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello to you."},
        {"role": "user", "content": last[:2]},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": last},
    ]


async def _ask(
    http: httpx.AsyncClient, form: Callable[[Sequence[bytes]], tuple[str, dict[str, Any]]], *images: bytes
) -> dict[str, Any]:
    """The explanation of that request."""
    path, fields = form(images)
    body = fields if "contents" in fields else {"model": tiny_model.MODEL, "max_tokens": 1, **fields}
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    url = f"/v1/cache/explain/{answer.headers['x-request-id']}"
    for _ in range(500):
        explanation = await http.get(url)
        if explanation.status_code == 200:
            found: dict[str, Any] = explanation.json()
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(explanation.text)


async def test_another_image_is_said_in_a_plain_sentence(http: httpx.AsyncClient) -> None:
    first = await _ask(http, _chat, RED, GREEN)
    assert first["prompts"][0]["place"] is None
    explanation = await _ask(http, _chat, RED, BLUE)
    place = explanation["prompts"][0]["place"]
    assert place["path"] == "messages[4].content[2].image_url"
    assert place["sentence"] == "image 2 of message 5 differs"
    assert "  image 2 of message 5 differs" in list(render(explanation))
    assert _coded(BLUE)[:16] not in str(explanation)


async def test_the_first_image_of_an_earlier_message_is_the_one_that_differs(http: httpx.AsyncClient) -> None:
    await _ask(http, _chat, RED, GREEN)
    explanation = await _ask(http, _chat, BLUE, GREEN)
    assert explanation["prompts"][0]["place"]["sentence"] == "image 1 of message 3 differs"


async def test_of_a_text_that_differs_there_is_no_such_sentence(http: httpx.AsyncClient) -> None:
    def other(images: Sequence[bytes]) -> tuple[str, dict[str, Any]]:
        path, fields = _chat(images)
        fields["messages"][1]["content"] = "Hello to everybody else."
        return path, fields

    await _ask(http, _chat, RED, GREEN)
    explanation = await _ask(http, other, RED, GREEN)
    assert explanation["prompts"][0]["place"]["sentence"] is None
    (newest, _) = (await http.get("/live/decisions")).json()["decisions"]
    assert newest["difference"] is None


async def test_the_page_is_told_of_images_in_numbers(server: HttpServer, http: httpx.AsyncClient) -> None:
    await _ask(http, _chat, RED, GREEN)
    media = server.dispatcher.generations[-1].submit.media
    inside = media[2].start + 3
    server.dispatcher.script = says([20], num_cached_tokens=inside)
    await _ask(http, _chat, RED, GREEN)
    server.dispatcher.script = says([20], num_cached_tokens=media[1].start)
    await _ask(http, _chat, RED, BLUE)
    answer = await http.get("/live/decisions")
    newest, second, first = answer.json()["decisions"]
    assert [one["images"] for one in (first, second, newest)] == [3, 3, 3]
    assert [one["image_tokens"] for one in (first, second, newest)] == [3 * NUM_IMAGE_TOKENS] * 3
    cached = [one["cached_image_tokens"] for one in (first, second, newest)]
    assert cached == [0, 2 * NUM_IMAGE_TOKENS + 3, NUM_IMAGE_TOKENS]
    assert [one["difference"] for one in (first, second, newest)] == [
        None,
        None,
        "image 2 of message 5 differs",
    ]
    opened = (await http.get(f"/live/decisions/{newest['number']}")).json()
    assert opened["difference"] == "image 2 of message 5 differs"
    for image in (RED, GREEN, BLUE):
        assert _coded(image)[:40] not in answer.text


async def test_an_image_that_was_read_from_another_prompt_s_cache_breaks_nothing(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    await _ask(http, _chat, RED, GREEN)
    server.dispatcher.script = says(
        [20], num_cached_tokens=server.dispatcher.generations[-1].submit.media[2].start + 1
    )
    await _ask(http, _chat, RED, BLUE)
    newest = (await http.get("/live/decisions")).json()["decisions"][0]
    assert newest["difference"] is None and newest["images"] == 3
