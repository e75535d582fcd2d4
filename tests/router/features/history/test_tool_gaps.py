"""Prompts that are kept while tools run."""

from typing import Any

import httpx
import pytest

from router.history.tool_gaps import LEAST_GAPS, LEAST_SECONDS
from tests.router import tiny_model
from tests.router.http_server import http_server
from tests.router.scripted_dispatch import says
from tests.router.thinking_model import MODEL, catalog, token_ids

CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


async def loop(http: httpx.AsyncClient, *, turns: int, **fields: Any) -> dict[str, Any]:
    """An agent whose model calls a tool in every turn."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather? " * 8}]
    answer: dict[str, Any] = {}
    for _ in range(turns):
        body = {"model": MODEL, "messages": messages, "tools": TOOLS} | fields
        response = await http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        message = answer["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Fine."}
        messages += [message, result]
    return answer


@pytest.mark.parametrize(("seconds", "parallel"), [(300, True), (300, False), (0, True)])
async def test_a_tenants_prompts_are_kept_once_its_tools_are_known(seconds: int, parallel: bool) -> None:
    async with http_server(catalog=catalog(), tool_gap_seconds=seconds) as server:
        server.dispatcher.script = says(token_ids(CALL))
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            answer = await loop(http, turns=10, parallel_tool_calls=parallel)
            leases = [generation.submit.leases for generation in server.dispatcher.generations]
            assert not any(leases[: LEAST_GAPS + 1])
            if not seconds:
                assert not any(leases)
                return
            (lease,) = leases[-1]
            num_tokens = len(server.dispatcher.generations[-1].token_ids)
            assert lease == (num_tokens // tiny_model.BLOCK_SIZE, LEAST_SECONDS)
            assert "cache_leases" not in answer["usage"]["prompt_tokens_details"]

            # What a client wishes goes before it.
            wished = await loop(http, turns=1, prompt_cache_retention="24h")
            (lease,) = server.dispatcher.generations[-1].submit.leases
            assert lease.seconds == 86_400
            assert len(wished["usage"]["prompt_tokens_details"]["cache_leases"]) == 1

            # Without tools there is nothing to wait for, and another tenant has taught nothing.
            await http.post(
                "/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
            )
            assert not server.dispatcher.generations[-1].submit.leases
            await loop(http, turns=1, cache_salt="another")
            assert not server.dispatcher.generations[-1].submit.leases
