"""A router over a scripted dispatcher, and clients for it."""

from collections.abc import AsyncIterator

import httpx
import pytest
from openai import AsyncOpenAI

from router.features.history import history_sync
from router.features.named_caches import named_caches
from router.features.published import store as published_store
from router.features.responses import store as response_store
from router.features.usage import store as usage_store
from router.shared import news
from tests.router.http_server import HttpServer, http_server

PATIENCE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _patient_with_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis is slow on a busy machine, not away. A test of one that is silent has a deadline of its own."""
    for module in (history_sync, named_caches, response_store, usage_store, news):
        monkeypatch.setattr(module, "REDIS_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(published_store, "ANSWER_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with http_server() as running:
        yield running


@pytest.fixture
async def http(server: HttpServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
async def openai(server: HttpServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client
