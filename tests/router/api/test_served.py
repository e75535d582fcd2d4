"""Whoever watches is told of each request once, at its end, whatever the end is."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest

from replicas.protocol.frames import FinishReason, PromptUsage, RequestKey, TokenDelta
from replicas.protocol.status import ReplicaId
from router.errors import (
    ContextLengthExceeded,
    ErrorKind,
    GenerationFailed,
    InvalidRequest,
    NoReplicaAvailable,
    Overloaded,
    RouterError,
    about_model,
)
from router.generation import Generation
from router.large_bodies.jobs import RefusedRequest
from router.routing.decision import Decision, DecisionReason
from router.served import CLIENT_GONE, ServedRequest
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import NEVER, Script, Step, says

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


class Watched:
    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.told: list[ServedRequest] = []
        server.context.hooks.ended.append(lambda request, served: self.told.append(served))

    async def one(self) -> ServedRequest:
        """The only one that was told, a while after the request's end."""
        while not self.told:  # noqa: ASYNC110 (an observer has no event)
            await asyncio.sleep(0.005)
        await self.server.wait_idle()
        await asyncio.sleep(0.02)
        (served,) = self.told
        return served


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    async with http_server(max_body_bytes=100_000) as server:
        yield Watched(server)


async def post(watched: Watched, body: dict[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
    async with httpx.AsyncClient(base_url=watched.server.url, timeout=60) as client:
        return await client.post(path, json=body)


def then(*steps: Step) -> Script:
    return lambda generation: list(steps)


def token(*token_ids: int, choice: int = 0, usage: PromptUsage | None = None) -> Sequence[TokenDelta]:
    return [TokenDelta(RequestKey(1, choice), token_ids, usage=usage)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_whole_answer(watched: Watched, stream: bool) -> None:
    watched.server.dispatcher.script = says([80, 81, 2], num_cached_tokens=3)
    await post(watched, {**CHAT, "stream": stream, "cache_salt": "ours"})
    served = await watched.one()
    assert (served.status, served.error, served.error_kind) == (200, None, None)
    assert (served.model, served.route, served.is_stream) == ("tiny", "chat_completions", stream)
    assert served.read_seconds is not None and served.prepared_seconds is not None
    assert served.first_token_seconds is not None
    assert 0 <= served.read_seconds <= served.prepared_seconds <= served.first_token_seconds
    assert served.first_token_seconds <= served.ended_seconds
    assert served.token_gaps is not None
    assert (served.token_gaps.num_first_tokens, sum(served.token_gaps.counts)) == (1, 2)
    (prompt,) = served.prompts
    assert prompt.usage is not None and prompt.usage.num_cached_tokens == 3
    assert (prompt.num_output_tokens, prompt.decision_seconds) == (3, 0.001)
    assert prompt.generation.tenant.startswith("salt-")
    assert "ours" not in prompt.generation.tenant


async def test_several_prompts_are_one_request_without_gaps(watched: Watched) -> None:
    watched.server.dispatcher.script = says([80, 2])
    await post(watched, {"model": "tiny", "prompt": ["a", "b", "c"], "n": 2}, "/v1/completions")
    served = await watched.one()
    assert [prompt.num_output_tokens for prompt in served.prompts] == [4, 4, 4]
    assert all(prompt.usage is not None for prompt in served.prompts)
    assert served.token_gaps is None


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("full"), 429, ErrorKind.OVERLOADED),
        (NoReplicaAvailable("none"), 503, ErrorKind.NO_REPLICA),
        (GenerationFailed("lost"), 500, ErrorKind.FAILED),
        (InvalidRequest("refused"), 400, ErrorKind.INVALID),
        (RuntimeError("a bug"), 500, ErrorKind.INTERNAL),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_fails_while_it_runs(
    watched: Watched, error: Exception, status: int, kind: ErrorKind, is_late: bool, stream: bool
) -> None:
    watched.server.dispatcher.script = then(*([token(80)] if is_late else []), error)
    await post(watched, {**CHAT, "stream": stream})
    served = await watched.one()
    assert (served.status, served.error_kind) == (status, kind)
    assert served.error == ("InternalError" if kind is ErrorKind.INTERNAL else type(error).__name__)
    assert served.model == "tiny"
    assert (served.first_token_seconds is not None) == is_late
    assert served.prompts[0].num_output_tokens == is_late


async def test_of_several_attempts_that_failed_the_last_ones_decision_is_told(watched: Watched) -> None:
    last = Decision(ReplicaId("replica-9"), 0, DecisionReason.SPILL, 1, ())
    watched.server.dispatcher.script = then(last, GenerationFailed("lost"))
    await post(watched, CHAT)
    served = await watched.one()
    assert served.prompts[0].decision == last


async def test_a_resumed_answers_decision_is_that_of_who_answered_first(watched: Watched) -> None:
    first = Decision(ReplicaId("replica-8"), 0, DecisionReason.HOME, 0, ())
    last = Decision(ReplicaId("replica-9"), 0, DecisionReason.SPILL, 1, ())
    usage = PromptUsage(5, 0, 0)
    watched.server.dispatcher.script = then(first, token(80, usage=usage), last, GenerationFailed("lost"))
    await post(watched, CHAT)
    served = await watched.one()
    assert served.prompts[0].decision == first


@pytest.mark.parametrize(
    ("body", "status", "kind", "model"),
    [
        ({**CHAT, "model": "nobody's"}, 404, ErrorKind.UNKNOWN_MODEL, None),
        ({**CHAT, "model": 3}, 400, ErrorKind.INVALID, None),
        ({**CHAT, "model": "nobody's", "n": "x"}, 400, ErrorKind.INVALID, None),
        ({**CHAT, "n": 0}, 400, ErrorKind.INVALID, "tiny"),
        ({**CHAT, "n": "x"}, 400, ErrorKind.INVALID, "tiny"),
        ({**CHAT, "messages": []}, 400, ErrorKind.INVALID, "tiny"),
        ({**CHAT, "logit_bias": {"x": 1}}, 400, ErrorKind.INVALID, "tiny"),
        ({"model": "tiny"}, 400, ErrorKind.INVALID, "tiny"),
        ({**CHAT, "max_tokens": 10**6}, 400, None, "tiny"),
        ({"model": "tiny", "messages": [{"role": "user", "content": "x " * 40_000}]}, 400, None, "tiny"),
        ({**CHAT, "padding": "x" * 200_000}, 413, ErrorKind.TOO_LARGE, None),
    ],
)
async def test_what_is_refused_before_it_runs_counts_for_the_model_that_was_asked_for(
    watched: Watched, body: dict[str, Any], status: int, kind: ErrorKind | None, model: str | None
) -> None:
    await post(watched, body)
    served = await watched.one()
    assert (served.status, served.error_kind) == (status, kind or ErrorKind.CONTEXT_LENGTH)
    assert (served.model, served.prompts, served.first_token_seconds) == (model, (), None)


@pytest.mark.parametrize(
    "change",
    [{"prompt": []}, {"prompt": [True]}, {"n": 0}, {"best_of": 3}, {"max_tokens": 10**6}, {"prompt": None}],
)
async def test_refused_completions_count_for_their_model_too(
    watched: Watched, change: dict[str, Any]
) -> None:
    await post(watched, {"model": "tiny", "prompt": "Hello", **change}, "/v1/completions")
    served = await watched.one()
    assert (served.status, served.model) == (400, "tiny")
    metrics = watched.server.context.metrics.render().decode()
    assert 'router_requests_total{model="tiny",route="completions",code="400"} 1' in metrics


async def test_a_wrong_method(watched: Watched) -> None:
    async with httpx.AsyncClient(base_url=watched.server.url, timeout=60) as client:
        await client.get("/v1/chat/completions")
    served = await watched.one()
    assert (served.status, served.error_kind) == (405, ErrorKind.METHOD)


async def test_a_full_router() -> None:
    async with http_server(max_in_flight=1) as server:
        watched = Watched(server)
        with server.context.in_flight.hold(None):
            await post(watched, CHAT)
        served = await watched.one()
        assert (served.status, served.error_kind) == (429, ErrorKind.OVERLOADED)


async def hang_up(
    watched: Watched, body: bytes, *, length: int | None = None, until: Callable[[], bool]
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", watched.server.port)
    length = length or len(body)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n"
    writer.write(head.encode() + body)
    while not until():  # noqa: ASYNC110 (nobody else can tell)
        await asyncio.sleep(0.005)
    writer.close()


async def test_a_client_that_leaves_while_it_sends(watched: Watched) -> None:
    body = json.dumps(CHAT).encode()
    context = watched.server.context
    await hang_up(watched, body[:20], length=len(body), until=lambda: bool(context.bodies.num_bytes))
    served = await watched.one()
    assert (served.status, served.error_kind) == (CLIENT_GONE, ErrorKind.CLIENT_GONE)
    assert (served.model, served.read_seconds) == (None, None)


async def test_a_client_that_sends_too_slowly() -> None:
    body = json.dumps(CHAT).encode()
    async with http_server(upload_seconds=0.3) as server:
        watched = Watched(server)
        await hang_up(watched, body[:20], length=len(body), until=lambda: bool(watched.told))
        served = await watched.one()
        assert (served.status, served.error_kind) == (408, ErrorKind.TOO_SLOW)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
async def test_a_client_that_leaves(watched: Watched, stream: bool, is_late: bool) -> None:
    dispatcher = watched.server.dispatcher

    def script(generation: Generation) -> Sequence[Step]:
        usage = PromptUsage(len(generation.token_ids), 2, 0)
        return [*([token(80, usage=usage), token(81)] if is_late else []), NEVER]

    dispatcher.script = script
    body = json.dumps({**CHAT, "stream": stream}).encode()
    await hang_up(watched, body, until=lambda: dispatcher.num_open == 1 and dispatcher.is_silent)
    served = await watched.one()
    assert (served.status, served.error_kind) == (CLIENT_GONE, ErrorKind.CLIENT_GONE)
    assert (served.first_token_seconds is not None) == is_late
    assert served.prompts[0].num_output_tokens == (2 if is_late else 0)
    assert (served.prompts[0].usage is not None) == is_late
    assert dispatcher.num_open == 0


async def test_a_client_that_leaves_several_prompts_behind(watched: Watched) -> None:
    dispatcher = watched.server.dispatcher
    dispatcher.script = then(NEVER)
    body = json.dumps({"model": "tiny", "prompt": ["a", "b"]}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", watched.server.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    while dispatcher.num_open < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    writer.close()
    served = await watched.one()
    assert served.error_kind is ErrorKind.CLIENT_GONE
    assert len(served.prompts) == 2


async def test_a_request_that_outlives_the_server() -> None:
    async with http_server() as server:
        watched = Watched(server)
        server.dispatcher.script = then(token(80), NEVER)
        asking = asyncio.create_task(post(watched, {**CHAT, "stream": True}))
        await server.dispatcher.has_started.wait()
        # Leaving stops the server, which waits for two seconds and then cancels what runs.
    with pytest.raises(httpx.HTTPError):
        await asking
    (served,) = watched.told
    assert (served.status, served.error_kind) == (503, ErrorKind.CUT_OFF)


async def test_a_stop_string_ends_the_tokens_that_are_counted(watched: Watched) -> None:
    watched.server.dispatcher.script = says([80] * 5, finish=FinishReason.LENGTH)
    text = (await post(watched, CHAT)).json()["choices"][0]["message"]["content"]
    watched.told.clear()
    await post(watched, {**CHAT, "stop": text[: len(text) // 5] * 2})
    served = await watched.one()
    assert served.prompts[0].num_output_tokens == 2
    assert served.error is None


def test_a_refusal_by_the_process_beside_the_loop_still_says_whom_it_was_asked_of() -> None:
    with pytest.raises(RouterError) as caught, about_model("tiny"):
        raise ContextLengthExceeded("too long", parameter="messages")
    error = RefusedRequest.of(caught.value).error()
    assert (type(error), error.message, error.model) == (ContextLengthExceeded, "too long", "tiny")
