"""Membership against a real Redis and replicas over real gRPC."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from redis.asyncio import Redis

from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import MODELS_KEY, ReplicaRecord, encode_record, replica_key, replicas_key
from replicas.protocol.status import (
    Adapter,
    Epoch,
    ModelCard,
    ReplicaId,
    ReplicaState,
    TokenizerBundle,
)
from replicas.protocol.tls import RouterTls
from router.errors import NoReplicaAvailable, UnknownModel
from router.membership import Membership, RegistrySource, ReplicaSource, StaticSource
from router.replica_sources import FORGET_SCRIPT
from router.routing.cost import CostParameters
from router.routing.decision import RoutingRequest
from router.routing.table import RoutingTable
from tests.redis_server import RedisServer
from tests.router.scripted_replica import CARD, ScriptedReplica, eventually

POLL_SECONDS = 0.02


@dataclass
class Registry:
    """What replicas write; the lease only ends when a test says so."""

    redis: "Redis"

    async def put(
        self,
        replica: ScriptedReplica,
        state: ReplicaState = ReplicaState.READY,
        load: LoadSnapshot | None = None,
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
        await self.redis.hset(key, mapping=encode_record(record))  # type: ignore[arg-type]

    async def end_lease(self, replica: ScriptedReplica) -> None:
        await self.redis.delete(replica_key(replica.card.name, replica.replica_id))


@dataclass
class World:
    table: RoutingTable
    membership: Membership
    models: list[tuple[ModelCard, TokenizerBundle]] = field(default_factory=list)
    records: dict[str, Mapping[ReplicaId, ReplicaRecord]] = field(default_factory=dict)
    adapters: dict[str, Sequence[Adapter]] = field(default_factory=dict)

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
    proof_seconds: float = 1.0,
    stall_seconds: float = 0.4,
    tls: RouterTls | None = None,
) -> AsyncIterator[World]:
    table = RoutingTable("kvasir", CostParameters(), random.Random(0))
    models: list[tuple[ModelCard, TokenizerBundle]] = []
    records: dict[str, Mapping[ReplicaId, ReplicaRecord]] = {}
    adapters: dict[str, Sequence[Adapter]] = {}
    membership = Membership(
        source,
        table,
        index_stride=16,
        on_model=on_model or (lambda card, bundle: models.append((card, bundle))),
        on_records=records.__setitem__,
        on_adapters=adapters.__setitem__,
        stall_seconds=stall_seconds,
        proof_seconds=proof_seconds,
        tls=tls,
    )
    task = asyncio.create_task(membership.run())
    try:
        yield World(table, membership, models, records, adapters)
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
async def start() -> AsyncIterator[Callable[..., Awaitable[ScriptedReplica]]]:
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


Start = Callable[..., Awaitable[ScriptedReplica]]


async def test_registered_replicas_are_routed_to(world: World, registry: Registry, start: Start) -> None:
    first, second = await start("r0"), await start("r1")
    await registry.put(first)
    await registry.put(second)
    await world.wait_routed("r0", "r1")
    assert world.models == [(CARD, TokenizerBundle({"tokenizer.json": b"{}"}))]
    assert set(world.records["toy"]) == {"r0", "r1"}
    client = world.membership.client(ReplicaId("r1"))
    assert client is not None and client.address == second.address
    assert world.membership.statistics()[:4] == (2, 2, 0, 0)


async def test_heartbeats_tell_the_load_of_a_replica_whose_stream_has_fallen_silent(
    redis_url: str, registry: Registry, start: Start
) -> None:
    replica = await start()
    await registry.put(replica)
    async with watching(RegistrySource(redis_url, POLL_SECONDS), stall_seconds=30.0) as world:
        await world.wait_routed("r0")
        client = world.membership.client(replica.replica_id)
        assert client is not None
        await eventually(lambda: client.num_frames > 0)
        replica.script.silent = True
        await registry.put(replica, load=LoadSnapshot(num_running=7))
        await eventually(lambda: world.table.load(replica.replica_id).num_requests == 7)


async def test_a_model_is_introduced_before_its_first_replica_is_routed_to(
    redis_url: str, registry: Registry, start: Start
) -> None:
    entered, proceed = asyncio.Event(), asyncio.Event()

    async def on_model(card: ModelCard, bundle: TokenizerBundle) -> None:
        entered.set()
        await proceed.wait()

    await registry.put(await start())
    async with watching(RegistrySource(redis_url, POLL_SECONDS), on_model=on_model) as world:
        await entered.wait()
        await asyncio.sleep(3 * POLL_SECONDS)
        assert world.routed() == set()
        assert world.records == {}
        proceed.set()
        await world.wait_routed("r0")


async def test_a_model_that_cannot_be_loaded_is_tried_again_and_ends_nothing(
    redis_url: str, registry: Registry, start: Start
) -> None:
    failures = [ValueError("no such tokenizer")]

    def on_model(card: ModelCard, bundle: TokenizerBundle) -> None:
        if failures:
            raise failures.pop()

    await registry.put(await start())
    async with watching(RegistrySource(redis_url, POLL_SECONDS), on_model=on_model) as world:
        await world.wait_routed("r0")


async def test_a_dead_replica_leaves_the_table_before_its_lease_ends(
    world: World, registry: Registry, start: Start
) -> None:
    dying = await start("r0")
    for replica in (dying, await start("r1")):
        await registry.put(replica)
    await world.wait_routed("r0", "r1")
    await dying.kill()
    await world.wait_routed("r1")
    assert set(world.records["toy"]) == {"r1"}
    assert world.membership.statistics().num_lost_streams == 1


async def test_a_broken_stream_is_connected_again_while_the_lease_holds(
    world: World, registry: Registry, start: Start
) -> None:
    replica = await start()
    await registry.put(replica)
    await world.wait_routed("r0")
    await replica.kill()
    await world.wait_routed()
    await replica.start()
    await world.wait_routed("r0")
    assert len(world.models) == 1


async def test_a_replica_without_lease_and_stream_is_forgotten(
    world: World, registry: Registry, start: Start
) -> None:
    replica = await start()
    await registry.put(replica)
    await world.wait_routed("r0")
    await replica.kill()
    await registry.end_lease(replica)
    await eventually(lambda: world.membership.members() == [])
    await replica.start()
    await asyncio.sleep(0.2)
    assert world.routed() == set()
    assert replica.num_streams == 0


async def test_a_silent_replica_is_dropped_as_soon_as_its_lease_ends(
    redis_url: str, registry: Registry, start: Start
) -> None:
    replica = await start()
    await registry.put(replica)
    async with watching(RegistrySource(redis_url, POLL_SECONDS), proof_seconds=0.1) as world:
        await world.wait_routed("r0")
        replica.script.silent = True
        await asyncio.sleep(0.15)
        await registry.end_lease(replica)
        await eventually(lambda: world.membership.members() == [])
        assert world.membership.statistics().num_lost_streams == 0  # the lease was quicker than the stall
        await eventually(lambda: replica.num_streams == 0)


async def test_a_replica_whose_lease_was_lost_but_whose_stream_lives_is_kept(
    world: World, registry: Registry, start: Start
) -> None:
    replica = await start()
    await registry.put(replica)
    await world.wait_routed("r0")
    await eventually(lambda: replica.num_streams == 1)
    await registry.redis.flushall()
    await asyncio.sleep(0.3)
    assert world.routed() == {"r0"}
    assert world.membership.statistics().num_lost_streams == 0


async def test_a_silent_stream_is_a_broken_one(world: World, registry: Registry, start: Start) -> None:
    replica = await start()
    await registry.put(replica)
    await world.wait_routed("r0")
    replica.script.silent = True
    await eventually(lambda: world.membership.statistics().num_lost_streams == 1)
    replica.script.silent = False
    await world.wait_routed("r0")


async def test_a_new_epoch_replaces_the_old_client(world: World, registry: Registry, start: Start) -> None:
    old = await start("r0", "e0")
    await registry.put(old)
    await world.wait_routed("r0")
    old_client = world.membership.client(ReplicaId("r0"))
    new = await start("r0", "e1")
    await registry.put(new)
    await eventually(lambda: new.num_streams == 1)
    await world.wait_routed("r0")
    client = world.membership.client(ReplicaId("r0"))
    assert old_client is not None and old_client.lost is not None
    assert client is not None and client.address == new.address
    await eventually(lambda: old.num_streams == 0)
    assert world.records["toy"][ReplicaId("r0")].epoch == "e1"


@pytest.mark.parametrize("described", [("r0", "another epoch"), ("another replica", "e0")])
async def test_a_replica_that_is_not_who_its_record_says_is_ignored(
    world: World, registry: Registry, start: Start, described: tuple[str, str]
) -> None:
    replica = await start()
    replica.script.describes_as = described
    await registry.put(replica)
    await eventually(lambda: replica.num_describes >= 2)
    assert world.routed() == set()
    replica.script.describes_as = None
    await world.wait_routed("r0")


async def test_a_draining_replica_takes_nothing_new_and_keeps_its_stream(
    world: World, registry: Registry, start: Start
) -> None:
    replica = await start()
    await registry.put(replica)
    await world.wait_routed("r0")
    await eventually(lambda: replica.num_streams == 1)
    await registry.put(replica, ReplicaState.DRAINING)
    await world.wait_routed()
    assert world.membership.client(replica.replica_id) is not None
    assert replica.num_streams == 1
    await registry.put(replica, ReplicaState.STOPPED)
    await eventually(lambda: world.membership.members() == [])


async def test_a_draining_replica_still_drains_after_its_stream_broke(
    world: World, registry: Registry, start: Start
) -> None:
    replica = await start()
    await registry.put(replica)
    await world.wait_routed("r0")
    await registry.put(replica, ReplicaState.DRAINING)
    await world.wait_routed()
    await replica.kill()
    await eventually(lambda: world.membership.statistics().num_lost_streams == 1)
    await replica.start()
    await eventually(lambda: replica.num_streams == 1)
    assert world.routed() == set()


async def test_a_starting_replica_is_not_yet_a_member(world: World, registry: Registry, start: Start) -> None:
    replica = await start()
    await registry.put(replica, ReplicaState.STARTING)
    await asyncio.sleep(5 * POLL_SECONDS)
    assert world.membership.members() == []
    await registry.put(replica)
    await world.wait_routed("r0")


@pytest.mark.parametrize("change", [{"fingerprint": "a" * 64}, {"block_size": 32}])
async def test_the_later_of_two_replicas_that_differ_under_one_name_is_refused(
    world: World,
    registry: Registry,
    start: Start,
    change: dict[str, object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = await start("r0")
    await registry.put(first)
    await world.wait_routed("r0")
    other = await start("r1", card=replace(CARD, **change))  # type: ignore[arg-type]
    await registry.put(other)
    await eventually(lambda: other.num_describes >= 3)
    assert world.routed() == {"r0"}
    assert world.membership.statistics().num_refused == 1
    assert len([entry for entry in caplog.records if "the replicas before it" in entry.message]) == 1
    # Once nobody holds the name any more, the other one may have it.
    await first.kill()
    await registry.end_lease(first)
    await world.wait_routed("r1")
    assert [card for card, _ in world.models] == [CARD, other.card]


async def test_every_replicas_adapters_are_told_those_of_the_newest_last(
    world: World, registry: Registry, start: Start
) -> None:
    old, new, other = Adapter("sql", "1"), Adapter("sql", "2"), Adapter("poetry", "1")
    newest = await start("r0", "e2", card=replace(CARD, adapters=(new,)))
    oldest = await start("r1", "e1", card=replace(CARD, adapters=(old, other)))
    await registry.put(newest)
    await world.wait_routed("r0")
    assert world.adapters["toy"] == [new]
    await registry.put(oldest)
    await registry.put(await start("r2", "e0"))
    await world.wait_routed("r0", "r1", "r2")
    assert world.adapters["toy"] == [old, other, new]
    assert len(world.models) == 1  # whatever adapters they have, they serve one model
    await registry.put(newest, ReplicaState.DRAINING)
    await eventually(lambda: world.adapters["toy"] == [old, other])
    await oldest.kill()
    await eventually(lambda: world.adapters["toy"] == [])


async def test_two_models_are_kept_apart(world: World, registry: Registry, start: Start) -> None:
    await registry.put(await start("r0"))
    await registry.put(await start("r1", card=replace(CARD, name="other")))
    await world.wait_routed("r0")
    await world.wait_routed("r1", model="other")
    assert {card.name for card, _ in world.models} == {"toy", "other"}


async def test_while_redis_is_away_the_fleet_stays_and_a_dead_replica_leaves(
    own_redis: RedisServer, start: Start
) -> None:
    replicas = [await start("r0"), await start("r1")]
    async with watching(RegistrySource(own_redis.url, POLL_SECONDS)) as world:
        async with Redis.from_url(own_redis.url, protocol=2) as redis:
            for replica in replicas:
                await Registry(redis).put(replica)
            await world.wait_routed("r0", "r1")
        own_redis.kill()
        await asyncio.sleep(5 * POLL_SECONDS)
        assert world.routed() == {"r0", "r1"}
        await replicas[0].kill()
        await world.wait_routed("r1")
        await asyncio.to_thread(own_redis.start)  # empty
        await asyncio.sleep(5 * POLL_SECONDS)
        assert world.routed() == {"r1"}
        async with Redis.from_url(own_redis.url, protocol=2) as redis:
            third = await start("r2")
            for replica in (replicas[1], third):
                await Registry(redis).put(replica)
            await world.wait_routed("r1", "r2")


async def test_an_unreadable_record_hides_nobody_else(world: World, registry: Registry, start: Start) -> None:
    for name in ("broken", "wrong type"):
        await registry.redis.sadd(replicas_key("toy"), name)
    await registry.redis.hset(replica_key("toy", ReplicaId("broken")), "epoch", "e0")
    await registry.redis.set(replica_key("toy", ReplicaId("wrong type")), "text")
    await registry.redis.sadd(replicas_key("toy"), b"\xff")
    await registry.put(await start())
    await world.wait_routed("r0")


async def test_ids_without_a_lease_are_taken_out_of_the_set_after_a_while(
    redis_url: str, registry: Registry, start: Start
) -> None:
    replica = await start()
    await registry.put(replica)
    await registry.redis.sadd(replicas_key("toy"), "long gone")
    source = RegistrySource(redis_url, POLL_SECONDS, forget_seconds=0.1)
    async with watching(source) as world:
        await world.wait_routed("r0")
        assert await registry.redis.scard(replicas_key("toy")) == 2
        async with asyncio.timeout(5):
            while await registry.redis.scard(replicas_key("toy")) > 1:  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)
        assert await registry.redis.smembers(replicas_key("toy")) == {b"r0"}


async def test_an_id_that_registers_again_at_the_last_moment_stays(registry: Registry, start: Start) -> None:
    replica = await start()
    await registry.put(replica)
    keys = (replica_key("toy", replica.replica_id), replicas_key("toy"))
    await registry.redis.eval(FORGET_SCRIPT, 2, *keys, replica.replica_id)
    assert await registry.redis.smembers(replicas_key("toy")) == {b"r0"}
    await registry.end_lease(replica)
    await registry.redis.eval(FORGET_SCRIPT, 2, *keys, replica.replica_id)
    assert await registry.redis.smembers(replicas_key("toy")) == set()


async def test_a_static_list_of_addresses_needs_no_registry(start: Start, free_port: int) -> None:
    replica = await start()
    addresses = [replica.address, f"127.0.0.1:{free_port}"]
    async with watching(StaticSource(addresses, POLL_SECONDS)) as world:
        await world.wait_routed("r0")
        await start("r1", port=free_port)
        await world.wait_routed("r0", "r1")
        await replica.kill()
        await world.wait_routed("r1")
        await eventually(lambda: len(world.membership.members()) == 1)


async def test_a_static_replica_that_restarts_comes_back_under_its_new_epoch(start: Start) -> None:
    replica = await start()
    async with watching(StaticSource([replica.address], POLL_SECONDS)) as world:
        await world.wait_routed("r0")
        await replica.kill()
        replica.epoch = Epoch("e1")
        await replica.start()
        await eventually(
            lambda: (
                [member.record.epoch for member in world.membership.members() if member.is_routed] == ["e1"]
            )
        )


async def test_when_membership_ends_every_stream_is_closed(
    redis_url: str, registry: Registry, start: Start
) -> None:
    replica = await start()
    await registry.put(replica)
    async with watching(RegistrySource(redis_url, POLL_SECONDS)) as world:
        await world.wait_routed("r0")
        await eventually(lambda: replica.num_streams == 1)
    await eventually(lambda: replica.num_streams == 0)
