"""A whole router over HTTP, with a real Redis and replicas over real gRPC that differ in their adapters."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import pytest
from openai import APIStatusError, AsyncOpenAI

from replicas.protocol.blocks import Namespace, namespace_root
from replicas.protocol.frames import Submit
from replicas.protocol.sampling_defaults import SamplingDefaults
from replicas.protocol.status import Adapter
from tests.router import tiny_model
from tests.router.http_server import whole_router
from tests.router.scripted_replica import CARD, ScriptedReplica
from tests.router.watched_fleet import register

OLD_SQL, SQL = Adapter("sql", "a1" * 16), Adapter("sql", "b2" * 16)
POETRY = Adapter("poetry", "c3" * 16)
HELLO = [{"role": "user", "content": "Hello"}]


@dataclass
class World:
    client: AsyncOpenAI
    replicas: dict[str, ScriptedReplica]
    redis_url: str

    async def names(self) -> list[str]:
        return [model.id async for model in self.client.models.list()]

    async def wait_served(self, model: str, replica_id: str) -> Submit:
        """Ask until that replica answers."""
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(APIStatusError):
                    name, submit = await self.ask(model)
                    if name == replica_id:
                        return submit
                await asyncio.sleep(0.02)

    async def ask(self, model: str, **options: object) -> tuple[str, Submit]:
        """Who answered, and what it was told."""
        raw = await self.client.chat.completions.with_raw_response.create(
            model=model,
            messages=HELLO,
            max_tokens=2,
            **options,  # type: ignore[arg-type]
        )
        completion = raw.parse()
        assert (completion.model, completion.usage.completion_tokens) == (model, 2)
        name = raw.headers["x-kvasir-replica"]
        return name, self.replicas[name].submits[-1]

    async def refusal(self, model: str) -> tuple[int, str]:
        with pytest.raises(APIStatusError) as refused:
            await self.ask(model)
        return refused.value.status_code, str(refused.value.code)


@pytest.fixture
async def world(redis_url: str) -> AsyncIterator[World]:
    """r1 is the newest that has any adapter; r2 is newer still and has none."""
    loaded = {"r1": (SQL, POETRY), "r0": (OLD_SQL,), "r2": ()}
    replicas: dict[str, ScriptedReplica] = {}
    async with AsyncExitStack() as stack:
        for name, adapters in loaded.items():
            # As large a vocabulary as the tokens come from that such replicas make up.
            card = replace(tiny_model.card(), adapters=adapters, vocab_size=CARD.vocab_size)
            card = replace(card, sampling_defaults=SamplingDefaults(top_k=len(replicas) + 1))
            replica = ScriptedReplica(name, f"epoch-{name}", card)
            replica.files = dict(tiny_model.bundle().files)
            await replica.start()
            stack.push_async_callback(replica.kill)
            await register(redis_url, replica)
            replicas[name] = replica
        async with (
            whole_router(redis_url, secret=tiny_model.SECRET.hex()) as (_, url),
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            world = World(client, replicas, redis_url)
            await world.wait_served("poetry", "r1")
            yield world


def root_of(adapter: Adapter | None) -> bytes:
    variant = None if adapter is None else f"{adapter.name}:{adapter.fingerprint}"
    fingerprint = bytes.fromhex(tiny_model.card().fingerprint)
    return namespace_root(tiny_model.SECRET, Namespace(fingerprint, tiny_model.BLOCK_SIZE, adapter=variant))


async def test_an_adapter_is_served_by_whoever_has_the_newest_version_of_it(world: World) -> None:
    for _ in range(6):
        name, submit = await world.ask("sql")
        assert (name, submit.adapter, submit.root) == ("r1", "sql", root_of(SQL))
    name, submit = await world.ask("poetry")
    assert (name, submit.adapter, submit.root) == ("r1", "poetry", root_of(POETRY))
    _, submit = await world.ask(tiny_model.MODEL)
    assert (submit.adapter, submit.root) == (None, root_of(None))
    assert await world.refusal("prose") == (404, "model_not_found")
    assert await world.names() == [tiny_model.MODEL, "poetry", "sql"]


async def test_when_its_replicas_are_gone_an_older_version_serves_or_nobody_for_now(world: World) -> None:
    await world.replicas["r1"].kill()
    assert (await world.wait_served("sql", "r0")).root == root_of(OLD_SQL)
    assert await world.refusal("poetry") == (503, "no_replica_available")
    assert await world.names() == [tiny_model.MODEL, "poetry", "sql"]
    await world.replicas["r1"].start()
    assert (await world.wait_served("sql", "r1")).root == root_of(SQL)


async def test_adapters_and_names_that_come_and_go_while_their_replica_lives(world: World) -> None:
    later, replica = Adapter("later", "d4" * 16), world.replicas["r1"]
    replica.card = replace(replica.card, adapters=(SQL, later), aliases=("gpt-4o",))
    await register(world.redis_url, replica)
    assert (await world.wait_served("later", "r1")).root == root_of(later)
    assert await world.names() == [tiny_model.MODEL, "gpt-4o", "later", "sql"]
    assert await world.refusal("poetry") == (404, "model_not_found")
    answer = await world.client.chat.completions.create(model="gpt-4o", messages=HELLO, max_tokens=2)  # type: ignore[arg-type]
    assert answer.model == tiny_model.MODEL
    roots = [submit.root for each in world.replicas.values() for submit in each.submits[-1:]]
    assert root_of(None) in roots
    # The same adapter's name for other weights: prompts of the one are not looked for in the other's cache.
    replica.card = replace(replica.card, adapters=(replace(later, fingerprint="e5" * 16),), aliases=())
    await register(world.redis_url, replica)
    await eventually_root(world, "later", root_of(replica.card.adapters[0]))
    assert (await world.wait_served("sql", "r0")).root == root_of(OLD_SQL)
    assert await world.refusal("gpt-4o") == (404, "model_not_found")
    assert await world.names() == [tiny_model.MODEL, "later", "sql"]


async def eventually_root(world: World, model: str, root: bytes) -> None:
    async with asyncio.timeout(30):
        while (await world.wait_served(model, "r1")).root != root:
            pass


async def test_replicas_tell_users_apart_and_learn_no_names(world: World) -> None:
    users = [(await world.ask("sql", **who))[1].user for who in ({"user": "ada"}, {"user": "bob"}, {})]
    assert len(set(users)) == 3
    assert users[2] == b""
    assert (await world.ask(tiny_model.MODEL, safety_identifier="ada"))[1].user == users[0]
    assert all(b"ada" not in user and b"bob" not in user for user in users)


async def test_the_newest_replica_that_is_there_says_how_all_of_them_sample(world: World) -> None:
    for name in ("r2", "r1"):
        async with asyncio.timeout(30):
            wanted = world.replicas[name].card.sampling_defaults
            assert wanted is not None
            while (await world.ask("sql"))[1].sampling.top_k != wanted.top_k:  # noqa: ASYNC110 - tells nobody
                await asyncio.sleep(0.02)
        assert (await world.ask("sql", extra_body={"top_k": 9}))[1].sampling.top_k == 9
        if name == "r2":
            await world.replicas[name].kill()
    await world.replicas["r2"].start()
