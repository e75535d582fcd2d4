"""What `/v1/usage` says is what the answers have said, and each tenant sees its own."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from replicas.protocol.frames import FinishReason, PromptUsage, RequestKey, TokenDelta
from replicas.protocol.prefix_leases import LeaseAnswer
from router.errors import GenerationFailed, NoReplicaAvailable
from router.features.usage import store as usage_store
from router.features.usage.ratios import RatioTable
from router.features.usage.store import UsageStore
from router.generation import Generation
from router.prompt.catalog import ModelCatalog
from tests.redis_server import RedisServer
from tests.router.features.api_keys.some_keys import ACME, BETA, OPERATOR, bearer, some_keys
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import NEVER, Step
from tests.router.thinking_model import MODEL, catalog, token_ids

ANSWER = "<think>\nHm.\n</think>\n\nYes."
HELLO = [{"role": "user", "content": "Hello, how are you? " * 9}]
GEMINI = {"contents": [{"parts": [{"text": "Hello, how are you? " * 9}]}]}
GEMINI_PATH = f"/v1beta/models/{MODEL}:"
CHAT = "/v1/chat/completions"
COUNTS = ("prompt", "cached", "output", "reasoning")


class Replica:
    """Says the same, for each choice, of a prompt that was cached and written as chance has it."""

    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.num_written = 0

    def __call__(self, generation: Generation) -> list[Step]:
        num_tokens = len(generation.token_ids)
        cached = self.rng.randrange(num_tokens + 1)
        written = self.rng.randrange(num_tokens - cached + 1)
        slower = self.rng.randrange(cached + 1)
        usage = PromptUsage(
            num_tokens,
            cached,
            written,
            self.rng.randrange(cached + 1),
            num_slower_tier_tokens=slower,
            num_disk_tokens=self.rng.randrange(slower + 1),
            leases=tuple(LeaseAnswer(lease.seconds, num_tokens // 2) for lease in generation.submit.leases),
        )
        self.num_written += written
        limited = token_ids(ANSWER)[: generation.sampling.max_tokens]
        return [
            [
                TokenDelta(
                    RequestKey(1, choice),
                    (token,),
                    FinishReason.STOP if place == len(limited) - 1 else None,
                    usage if not place else None,
                )
                for choice in range(generation.num_choices)
            ]
            for place, token in enumerate(limited)
        ]


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[UsageStore]:
    made = UsageStore(redis_url, 744, RatioTable(["read=0.5", "beta:read=0"]))
    yield made
    await made.close()


@pytest.fixture
async def server(store: UsageStore) -> AsyncIterator[HttpServer]:
    async with http_server(keys=some_keys(), usage=store, catalog=catalog()) as running:
        running.dispatcher.script = Replica()
        yield running


async def usage(http: httpx.AsyncClient, key: str, query: str = "") -> Any:
    answer = await http.get(f"/v1/usage{query}", headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return answer.json()


def requests_of(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """One in any dialect."""
    stream = rng.random() < 0.5
    limits = {"max_tokens": rng.randint(1, 12), "stream": stream}
    openai = {**limits, "stream_options": {"include_usage": True}} if stream else limits
    match rng.randrange(6):
        case 0:
            more = {"n": rng.randint(1, 3), "prompt_cache_options": {"ttl": rng.choice(["5m", "1h"])}}
            return CHAT, {"model": MODEL, "messages": HELLO, **openai, **more}
        case 1:
            prompts = [f"{number} apples and pears" for number in range(rng.randint(1, 3))]
            return "/v1/completions", {"model": MODEL, "prompt": prompts, **openai, "n": rng.randint(1, 2)}
        case 2:
            mark = {"cache_control": {"type": "ephemeral"}}
            return "/v1/messages", {"model": MODEL, "messages": HELLO, **limits, **mark}
        case 3:
            asked = {"model": MODEL, "messages": HELLO, "max_tokens": 0}
            return "/v1/messages", asked
        case 4:
            return "/v1/responses", {"model": MODEL, "input": "Hello!", "stream": stream}
    if stream:
        return f"{GEMINI_PATH}streamGenerateContent?alt=sse", GEMINI
    return f"{GEMINI_PATH}generateContent", GEMINI


def counted(answer: Any) -> tuple[int, int, int, int]:
    """The same four numbers of every dialect's usage."""
    said = answer.get("usageMetadata") or answer["usage"]
    if "promptTokenCount" in said:
        thought = said["thoughtsTokenCount"]
        output = said["candidatesTokenCount"] + thought
        return said["promptTokenCount"], said["cachedContentTokenCount"], output, thought
    if "cache_read_input_tokens" in said:
        read = said["cache_read_input_tokens"]
        prompt = said["input_tokens"] + said["cache_creation_input_tokens"] + read
        return prompt, read, said["output_tokens"], said["output_tokens_details"]["thinking_tokens"]
    given, made = ("input", "output") if "input_tokens" in said else ("prompt", "completion")
    return (
        said[f"{given}_tokens"],
        said[f"{given}_tokens_details"]["cached_tokens"],
        said[f"{made}_tokens"],
        said[f"{made}_tokens_details"]["reasoning_tokens"],
    )


def last_of_stream(text: str) -> Any:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    for event in reversed(events):
        found = event.get("response", event)
        if found.get("usage") or found.get("usageMetadata"):
            return found
    raise AssertionError(text)


async def test_sums_are_those_of_the_answers_in_every_dialect(
    http: httpx.AsyncClient, server: HttpServer, store: UsageStore
) -> None:
    rng = random.Random(2)
    expected: dict[str, Counter[str]] = {ACME: Counter(), BETA: Counter()}
    for number in range(120):
        key = rng.choice([ACME, BETA])
        path, body = requests_of(rng)
        answer = await http.post(path, json=body, headers=bearer(key))
        assert answer.status_code == 200, answer.text
        is_stream = answer.headers["content-type"].startswith("text/event-stream")
        found = last_of_stream(answer.text) if is_stream else answer.json()
        expected[key].update(dict(zip(COUNTS, counted(found), strict=True)), requests=1)
        if number % 30 == 0:
            await store.write()
    written = 0
    for key, name in ((ACME, "acme"), (BETA, "beta")):
        total = (await usage(http, key))["total"]
        got = {what: total[f"{what}_tokens"] for what in COUNTS} | {"requests": total["requests"]}
        assert got == dict(expected[key]), name
        assert sum(total["cached_tokens_by_tier"].values()) == total["cached_tokens"]
        assert sum(total["written_tokens_by_ttl"].values()) == total["written_tokens"]
        parts = total["uncached_tokens"] + total["cached_tokens"] + total["written_tokens"]
        assert parts == total["prompt_tokens"]
        assert total["written_tokens_by_ttl"]["5m"] > 0 < total["written_tokens_by_ttl"]["1h"]
        written += total["written_tokens"]
    assert isinstance(server.dispatcher.script, Replica)
    assert written == server.dispatcher.script.num_written
    everybody = (await usage(http, OPERATOR))["total"]
    assert everybody["requests"] == 120
    assert everybody["written_tokens"] == written


async def test_each_sees_its_own_and_only_who_may_sees_all(http: httpx.AsyncClient) -> None:
    for key in (ACME, BETA, BETA):
        await http.post(CHAT, json={"model": MODEL, "messages": HELLO}, headers=bearer(key))
    own = await usage(http, ACME, "?group_by=key,model")
    assert own["tenant"] == "acme"
    assert [(row["tenant"], row["key_id"], row["model"]) for row in own["data"]] == [
        ("acme", "1" * 12, MODEL)
    ]
    assert "beta" not in json.dumps(own)
    assert (await usage(http, ACME, "?tenant=acme"))["total"]["requests"] == 1
    answers = [
        await http.get(f"/v1/usage?tenant={name}", headers=bearer(ACME)) for name in ("beta", "nobody")
    ]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].json() == answers[1].json(), "who there is is not told"
    assert (await usage(http, ACME, "?key_id=222222222222"))["total"]["requests"] == 0
    everybody = await usage(http, OPERATOR)
    assert {row["tenant"]: row["requests"] for row in everybody["data"]} == {"acme": 1, "beta": 2}
    assert (await usage(http, OPERATOR, "?tenant=beta"))["total"]["requests"] == 2
    assert (await http.get("/v1/usage")).status_code == 401


async def test_metrics_say_the_same_of_each_tenant(http: httpx.AsyncClient) -> None:
    rng = random.Random(3)
    for _ in range(20):
        path, body = requests_of(rng)
        await http.post(path, json=body, headers=bearer(rng.choice([ACME, BETA])))
    text = (await http.get("/metrics", headers=bearer(OPERATOR))).text
    told = {
        (sample.name.removeprefix("router_tenant_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("router_tenant_")
    }
    for key, tenant in ((ACME, "acme"), (BETA, "beta")):
        total = (await usage(http, key))["total"]
        for tier, number in total["cached_tokens_by_tier"].items():
            assert told["cached_tokens_by_tier_total", tenant, tier] == number
        for ttl, number in total["written_tokens_by_ttl"].items():
            assert told["written_tokens_total", tenant, ttl] == number
        assert told["cost_tokens_total", tenant] == pytest.approx(total["cost"])
        assert told["cost_without_cache_tokens_total", tenant] == pytest.approx(total["cost_without_cache"])


@pytest.mark.parametrize("leaves", [False, True])
async def test_what_breaks_off_counts_as_far_as_it_came(
    http: httpx.AsyncClient, server: HttpServer, leaves: bool
) -> None:
    given = PromptUsage(50, 20, 16)
    token = TokenDelta(RequestKey(1, 0), tuple(token_ids("Yes", end=False)), usage=given)
    end: Step = NEVER if leaves else GenerationFailed("it broke")
    server.dispatcher.script = lambda generation: [[token], end]
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    async with http.stream("POST", CHAT, json=body, headers=bearer(ACME)) as answer:
        async for line in answer.aiter_lines():
            if leaves and line:
                break
    await server.wait_idle()
    while not (await usage(http, ACME))["total"]["requests"]:  # noqa: ASYNC110 (an observer has no event)
        await asyncio.sleep(0.01)
    total = (await usage(http, ACME))["total"]
    assert (total["aborted"], total["errors"]) == ((1, 0) if leaves else (0, 1))
    assert (total["prompt_tokens"], total["cached_tokens"]) == (50, 20)
    assert total["output_tokens"] == len(token.token_ids)


async def test_refused_requests_are_requests_and_nothing_else(http: httpx.AsyncClient) -> None:
    await http.post(CHAT, json={"model": "no such"}, headers=bearer(ACME))
    (row,) = (await usage(http, ACME, "?group_by=model"))["data"]
    assert (row["model"], row["requests"], row["errors"], row["cost"]) == ("unknown", 1, 1, 0)


async def test_a_request_for_which_no_replica_is_ready_is_none(
    http: httpx.AsyncClient, server: HttpServer, store: UsageStore
) -> None:
    """Before any model is known, and while the fleet is away."""
    async with http_server(keys=some_keys(), usage=store, catalog=ModelCatalog(b"secret")) as early:
        async with httpx.AsyncClient(base_url=early.url, timeout=60) as client:
            answer = await client.post(CHAT, json={"model": MODEL, "messages": HELLO}, headers=bearer(ACME))
            assert answer.status_code == 503
        assert (await usage(http, ACME))["data"] == []
    server.dispatcher.script = lambda generation: [NoReplicaAvailable("none is ready")]
    for is_stream in (False, True):
        body = {"model": MODEL, "messages": HELLO, "stream": is_stream}
        assert (await http.post(CHAT, json=body, headers=bearer(ACME))).status_code == 503
    await server.wait_idle()
    assert (await usage(http, ACME))["data"] == []


async def test_hours_and_days(http: httpx.AsyncClient, server: HttpServer) -> None:
    await http.post(CHAT, json={"model": MODEL, "messages": HELLO}, headers=bearer(ACME))
    now = server.context.wall_clock()
    hour = int(now // 3600) * 3600
    found = await usage(http, ACME, f"?start={now}&end={now + 1}")
    assert (found["start"], found["end"]) == (hour, hour + 3600)
    assert [(row["start"], row["end"]) for row in found["data"]] == [(hour, hour + 3600)]
    (day,) = (await usage(http, ACME, "?bucket=day"))["data"]
    assert (day["start"], day["end"] - day["start"]) == (hour // 86_400 * 86_400, 86_400)
    assert not (await usage(http, ACME, f"?end={hour}"))["data"]
    assert not (await usage(http, ACME, "?start=2026-01-01&end=2026-01-02T10:00:00Z"))["data"]
    assert (await usage(http, ACME, "?start=0&end=99999999999"))["total"]["requests"] == 1


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ("start=1e400", "start"),
        ("end=99999999999999", "end"),
        ("end=0001-01-01", "end"),
        ("start=7200&end=7200", "start"),
        ("bucket=week", "bucket"),
        ("group_by=key,,model", "group_by"),
        ("tenant=", "tenant"),
        ("key_id=" + "x" * 300, "key_id"),
        ("bucket=%ff%00", "bucket"),
    ],
)
async def test_a_bad_query_is_a_400_that_names_it(
    http: httpx.AsyncClient, query: str, parameter: str
) -> None:
    answer = await http.get(f"/v1/usage?{query}", headers=bearer(ACME))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", parameter)


async def test_without_keys_everybody_sees_what_everybody_used(store: UsageStore) -> None:
    async with http_server(usage=store, catalog=catalog()) as running:
        running.dispatcher.script = Replica()
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
            body: Mapping[str, Any] = {"model": MODEL, "messages": HELLO}
            for salt in ("ours", "theirs"):
                await http.post(CHAT, json={**body, "cache_salt": salt})
            found = (await http.get("/v1/usage?group_by=key")).json()
    assert found["tenant"] == "default"
    assert [(row["key_id"], row["requests"]) for row in found["data"]] == [(None, 2)]


async def test_while_redis_is_away_requests_are_served_and_questions_come_back(
    own_redis: RedisServer,
) -> None:
    store = UsageStore(own_redis.url, 744)
    async with http_server(usage=store, catalog=catalog()) as running:
        running.dispatcher.script = Replica()
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
            with own_redis.silent(usage_store):
                answer = await http.post(CHAT, json={"model": MODEL, "messages": HELLO})
                assert answer.status_code == 200
                refused = await http.get("/v1/usage")
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "usage_unavailable")
                assert "retry-after" in refused.headers
            await store.write()
            assert (await http.get("/v1/usage")).json()["total"]["requests"] == 1
    await store.close()
