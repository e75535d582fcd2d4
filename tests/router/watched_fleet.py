"""Scripted replicas, a registry that a test writes, and a membership that watches both."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from redis.asyncio import Redis

from replicas.process.tls import RouterTls
from replicas.protocol.cluster_secret import ClusterSecret
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import MODELS_KEY, ReplicaRecord, encode_record, replica_key, replicas_key
from replicas.protocol.lease_seal import LeaseSeal
from replicas.protocol.status import Adapter, ModelCard, ReplicaId, ReplicaState, TokenizerBundle
from router.errors import NoReplicaAvailable, UnknownModel
from router.fleet.membership import Membership
from router.fleet.registry_source import RegistrySource, ReplicaSource
from router.routing.cost import CostParameters
from router.routing.decision import RoutingRequest
from router.routing.table import RoutingTable
from tests.router import tiny_model
from tests.router.scripted_replica import CARD, ScriptedReplica, eventually

POLL_SECONDS = 0.02
Start = Callable[..., Awaitable[ScriptedReplica]]


@dataclass
class Registry:
    """What replicas write; the lease only ends when a test says so."""

    redis: Redis

    async def put(
        self,
        replica: ScriptedReplica,
        state: ReplicaState = ReplicaState.READY,
        load: LoadSnapshot | None = None,
        secret: ClusterSecret | None = None,
    ) -> None:
        record = ReplicaRecord(
            replica.replica_id,
            replica.epoch,
            replica.address,
            state,
            replica.card.digest(),
            last_change=0,
            load=load or LoadSnapshot(),
        )
        model = replica.card.name
        await self.redis.sadd(MODELS_KEY, model)
        await self.redis.sadd(replicas_key(model), replica.replica_id)
        key = replica_key(model, replica.replica_id)
        fields = encode_record(record)
        signed = fields if secret is None else LeaseSeal(secret).signed(key, fields)
        await self.redis.hset(key, mapping=signed)  # type: ignore[arg-type]

    async def end_lease(self, replica: ScriptedReplica) -> None:
        await self.redis.delete(replica_key(replica.card.name, replica.replica_id))


async def register(redis_url: str, replica: ScriptedReplica) -> None:
    """Put it once, signed with the secret of `tiny_model`."""
    async with Redis.from_url(redis_url, protocol=2) as redis:
        await Registry(redis).put(replica, secret=ClusterSecret(tiny_model.SECRET))


@dataclass
class World:
    table: RoutingTable
    membership: Membership
    models: list[tuple[ModelCard, TokenizerBundle]] = field(default_factory=list)
    records: dict[str, Mapping[ReplicaId, ReplicaRecord]] = field(default_factory=dict)
    cards: dict[str, Sequence[ModelCard]] = field(default_factory=dict)

    def adapters(self, model: str) -> list[Adapter]:
        return [adapter for card in self.cards[model] for adapter in card.adapters]

    def routed(self, model: str = "toy") -> set[str]:
        """Whom a request could go to: the routing table's own word."""
        found: set[str] = set()
        with contextlib.suppress(NoReplicaAvailable, UnknownModel):
            while True:
                request = RoutingRequest(b"bucket", 10, CARD.block_size)
                with self.table.route(model, request, [], exclude=found) as routed:  # type: ignore[arg-type]
                    found.add(routed.decision.replica_id)
        return found

    async def wait_routed(self, *replica_ids: str, model: str = "toy") -> None:
        await eventually(lambda: self.routed(model) == set(replica_ids))


@contextlib.asynccontextmanager
async def watching(
    source: ReplicaSource,
    *,
    on_model: Callable[[ModelCard, TokenizerBundle], Awaitable[None] | None] | None = None,
    proof_seconds: float = 30.0,
    stall_seconds: float = 30.0,
    tls: RouterTls | None = None,
    secret: ClusterSecret | None = None,
) -> AsyncIterator[World]:
    """A stream is lost when it is cut, and not because the machine was busy for a while."""
    table = RoutingTable("kvasir", CostParameters(), random.Random(0))
    models: list[tuple[ModelCard, TokenizerBundle]] = []
    records: dict[str, Mapping[ReplicaId, ReplicaRecord]] = {}
    cards: dict[str, Sequence[ModelCard]] = {}
    membership = Membership(
        source,
        table,
        index_stride=16,
        on_model=on_model or (lambda card, bundle: models.append((card, bundle))),
        on_records=records.__setitem__,
        on_cards=lambda model, told: cards.__setitem__(model, [card for _, card in told]),
        stall_seconds=stall_seconds,
        proof_seconds=proof_seconds,
        tls=tls,
        secret=secret,
    )
    task = asyncio.create_task(membership.run())
    try:
        yield World(table, membership, models, records, cards)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def registry(redis_url: str) -> AsyncIterator[Registry]:
    async with Redis.from_url(redis_url, protocol=2) as redis:
        yield Registry(redis)


@pytest.fixture
async def world(redis_url: str) -> AsyncIterator[World]:
    async with watching(RegistrySource(redis_url, POLL_SECONDS)) as world:
        yield world


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    replicas: list[ScriptedReplica] = []

    async def start(
        replica_id: str = "r0", epoch: str = "e0", card: ModelCard = CARD, port: int = 0
    ) -> ScriptedReplica:
        replica = ScriptedReplica(replica_id, epoch, card)
        replica.port = port
        await replica.start()
        replicas.append(replica)
        return replica

    yield start
    for replica in replicas:
        await replica.kill()
