"""How long a prompt is to be kept, as OpenAI's clients say it and are told what became of it."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from openai import AsyncOpenAI

from replicas.protocol.frames import TokenDelta
from replicas.protocol.prefix_leases import LeaseAnswer, LeaseBreak, LeaseRefusal, PrefixLease
from router.generation import Generation
from router.keeping import LeaseRequest, leases_of
from tests.router import tiny_model
from tests.router.http_server import HttpServer
from tests.router.scripted_dispatch import Script, Step, says

END = tiny_model.END_OF_TURN
LONG = "The quick brown fox jumps over the lazy dog. " * 4
CHAT = [{"role": "user", "content": LONG}]


def answers(
    *leases: LeaseAnswer, num_evicted_early_tokens: int = 0, broken_by: LeaseBreak | None = None
) -> Script:
    """One token, and this of leases."""

    def script(generation: Generation) -> Sequence[Step]:
        ((delta, *rest),) = says([END])(generation)
        assert isinstance(delta, TokenDelta) and delta.usage is not None
        usage = msgspec.structs.replace(
            delta.usage,
            leases=leases,
            num_evicted_early_tokens=num_evicted_early_tokens,
            broken_by=broken_by,
        )
        return [[msgspec.structs.replace(delta, usage=usage), *rest]]

    return script


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, None),
        ({"prompt_cache_retention": None, "prompt_cache_options": None}, None),
        ({"prompt_cache_options": {"mode": "explicit"}}, None),
        ({"prompt_cache_retention": "in_memory"}, 300),
        ({"prompt_cache_retention": "in-memory"}, 300),
        ({"prompt_cache_retention": "24h"}, 86_400),
        ({"prompt_cache_options": {"ttl": "30m"}}, 1800),
        ({"prompt_cache_options": {"ttl": "12h", "mode": "implicit", "unknown": 1}}, 43_200),
        ({"prompt_cache_retention": "in_memory", "prompt_cache_options": {"ttl": "1h"}}, 3600),
        ({"prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "5m"}}, 86_400),
    ],
)
@pytest.mark.parametrize("route", ["chat", "completions"])
async def test_the_fields_become_one_lease_on_the_whole_prompt(
    server: HttpServer, openai: AsyncOpenAI, route: str, fields: dict[str, Any], seconds: int | None
) -> None:
    server.dispatcher.script = says([END])
    if route == "chat":
        await openai.chat.completions.create(model="tiny", messages=CHAT, **fields)
    else:
        await openai.completions.create(model="tiny", prompt=[LONG, LONG * 2], extra_body=fields)
    for generation in server.dispatcher.generations:
        num_blocks = len(generation.block_hashes)
        assert num_blocks == len(generation.token_ids) // 16 > 1
        expected = () if seconds is None else (PrefixLease(num_blocks, seconds),)
        assert generation.submit.leases == expected


def test_wishes_reach_to_whole_blocks_of_the_prompt_and_to_one_at_least() -> None:
    keeps = [LeaseRequest(60), LeaseRequest(60, 33), LeaseRequest(60, 1000), LeaseRequest(60, 3)]
    assert leases_of(keeps, 50, 16) == (
        PrefixLease(3, 60),
        PrefixLease(2, 60),
        PrefixLease(3, 60),
        PrefixLease(1, 60),
    )
    assert leases_of([LeaseRequest(60)] * 100, 5, 16) == (PrefixLease(1, 60),) * 16


@pytest.mark.parametrize("stream", [False, True])
async def test_what_became_of_a_lease_stands_in_usage_in_a_header_and_in_the_metrics(
    server: HttpServer, openai: AsyncOpenAI, stream: bool
) -> None:
    server.dispatcher.script = answers(
        LeaseAnswer(86_400, 32), num_evicted_early_tokens=7, broken_by=LeaseBreak.HOST_FULL
    )
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    raw = await openai.chat.completions.with_raw_response.create(
        model="tiny", messages=CHAT, n=2, prompt_cache_retention="24h", **options
    )
    parsed = raw.parse()
    usage = [chunk async for chunk in parsed][-1].usage if stream else parsed.usage
    details = usage.prompt_tokens_details.model_dump()
    assert details["cache_leases"] == [{"status": "granted", "seconds": 86_400, "tokens": 32}]
    assert (details["evicted_early_tokens"], details["evicted_early_cause"]) == (7, "host_full")
    assert raw.headers["x-kvasir-cache-lease"] == "granted; seconds=86400; tokens=32"
    assert raw.headers["x-kvasir-evicted-early-tokens"] == "7; cause=host_full"
    text = server.context.metrics.render().decode()
    assert 'router_prefix_leases_total{model="tiny",outcome="granted"} 1' in text
    assert 'router_evicted_early_tokens_total{model="tiny",cause="host_full"} 7' in text


@pytest.mark.parametrize("reason", [*LeaseRefusal, None])
async def test_a_refused_lease_is_an_answer_and_no_error(
    server: HttpServer, openai: AsyncOpenAI, reason: LeaseRefusal | None
) -> None:
    """None: a replica that says nothing of leases."""
    said = () if reason is None else (LeaseAnswer(refusal=reason),)
    word = "no_answer" if reason is None else reason.value
    server.dispatcher.script = answers(*said)
    raw = await openai.chat.completions.with_raw_response.create(
        model="tiny", messages=CHAT, prompt_cache_options={"ttl": "12h"}
    )
    details = raw.parse().usage.prompt_tokens_details.model_dump()
    assert details["cache_leases"] == [{"status": "refused", "reason": word}]
    assert raw.headers["x-kvasir-cache-lease"] == f"refused; reason={word}"
    text = server.context.metrics.render().decode()
    assert f'router_prefix_leases_total{{model="tiny",outcome="{word}"}} 1' in text


async def test_a_body_that_is_prepared_beside_the_loop_keeps_its_wish(
    server: HttpServer, openai: AsyncOpenAI
) -> None:
    server.dispatcher.script = says([END])
    await openai.chat.completions.create(
        model="tiny",
        messages=CHAT,
        prompt_cache_options={"ttl": "1h"},
        extra_body={"unknown": [0] * 10_000},
    )
    assert server.dispatcher.generations[0].submit.leases[0].seconds == 3600
