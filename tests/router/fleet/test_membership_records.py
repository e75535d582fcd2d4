"""What replicas say of themselves and what becomes of it: states, epochs, models, adapters, lists."""

import asyncio
from dataclasses import replace

import pytest

from replicas.protocol.keys import replica_key, replicas_key
from replicas.protocol.status import Adapter, ReplicaId, ReplicaState
from router.fleet.registry_source import RegistrySource, forget
from tests.router.scripted_replica import CARD, eventually
from tests.router.watched_fleet import POLL_SECONDS, Registry, Start, World, registry, start, watching, world

__all__ = ["registry", "start", "world"]


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
    await eventually(lambda: world.membership.num_lost_streams == 1)
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
    assert world.membership.num_refused == 1
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
    assert world.adapters("toy") == [new]
    await registry.put(oldest)
    await registry.put(await start("r2", "e0"))
    await world.wait_routed("r0", "r1", "r2")
    assert world.adapters("toy") == [old, other, new]
    assert len(world.models) == 1  # whatever adapters they have, they serve one model
    await registry.put(newest, ReplicaState.DRAINING)
    await eventually(lambda: world.adapters("toy") == [old, other])
    await oldest.kill()
    await eventually(lambda: world.adapters("toy") == [])


async def test_adapters_that_come_and_go_are_known_without_a_new_connection(
    world: World, registry: Registry, start: Start
) -> None:
    first, second = Adapter("sql", "1"), Adapter("sql", "2")
    replica = await start("r0", card=replace(CARD, adapters=(first,)))
    await registry.put(replica)
    await world.wait_routed("r0")
    await eventually(lambda: replica.num_streams == 1)
    num_asked = replica.num_describes
    for adapters in ((), (second,), (first, Adapter("poetry", "1"))):
        # Nothing but names may change in an incarnation.
        replica.card = replace(CARD, adapters=adapters, context_length=7, fingerprint="0" * 64)
        await registry.put(replica)
        await eventually(lambda: world.adapters("toy") == [*adapters])  # noqa: B023
        for adapter in (first, second):
            assert world.table.has_ready("toy", adapter=adapter) == (adapter in adapters)
        (member,) = world.membership.members()
        assert member.card == replace(CARD, adapters=adapters)
    await asyncio.sleep(5 * POLL_SECONDS)
    assert replica.num_describes == num_asked + 3  # a card is asked for when it changes, and then once
    assert (replica.num_streams, world.membership.num_lost_streams, len(world.models)) == (1, 0, 1)


async def test_two_models_are_kept_apart(world: World, registry: Registry, start: Start) -> None:
    await registry.put(await start("r0"))
    await registry.put(await start("r1", card=replace(CARD, name="other")))
    await world.wait_routed("r0")
    await world.wait_routed("r1", model="other")
    assert {card.name for card, _ in world.models} == {"toy", "other"}


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
    await registry.redis.sadd(replicas_key("toy"), "long-gone")
    source = RegistrySource(redis_url, POLL_SECONDS, forget_seconds=1.0)
    async with watching(source) as world:
        await world.wait_routed("r0")
        assert await registry.redis.scard(replicas_key("toy")) == 2
        async with asyncio.timeout(30):
            while await registry.redis.scard(replicas_key("toy")) > 1:  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)
        assert await registry.redis.smembers(replicas_key("toy")) == {b"r0"}


async def test_an_id_that_registers_again_at_the_last_moment_stays(registry: Registry, start: Start) -> None:
    replica = await start()
    await registry.put(replica)
    await forget(registry.redis, "toy", replica.replica_id)
    assert await registry.redis.smembers(replicas_key("toy")) == {b"r0"}
    await registry.end_lease(replica)
    await forget(registry.redis, "toy", replica.replica_id)
    assert await registry.redis.smembers(replicas_key("toy")) == set()
