"""Keys in Redis: sealed, followed, not forged, not rolled back, and in force while Redis is away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from redis.exceptions import NoPermissionError

from replicas.protocol.cluster_secret import ClusterSecret, Purpose
from router.errors import KeyFault
from router.features.api_keys.keys_in_force import KeysInForce
from router.features.api_keys.redis_keys import (
    DOCUMENT_KEY,
    Numbered,
    RedisKeys,
    next_number,
    read_keys,
    replace_keys,
    seal_document,
)
from router.shared.sealing import Seal
from tests.redis_server import RedisServer
from tests.router.features.api_keys.documents import document_of, numbered_key
from tests.router.raw_client import wait_for

SECRET = ClusterSecret(b"s" * 32)
SEAL = Seal(SECRET, Purpose.API_KEYS)


class Followed:
    def __init__(self, url: str) -> None:
        self.keys = KeysInForce(lambda: 0.0)
        self.source = RedisKeys(url, SECRET, self.keys, poll_seconds=0.01)

    @property
    def in_force(self) -> list[int]:
        return [
            number
            for number in range(1, 6)
            if not isinstance(self.keys.find(numbered_key(number)[1], now=0.0), KeyFault)
        ]

    @property
    def is_refused(self) -> bool:
        return self.keys.is_newest_refused


@contextlib.asynccontextmanager
async def following(url: str) -> AsyncIterator[Followed]:
    followed = Followed(url)
    task = asyncio.create_task(followed.source.follow())
    try:
        yield followed
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def put(url: str, *numbers: int, number: int) -> bytes:
    sealed = seal_document(SEAL, Numbered(number, document_of(*numbers)))
    await put_bytes(url, sealed)
    return sealed


async def put_bytes(url: str, sealed: bytes) -> None:
    async with redis.asyncio.Redis.from_url(url, protocol=2) as client:
        await client.set(DOCUMENT_KEY, sealed)


async def test_nobody_is_let_in_before_there_are_keys_and_then_they_are_followed(
    own_redis: RedisServer,
) -> None:
    async with following(own_redis.url) as followed:
        assert followed.in_force == []
        await put(own_redis.url, 1, 2, number=5)
        await wait_for(lambda: followed.in_force == [1, 2])
        await put(own_redis.url, 2, 3, number=6)
        await wait_for(lambda: followed.in_force == [2, 3])


async def test_an_older_document_is_not_believed(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(own_redis.url) as followed:
        old = await put(own_redis.url, 1, 2, number=5)
        await wait_for(lambda: followed.in_force == [1, 2])
        await put(own_redis.url, 2, number=6)
        await wait_for(lambda: followed.in_force == [2])
        await put_bytes(own_redis.url, old)
        await wait_for(lambda: followed.is_refused)
        await asyncio.sleep(0.1)
        assert followed.in_force == [2]
        said = [record.message for record in caplog.records if record.levelname == "ERROR"]
        assert sum("the keys in Redis are older than those in force" in message for message in said) == 1
        await put(own_redis.url, 3, number=7)
        await wait_for(lambda: followed.in_force == [3])
        assert not followed.is_refused


@pytest.mark.parametrize("place", [0, 3, 10, 40, -1])
async def test_a_document_that_was_changed_is_not_believed(own_redis: RedisServer, place: int) -> None:
    async with following(own_redis.url) as followed:
        await put(own_redis.url, 1, number=5)
        await wait_for(lambda: followed.in_force == [1])
        changed = bytearray(seal_document(SEAL, Numbered(6, document_of(2))))
        changed[place] ^= 1
        await put_bytes(own_redis.url, bytes(changed))
        await wait_for(lambda: followed.is_refused)
        assert followed.in_force == [1]


async def test_another_secret_and_another_place_make_no_keys(own_redis: RedisServer) -> None:
    other = Seal(ClusterSecret(b"t" * 32), Purpose.API_KEYS)
    caches = Seal(SECRET)
    numbered = Numbered(6, document_of(2))
    elsewhere = SEAL.seal("kvasir-caches:record:x", b"\0" * 8 + b"{}")
    async with following(own_redis.url) as followed:
        foreign = (seal_document(other, numbered), seal_document(caches, numbered), elsewhere)
        for number, sealed in enumerate(foreign):
            await put(own_redis.url, 1, number=10 + number)
            await wait_for(lambda: followed.in_force == [1] and not followed.is_refused)
            await put_bytes(own_redis.url, sealed)
            await wait_for(lambda: followed.is_refused)
            assert followed.in_force == [1]


async def test_keys_stay_in_force_while_redis_is_away_and_after_it_has_lost_them(
    own_redis: RedisServer,
) -> None:
    async with following(own_redis.url) as followed:
        await put(own_redis.url, 1, number=5)
        await wait_for(lambda: followed.in_force == [1])
        await asyncio.to_thread(own_redis.kill)
        await asyncio.sleep(0.1)
        assert followed.in_force == [1]
        await asyncio.to_thread(own_redis.start)
        await asyncio.sleep(0.1)
        assert followed.in_force == [1]
        await put(own_redis.url, 2, number=next_number(None, 2_000_000_000_000))
        await wait_for(lambda: followed.in_force == [2])


async def test_of_two_writers_at_once_one_is_told_to_look_again(own_redis: RedisServer) -> None:
    old = Numbered(5, document_of(1))
    assert await replace_keys(own_redis.url, SEAL, None, old)
    assert not await replace_keys(own_redis.url, SEAL, None, Numbered(6, document_of(2)))
    assert await replace_keys(own_redis.url, SEAL, old, Numbered(6, document_of(1, 2)))
    assert not await replace_keys(own_redis.url, SEAL, old, Numbered(6, document_of(1, 3)))
    assert await read_keys(own_redis.url, SEAL) == Numbered(6, document_of(1, 2))


async def test_who_may_read_what_replicas_may_cannot_read_keys(own_redis: RedisServer) -> None:
    await put(own_redis.url, 1, number=5)
    async with redis.asyncio.Redis.from_url(own_redis.url, protocol=2) as client:
        await client.execute_command("ACL", "SETUSER", "replica", "on", "nopass", "~kvasir:*", "+@all")
        await client.execute_command("AUTH", "replica", "x")
        with pytest.raises(NoPermissionError):
            await client.get(DOCUMENT_KEY)


def test_numbers_go_up_though_clocks_go_back() -> None:
    assert next_number(None, 1000) == 1000
    assert next_number(Numbered(5000, document_of()), 1000) == 5001
    assert next_number(Numbered(5, document_of()), 1000) == 1000
