"""Hostile images in every dialect: a clear answer to each, and nothing left behind."""

from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from loadtests.workloads.worst_images import LIGHT_BYTES, worst_images
from replicas.protocol.image_rules import CellRule, written_rule
from router.api.body_weight import MOST_BYTES
from router.prompt.catalog import ModelCatalog
from tests.router import tiny_model
from tests.router.api.test_image_stories import TEMPLATE
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
