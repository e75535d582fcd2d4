"""Sealed values: what is not of this secret and place is missing and counted; no update at once is lost."""

import asyncio
from typing import Any

import msgspec
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from replicas.protocol.cluster_secret import ClusterSecret, Purpose
from router.shared.sealed_store import MAX_TRIES, SealedStore
from router.shared.sealing import OVERHEAD_BYTES, NotOurs, Seal

SECRET = ClusterSecret(b"s" * 32)
decode_number = msgspec.msgpack.Decoder(int).decode


class Numbers(SealedStore):
    async def put(self, key: str, value: object) -> None:
        await self._redis.set(key, await self._seal(key, value))

    async def put_raw(self, key: str, value: bytes) -> None:
        await self._redis.set(key, value)

    async def get(self, *keys: str) -> list[int | None]:
        return await self._read_all(keys, decode_number)

    async def add(self, key: str, interfere: Any = None) -> int:
        async def change(pipeline: Any) -> int:
            number = (await self._opened(key, await pipeline.get(key), decode_number) or 0) + 1
            if interfere is not None:
                await interfere()
            sealed = await self._seal(key, number)
            pipeline.multi()
            pipeline.set(key, sealed)
            return number

        return await self._update(key, change)


async def test_a_value_that_is_not_ours_is_missing_and_counted(redis_url: str) -> None:
    store, other = Numbers(redis_url, SECRET), Numbers(redis_url, ClusterSecret(b"t" * 32))
    elsewhere = Numbers(redis_url, SECRET, Purpose.HISTORY)
    await store.put("mine", 7)
    await other.put("of-another-secret", 7)
    await elsewhere.put("for-another-purpose", 7)
    await store.put("of-another-type", "seven")
    await store.put_raw("moved", await store._redis.get("mine"))
    await store.put_raw("broken", b"\x01")
    names = ("of-another-secret", "for-another-purpose", "of-another-type", "moved", "broken")
    assert await store.get("mine", "never-was", *names) == [7, None, *[None] * len(names)]
    assert store.num_not_ours == len(names)
    for each in (store, other, elsewhere):
        await each.close()


async def test_updates_at_once_lose_nothing(redis_url: str) -> None:
    store = Numbers(redis_url, SECRET)
    assert sorted(await asyncio.gather(*(store.add("count") for _ in range(4)))) == [1, 2, 3, 4]
    assert await store.get("count") == [4]
    await store.close()


async def test_an_update_that_is_always_overtaken_gives_up(redis_url: str) -> None:
    store = Numbers(redis_url, SECRET)
    num_tries = 0

    async def interfere() -> None:
        nonlocal num_tries
        num_tries += 1
        await store.put("count", num_tries)

    with pytest.raises(RedisConnectionError):
        await store.add("count", interfere)
    assert num_tries == MAX_TRIES and await store.get("count") == [MAX_TRIES]
    await store.close()


OLD, NEW = b"the old secret....", b"the new secret...."
PLAIN = "What nobody else may read. ☂".encode()


def test_what_was_sealed_is_opened_at_its_place_and_reads_like_noise() -> None:
    seal = Seal(ClusterSecret(OLD))
    sealed = seal.seal("here", PLAIN)
    assert Seal(ClusterSecret(OLD)).open("here", sealed) == PLAIN
    assert len(sealed) == len(PLAIN) + OVERHEAD_BYTES and b"nobody" not in sealed
    assert seal.seal("here", PLAIN) != sealed
    with pytest.raises(NotOurs):
        seal.open("there", sealed)


def test_no_bit_may_be_another() -> None:
    seal = Seal(ClusterSecret(OLD))
    sealed = seal.seal("here", PLAIN)
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 0x10
        with pytest.raises(NotOurs):
            seal.open("here", bytes(changed))
    for length in range(len(sealed)):
        with pytest.raises(NotOurs):
            seal.open("here", sealed[:length])


def test_a_secret_is_changed_without_losing_what_was_sealed() -> None:
    before = Seal(ClusterSecret(OLD)).seal("here", PLAIN)
    during = Seal(ClusterSecret(NEW, (OLD,)))
    assert during.open("here", before) == PLAIN
    after = during.seal("here", PLAIN)
    assert Seal(ClusterSecret(NEW)).open("here", after) == PLAIN
    for seal, sealed in ((Seal(ClusterSecret(NEW)), before), (Seal(ClusterSecret(OLD)), after)):
        with pytest.raises(NotOurs):
            seal.open("here", sealed)
