"""With a cluster secret only leases that were signed with it are believed, and only as what they are."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from cluster.registry import read_signed_registry
from replicas.errors import LeaseLost
from replicas.observation.metrics import ReplicaMetrics
from replicas.protocol.cluster_secret import ClusterSecret
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import (
    MODELS_KEY,
    ReplicaRecord,
    encode_record,
    registrations_key,
    replica_key,
    replicas_key,
)
from replicas.protocol.lease_seal import REASONS, LeaseRefused, LeaseSeal
from replicas.protocol.status import Adapter, Epoch, ReplicaId, ReplicaState
from replicas.registration import Registration
from router.fleet import registry_source
from router.fleet.registry_source import RegistrySource
from tests.router.scripted_replica import CARD, eventually
from tests.router.watched_fleet import POLL_SECONDS, Registry, Start, World, watching

SECRET = ClusterSecret(b"s" * 32)
SEAL = LeaseSeal(SECRET)
KEY = replica_key("toy", ReplicaId("r0"))
RECORD = ReplicaRecord(
    ReplicaId("r0"), Epoch("e0"), "127.0.0.1:9", ReplicaState.READY, "d", 3, LoadSnapshot(num_running=1), 7, 8
)
SIGNED = SEAL.signed(KEY, encode_record(RECORD))


def read(fields: Mapping[str, str]) -> dict[bytes, bytes]:
    return {name.encode(): value.encode() for name, value in fields.items()}


def reason_of(seal: LeaseSeal, key: str, fields: Mapping[str, str]) -> str | None:
    try:
        seal.check(key, read(fields))
    except LeaseRefused as refused:
        assert refused.reason in REASONS
        return refused.reason
    return None


def test_a_lease_is_believed_under_its_own_name_only() -> None:
    assert reason_of(SEAL, KEY, SIGNED) is None
    assert reason_of(SEAL, replica_key("toy", ReplicaId("r1")), SIGNED) == "forged"
    assert reason_of(SEAL, replica_key("other", ReplicaId("r0")), SIGNED) == "forged"


@pytest.mark.parametrize("name", sorted(encode_record(RECORD)))
def test_no_field_of_a_lease_can_be_changed_added_or_left_out(name: str) -> None:
    assert reason_of(SEAL, KEY, SIGNED | {name: SIGNED[name] + "0"}) == "forged"
    assert reason_of(SEAL, KEY, {key: value for key, value in SIGNED.items() if key != name}) == "forged"
    assert reason_of(SEAL, KEY, SIGNED | {"new": "field"}) == "forged"


def test_where_one_field_ends_and_the_next_begins_is_signed_too() -> None:
    moved = SIGNED | {"epoch": "e", "card_digest": "0d"}
    assert reason_of(SEAL, KEY, moved) == "forged"


def test_another_secret_is_told_from_a_forgery_and_a_secret_that_follows_is_believed() -> None:
    other = ClusterSecret(b"o" * 32)
    assert reason_of(LeaseSeal(other), KEY, SIGNED) == "other_secret"
    assert reason_of(LeaseSeal(ClusterSecret(other.current, (SECRET.current,))), KEY, SIGNED) is None
    assert reason_of(SEAL, KEY, encode_record(RECORD)) == "unsigned"
    assert reason_of(SEAL, KEY, SIGNED | {"signature": "\u00e9"}) == "forged"


def test_what_is_published_says_nothing_of_the_secret() -> None:
    told = " ".join(SIGNED.values())
    assert SECRET.current.hex() not in told and repr(SECRET.current) not in told
    assert len(SIGNED["check"]) == 16


@contextlib.asynccontextmanager
async def registered(
    redis_url: str,
    address: str,
    *,
    epoch: str = "e0",
    seal: LeaseSeal | None = SEAL,
    replica_id: str = "r0",
) -> AsyncIterator[list[LeaseLost]]:
    """A replica's registration, for a replica of that address. Yields what it lost its lease to."""

    class NoIndex:
        set_key = "nothing"

        def check(self, number: int, num_members: int) -> None:
            pass

        async def make_room(self) -> None:
            pass

    lost: list[LeaseLost] = []
    redis: Any = Redis.from_url(redis_url, protocol=2)
    registration = Registration(
        redis,
        "toy",
        ReplicaId(replica_id),
        Epoch(epoch),
        record=lambda: ReplicaRecord(
            ReplicaId(replica_id), Epoch(epoch), address, ReplicaState.READY, CARD.digest(), 0, LoadSnapshot()
        ),
        index=NoIndex(),
        lease_seconds=2.0,
        heartbeat_seconds=0.05,
        set_ttl_seconds=10,
        on_lost=lost.append,
        metrics=ReplicaMetrics(CollectorRegistry()),
        seal=seal,
    )
    task = asyncio.create_task(registration.run())
    try:
        await registration.wait_registered()
        yield lost
    finally:
        task.cancel()
        await asyncio.wait([task])
        await redis.aclose()


def refused(world: World, reason: str) -> int:
    return world.membership.num_refused_records.get(reason, 0)


@pytest.mark.parametrize("kind", ["unsigned", "copied from another", "of another secret"])
async def test_a_forged_lease_draws_no_request(
    redis_url: str, registry: Registry, start: Start, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    right, forger = await start("r0"), await start("forger")
    async with (
        registered(redis_url, right.address),
        watching(RegistrySource(redis_url, POLL_SECONDS, seal=SEAL)) as world,
    ):
        await world.wait_routed("r0")
        key = replica_key("toy", ReplicaId("forger"))
        record = replace(RECORD, replica_id=ReplicaId("forger"), address=forger.address, order=10**6)
        fields: Mapping[Any, Any] = encode_record(record)
        reason = "unsigned"
        if kind == "copied from another":
            fields, reason = await registry.redis.hgetall(KEY), "forged"
        elif kind == "of another secret":
            fields, reason = LeaseSeal(ClusterSecret(b"x" * 16)).signed(key, fields), "other_secret"
        await registry.redis.hset(key, mapping=fields)  # type: ignore[arg-type]
        await registry.redis.sadd(replicas_key("toy"), "forger")
        await eventually(lambda: refused(world, reason) == 1)
        await asyncio.sleep(5 * POLL_SECONDS)
        assert world.routed() == {"r0"} and forger.num_describes == 0
        complaints = [entry for entry in caplog.records if "forger of toy is ignored" in entry.message]
        assert len(complaints) == 1


async def test_without_a_secret_leases_are_believed_as_they_are(redis_url: str, start: Start) -> None:
    replica = await start("r0")
    for seal in (None, SEAL):
        async with (
            registered(redis_url, replica.address, seal=seal),
            watching(RegistrySource(redis_url, POLL_SECONDS)) as world,
        ):
            await world.wait_routed("r0")


async def test_the_controller_believes_signed_leases_only(
    redis_url: str, registry: Registry, tmp_path: Any
) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET.current.hex())
    await registry.redis.sadd(MODELS_KEY, "toy")
    await registry.redis.sadd(replicas_key("toy"), "r0", "r1")
    await registry.redis.hset(KEY, mapping=SIGNED)  # type: ignore[arg-type]
    await registry.redis.hset(  # type: ignore[arg-type]
        replica_key("toy", ReplicaId("r1")),
        mapping=encode_record(replace(RECORD, replica_id=ReplicaId("r1"))),
    )
    found = await asyncio.to_thread(read_signed_registry, redis_url, str(file))
    assert list(found.records) == ["r0"] and "r1" in found.refused[0]
    found = await asyncio.to_thread(read_signed_registry, redis_url, None)
    assert list(found.records) == ["r0", "r1"]


async def test_a_lease_of_a_dead_epoch_that_is_copied_back_ends_nobody(
    redis_url: str, registry: Registry, start: Start
) -> None:
    old = await start("r0", "e0")
    async with registered(redis_url, old.address):
        copied = await registry.redis.hgetall(KEY)
    await old.kill()
    new = await start("r0", "e1")
    async with (
        registered(redis_url, new.address, epoch="e1") as lost,
        watching(RegistrySource(redis_url, POLL_SECONDS, seal=SEAL)) as world,
    ):
        await world.wait_routed("r0")
        client = world.membership.client(new.replica_id)
        for _ in range(50):
            await registry.redis.hset(KEY, mapping=copied)
            await asyncio.sleep(0.01)
        assert lost == []
        assert world.membership.client(new.replica_id) is client, "the live incarnation was dismissed"
        assert world.routed() == {"r0"}


async def test_a_replica_gives_way_to_one_of_its_name_that_registered_later(
    redis_url: str, start: Start
) -> None:
    async with registered(redis_url, "127.0.0.1:1") as lost, registered(redis_url, "127.0.0.1:2", epoch="e1"):
        await eventually(lambda: len(lost) == 1)


async def test_an_earlier_heartbeat_is_not_believed_while_a_later_one_is_fresh(
    redis_url: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    source = RegistrySource(redis_url, POLL_SECONDS, seal=SEAL, clock=lambda: now)
    views = source.views()

    async def look(record: ReplicaRecord) -> bool:
        fields = SEAL.signed(KEY, encode_record(record))
        await registry.redis.hset(KEY, mapping=fields)  # type: ignore[arg-type]
        return "r0" in (await anext(views))["toy"]

    await registry.redis.sadd(MODELS_KEY, "toy")
    await registry.redis.sadd(replicas_key("toy"), "r0")
    assert await look(RECORD)
    assert await look(replace(RECORD, beat=9))
    assert not await look(RECORD)
    assert source.num_refused["old"] == 1
    assert not await look(replace(RECORD, epoch=Epoch("e9"), order=6, beat=100))
    assert await look(replace(RECORD, epoch=Epoch("e1"), order=8, beat=1))
    now += registry_source.OLD_SECONDS
    assert await look(replace(RECORD, epoch=Epoch("e2"), order=1, beat=1))  # Redis came back empty
    await views.aclose()  # type: ignore[attr-defined]


async def test_adapters_follow_the_order_of_registration_whatever_the_clocks_said(
    redis_url: str, registry: Registry, start: Start
) -> None:
    first, second = Adapter("sql", "1"), Adapter("sql", "2")
    # The one that registers first was started by a clock an hour ahead.
    ahead = await start("r0", "ffff-ahead", card=replace(CARD, adapters=(first,)))
    behind = await start("r1", "0000-behind", card=replace(CARD, adapters=(second,)))
    async with (
        registered(redis_url, ahead.address, epoch=ahead.epoch),
        registered(redis_url, behind.address, epoch=behind.epoch, replica_id="r1"),
        watching(RegistrySource(redis_url, POLL_SECONDS, seal=SEAL)) as world,
    ):
        await world.wait_routed("r0", "r1")
        assert world.adapters("toy") == [first, second]
        # Redis loses everything, the counter too: whoever comes next is the newest all the same.
        await registry.redis.flushall()
        async with asyncio.timeout(30):
            while int(await registry.redis.get(registrations_key("toy")) or 0) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        third = Adapter("sql", "3")
        newest = await start("r2", "0000-a", card=replace(CARD, adapters=(third,)))
        async with registered(redis_url, newest.address, epoch=newest.epoch, replica_id="r2"):
            await world.wait_routed("r0", "r1", "r2")
            assert world.adapters("toy") == [first, second, third]


@pytest.mark.parametrize("nonsense", ["text", "9223372036854775807", "-5", "list"])
async def test_what_lies_under_the_keys_of_a_lease_keeps_no_replica_from_registering(
    redis_url: str, registry: Registry, nonsense: str
) -> None:
    for key in (KEY, MODELS_KEY, replicas_key("toy"), registrations_key("toy")):
        if nonsense == "list":
            await registry.redis.rpush(key, "x")
        else:
            await registry.redis.set(key, nonsense)
    async with asyncio.timeout(30), registered(redis_url, "127.0.0.1:1"):
        found = await asyncio.to_thread(read_signed_registry, redis_url, None)
        assert list(found.records) == ["r0"]


async def test_an_epoch_that_is_no_text_ends_no_replica(redis_url: str, registry: Registry) -> None:
    async with registered(redis_url, "127.0.0.1:1") as lost:
        await registry.redis.hset(KEY, "epoch", b"\xff")  # type: ignore[arg-type]
        async with asyncio.timeout(30):
            while await registry.redis.hget(KEY, "epoch") != b"e0":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert lost == []
