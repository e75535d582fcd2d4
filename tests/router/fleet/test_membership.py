"""Membership against a real Redis and replicas over real gRPC: who comes, who stays, who is lost."""

import asyncio

import pytest
from redis.asyncio import Redis

from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import ModelCard, ReplicaId, ReplicaState, TokenizerBundle
from router.fleet.fleet_health import FleetHealth
from router.fleet.registry_source import RegistrySource
from tests.redis_server import RedisServer
from tests.router.scripted_replica import CARD, eventually
from tests.router.watched_fleet import POLL_SECONDS, Registry, Start, World, registry, start, watching, world

__all__ = ["registry", "start", "world"]


async def test_registered_replicas_are_routed_to(world: World, registry: Registry, start: Start) -> None:
    first, second = await start("r0"), await start("r1")
    await registry.put(first)
    await registry.put(second)
    await world.wait_routed("r0", "r1")
    assert world.models == [(CARD, TokenizerBundle({"tokenizer.json": b"{}"}))]
    assert set(world.records["toy"]) == {"r0", "r1"}
    client = world.membership.client(ReplicaId("r1"))
    assert client is not None and client.address == second.address
    found = world.membership
    assert (found.num_known, found.num_routed, found.num_lost_streams, found.num_refused) == (2, 2, 0, 0)


async def test_heartbeats_tell_the_load_of_a_replica_whose_stream_has_fallen_silent(
    redis_url: str, registry: Registry, start: Start
) -> None:
    replica = await start()
    await registry.put(replica)
    async with watching(RegistrySource(redis_url, POLL_SECONDS)) as world:
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
    assert world.membership.num_lost_streams == 1


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
        assert world.membership.num_lost_streams == 0  # the lease was quicker than the stall
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
    assert world.membership.num_lost_streams == 0


async def test_a_silent_stream_is_a_broken_one(redis_url: str, registry: Registry, start: Start) -> None:
    replica = await start()
    await registry.put(replica)
    async with watching(RegistrySource(redis_url, POLL_SECONDS), stall_seconds=0.4) as world:
        await world.wait_routed("r0")
        replica.script.silent = True
        await eventually(lambda: world.membership.num_lost_streams >= 1)
        replica.script.silent = False
        await world.wait_routed("r0")


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


async def test_when_membership_ends_every_stream_is_closed(
    redis_url: str, registry: Registry, start: Start
) -> None:
    replica = await start()
    await registry.put(replica)
    async with watching(RegistrySource(redis_url, POLL_SECONDS)) as world:
        await world.wait_routed("r0")
        await eventually(lambda: replica.num_streams == 1)
    await eventually(lambda: replica.num_streams == 0)


async def test_a_model_that_has_just_lost_its_last_replica_is_taken_to_get_another(
    world: World, registry: Registry, start: Start
) -> None:
    assert not world.membership.outlook("toy").is_coming
    dying = await start("r0")
    await registry.put(dying)
    await world.wait_routed("r0")
    assert world.membership.outlook("toy") == FleetHealth(is_coming=False)
    await dying.kill()
    await registry.end_lease(dying)
    await eventually(lambda: not world.membership.members())
    await eventually(lambda: world.membership.outlook("toy").away_seconds > 0.05)
    assert world.membership.outlook("toy").is_coming
    back = await start("r1")
    await registry.put(back)
    await world.wait_routed("r1")
    assert world.membership.outlook("toy") == FleetHealth(is_coming=False)


async def test_a_model_whose_replicas_all_drain_is_taken_to_get_another(
    world: World, registry: Registry, start: Start
) -> None:
    leaving = await start("r0")
    await registry.put(leaving)
    await world.wait_routed("r0")
    await registry.put(leaving, ReplicaState.DRAINING)
    await eventually(lambda: world.membership.outlook("toy").is_coming)


async def test_a_model_that_has_been_without_replicas_for_long_is_not(
    world: World, registry: Registry, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = await start("r0")
    await registry.put(dying)
    await world.wait_routed("r0")
    monkeypatch.setattr("router.fleet.membership.COMING_BACK_SECONDS", 0.0)
    await registry.end_lease(dying)
    await dying.kill()
    await eventually(lambda: not world.membership.members())
    assert not world.membership.outlook("toy").is_coming
