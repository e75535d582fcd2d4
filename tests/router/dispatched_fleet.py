"""Scripted replicas under a dispatcher, generations for it, and what must come of them."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from msgspec import structs

from replicas.protocol.blocks import BlockHash, hash_blocks, pack_token_ids
from replicas.protocol.frames import FinishReason, SamplingParams, Submit, TokenDelta
from replicas.protocol.status import Adapter, ReplicaId
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.generation_run import GenerationRun
from router.dispatch.retries import RetryPolicy
from router.dispatch.waiting_room import WaitingRoom
from router.fleet.fleet_health import NOTHING_COMING
from router.fleet.replica_client import ReplicaClient
from router.fleet.replica_words import Traffic
from router.generation import Generation
from router.queue.holding import Holding
from router.routing.cost import CostParameters
from router.routing.table import RoutingTable
from tests.router.scripted_replica import CARD, ScriptedReplica, token_at

ROOT = BlockHash(bytes(16))
PROMPT = list(range(100))
GENERATION = Generation(
    model="toy",
    token_ids=PROMPT,
    submit=Submit(0, pack_token_ids(PROMPT), SamplingParams(max_tokens=20, seed=7), ROOT),
    block_hashes=hash_blocks(ROOT, PROMPT, CARD.block_size),
    bucket=b"bucket",
)

IMPATIENT = RetryPolicy(max_waits=3, first_wait_seconds=0.01)


def changed(generation: Generation, **values: Any) -> Generation:
    """A copy with other values for fields of its own, or of its submit."""
    own = {each.name: values.pop(each.name) for each in fields(Generation) if each.name in values}
    if "token_ids" in own:
        values["packed_tokens"] = pack_token_ids(own["token_ids"])
    if "adapter" in own:
        values["adapter"] = own["adapter"].name
    return replace(generation, submit=structs.replace(generation.submit, **values), **own)


class DispatchedFleet:
    """Scripted replicas, their clients, a table and a dispatcher, wired as membership wires them."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.tasks = tasks
        self.table = RoutingTable("kvasir", CostParameters(), random.Random(0))
        self.replicas: dict[ReplicaId, ScriptedReplica] = {}
        self.clients: dict[ReplicaId, ReplicaClient] = {}
        self.serving: list[asyncio.Task[None]] = []
        self.stall_seconds = 30.0
        self.traffic = Traffic()
        self.outlook = NOTHING_COMING
        self.dispatcher = self.new_dispatcher()

    def new_dispatcher(
        self,
        room: WaitingRoom | None = None,
        *,
        retry: RetryPolicy = IMPATIENT,
        holding: Holding | None = None,
    ) -> Dispatcher:
        return Dispatcher(
            self.table,
            self.clients.get,
            rng=random.Random(0),
            retry=retry,
            room=room,
            outlook=lambda model: self.outlook,
            holding=holding,
        )

    async def add(
        self, replica_id: str, *adapters: Adapter, max_running: int = 0, holding: bool = False
    ) -> ScriptedReplica:
        replica = ScriptedReplica(replica_id, card=replace(CARD, adapters=adapters, max_running=max_running))
        replica.script.holding = holding
        await replica.start()
        self.replicas[replica.replica_id] = replica
        self.connect(replica)
        return replica

    def connect(self, replica: ScriptedReplica) -> None:
        client = ReplicaClient(
            replica.replica_id,
            replica.address,
            self.table.update_load,
            on_lost=lambda client: self.table.remove_replica(client.replica_id),
            stall_seconds=self.stall_seconds,
            traffic=self.traffic,
            epoch=replica.epoch,
        )
        self.clients[replica.replica_id] = client
        self.table.add_replica(replica.replica_id, replica.card, CARD.block_size)
        self.serving.append(self.tasks.create_task(client.serve()))

    def serving_replica(self) -> ScriptedReplica:
        return next(replica for replica in self.replicas.values() if replica.num_live)

    def assert_nothing_reserved(self) -> None:
        assert self.table.loads.num_reserved == 0
        assert self.table.num_predictions == 0
        statistics = self.dispatcher
        assert statistics.num_running == statistics.room.num_waiting == statistics.room.num_bytes == 0
        assert statistics.suspects.num_on_trial == 0
        assert statistics.holding.num_waiting == statistics.holding.num_bytes == 0
        assert statistics.holding.num_active_tenants == 0
        assert all(client.num_inflight == 0 for client in self.clients.values())

    async def close(self) -> None:
        for client in self.clients.values():
            await client.close()
        for replica in self.replicas.values():
            await replica.kill()


@pytest.fixture
async def fleet() -> AsyncIterator[DispatchedFleet]:
    async with asyncio.TaskGroup() as tasks:
        fleet = DispatchedFleet(tasks)
        yield fleet
        fleet.assert_nothing_reserved()
        await fleet.close()


def tokens_of(deltas: list[TokenDelta], choice: int = 0) -> list[int]:
    return [token for delta in deltas if delta.key.choice == choice for token in delta.token_ids]


def expected_tokens(choice: int = 0, num_tokens: int = 20) -> list[int]:
    return [token_at(7 + choice, n) for n in range(num_tokens)]


async def generate(
    fleet: DispatchedFleet,
    generation: Generation = GENERATION,
    *,
    after_first: Callable[[GenerationRun], Awaitable[None]] | None = None,
    heard: list[TokenDelta] | None = None,
) -> list[TokenDelta]:
    """Run to the end. `after_first` is awaited once, after the first batch. With `heard`, a listener takes
    what it is offered, which is put there as well."""
    deltas: list[TokenDelta] = []

    def take(delta: TokenDelta) -> bool:
        assert heard is not None
        heard.append(delta)
        deltas.append(delta)
        return True

    async with fleet.dispatcher.run(generation) as run:
        if heard is not None:
            run.listen(take)
        async for batch in run:
            if not deltas and after_first is not None:
                await after_first(run)
            deltas += batch
    return deltas


def assert_complete(deltas: list[TokenDelta], num_choices: int) -> None:
    """Every choice has exactly its own tokens, one usage at its start, one end."""
    for choice in range(num_choices):
        own = [delta for delta in deltas if delta.key.choice == choice]
        assert tokens_of(own, choice) == expected_tokens(choice)
        assert [delta.finish_reason is not None for delta in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].finish_reason is FinishReason.LENGTH
        assert [delta.usage is not None for delta in own] == [True] + [False] * (len(own) - 1)


def long_generation(num_choices: int = 1) -> Generation:
    sampling = structs.replace(GENERATION.sampling, max_tokens=100_000)
    return changed(GENERATION, sampling=sampling, num_choices=num_choices)
