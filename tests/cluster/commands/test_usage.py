"""`kvasir usage` against a real router: one line per tenant, whose sums are the router's."""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from cluster.commands.usage import add_arguments, usage
from router.features.usage.store import UsageStore
from tests.router.features.api_keys.some_keys import ACME, BETA, OPERATOR, some_keys
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
async def server(redis_url: str) -> AsyncIterator[HttpServer]:
    store = UsageStore(redis_url, 744)
    async with http_server(keys=some_keys(), usage=store) as running:
        running.dispatcher.script = says([80, 81, 2], num_cached_tokens=3, num_slower_tier_tokens=1)
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
            for key in (ACME, BETA, BETA):
                headers = {"authorization": f"Bearer {key}"}
                assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).is_success
        yield running
    await store.close()


async def printed(server: HttpServer, key: str | None, *flags: str) -> str:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    said: list[str] = []
    arguments = parser.parse_args(flags)
    await asyncio.to_thread(usage, arguments, server.url, key, time.time(), said.append)
    return "\n".join(said)


async def test_a_line_per_tenant_and_one_for_all(server: HttpServer) -> None:
    header, acme, beta, together = (line.split() for line in (await printed(server, OPERATOR)).splitlines())
    assert header[0] == "TENANT"
    assert (acme[0], acme[1], beta[0], beta[1], together[:2]) == ("acme", "1", "beta", "2", ["all", "3"])
    for place, title in enumerate(header):
        if title in ("PROMPT", "CACHED", "DEVICE", "HOST", "OUTPUT"):
            assert int(acme[place]) + int(beta[place]) == int(together[place]) > 0
    assert acme[header.index("CACHED")] == "3"
    assert acme[header.index("SHARE")].endswith("%")


async def test_json_is_the_routers_answer(server: HttpServer) -> None:
    found = json.loads(await printed(server, OPERATOR, "--json", "--since=7d", "--tenant=acme"))
    assert found["total"]["requests"] == 1
    assert found["end"] - found["start"] in (7 * 86_400, 7 * 86_400 + 3600)
