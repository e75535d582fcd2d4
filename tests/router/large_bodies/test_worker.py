"""What is prepared beside the event loop is bounded in time, memory and number, and gone with its client."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI

from replicas.protocol.status import TokenizerBundle
from router.answers.grammar_check import MANY_STATES_BYTES, WishedGrammar
from router.answers.wishes import FormatKind, OutputFormat
from router.api.prepare import text_grammar
from router.api.prepare_in_worker import prepare_in_worker
from router.errors import InvalidRequest, RouterBusy
from router.large_bodies import worker as worker_module
from router.large_bodies.jobs import Bounds, PreparedRequest
from router.large_bodies.worker import Worker
from router.prompt.catalog import ModelCatalog, bundle_digest
from router.prompt.template import TemplateTrial
from tests.router import tiny_model
from tests.router.http_server import http_server, whole_router
from tests.router.scripted_dispatch import says
from tests.router.scripted_replica import CARD, ScriptedReplica
from tests.router.watched_fleet import register

QUICK = Bounds(cpu_seconds=1.0, num_bytes=128 * 2**20)

ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
HUGE = "{{ 'a' * 10**10 }}"
FOLDED = "{{ 9**(9**9) }}"
DEEP = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"

PADDED = tiny_model.TEMPLATE + "{{ 'x' * (width or 1) }}"
LOOPING = (
    tiny_model.TEMPLATE + "{% for a in range(n or 1) %}{% for b in range(n or 1) %}{% endfor %}{% endfor %}"
)

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
async def quick() -> AsyncIterator[Worker]:
    made = Worker(tiny_model.catalog(), prepare_in_worker, max_choices=16, max_prompts=16, bounds=QUICK)
    yield made
    await made.close()


@pytest.mark.parametrize("template", [ENDLESS, HUGE, FOLDED, DEEP])
async def test_a_template_without_an_end_costs_a_model_its_chats_and_nobody_anything_else(
    quick: Worker, template: str
) -> None:
    bundle = tiny_model.bundle(template)
    verdict = await quick.try_out(bundle_digest(bundle), bundle)
    assert verdict.complaint is not None and "chat template takes more than 1 s" in verdict.complaint
    catalog = ModelCatalog(tiny_model.SECRET)
    catalog.add(tiny_model.card(), bundle, verdict=verdict)
    async with (
        http_server(catalog=catalog, bounds=QUICK) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
    ):
        server.dispatcher.script = says([tiny_model.END_OF_TURN])
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 400 and verdict.complaint in answer.json()["error"]["message"]
        plain = await client.post("/v1/completions", json={"model": "tiny", "prompt": "Hello"})
        assert plain.status_code == 200


EXPLODING = {
    "divisor": {"type": "integer", "multipleOf": 99999937},
    "divisors": {"properties": {f"p{n}": {"type": "number", "multipleOf": 99991 - n} for n in range(50)}},
    "names": {
        "patternProperties": {f"^{n:04}[a-z]{{1,{n}}}$": {} for n in range(500)},
        "additionalProperties": False,
    },
    "all patterns": {"allOf": [{"type": "string", "pattern": f".*{n}.*{n % 7}.*"} for n in range(10, 30)]},
}


def wished_schema(schema: object) -> WishedGrammar:
    return text_grammar(OutputFormat(FormatKind.JSON_SCHEMA, schema=schema, parameter="schema"))


@pytest.mark.parametrize("name", EXPLODING)
async def test_a_grammar_that_takes_too_much_is_refused(quick: Worker, name: str) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        await quick.work_out(wished_schema(EXPLODING[name]))
    assert caught.value.parameter == "schema"
    assert time.monotonic() - began < 20


async def test_the_memory_of_a_grammar_is_measured_as_it_is_built(quick: Worker) -> None:
    ranges = {f"p{n}": {"type": "integer", "minimum": n, "maximum": 10**15 + n} for n in range(300)}
    small = await quick.work_out(wished_schema({"type": "object", "properties": {"a": {"type": "boolean"}}}))
    large = await quick.work_out(wished_schema({"type": "object", "properties": ranges}))
    assert 0 < small.num_bytes < 8 << 20
    assert large.num_bytes - MANY_STATES_BYTES > 2 << 20
    assert large.seconds > small.seconds > 0


async def test_a_good_template_is_tried_out_elsewhere_and_not_again(quick: Worker) -> None:
    bundle = tiny_model.bundle()
    verdict = await quick.try_out(bundle_digest(bundle), bundle)
    assert verdict.trials == {"default": TemplateTrial("minijinja", is_bounded=True)}


@pytest.mark.parametrize(
    ("template", "arguments"),
    [(PADDED, {"width": 10**12}), (LOOPING, {"n": 99_999})],
    ids=["padded", "looping"],
)
async def test_arguments_that_make_an_honest_template_explode_fail_their_request_alone(
    template: str, arguments: dict[str, int]
) -> None:
    catalog = ModelCatalog(tiny_model.SECRET)
    catalog.add(tiny_model.card(), tiny_model.bundle(template))
    async with (
        http_server(catalog=catalog, bounds=QUICK) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
    ):
        server.dispatcher.script = says([tiny_model.END_OF_TURN])
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = await client.post(path, json={**CHAT, "chat_template_kwargs": arguments})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] in ("too_much_work", "invalid_value")
            assert (await client.post(path, json=CHAT)).status_code == 200


async def test_a_body_that_takes_more_memory_than_it_may_is_refused(quick: Worker) -> None:
    chat = {**CHAT, "metadata": 0, "chat_template_kwargs": {"a": 0}}
    body = json.dumps(chat).replace('"a": 0', '"a": [' + "[]," * 2_000_000 + "0]").encode()
    with pytest.raises(InvalidRequest, match="more than 1 s of processor time or 128 MiB") as refused:
        await quick.prepare("chat", body)
    assert refused.value.code == "too_much_work"
    assert quick.num_ended == 1
    await quick.prepare("chat", json.dumps(CHAT).encode())


async def test_a_key_with_less_context_gets_prompts_that_fit_it(quick: Worker) -> None:
    body = json.dumps(
        {"model": "tiny", "prompt": [72] * 50, "truncate_prompt_tokens": -1, "max_tokens": 4}
    ).encode()
    for max_context, num_tokens in ((20, 16), (None, 50)):
        prepared = await quick.prepare("completion", body, max_context=max_context)
        assert isinstance(prepared, PreparedRequest)
        assert len(prepared.prompts[0].ids()) == num_tokens


async def test_a_client_that_leaves_takes_the_work_with_it(quick: Worker) -> None:
    await quick.prepare("chat", json.dumps(CHAT).encode())
    process = quick._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)  # so that no child is forked before it is looked at
    work = asyncio.create_task(quick.prepare("chat", _endless_body()))
    while quick.places.line.num_working == 0:  # noqa: ASYNC110 (nobody else can tell)
        await asyncio.sleep(0.01)
    os.kill(process.pid, signal.SIGCONT)
    while not _children(process.pid):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert quick.places.line.num_working == 0
    while _children(process.pid):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def _endless_body() -> bytes:
    return json.dumps({**CHAT, "metadata": [[]] * 1_000_000}).encode()


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.fixture
async def impatient(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Worker]:
    monkeypatch.setattr(worker_module, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(worker_module, "MOST_WAITING", 1)
    made = Worker(tiny_model.catalog(), prepare_in_worker, max_choices=16, max_prompts=16, bounds=QUICK)
    yield made
    await made.close()


async def test_those_that_wait_too_long_or_are_too_many_are_told_to_come_back(impatient: Worker) -> None:
    quick = impatient
    body = json.dumps(CHAT).encode()
    await quick.prepare("chat", body)
    assert quick._process is not None
    os.kill(quick._process.pid, signal.SIGSTOP)
    working = [asyncio.create_task(quick.prepare("chat", body)) for _ in range(worker_module.PLACES)]
    while quick.places.line.num_working < worker_module.PLACES:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    waiting = asyncio.create_task(quick.prepare("chat", body))
    await asyncio.sleep(0)
    with pytest.raises(RouterBusy) as refused:
        await quick.prepare("chat", body)
    assert refused.value.retry_after_seconds > 0
    with pytest.raises(RouterBusy):
        await waiting
    os.kill(quick._process.pid, signal.SIGCONT)
    await asyncio.gather(*working)
    assert quick.num_refused == 2
    await quick.prepare("chat", body)


async def test_a_process_that_has_died_is_started_again(quick: Worker) -> None:
    body = json.dumps(CHAT).encode()
    await quick.prepare("chat", body)
    first = quick._process
    assert first is not None
    first.kill()
    await asyncio.to_thread(first.wait)
    await quick.prepare("chat", body)
    assert quick._process is not first


async def test_a_tokenizer_that_cannot_be_read_leaves_the_process_as_it_was(quick: Worker) -> None:
    broken = TokenizerBundle({"tokenizer.json": b"{}"})
    await quick.try_out(bundle_digest(broken), broken)
    await quick.prepare("chat", json.dumps(CHAT).encode())


async def test_the_process_ends_with_its_router() -> None:
    made = Worker(tiny_model.catalog(), prepare_in_worker, max_choices=16, max_prompts=16)
    await made.prepare("chat", json.dumps(CHAT).encode())
    process = made._process
    assert process is not None
    await made.close()
    assert process.returncode == 0


async def test_a_process_that_hung_up_is_replaced_though_it_has_not_ended_yet(quick: Worker) -> None:
    body = json.dumps(CHAT).encode()
    await quick.prepare("chat", body)
    first = quick._process
    assert first is not None and quick._control is not None
    os.kill(first.pid, signal.SIGSTOP)
    quick._control.shutdown(socket.SHUT_RDWR)
    bundle = tiny_model.bundle("another")
    with pytest.raises(RouterBusy):
        await quick.try_out(bundle_digest(bundle), bundle)
    await quick.prepare("chat", body)
    assert quick._process is not first
    first.kill()
    first.wait()


async def test_a_template_without_an_end_neither_holds_the_loop_nor_keeps_the_model_from_its_completions(
    redis_url: str,
) -> None:
    replica = ScriptedReplica("r0", "epoch", replace(tiny_model.card(), vocab_size=CARD.vocab_size))
    replica.files = dict(tiny_model.bundle(ENDLESS).files)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        await replica.start()
        stack.push_async_callback(replica.kill)
        await register(redis_url, replica)
        watching = tasks.create_task(_worst_lateness())
        async with (
            whole_router(redis_url, bounds=Bounds(cpu_seconds=1.0)) as (_, url),
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            await _wait_served(client)
            status, message = await _chat(client)
        watching.cancel()
        assert status == 400 and "takes more than 1 s of processor time" in message


async def _wait_served(client: AsyncOpenAI) -> None:
    async with asyncio.timeout(50):
        while True:
            with contextlib.suppress(APIStatusError):
                await client.completions.create(model=tiny_model.MODEL, prompt="Hello", max_tokens=1)
                return
            await asyncio.sleep(0.02)


async def _chat(client: AsyncOpenAI) -> tuple[int, str]:
    try:
        await client.chat.completions.create(model=tiny_model.MODEL, messages=CHAT["messages"])  # type: ignore[arg-type]
    except APIStatusError as error:
        return error.status_code, error.message
    return 200, ""


async def _worst_lateness() -> None:
    """Fails if the event loop stands for as long as a template that is tried out."""
    while True:
        due = time.monotonic() + 0.05
        await asyncio.sleep(0.05)
        assert time.monotonic() - due < 20, "the event loop was held"
