"""Requests for a model without a replica: who goes first, who loses a place, and what is given back."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.caller import Tenant
from router.errors import NoReplicaAvailable
from router.limits.first_replica import FirstReplica
from router.queue.fair_queue import FairQueue
from router.queue.work import BYTES_PER_TOKEN
from tests.router.scripted_replica import eventually

NONE = {"m": (0, 0), "n": (0, 0)}
ONE, OTHER = Tenant(name="one"), Tenant(name="other")


class World:
    def __init__(self, seconds: float = 30.0, *, max_waiting: int = 100, max_tokens: int = 10_000) -> None:
        self.ready: set[str] = set()
        queue = FairQueue(max_waiting=max_waiting, max_bytes=max_tokens * BYTES_PER_TOKEN)
        self.first = FirstReplica(
            seconds, queue, has_ready=self.ready.__contains__, registered=lambda: {"m", "n"}
        )
        self.gone: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, name: str, tenant: Tenant = ONE, *, model: str = "m", num_tokens: int = 10) -> None:
        async def one() -> None:
            await self.first.wait(model, tenant, num_tokens)
            self.gone.append(name)

        self.tasks.append(asyncio.create_task(one(), name=name))
        await asyncio.sleep(0)

    def comes(self, model: str) -> None:
        self.ready.add(model)
        self.first.look(model)

    def num_waiting(self, model: str = "m") -> int:
        return self.first.waiting_by_model.get(model, (0, 0))[0]

    async def refusal(self, name: str) -> str:
        (task,) = [task for task in self.tasks if task.get_name() == name]
        with pytest.raises(NoReplicaAvailable) as refused:
            await task
        return refused.value.message


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    assert world.first.waiting_by_model == NONE


async def test_those_that_wait_go_on_when_a_replica_of_their_model_is_ready(world: World) -> None:
    await world.ask("a")
    await world.ask("b", model="n", num_tokens=7)
    assert world.first.waiting_by_model == {"m": (1, 10 * BYTES_PER_TOKEN), "n": (1, 7 * BYTES_PER_TOKEN)}
    world.first.look("m")
    await asyncio.sleep(0.01)
    assert world.gone == []
    world.comes("m")
    await eventually(lambda: world.gone == ["a"])
    world.comes("n")
    await eventually(lambda: world.gone == ["a", "b"])
    await world.ask("c")
    assert world.gone == ["a", "b", "c"], "at once"


async def test_of_too_many_the_tenant_with_most_loses_its_last() -> None:
    world = World(max_waiting=3)
    for name in ("a", "b", "c"):
        await world.ask(name)
    await world.ask("d")
    assert "too many requests wait" in await world.refusal("d")
    await world.ask("single", OTHER)
    assert "too many requests of this tenant wait" in await world.refusal("a")
    assert world.num_waiting() == 3
    world.comes("m")
    await eventually(lambda: len(world.gone) == 3)
    assert set(world.gone) == {"b", "c", "single"}


@pytest.mark.parametrize("comes_at_once", [False, True])
async def test_who_leaves_gives_the_place_back(world: World, comes_at_once: bool) -> None:
    await world.ask("a")
    await world.ask("b")
    world.tasks[0].cancel()
    if comes_at_once:  # before the task has noticed
        world.comes("m")
    with pytest.raises(asyncio.CancelledError):
        await world.tasks[0]
    if not comes_at_once:
        assert world.num_waiting() == 1
        world.comes("m")
    await world.tasks[1]
    assert world.gone == ["b"]
