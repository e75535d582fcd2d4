"""A registry full of nonsense: whoever is right in it is found, and nobody else is harmed."""

import asyncio
import contextlib
import json
import random
import struct
from collections.abc import Callable

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from cluster.registry import read_registry
from replicas.protocol import keys
from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState
from router.fleet.index_mirror import IndexMirror
from router.fleet.registry_source import RegistrySource
from router.routing.overlap import PrefixIndex
from tests.router.scripted_replica import eventually
from tests.router.watched_fleet import POLL_SECONDS, Registry, Start, World, registry, start, watching, world

__all__ = ["registry", "start", "world"]

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
