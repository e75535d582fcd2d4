"""A whole router whose replica hands out a chat template that never ends: only that model's chats suffer."""

import asyncio
import contextlib
import random
import time
from contextlib import AsyncExitStack
from dataclasses import replace

from openai import APIStatusError, AsyncOpenAI

from replicas.process.settings import build
from router.assembly import Router
from router.config import RouterConfig
from router.large_bodies.jobs import Bounds
from tests.router import tiny_model
from tests.router.http_server import listening
from tests.router.large_bodies.test_worker import ENDLESS
from tests.router.scripted_replica import CARD, ScriptedReplica
from tests.router.test_adapters_end_to_end import HELLO, register

BOUNDS = Bounds(cpu_seconds=1.0)


async def test_a_template_without_an_end_neither_holds_the_loop_nor_keeps_the_model_from_its_completions(
    redis_url: str,
) -> None:
    config = build(RouterConfig, {"redis_url": redis_url, "poll_seconds": 0.02})
    router = Router(config, rng=random.Random(0), bounds=BOUNDS)
    replica = ScriptedReplica("r0", "epoch", replace(tiny_model.card(), vocab_size=CARD.vocab_size))
    replica.files = dict(tiny_model.bundle(ENDLESS).files)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        await replica.start()
        stack.push_async_callback(replica.kill)
        await register(redis_url, replica)
        following = tasks.create_task(router.run())
        watching = tasks.create_task(_worst_lateness())
        async with listening(router.apps.main, router.connections) as port:
            url = f"http://127.0.0.1:{port}/v1"
            async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                await _wait_served(client)
                status, message = await _chat(client)
        following.cancel()
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
        await client.chat.completions.create(model=tiny_model.MODEL, messages=HELLO)  # type: ignore[arg-type]
    except APIStatusError as error:
        return error.status_code, error.message
    return 200, ""


async def _worst_lateness() -> None:
    """Fails if the event loop stands for as long as a template that is tried out."""
    while True:
        due = time.monotonic() + 0.05
        await asyncio.sleep(0.05)
        assert time.monotonic() - due < 20, "the event loop was held"
