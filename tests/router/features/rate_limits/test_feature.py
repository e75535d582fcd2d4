"""What bounds a tenant and a key, over real sockets and with the vendors' libraries."""

import asyncio
import contextlib
import datetime
import random
from collections.abc import AsyncIterator, Sequence

import anthropic
import httpx
import openai
import pytest

from replicas.protocol.frames import PromptUsage, RequestKey, TokenDelta
from router.caller import Caller, Limits, Right, Tenant
from router.errors import GenerationFailed, Overloaded
from router.features.api_keys.keyring import HeldKey, Keyring, key_digest
from router.generation import Generation
from tests.router import tiny_model
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import NEVER, Step, says

KEY, SECOND = (f"sk-kvasir-{digit * 12}-{digit * 43}" for digit in "12")
MESSAGES = [{"role": "user", "content": "How are you?"}]
CHAT = {"model": tiny_model.MODEL, "messages": MESSAGES, "max_tokens": 4}
BEARER = {"authorization": f"Bearer {KEY}"}


class Clock:
    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def limited(
    of_key: Limits | None = None,
    *,
    of_tenant: Limits | None = None,
    rights: frozenset[Right] = frozenset(),
    **settings: object,
) -> AsyncIterator[tuple[HttpServer, Clock]]:
    tenant = Tenant(name="acme", limits=of_tenant or Limits())
    held = {
        key_id: HeldKey(
            key_digest(key),
            Caller(tenant=tenant, key_id=key_id, limits=of_key or Limits(), rights=rights),
        )
        for key_id, key in (("1" * 12, KEY), ("2" * 12, SECOND))
    }
    async with http_server(keys=Keyring(held), **settings) as server:  # type: ignore[arg-type]
        clock = Clock()
        server.rates.clock, server.rates.wall_clock = clock, lambda: 1_700_000_000.0
        server.dispatcher.script = says([65, 66])
        yield server, clock


def client_of(server: HttpServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=60, headers=BEARER)


async def test_openais_library_reads_when_to_come_back_and_what_is_left() -> None:
    async with (
        limited(Limits(requests_per_minute=2, tokens_per_minute=6000)) as (server, clock),
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client,
    ):
        first = await client.chat.completions.with_raw_response.create(**CHAT)  # type: ignore[call-overload]
        used = first.parse().usage.total_tokens
        headers = first.headers
        assert headers["x-ratelimit-limit-requests"] == "2"
        assert headers["x-ratelimit-remaining-requests"] == "1"
        assert headers["x-ratelimit-reset-requests"] == "30s"
        assert headers["x-ratelimit-limit-tokens"] == "6000"
        assert headers["x-ratelimit-remaining-tokens"] == str(6000 - used)
        assert headers["x-ratelimit-reset-tokens"] == f"{used * 10}ms"
        streamed = await client.chat.completions.with_raw_response.create(**CHAT, stream=True)  # type: ignore[call-overload]
        assert streamed.headers["x-ratelimit-remaining-requests"] == "0"
        assert streamed.headers["x-ratelimit-reset-requests"] == "1m0s"
        async for _ in streamed.parse():
            pass
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
        error = caught.value
        assert (error.code, error.type) == ("rate_limit_exceeded", "requests")
        assert error.response.headers["retry-after"] == "30"
        assert error.response.headers["retry-after-ms"] == "30000"
        assert error.response.headers["x-should-retry"] == "true"
        assert error.response.headers["x-ratelimit-remaining-requests"] == "0"
        assert "try again in 30s" in error.message
        clock.now += 30
        await client.chat.completions.create(**CHAT)  # type: ignore[call-overload]


async def test_anthropics_library_reads_its_own_headers_and_error() -> None:
    async with (
        limited(Limits(requests_per_minute=1, tokens_per_minute=6000)) as (server, _),
        anthropic.AsyncAnthropic(base_url=server.url, api_key=KEY, max_retries=0) as client,
    ):
        first = await client.messages.with_raw_response.create(**CHAT)  # type: ignore[call-overload]
        usage = (await first.parse()).usage
        left = str(6000 - usage.input_tokens - usage.output_tokens)
        headers = first.headers
        assert headers["anthropic-ratelimit-requests-limit"] == "1"
        assert headers["anthropic-ratelimit-requests-remaining"] == "0"
        reset = datetime.datetime.fromisoformat(headers["anthropic-ratelimit-requests-reset"])
        assert reset.timestamp() == 1_700_000_060
        for name in ("tokens", "input-tokens", "output-tokens"):
            assert headers[f"anthropic-ratelimit-{name}-limit"] == "6000"
            assert headers[f"anthropic-ratelimit-{name}-remaining"] == left
        assert not any(name.startswith("x-ratelimit") for name in headers)
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(**CHAT)  # type: ignore[call-overload]
        assert caught.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
        assert caught.value.response.headers["retry-after"] == "60"


async def test_requests_are_refused_before_their_body_is_read() -> None:
    async with limited(Limits(requests_per_minute=1)) as (server, _), client_of(server) as http:
        await http.post("/v1/chat/completions", json=CHAT)
        refused = await http.post("/v1/chat/completions", content=b"no JSON")
        assert refused.status_code == 429
        again = await http.post("/v1/chat/completions", content=b"x" * 1_000_000)
        assert again.status_code == 429


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_context_of_a_key_is_the_smaller_one(path: str) -> None:
    body = dict(CHAT)
    if path == "/v1/completions":
        del body["messages"]
        body["prompt"] = "How are you?"
    of_tenant, of_key = Limits(max_context=90), Limits(max_context=4000)
    async with limited(of_key, of_tenant=of_tenant) as (server, _), client_of(server) as http:
        assert (await http.post(path, json=body)).status_code == 200
        server.dispatcher.generations.clear()
        unbounded = {name: value for name, value in body.items() if name != "max_tokens"}
        assert (await http.post(path, json=unbounded)).status_code == 200
        generation = server.dispatcher.generations[0]
        assert len(generation.token_ids) + generation.sampling.max_tokens <= 90
        refused = await http.post(path, json={**body, "max_tokens": 90})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_the_right_to_go_first_makes_a_priority_count() -> None:
    for rights, counts in ((frozenset({Right.PRIORITY}), -5), (frozenset({Right.EXPLAIN}), 0)):
        async with limited(rights=rights) as (server, _), client_of(server) as http:
            await http.post("/v1/chat/completions", json={**CHAT, "priority": -5})
            assert server.dispatcher.generations[0].submit.priority == counts


async def test_replicas_are_told_whose_a_prompt_is_and_its_shares_but_not_the_name() -> None:
    bounds = Limits(lease_share=0.6, store_share=0.5)
    async with limited(of_tenant=bounds) as (server, _), client_of(server) as http:
        for _ in range(2):
            await http.post("/v1/chat/completions", json=CHAT)
        first, second = (generation.submit for generation in server.dispatcher.generations)
        assert (first.lease_share, first.store_share) == (0.6, 0.5)
        assert len(first.tenant) == 8
        assert first.tenant == second.tenant != b"acme"
    async with http_server() as server, httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        server.dispatcher.script = says([65])
        await http.post("/v1/chat/completions", json=CHAT)
        submit = server.dispatcher.generations[0].submit
        assert (submit.tenant, submit.lease_share, submit.store_share) == (b"", 0.0, 0.0)


def _remaining(answer: httpx.Response) -> tuple[int, int]:
    return (
        int(answer.headers["x-ratelimit-remaining-requests"]),
        int(answer.headers["x-ratelimit-remaining-tokens"]),
    )


@pytest.mark.parametrize(
    "failure", [Overloaded("full"), GenerationFailed("died"), RuntimeError("a mistake of ours")]
)
async def test_what_is_refused_or_fails_here_is_given_back(failure: Exception) -> None:
    async with (
        limited(Limits(requests_per_minute=9, tokens_per_minute=5000)) as (server, _),
        client_of(server) as http,
    ):
        server.dispatcher.script = lambda generation: [failure]
        assert _remaining(await http.post("/v1/chat/completions", json=CHAT)) == (9, 5000)
        assert server.rates.limits.num_sequences == 0


def _two_tokens_then_silence(generation: Generation) -> Sequence[Step]:
    usage = PromptUsage(len(generation.token_ids), 0, 0)
    return [[TokenDelta(RequestKey(1, 0), (80, 81), usage=usage)], NEVER]


async def test_who_leaves_has_used_the_prompt_and_what_came() -> None:
    async with (
        limited(Limits(requests_per_minute=9, tokens_per_minute=5000)) as (server, _),
        client_of(server) as http,
    ):
        server.dispatcher.script = _two_tokens_then_silence
        async with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
            async for _ in answer.aiter_bytes():
                break
        await server.wait_idle()
        used = len(server.dispatcher.generations[0].token_ids) + 2
        server.dispatcher.script = lambda generation: [Overloaded("full")]
        assert _remaining(await http.post("/v1/chat/completions", json=CHAT)) == (8, 5000 - used)


async def test_sequences_are_counted_while_they_are_served() -> None:
    async with limited(Limits(max_sequences=3)) as (server, _), client_of(server) as http:
        server.dispatcher.script = lambda generation: [NEVER]
        body = {"model": tiny_model.MODEL, "prompt": ["a", "b"]}
        running = asyncio.create_task(http.post("/v1/completions", json=body))
        await server.dispatcher.has_started.wait()
        refused = await http.post("/v1/completions", json=body)
        assert refused.status_code == 429
        assert "sequences at a time" in refused.json()["error"]["message"]
        many = await http.post("/v1/completions", json={**body, "prompt": ["a"] * 4})
        assert many.headers["x-should-retry"] == "false"
        running.cancel()
        await server.wait_idle()
        server.dispatcher.script = says([65])
        assert (await http.post("/v1/completions", json=body)).status_code == 200


async def test_after_a_storm_of_disconnects_and_failures_nothing_is_held() -> None:
    rng = random.Random(7)
    bounds = Limits(requests_per_minute=10_000, tokens_per_minute=10_000_000, max_sequences=1000)
    async with limited(bounds, of_tenant=bounds) as (server, clock), client_of(server) as http:
        server.dispatcher.script = lambda generation: rng.choice(
            [
                _two_tokens_then_silence(generation),
                [NEVER],
                [GenerationFailed("died")],
                [Overloaded("full")],
                says([65, 66])(generation),
            ]
        )

        async def one(number: int) -> None:
            body = {**CHAT, "stream": bool(number % 2), "n": 1 + number % 3}
            with contextlib.suppress(TimeoutError, httpx.HTTPError):
                async with asyncio.timeout(rng.random() * 0.3):
                    await http.post("/v1/chat/completions", json=body)

        for _ in range(8):
            await asyncio.gather(*(one(number) for number in range(25)))
        await server.wait_idle()
        statistics = server.rates.limits
        assert statistics.num_sequences == 0
        clock.now += 60
        server.dispatcher.script = lambda generation: [Overloaded("full")]
        assert _remaining(await http.post("/v1/chat/completions", json=CHAT)) == (10_000, 10_000_000)
        assert "router_rate_limited_sequences 0" in server.context.metrics.render().decode()
