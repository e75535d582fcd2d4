"""Hostile images in every dialect: a clear answer to each, and nothing left behind."""

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from loadtests.workloads.worst_images import LIGHT_BYTES, worst_images
from replicas.media.probes import probe_png
from replicas.protocol.image_rules import CellRule, written_rule
from router.large_bodies.body_weight import MOST_BYTES
from router.prompt.catalog import ModelCatalog
from tests.router import tiny_model
from tests.router.explain.image_prompts import TEMPLATE
from tests.router.http_server import HttpServer, http_server
from tests.router.quiet_fleet import QuietFleet
from tests.router.scripted_dispatch import says

RULE = CellRule(placeholder=0, cell=4, min_pixels=16, max_pixels=16 * 300)
SOUND = {
    f"image: {name}"
    for name in (
        *("PNG: noise", "PNG: a bomb", "PNG: something else behind it"),
        *("WebP: empty chunks", "WebP: a length that lies"),
    )
}
"""By their headers: a replica is the first to read more of them."""


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    catalog = ModelCatalog(tiny_model.SECRET)
    catalog.add(replace(tiny_model.card(), image_rule=written_rule(RULE)), tiny_model.bundle(TEMPLATE))
    async with http_server(QuietFleet(), catalog=catalog) as running:
        running.dispatcher.script = says([20])
        yield running


@pytest.mark.parametrize("size", [LIGHT_BYTES, MOST_BYTES * 2])
async def test_each_is_answered_clearly_and_leaves_nothing_behind(server: HttpServer, size: int) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        for body in worst_images(size, model="tiny"):
            answer = await client.post(body.route, content=body.content)
            is_sound = f"image: {body.name.partition(': ')[2]}" in SOUND
            assert answer.status_code == (200 if body.name in SOUND else 400), (body.name, answer.text)
            if answer.status_code == 400:
                complaint = "context length" if is_sound else "messages[0].content[0].image_url"
                assert complaint in answer.text, body.name
            await server.wait_idle()
    assert server.dispatcher.num_open == 0


async def test_images_count_until_their_requests_have_ended_and_too_many_are_refused() -> None:
    catalog = ModelCatalog(tiny_model.SECRET)
    catalog.add(replace(tiny_model.card(), image_rule=written_rule(RULE)), tiny_model.bundle(TEMPLATE))
    bounds = {"image_memory_bytes": 8 << 20, "max_body_bytes": 4 << 20}
    async with http_server(QuietFleet(), catalog=catalog, **bounds) as server:
        may_go_on = asyncio.Event()
        server.dispatcher.script = lambda generation: [may_go_on, *says([20])(generation)]
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            bodies = [
                body_of(probe_png(32, 16, b"\1\2\3") + bytes([number]) * (1 << 20)) for number in range(6)
            ]
            asked = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for body in bodies]
            while server.dispatcher.num_open + sum(each.done() for each in asked) < len(asked):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            statistics = server.context.images
            assert (server.dispatcher.num_open, statistics.num_refused) == (3, 3), "half is one address's"
            assert 3 << 20 < statistics.num_bytes < 4 << 20
            may_go_on.set()
            statuses = sorted([(await each).status_code for each in asked])
        assert statuses == [200, 200, 200, 503, 503, 503]
        await server.wait_idle()
        assert server.context.images.num_bytes == 0


def body_of(image: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": [part]}]}
