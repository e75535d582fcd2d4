"""RedisHistory: how much there is in a real Redis, and whose goes when that is too much. HistorySync: nothing
waits for it, and what waits in it is bounded; with a Redis that hangs."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from replicas.protocol.cluster_secret import ClusterSecret
from router.features.history import history_sync
from router.features.history.history_sync import MOST_LOOKING, MOST_MISSING, MOST_UNSENT, Fetch, HistorySync
from router.features.history.redis_history import (
    PREFIX,
    SHARE_BEFORE_SURVEY,
    TENANTS_KEY,
    HistoryBounds,
    OutgoingRecord,
    RedisHistory,
    end_key,
    level_of,
    log_key,
    record_key,
)
from router.history.canonical import ConversationKey
from router.history.retracing import HistoryRecord
from router.shared.tenant_tags import TenantTags
from tests.redis_server import RedisServer
from tests.router.raw_client import wait_for

SECRET = ClusterSecret(b"of the whole cluster")
TAG = TenantTags(SECRET).of("us")
SAID = b"toks" * 100

pytestmark = pytest.mark.timeout(120)


def key(number: int) -> ConversationKey:
    return ConversationKey(number.to_bytes(16))


def told(said: bytes = SAID) -> HistoryRecord:
    return HistoryRecord(b"", int(time.time()), b"", 0, b"d" * 16, b"ends", said, False, False)


def telling(number: int, tenant: str = "us", said: bytes = SAID) -> OutgoingRecord:
    return OutgoingRecord(tenant, key(number), told(said))


async def written(history: RedisHistory, tellings: list[OutgoingRecord]) -> None:
    for first in range(0, len(tellings), 50):
        if history.is_survey_due:
            await history.survey()
        await history.write(tellings[first : first + 50])


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator["redis.asyncio.Redis"]:
    async with redis.asyncio.Redis.from_url(redis_url, protocol=2) as client:
        yield client


async def num_records(client: "redis.asyncio.Redis", tenant: str) -> int:
    return len(
        [
            name
            async for name in client.scan_iter(
                f"{PREFIX}{{{TenantTags(SECRET).of(tenant)}}}:record:*", count=1000
            )
        ]
    )


async def test_what_one_writes_another_reads_and_nobody_without_the_secret(
    redis_url: str, client: "redis.asyncio.Redis"
) -> None:
    one, other = (RedisHistory(redis_url, SECRET, HistoryBounds(seconds=60)) for _ in range(2))
    stranger = RedisHistory(redis_url, ClusterSecret(b"of another cluster.."), HistoryBounds())
    await one.write([telling(1), telling(2)])
    found = await other.read("us", [key(1), key(3)])
    assert found[0] is not None and found[0].said == SAID and found[1] is None
    assert await other.read("them", [key(1)]) == [None]
    assert await stranger.read("us", [key(1)]) == [None]
    sealed = await client.get(record_key(TAG, key(1)))
    assert SAID not in sealed
    await client.set(record_key(TAG, key(3)), sealed)  # moved
    assert await other.read("us", [key(3)]) == [None] and other.num_not_ours == 1
    await client.delete(record_key(TAG, key(3)))
    async for name in client.scan_iter(PREFIX + "*"):
        assert 0 < await client.pttl(name) <= 2 * 90_000
    assert 0 < await client.pttl(record_key(TAG, key(1))) <= 90_000
    for each in (one, other, stranger):
        await each.close()


async def test_ten_thousand_conversations_stay_within_the_bound(
    redis_url: str, client: "redis.asyncio.Redis"
) -> None:
    bounds = HistoryBounds(num_bytes=2**20)
    routers = [RedisHistory(redis_url, SECRET, bounds) for _ in range(2)]
    before = (await client.info("memory"))["used_memory_dataset"]
    for first in range(0, 10_000, 1000):
        for place, router in enumerate(routers):
            start = first + 500 * place
            await written(router, [telling(number) for number in range(start, start + 500)])
        taken = (await client.info("memory"))["used_memory_dataset"] - before
        assert taken <= bounds.num_bytes * (1 + 2 / SHARE_BEFORE_SURVEY) + 100_000
    assert routers[0].num_let_go + routers[1].num_let_go > 8000
    assert await client.zcard(log_key(TAG)) == await num_records(client, "us") > 500
    assert (await routers[0].read("us", [key(9999)])) != [None]
    assert (await routers[0].read("us", [key(0)])) == [None]
    assert 0 < routers[1].num_bytes <= bounds.num_bytes * (1 + 1 / SHARE_BEFORE_SURVEY) + 50 * 1000
    for router in routers:
        await router.close()


async def test_who_holds_most_makes_room(redis_url: str, client: "redis.asyncio.Redis") -> None:
    history = RedisHistory(redis_url, SECRET, HistoryBounds(num_bytes=2**20))
    await written(history, [telling(number, "quiet") for number in range(100)])
    await written(history, [telling(number, "loud") for number in range(5000)])
    assert await num_records(client, "quiet") == 100
    await written(history, [telling(number, "second") for number in range(5000)])
    held = {name: await num_records(client, name) for name in ("quiet", "loud", "second")}
    assert held["quiet"] == 100 and abs(held["loud"] - held["second"]) <= 100
    await history.close()


async def test_who_is_gone_counts_for_nothing_and_what_is_no_number_harms_nobody(
    redis_url: str, client: "redis.asyncio.Redis"
) -> None:
    history = RedisHistory(redis_url, SECRET, HistoryBounds(num_bytes=2**20))
    await client.sadd(TENANTS_KEY, "gone", b"\xff", "odd", "endless")
    await client.set(end_key("odd"), "many")
    await client.zadd(log_key("odd"), {"x": 1})
    await client.set(end_key("endless"), "1")
    await client.zadd(log_key("endless"), {"x": "-inf"})
    await written(history, [telling(1)])
    assert await client.smembers(TENANTS_KEY) == {TAG.encode(), b"\xff"}
    await history.close()


async def test_written_twice_is_there_once_and_as_if_new(
    redis_url: str, client: "redis.asyncio.Redis"
) -> None:
    history = RedisHistory(redis_url, SECRET, HistoryBounds(num_bytes=2**20))
    await written(history, [telling(1)])
    for first in range(10, 5000, 50):
        await written(history, [telling(number) for number in range(first, first + 50)])
        await written(history, [telling(1)])
    assert await history.read("us", [key(1)]) != [None]
    assert await num_records(client, "us") == await client.zcard(log_key(TAG))
    await history.close()


async def test_it_notices_that_redis_has_lost_what_was_written(
    redis_url: str, client: "redis.asyncio.Redis"
) -> None:
    history = RedisHistory(redis_url, SECRET, HistoryBounds())
    assert await history.write([telling(1)])
    assert await history.write([telling(2)])
    await client.flushall()
    assert not await history.write([telling(3)])
    assert await history.write([telling(4)])
    await history.close()


@given(st.lists(st.integers(0, 10_000), max_size=20), st.integers(0, 50_000))
def test_the_level_gives_those_that_hold_most_as_much_as_there_is(sizes: list[int], room: int) -> None:
    level = level_of(sizes, room)
    assert sum(min(size, level) for size in sizes) <= room
    if sum(sizes) <= room:
        assert all(size <= level for size in sizes)
    else:
        assert sum(min(size, level + 1) for size in sizes) > room


def exchange(url: str, **bounds: int) -> HistorySync:
    """Which a busy machine does not make late."""
    return HistorySync(RedisHistory(url, SECRET, HistoryBounds(**bounds)), look_seconds=5.0)


async def test_what_waits_is_bounded_and_what_is_dropped_is_counted() -> None:
    one = exchange("redis://127.0.0.1:1/0")
    for number in range(MOST_UNSENT + 10):
        one.send(telling(number))
    assert (one.num_unsent, one.num_sent["dropped"]) == (MOST_UNSENT, 10)
    assert one.lost_at > 0
    other = exchange("redis://127.0.0.1:1/0")
    for number in range(100):
        other.send(telling(number, said=bytes(2**20 - 1000)))
    assert 0 < other.num_unsent <= 16
    other.send(telling(0, said=bytes(2**20)))
    assert other.num_sent["too_large"] == 1
    for each in (one, other):
        await each.close()


async def test_redis_that_hangs_is_waited_for_once(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(history_sync, "REST_SECONDS", (0.01, 0.05))
    one = exchange(own_redis.url)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(one.run())
        await wait_for(lambda: not one.is_resting)
        with own_redis.silent(history_sync, 0.05):
            one.look_seconds = 0.05
            assert await one.fetch("us", [key(1), key(2)]) == [None, None]
            for _ in range(100):
                assert await one.fetch("us", [key(1)]) == [None]
            assert (one.num_looks[Fetch.LATE], one.num_looks[Fetch.RESTING]) == (1, 100)
            one.send(telling(1))
            await wait_for(lambda: any("cannot tell" in each.message for each in caplog.records))
        one.look_seconds = 5.0
        await wait_for(lambda: not one.num_unsent)
        (found,) = await one.fetch("us", [key(1)])
        assert found is not None and found.said == SAID
        running.cancel()
    await one.close()
    words = [record.message for record in caplog.records]
    assert sum("cannot tell each other" in each for each in words) == 1
    assert sum("can tell each other of answers again" in each for each in words) == 1


async def test_what_redis_does_not_take_is_counted_and_nothing_is_written_where_room_cannot_be_seen(
    own_redis: RedisServer,
) -> None:
    one = exchange(own_redis.url)
    async with RedisHistory(own_redis.url, SECRET, HistoryBounds())._redis as client:
        await client.set("kvasir-history:tenants", "no set")
        async with asyncio.TaskGroup() as group:
            running = group.create_task(one.run())
            for number in range(3):
                one.send(telling(number))
            await wait_for(lambda: one.num_sent["failed"] >= 3)
            assert await client.dbsize() == 1
            await client.delete("kvasir-history:tenants")
            one.send(telling(4))
            await wait_for(lambda: one.num_sent["told"] >= 1)
            running.cancel()
    await one.close()


async def test_what_has_just_been_answered_is_told_before_the_end(redis_url: str) -> None:
    one, other = exchange(redis_url), exchange(redis_url)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each.run()) for each in (one, other)]
        await wait_for(lambda: not (one.is_resting or other.is_resting))
        for number in range(200):
            one.send(telling(number))
        tasks[0].cancel()
        await one.close()
        assert all(await other.fetch("us", [key(number) for number in range(200)]))
        tasks[1].cancel()
    await other.close()


async def test_what_is_known_to_be_missing_is_bounded() -> None:
    one = exchange("redis://127.0.0.1:1/0")
    one.pass_over("us", [key(number) for number in range(MOST_MISSING + 100)])
    assert len(one._missing) == MOST_MISSING
    assert await one.fetch("us", [key(MOST_MISSING)]) == [None]
    assert one.num_looks[Fetch.KNOWN_MISSING] == 1
    await one.close()


async def test_a_busy_router_does_not_take_itself_for_a_slow_redis(redis_url: str) -> None:
    one = exchange(redis_url)

    async def hog() -> None:
        while True:
            end = time.perf_counter() + 0.02
            while time.perf_counter() < end:
                pass
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in (one.run(), hog())]
        one.look_seconds = 0.001
        one.send(telling(1))
        await wait_for(lambda: one.num_sent["told"] >= 1)
        found = await asyncio.gather(*(one.fetch("us", [key(1)]) for _ in range(20)))
        assert all(told for (told,) in found)
        assert one.num_looks[Fetch.HEARD] == 20
        for task in tasks:
            task.cancel()
    await one.close()


async def test_a_client_that_leaves_while_it_is_looked_for_leaves_nothing_behind(
    own_redis: RedisServer,
) -> None:
    one = exchange(own_redis.url)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(one.run())
        await wait_for(lambda: not one.is_resting)
        own_redis.pause()
        looks = [group.create_task(one.fetch("us", [key(number)])) for number in range(30)]
        await wait_for(lambda: len(one._reads) >= MOST_LOOKING)
        for look in looks:
            look.cancel()
        await wait_for(lambda: not one._reads)
        own_redis.resume()
        one.send(telling(1))
        await wait_for(lambda: one.num_sent["told"] >= 1)
        assert (await one.fetch("us", [key(1)]))[0] is not None
        running.cancel()
    await one.close()
