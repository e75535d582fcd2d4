"""A model that goes down to zero replicas, behind a whole router: a real replica that comes late."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from replicas.host import ReplicaHost
from router.assembly import Router
from tests.replicas.whole_replica import MODEL, config
from tests.router.http_server import whole_router
from tests.router.scripted_replica import eventually

SAID = "Hello"
DIALECTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "chat": (
        "/v1/chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": SAID}], "max_tokens": 2},
        503,
    ),
    "completion": ("/v1/completions", {"model": MODEL, "prompt": SAID, "max_tokens": 2}, 503),
    "responses": ("/v1/responses", {"model": MODEL, "input": SAID, "max_output_tokens": 2}, 503),
    "messages": (
        "/v1/messages",
        {"model": MODEL, "messages": [{"role": "user", "content": SAID}], "max_tokens": 2},
        529,
    ),
    "gemini": (
        f"/v1beta/models/{MODEL}:generateContent",
        {"contents": [{"parts": [{"text": SAID}]}], "generationConfig": {"maxOutputTokens": 2}},
        503,
    ),
}
"""Path, body, and the status for a model without a replica."""


class Front:
    def __init__(self, router: Router, client: httpx.AsyncClient) -> None:
        self.router = router
        self.client = client

    async def ask(self, dialect: str = "chat", **changes: Any) -> httpx.Response:
        path, body, _ = DIALECTS[dialect]
        return await self.client.post(path, json={**body, **changes})

    async def unplaced(self) -> float:
        """Read as an autoscaler's query does."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        wanted = f'router_unplaced_requests{{model="{MODEL}"}} '
        (found,) = [line.removeprefix(wanted) for line in lines if line.startswith(wanted)]
        return float(found)

    async def wait_unplaced(self, number: int) -> None:
        async with asyncio.timeout(20):
            while await self.unplaced() != number:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def front(redis_url: str, **settings: Any) -> AsyncIterator[Front]:
    async with (
        whole_router(redis_url, wait_seconds=0.0, **settings) as (router, url),
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield Front(router, client)


@contextlib.asynccontextmanager
async def replica(redis_url: str) -> AsyncIterator[ReplicaHost]:
    host = ReplicaHost(config(redis_url, device="cpu", num_threads=1))
    await host.start()
    try:
        yield host
    finally:
        await host.stop()


async def is_away(front: Front) -> None:
    await eventually(lambda: not front.router._table.has_ready(MODEL))


@pytest.mark.parametrize("is_met", [True, False])
async def test_requests_in_every_dialect_wait_for_the_first_replica(redis_url: str, is_met: bool) -> None:
    """The router has the model's tokenizer from before, or came after the last replica had gone."""
    async with contextlib.AsyncExitStack() as stack:
        if not is_met:
            async with replica(redis_url):
                pass
        router = await stack.enter_async_context(front(redis_url, wait_for_replica_seconds=60))
        if is_met:
            async with replica(redis_url):
                await eventually(lambda: router.router._table.has_ready(MODEL))
                assert (await router.ask()).status_code == 200
            await is_away(router)
        await eventually(lambda: router.router.is_ready)
        assert (await router.client.get("/ready")).status_code == 200, "or no request would come here"
        assert await router.unplaced() == 0, "an autoscaler looks before anything waits"
        tasks = [asyncio.create_task(router.ask(dialect)) for dialect in DIALECTS]
        await router.wait_unplaced(len(tasks))
        never_seen = await router.ask(model="never-seen")  # and no adapter, as far as the router can know
        assert never_seen.status_code == (404 if is_met else 503)
        async with replica(redis_url):
            answers = await asyncio.gather(*tasks)
            assert [answer.status_code for answer in answers] == [200] * len(tasks), answers[0].text
            assert await router.unplaced() == 0


async def test_a_client_that_is_killed_gives_its_place_back(redis_url: str) -> None:
    async with replica(redis_url):
        pass
    async with front(redis_url, wait_for_replica_seconds=60, max_waiting=1) as router:
        await eventually(lambda: router.router.is_ready)
        first = asyncio.create_task(router.ask())
        await router.wait_unplaced(1)
        refused = await router.ask()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "60")
        assert "too many requests wait" in refused.json()["error"]["message"]
        first.cancel()
        await router.wait_unplaced(0)
        second = asyncio.create_task(router.ask())
        await router.wait_unplaced(1)
        async with replica(redis_url):
            assert (await second).status_code == 200


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_when_none_comes_in_time_each_dialect_says_so_in_its_own_words(
    redis_url: str, dialect: str
) -> None:
    async with replica(redis_url):
        pass
    async with front(redis_url, wait_for_replica_seconds=0.2) as router:
        await eventually(lambda: router.router.is_ready)
        answer = await router.ask(dialect)
        assert answer.status_code == DIALECTS[dialect][2]
        assert answer.headers["retry-after"] == "1"
        assert "none came within 0.2 s" in answer.json()["error"]["message"]


async def test_without_the_setting_nothing_waits(redis_url: str) -> None:
    async with replica(redis_url):
        pass
    async with front(redis_url) as router:
        answer = await router.ask()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica_available")
        assert (await router.client.get("/ready")).status_code == 503


async def test_the_time_that_a_client_gives_bounds_the_wait(redis_url: str) -> None:
    async with replica(redis_url):
        pass
    async with front(redis_url, wait_for_replica_seconds=60) as router:
        await eventually(lambda: router.router.is_ready)
        answer = await router.client.post(
            "/v1/chat/completions", json=DIALECTS["chat"][1], headers={"x-kvasir-timeout": "0.2"}
        )
        assert answer.status_code == 503
