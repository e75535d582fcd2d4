"""A store of sealed values: what is not its own is missing and counted, and no update at once is lost."""

import asyncio
from typing import Any

import msgspec
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from replicas.protocol.cluster_secret import ClusterSecret, Purpose
from router.shared.sealed_store import MAX_TRIES, SealedStore

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
