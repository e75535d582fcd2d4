"""The index writer against a real Redis that is slow, dies, comes back empty, or loses a key."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from replicas import index_writer
from replicas.index_writer import IndexWriter
from replicas.metrics import ReplicaMetrics
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored
from replicas.protocol.keys import Announcement, blocks_key
from replicas.protocol.status import Epoch, ReplicaId
from tests.redis_server import RedisServer
from tests.replicas.mirror import connect, live_announcements, read_changes, read_set, replay
from tests.replicas.scripted_engine import CARD

MODEL, REPLICA, EPOCH = CARD.name, ReplicaId("r0"), Epoch("e1")


def hashes(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(number.to_bytes(16, "big")) for number in numbers)


def stored(*numbers: int) -> BlockStored:
    return BlockStored(hashes(*numbers), 0)


@asynccontextmanager
async def running_writer(url: str, index_stride: int = CARD.block_size) -> AsyncIterator[IndexWriter]:
    redis = connect(url)
    redis.connection_pool.connection_kwargs["retry"] = Retry(NoBackoff(), 0)
    writer = IndexWriter(
        redis,
        CARD,
        REPLICA,
        EPOCH,
        index_stride=index_stride,
        stream_length=100_000,
        set_ttl_seconds=60,
        metrics=ReplicaMetrics(CollectorRegistry()),
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(writer.run())
        yield writer
        task.cancel()
    await redis.aclose()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.002)


async def assert_redis_holds(url: str, numbers: Sequence[int], *, with_stream: bool = True) -> None:
    redis = connect(url)
    assert await read_set(redis, MODEL, REPLICA, EPOCH) == set(hashes(*numbers))
    if with_stream:
        assert replay(await read_changes(redis, MODEL, EPOCH)) == set(hashes(*numbers))
    await redis.aclose()


async def test_a_new_replica_announces_its_empty_set(redis_url: str) -> None:
    async with running_writer(redis_url) as writer:
        await until(lambda: writer.is_settled)
        assert writer.last_change == 1
        await assert_redis_holds(redis_url, [])
        redis = connect(redis_url)
        assert 0 < await redis.ttl(blocks_key(MODEL, REPLICA, EPOCH)) <= 60
        (change,) = await read_changes(redis, MODEL, EPOCH)
        assert change.cleared
        await redis.aclose()


async def test_set_and_stream_follow_the_events(redis_url: str) -> None:
    async with running_writer(redis_url) as writer:
        writer.observe([stored(1, 2, 3)])
        await until(lambda: writer.is_settled)
        await assert_redis_holds(redis_url, [1, 2, 3])
        writer.observe([BlockRemoved(hashes(2)), stored(4)])
        await until(lambda: writer.is_settled)
        await assert_redis_holds(redis_url, [1, 3, 4])
        writer.observe([AllBlocksCleared(), stored(5)])
        await until(lambda: writer.is_settled)
        await assert_redis_holds(redis_url, [5])


async def test_what_comes_and_goes_between_two_writes_is_never_written(redis_url: str) -> None:
    async with running_writer(redis_url) as writer:
        await until(lambda: writer.is_settled)
        writer.observe([stored(1), stored(1), BlockRemoved(hashes(1))])
        writer.observe([BlockRemoved(hashes(1))])
        await until(lambda: writer.is_settled)
        assert writer.last_change == 1


async def test_events_that_come_during_a_write_become_one_next_write(redis_url: str) -> None:
    async with running_writer(redis_url) as writer:
        await until(lambda: writer.is_settled)
        for number in range(1, 501):
            writer.observe([stored(number)])
        await until(lambda: writer.is_settled)
        assert writer.last_change == 2
        await assert_redis_holds(redis_url, range(1, 501))


async def test_a_large_set_goes_through_the_stream_in_bites(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_writer, "HASHES_PER_CHANGE", 10)
    async with running_writer(redis_url) as writer:
        writer.observe([stored(*range(100))])
        await until(lambda: writer.is_settled)
        await assert_redis_holds(redis_url, range(100))
        assert writer.last_change == 10
        writer.observe([BlockRemoved(hashes(*range(50))), stored(*range(200, 230))])
        await until(lambda: writer.is_settled)
        await assert_redis_holds(redis_url, [*range(50, 100), *range(200, 230)])
        redis = connect(redis_url)
        changes = await read_changes(redis, MODEL, EPOCH)
        assert max(len(change.added) + len(change.removed) for change in changes) <= 10
        await redis.aclose()


async def test_a_redis_that_comes_back_empty_gets_everything_again(own_redis: RedisServer) -> None:
    async with running_writer(own_redis.url) as writer:
        writer.observe([stored(1, 2)])
        await until(lambda: writer.is_settled)
        own_redis.kill()
        writer.observe([stored(3), BlockRemoved(hashes(1))])
        await asyncio.sleep(0.1)
        assert not writer.is_settled
        writer.observe([stored(4)])
        await asyncio.to_thread(own_redis.start)
        await until(lambda: writer.is_settled)
        await assert_redis_holds(own_redis.url, [2, 3, 4])


async def test_an_outage_costs_no_memory_for_what_comes_and_goes(own_redis: RedisServer) -> None:
    own_redis.kill()
    async with running_writer(own_redis.url) as writer:
        for number in range(2000):
            writer.observe([stored(number)])
            if number >= 10:
                writer.observe([BlockRemoved(hashes(number - 10))])
        assert len(writer.block_hashes) == 10
        await asyncio.to_thread(own_redis.start)
        await until(lambda: writer.is_settled)
        await assert_redis_holds(own_redis.url, range(1990, 2000))


async def test_a_lost_set_is_noticed_by_the_next_write(redis_url: str) -> None:
    async with running_writer(redis_url) as writer:
        writer.observe([stored(1, 2)])
        await until(lambda: writer.is_settled)
        redis = connect(redis_url)
        await redis.flushall()
        await redis.aclose()
        writer.observe([stored(3)])
        await until(lambda: writer.is_settled)
        await assert_redis_holds(redis_url, [1, 2, 3], with_stream=False)


async def test_a_replica_that_dies_while_its_set_is_lost_leaves_nothing_without_an_end(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_writer(redis_url) as writer:
        await until(lambda: writer.is_settled)
        redis = connect(redis_url)
        await redis.flushall()
        died = asyncio.Event()

        async def die() -> None:
            died.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(writer, "_write_whole_set", die)
        writer.observe([stored(3)])
        await died.wait()
        assert 0 < await redis.ttl(blocks_key(MODEL, REPLICA, EPOCH)) <= 60
        await redis.aclose()


async def test_a_heartbeat_that_counts_other_members_than_were_written_causes_a_rewrite(
    redis_url: str,
) -> None:
    async with running_writer(redis_url) as writer:
        writer.observe([stored(1, 2)])
        await until(lambda: writer.is_settled)
        number = writer.last_change
        writer.check(number, 3)  # two hashes and the marker
        assert writer.is_settled
        writer.check(number - 1, 0)  # counted before the newest write: says nothing
        assert writer.is_settled
        redis = connect(redis_url)
        await redis.srem(blocks_key(MODEL, REPLICA, EPOCH), hashes(1)[0])
        await redis.aclose()
        writer.check(number, 2)
        assert not writer.is_settled
        await until(lambda: writer.is_settled)
        await assert_redis_holds(redis_url, [1, 2])


async def test_a_set_that_cannot_be_written_is_tried_until_it_can(redis_url: str) -> None:
    redis = connect(redis_url)
    await redis.set(f"kvasir:v1:{{{MODEL}}}:events", "no stream")
    async with running_writer(redis_url) as writer:
        writer.observe([stored(1)])
        await asyncio.sleep(0.2)
        assert not writer.is_settled
        await redis.delete(f"kvasir:v1:{{{MODEL}}}:events")
        await until(lambda: writer.is_settled)
        await assert_redis_holds(redis_url, [1])
    await redis.aclose()


async def test_only_hashes_on_the_stride_and_ends_of_prompts_are_written(redis_url: str) -> None:
    async with running_writer(redis_url, index_stride=2 * CARD.block_size) as writer:
        writer.observe([BlockStored(hashes(0, 1, 2, 3, 4), 0, ends_prompt=True)])
        assert writer.block_hashes == set(hashes(1, 3, 4))
        await until(lambda: writer.is_settled)
        await assert_redis_holds(redis_url, [1, 3, 4])


async def test_a_replica_that_leaves_takes_its_set_along(redis_url: str) -> None:
    async with running_writer(redis_url) as writer:
        writer.observe([stored(1)])
        await until(lambda: writer.is_settled)
        await writer.remove()
        redis = connect(redis_url)
        assert await read_set(redis, MODEL, REPLICA, EPOCH) is None
        await redis.aclose()


async def announced_in(url: str) -> dict[int, tuple[BlockHash, ...]]:
    redis = connect(url)
    changes = await read_changes(redis, MODEL, EPOCH)
    await redis.aclose()
    return live_announcements(changes)


async def num_writes(redis: Any) -> int:
    stats = await redis.info("commandstats")
    return sum(
        int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in ("multi", "sadd", "srem", "xadd")
    )


async def test_an_announcement_alone_is_one_entry_in_the_stream_and_so_is_its_end(redis_url: str) -> None:
    redis = connect(redis_url)
    async with running_writer(redis_url) as writer:
        await until(lambda: writer.is_settled)
        before = await num_writes(redis)
        assert writer.announce(7, hashes(1, 2))
        assert writer.num_announcements == 1
        await until(lambda: writer.is_settled)
        assert await announced_in(redis_url) == {7: hashes(1, 2)}
        await assert_redis_holds(redis_url, [])
        writer.end(7)
        await until(lambda: writer.is_settled)
        assert await announced_in(redis_url) == {}
        assert (writer.last_change, writer.num_announcements) == (3, 0)
        assert await num_writes(redis) == before + 2
    await redis.aclose()


async def test_the_end_comes_with_what_was_observed_before_it(redis_url: str) -> None:
    async with running_writer(redis_url) as writer:
        await until(lambda: writer.is_settled)
        writer.announce(7, hashes(1, 2))
        await until(lambda: writer.is_settled)
        writer.observe([stored(1, 2)])
        writer.end(7)
        writer.announce(8, hashes(3))
        await until(lambda: writer.is_settled)
        redis = connect(redis_url)
        last = (await read_changes(redis, MODEL, EPOCH))[-1]
        await redis.aclose()
        assert (set(last.added), last.ended, last.announced) == (
            set(hashes(1, 2)),
            (7,),
            (Announcement(8, hashes(3)),),
        )


async def test_an_announcement_that_ends_before_it_is_written_never_is(redis_url: str) -> None:
    async with running_writer(redis_url) as writer:
        await until(lambda: writer.is_settled)
        writer.announce(7, hashes(1, 2))
        writer.end(7)
        assert writer.is_settled
        assert writer.announce(7, hashes(1, 2))
        assert not writer.announce(7, hashes(3))
        await until(lambda: writer.is_settled)
        assert writer.last_change == 2


async def test_after_a_rewrite_what_lives_is_announced_again_and_nothing_else(redis_url: str) -> None:
    async with running_writer(redis_url) as writer:
        for number in range(5):
            writer.announce(number, hashes(number))
        await until(lambda: writer.is_settled)
        writer.end(1)
        writer.rewrite()
        writer.end(2)
        writer.announce(9, hashes(9))
        await until(lambda: writer.is_settled)
        redis = connect(redis_url)
        last = (await read_changes(redis, MODEL, EPOCH))[-1]
        await redis.aclose()
        assert last.cleared
        assert last.ended == ()
        assert {announcement.announcement_id for announcement in last.announced} == {0, 3, 4, 9}


async def test_an_outage_leaves_no_announcement_and_costs_no_memory(own_redis: RedisServer) -> None:
    async with running_writer(own_redis.url) as writer:
        for number in range(10):
            writer.announce(number, hashes(number))
        await until(lambda: writer.is_settled)
        own_redis.kill()
        for number in range(10):
            writer.end(number)
        for number in range(10, 3000):
            writer.announce(number, hashes(number))
            if number < 2998:
                writer.end(number)
            if number % 300 == 0:
                await asyncio.sleep(0.01)
        assert len(writer._announcements._ended) <= 10
        await asyncio.to_thread(own_redis.start)
        await until(lambda: writer.is_settled)
        assert set(await announced_in(own_redis.url)) == {2998, 2999}


async def test_many_announcements_go_through_the_stream_in_bites(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_writer, "HASHES_PER_CHANGE", 10)
    async with running_writer(redis_url) as writer:
        await until(lambda: writer.is_settled)
        sizes = {1: 4, 2: 6, 3: 25, 4: 1, 5: 10, 6: 9}
        for announcement_id, size in sizes.items():
            writer.announce(
                announcement_id, hashes(*range(100 * announcement_id, 100 * announcement_id + size))
            )
        writer.observe([stored(*range(12))])
        await until(lambda: writer.is_settled)
        redis = connect(redis_url)
        changes = await read_changes(redis, MODEL, EPOCH)
        await redis.aclose()
        bites = [[it.announcement_id for it in change.announced] for change in changes if change.announced]
        assert bites == [[1, 2], [3], [4], [5], [6]]
        live = live_announcements(changes)
        assert {announcement_id: len(found) for announcement_id, found in live.items()} == sizes
        for announcement_id in sizes:
            writer.end(announcement_id)
        writer.observe([BlockRemoved(hashes(*range(12)))])
        await until(lambda: writer.is_settled)
        assert await announced_in(redis_url) == {}
        await assert_redis_holds(redis_url, [])


@pytest.mark.timeout(60)
async def test_a_reader_of_the_stream_always_knows_what_is_announced(redis_url: str) -> None:
    rng = random.Random(3)
    live: dict[int, tuple[BlockHash, ...]] = {}
    async with running_writer(redis_url) as writer:
        for step in range(1, 1500):
            if rng.random() < 0.5:
                live[step] = hashes(*rng.sample(range(100), rng.randrange(1, 5)))
                writer.announce(step, live[step])
            elif live:
                announcement_id = rng.choice(sorted(live))
                if rng.random() < 0.7:
                    writer.observe([BlockStored(live[announcement_id], 0)])
                writer.end(announcement_id)
                del live[announcement_id]
            if rng.random() < 0.01:
                writer.rewrite()
            if rng.random() < 0.2:
                await asyncio.sleep(0)
            if rng.random() < 0.02:
                await until(lambda: writer.is_settled)
                assert await announced_in(redis_url) == live
        for announcement_id in live:
            writer.end(announcement_id)
        await until(lambda: writer.is_settled)
        assert await announced_in(redis_url) == {}
        redis = connect(redis_url)
        assert replay(await read_changes(redis, MODEL, EPOCH)) == writer.block_hashes
        await redis.aclose()


@pytest.mark.timeout(60)
async def test_a_redis_that_hangs_is_given_up_and_written_to_again(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_writer, "TIMEOUT_SECONDS", 0.1)
    async with running_writer(own_redis.url) as writer:
        writer.announce(7, hashes(7))
        await until(lambda: writer.is_settled)
        own_redis.pause()
        writer.observe([stored(1)])
        writer.end(7)
        await until(lambda: writer._must_rewrite)
        own_redis.resume()
        await until(lambda: writer.is_settled)
        redis = connect(own_redis.url)
        assert await read_set(redis, MODEL, REPLICA, EPOCH) == set(hashes(1))
        assert await announced_in(own_redis.url) == {}
        await redis.aclose()


@pytest.mark.timeout(60)
async def test_a_writer_ends_whenever_it_is_cancelled(redis_url: str) -> None:
    for num_turns in range(120):
        redis = connect(redis_url)
        metrics = ReplicaMetrics(CollectorRegistry())
        writer = IndexWriter(
            redis,
            CARD,
            REPLICA,
            EPOCH,
            index_stride=CARD.block_size,
            stream_length=1000,
            set_ttl_seconds=60,
            metrics=metrics,
        )
        task = asyncio.create_task(writer.run())
        for turn in range(num_turns):
            writer.announce(turn, hashes(turn))
            await asyncio.sleep(0)
        task.cancel()
        _, still_running = await asyncio.wait([task], timeout=5)
        assert not still_running
        assert task.cancelled()
        await redis.aclose()
