"""Membership against a real Redis: who comes, stays or is lost, what records say, and nonsense among them."""

import asyncio
import contextlib
import json
import random
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from cluster.registry import read_registry
from replicas.protocol import keys
from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import replicas_key
from replicas.protocol.status import Adapter, Epoch, ModelCard, ReplicaId, ReplicaState, TokenizerBundle
from router.fleet.fleet_health import FleetHealth
from router.fleet.index_mirror import IndexMirror
from router.fleet.registry_source import RegistrySource, forget
from router.routing.overlap import PrefixIndex
from tests.redis_server import RedisServer
from tests.router.scripted_replica import CARD, eventually
from tests.router.watched_fleet import POLL_SECONDS, Registry, Start, World, watching


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


NUMBERS = (b"", b"-1", b"nan", b"1e999", b"9" * 40, b"1_0", b" 7", b"0x1f", b"\xd9\xa3")
LOADS = (
    b"[" * 100_000,
    b'{"num_running":' * 300,
    b'{"num_running": -5}',
    b'{"num_running": 1e400}',
    b'{"num_waiting": 99999999999999999999999999}',
    b'{"num_pending_tokens": "many"}',
    b'{"decode_step_seconds": NaN}',
    b"null",
    b"\xff\xfe",
)


def num_refused(world: World) -> int:
    return sum(world.membership.num_refused_records.values())


def bytes_of(rng: random.Random) -> bytes:
    return rng.choice([*NUMBERS, *LOADS, rng.randbytes(rng.randrange(64)), b"ready", b"127.0.0.1:9"])


async def spoil(redis: Redis, key: str, rng: random.Random, *, good: Callable[[], dict[str, bytes]]) -> None:
    """Something else under this key, of whatever type; a hash mostly has the right fields."""
    if rng.random() < 0.7:
        await redis.delete(key)
    kind = rng.randrange(6)
    with contextlib.suppress(ResponseError):  # it holds another type already: let it be so
        if kind == 0:
            await redis.set(key, bytes_of(rng))
        elif kind == 1:
            await redis.rpush(key, *(bytes_of(rng) for _ in range(3)))
        elif kind == 2:
            await redis.sadd(key, *(bytes_of(rng) for _ in range(3)))
        elif kind == 3:
            await redis.zadd(key, {bytes_of(rng): 1.0})
        elif kind == 4:
            await redis.xadd(key, {b"replica": bytes_of(rng), bytes_of(rng): bytes_of(rng)})
        else:
            fields = good()
            for name in rng.sample(sorted(fields), rng.randint(1, 2)):
                fields[name] = bytes_of(rng)
            await redis.hset(key, mapping=fields)  # type: ignore[arg-type]


def lease(replica_id: str) -> dict[str, bytes]:
    record = keys.ReplicaRecord(
        ReplicaId(replica_id), Epoch("e0"), "127.0.0.1:9", ReplicaState.READY, "d", 0, LoadSnapshot()
    )
    return {name: value.encode() for name, value in keys.encode_record(record).items()}


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_lies_in_the_registry_the_replica_that_is_right_serves(
    redis_url: str, registry: Registry, start: Start, seed: int
) -> None:
    rng = random.Random(seed)
    replica = await start("right")
    async with watching(RegistrySource(redis_url, POLL_SECONDS)) as world:
        for _ in range(60):
            await registry.put(replica)
            for key in (keys.MODELS_KEY, keys.replicas_key("toy")):
                with contextlib.suppress(ResponseError):
                    await registry.redis.sadd(key, bytes_of(rng))
            wrong = f"wrong-{rng.randrange(5)}"
            await registry.redis.sadd(keys.replicas_key("toy"), wrong)
            key = keys.replica_key("toy", ReplicaId(wrong))
            await spoil(registry.redis, key, rng, good=lambda wrong=wrong: lease(wrong))
            await registry.redis.sadd(keys.MODELS_KEY, "other")
            await spoil(registry.redis, keys.replicas_key("other"), rng, good=lambda: lease("x"))
            await asyncio.sleep(POLL_SECONDS / 4)
        await world.wait_routed("right")
        await eventually(lambda: num_refused(world) > 0)
    # The controller and `kvasir status` read the same.
    found = await asyncio.to_thread(read_registry, redis_url)
    assert "right" in found.records and found.complaint is None and found.refused


async def test_a_registry_whose_root_is_of_another_type_leaves_the_fleet_alone(
    world: World, registry: Registry, start: Start
) -> None:
    await registry.put(await start())
    await world.wait_routed("r0")
    await registry.redis.set(keys.MODELS_KEY, "text")
    await eventually(lambda: num_refused(world) > 0)
    assert world.routed() == {"r0"}  # its stream lives


@pytest.mark.parametrize("load", LOADS, ids=range(len(LOADS)))
async def test_no_load_of_one_replica_keeps_the_others_from_being_decided_on(
    world: World, registry: Registry, start: Start, load: bytes
) -> None:
    await registry.put(await start("r0"))
    other = await start("r1")
    await registry.put(other)
    await world.wait_routed("r0", "r1")
    await registry.redis.hset(keys.replica_key("toy", other.replica_id), "load", load)  # type: ignore[arg-type]
    await eventually(lambda: num_refused(world) == 1)
    assert "r0" in world.routed()


async def test_more_names_than_one_look_takes_do_not_hide_who_is_known(
    world: World, registry: Registry, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.fleet.registry_source.MAX_NAMES_PER_LOOK", 8)
    await registry.put(await start("r0"))
    await world.wait_routed("r0")
    await registry.redis.sadd(keys.replicas_key("toy"), *(f"a{number}" for number in range(50)))
    await registry.put(await start("r1"))  # comes after all of those, in the alphabet too
    await world.wait_routed("r0", "r1")


async def test_what_is_wrong_is_logged_once_and_no_more_often_than_a_bound(
    world: World, registry: Registry, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    await registry.put(await start("right"))
    for number in range(200):
        key = keys.replica_key("toy", ReplicaId(f"wrong-{number}"))
        await registry.redis.sadd(keys.replicas_key("toy"), f"wrong-{number}")
        await registry.redis.hset(key, "epoch", "e")
    await world.wait_routed("right")
    await eventually(lambda: num_refused(world) == 200)
    await asyncio.sleep(5 * POLL_SECONDS)
    assert 0 < len([entry for entry in caplog.records if "is ignored" in entry.message]) <= 65


@contextlib.asynccontextmanager
async def mirroring(redis_url: str, *records: keys.ReplicaRecord):  # type: ignore[no-untyped-def]
    index = PrefixIndex(16, 16)
    mirror = IndexMirror(redis_url, "toy", index, audit_seconds=0.05)
    mirror.set_live({record.replica_id: record for record in records})
    task = asyncio.create_task(mirror.run())
    try:
        yield index, mirror
    finally:
        assert not task.done(), "the mirror has ended"
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def record_of(name: str) -> keys.ReplicaRecord:
    return keys.ReplicaRecord(ReplicaId(name), Epoch("e0"), "a:1", ReplicaState.READY, "d", 0, LoadSnapshot())


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_lies_in_the_index_what_is_right_in_it_is_mirrored(redis_url: str, seed: int) -> None:
    rng = random.Random(seed)
    right, wrong = record_of("right"), record_of("wrong")
    hashes = [BlockHash(rng.randbytes(16)) for _ in range(20)]
    async with Redis.from_url(redis_url, protocol=2) as redis:
        key = keys.blocks_key("toy", right.replica_id, right.epoch)
        await redis.sadd(key, keys.BLOCKS_MARKER, *hashes, b"short", bytes(17), bytes(1000))
        async with mirroring(redis_url, right, wrong) as (index, mirror):
            await eventually(lambda: index.num_stored(right.replica_id) == 20)
            for number in range(40):
                await redis.delete(wrong_key := keys.blocks_key("toy", wrong.replica_id, wrong.epoch))
                await spoil(redis, wrong_key, rng, good=lambda: {"a": b"b", "c": b"d"})
                change = keys.encode_change(keys.IndexChange(wrong.replica_id, wrong.epoch, number + 1))
                change[rng.choice(sorted(change))] = bytes_of(rng)
                await redis.xadd(keys.events_key("toy"), change)  # type: ignore[arg-type]
            torn = keys.encode_change(keys.IndexChange(right.replica_id, right.epoch, 1))
            torn["announced"] = struct.pack("<QI", 7, 2**32 - 1)
            await redis.xadd(keys.events_key("toy"), torn)  # type: ignore[arg-type]
            await eventually(lambda: mirror.num_malformed > 5)
            assert index.stored(right.replica_id) == set(hashes)
            # The connection is not given up for what one replica wrote.
            await eventually(lambda: mirror.is_connected)
            change = keys.IndexChange(right.replica_id, right.epoch, 1, added=(BlockHash(bytes(16)),))
            await redis.sadd(key, bytes(16))
            await redis.xadd(keys.events_key("toy"), keys.encode_change(change))  # type: ignore[arg-type]
            await eventually(lambda: index.num_stored(right.replica_id) == 21)


async def test_members_that_are_no_hashes_do_not_have_a_set_read_over_and_over(redis_url: str) -> None:
    right = record_of("right")
    async with Redis.from_url(redis_url, protocol=2) as redis:
        key = keys.blocks_key("toy", right.replica_id, right.epoch)
        await redis.sadd(key, keys.BLOCKS_MARKER, bytes(16), b"short")
        async with mirroring(redis_url, right) as (index, mirror):
            await eventually(lambda: index.num_stored(right.replica_id) == 1)
            await asyncio.sleep(0.5)
            assert mirror.num_resyncs == 1


async def test_a_stream_of_another_type_is_followed_once_it_is_one(redis_url: str) -> None:
    right = record_of("right")
    async with Redis.from_url(redis_url, protocol=2) as redis:
        await redis.set(keys.events_key("toy"), json.dumps({}))
        await redis.sadd(keys.blocks_key("toy", right.replica_id, right.epoch), keys.BLOCKS_MARKER, bytes(16))
        async with mirroring(redis_url, right) as (index, mirror):
            await eventually(lambda: index.num_stored(right.replica_id) == 1)
            await redis.delete(keys.events_key("toy"))
            change = keys.IndexChange(right.replica_id, right.epoch, 1, removed=(BlockHash(bytes(16)),))
            await redis.srem(keys.blocks_key("toy", right.replica_id, right.epoch), bytes(16))
            await redis.xadd(keys.events_key("toy"), keys.encode_change(change))  # type: ignore[arg-type]
            await eventually(lambda: index.num_stored(right.replica_id) == 0)
            await eventually(lambda: mirror.is_connected)
