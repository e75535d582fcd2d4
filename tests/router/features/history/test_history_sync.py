"""HistorySync: nothing waits for it, and what waits in it is bounded; with a Redis that hangs."""

import asyncio
import logging
import time

import pytest

from replicas.protocol.cluster_secret import ClusterSecret
from router.features.history import history_sync
from router.features.history.history_sync import MOST_LOOKING, MOST_MISSING, MOST_UNSENT, Fetch, HistorySync
from router.features.history.redis_history import HistoryBounds, RedisHistory
from tests.redis_server import RedisServer
from tests.router.features.history.test_redis_history import SAID, key, telling

SECRET = ClusterSecret(b"of the whole cluster")

pytestmark = pytest.mark.timeout(120)


def exchange(url: str, **bounds: int) -> HistorySync:
    """Which a busy machine does not make late."""
    return HistorySync(RedisHistory(url, SECRET, HistoryBounds(**bounds)), look_seconds=5.0)


async def test_what_waits_is_bounded_and_what_is_dropped_is_counted() -> None:
    one = exchange("redis://127.0.0.1:1/0")
    for number in range(MOST_UNSENT + 10):
        one.send(telling(number))
    statistics = one
    assert (statistics.num_unsent, statistics.num_sent["dropped"]) == (MOST_UNSENT, 10)
    for number in range(100):
        one.send(telling(number, said=bytes(2**20 - 1000)))
    assert one.num_unsent == MOST_UNSENT
    assert one.lost_at > 0
    await one.close()


async def test_bytes_that_wait_are_bounded_and_one_that_is_too_large_is_not_told() -> None:
    one = exchange("redis://127.0.0.1:1/0")
    for number in range(100):
        one.send(telling(number, said=bytes(2**20 - 1000)))
    assert 0 < one.num_unsent <= 16
    one.send(telling(0, said=bytes(2**20)))
    assert one.num_sent["too_large"] == 1
    await one.close()


async def test_redis_that_hangs_is_waited_for_once(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(history_sync, "REST_SECONDS", (0.01, 0.05))
    one = exchange(own_redis.url)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(one.run())
        while one.is_resting:  # noqa: ASYNC110 (nobody else can tell)
            await asyncio.sleep(0.005)
        with own_redis.silent(history_sync, 0.05):
            one.look_seconds = 0.05
            assert await one.fetch("us", [key(1), key(2)]) == [None, None]
            for _ in range(100):
                assert await one.fetch("us", [key(1)]) == [None]
            looks = one.num_looks
            assert (looks[Fetch.LATE], looks[Fetch.RESTING]) == (1, 100)
            one.send(telling(1))
            while not any("cannot tell" in each.message for each in caplog.records):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        one.look_seconds = 5.0
        while one.num_unsent:  # noqa: ASYNC110 (nobody else can tell)
            await asyncio.sleep(0.005)
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
            while one.num_sent["failed"] < 3:  # noqa: ASYNC110 (nobody else can tell)
                await asyncio.sleep(0.005)
            assert await client.dbsize() == 1
            await client.delete("kvasir-history:tenants")
            one.send(telling(4))
            while one.num_sent["told"] < 1:  # noqa: ASYNC110 (nobody else can tell)
                await asyncio.sleep(0.005)
            running.cancel()
    await one.close()


async def test_what_has_just_been_answered_is_told_before_the_end(redis_url: str) -> None:
    one, other = exchange(redis_url), exchange(redis_url)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each.run()) for each in (one, other)]
        while one.is_resting or other.is_resting:  # noqa: ASYNC110 (nobody else can tell)
            await asyncio.sleep(0.005)
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
        while one.num_sent["told"] < 1:  # noqa: ASYNC110 (nobody else can tell)
            await asyncio.sleep(0.005)
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
        while one.is_resting:  # noqa: ASYNC110 (nobody else can tell)
            await asyncio.sleep(0.005)
        own_redis.pause()
        looks = [group.create_task(one.fetch("us", [key(number)])) for number in range(30)]
        while len(one._reads) < MOST_LOOKING:  # noqa: ASYNC110 (nobody else can tell)
            await asyncio.sleep(0.005)
        for look in looks:
            look.cancel()
        while one._reads:  # noqa: ASYNC110 (nobody else can tell)
            await asyncio.sleep(0.005)
        own_redis.resume()
        one.send(telling(1))
        while one.num_sent["told"] < 1:  # noqa: ASYNC110 (nobody else can tell)
            await asyncio.sleep(0.005)
        assert (await one.fetch("us", [key(1)]))[0] is not None
        running.cancel()
    await one.close()
