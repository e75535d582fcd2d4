"""A router over a scripted dispatcher, and clients for it."""

from collections.abc import AsyncIterator

import httpx
import pytest
from openai import AsyncOpenAI

from tests.router.http_server import HttpServer, http_server


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
