"""The mirror against a real Redis: it equals the sets in the end, also when Redis is away, empty or hangs."""

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from redis.exceptions import RedisError, ResponseError

from replicas.process.plain_redis import plain_redis
from replicas.protocol.blocks import BlockHash
from replicas.protocol.keys import events_key
from router.fleet import index_mirror
from router.fleet.index_mirror import ENTRIES_PER_READ, SECONDS_BETWEEN_READS, IndexMirror, StreamId
from router.fleet.stream_reader import StreamReader
from router.routing.overlap import PrefixIndex
from tests.redis_server import RedisServer
from tests.router.index_set_writer import IndexSetWriter
from tests.router.mirrored_index import MODEL, announce, block, blocks, level, mirroring
from tests.router.scripted_replica import eventually


async def test_changes_reach_the_mirror_by_the_stream_and_not_by_reading_sets_again(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    a = writer("a")
    async with mirroring(redis_url, a) as (mirror, index):
        await eventually(lambda: mirror.num_resyncs == 1)
        for number in range(200):
            a.change(added=blocks(number))
        await level(index, a)
        assert mirror.num_changes == 200
        assert mirror.num_resyncs == 1


async def test_a_replica_that_is_gone_is_forgotten(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    a, b = writer("a"), writer("b")
    async with mirroring(redis_url, a, b) as (mirror, index):
        a.change(added=blocks(1))
        b.change(added=blocks(1))
        await eventually(lambda: index.overlaps(blocks(1)) == {"a": 1, "b": 1})
        announce(mirror, b)
        assert index.overlaps(blocks(1)) == {"b": 1}
        a.change(added=blocks(2))  # its last words
        b.change(added=blocks(3))
        await level(index, b)
        assert not index.stored(a.replica_id)


async def test_nothing_of_an_earlier_incarnation_is_believed(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    a = writer("a")
    async with mirroring(redis_url, a) as (mirror, index):
        for number in range(20):
            a.change(added=blocks(number))
        await level(index, a)
        a.restart("e2")
        a.change(added=blocks(77))
        announce(mirror, a)
        assert not index.stored(a.replica_id)
        await eventually(lambda: index.stored(a.replica_id) == set(blocks(77)))
        a.change(added=blocks(78), removed=blocks(77))
        await eventually(lambda: index.stored(a.replica_id) == set(blocks(78)))


async def test_a_change_that_is_missing_from_the_stream_has_the_set_read_again(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    a = writer("a")
    async with mirroring(redis_url, a, audit_seconds=3600) as (mirror, index):
        a.change(added=blocks(1))
        await level(index, a)
        before = mirror.num_resyncs
        a.change(added=blocks(2), removed=blocks(1), num_heard=0)
        a.change(added=blocks(3))
        await eventually(lambda: index.stored(a.replica_id) == set(blocks(2, 3)))
        assert mirror.num_resyncs > before
        a.change(added=blocks(4))
        await level(index, a)


async def test_a_missed_end_of_the_stream_is_found_by_its_number_even_at_equal_size(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    a = writer("a")
    async with mirroring(redis_url, a) as (mirror, index):
        a.change(added=blocks(1))
        await level(index, a)
        a.change(added=blocks(2), removed=blocks(1), num_heard=0)
        announce(mirror, a)
        await eventually(lambda: index.stored(a.replica_id) == set(blocks(2)))


async def test_a_set_of_another_size_is_read_again_though_no_number_says_so(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    a = writer("a")
    async with mirroring(redis_url, a) as (_, index):
        a.change(added=blocks(1))
        await level(index, a)
        a.client.sadd(a.key, block(5))
        await eventually(lambda: index.stored(a.replica_id) == set(blocks(1, 5)))


async def test_a_stream_trimmed_ahead_of_the_mirror_loses_nothing(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    a = writer("a")
    async with mirroring(redis_url, a) as (mirror, index):
        await eventually(lambda: mirror.is_connected)
        for number in range(3000):  # the event loop gets no turn: the mirror sees only what is left
            a.change(
                added=blocks(number), removed=blocks(number - 40) if number >= 40 else (), stream_length=5
            )
        await level(index, a)
        assert len(index.stored(a.replica_id)) == 40


async def test_a_lost_set_leaves_the_mirror_as_it_is_until_it_is_written_again(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    a = writer("a")
    async with mirroring(redis_url, a) as (mirror, index):
        a.change(added=blocks(1, 2))
        await level(index, a)
        before = mirror.num_resyncs
        a.client.delete(a.key)
        await eventually(lambda: mirror.num_resyncs >= before + 2)
        assert index.stored(a.replica_id) == set(blocks(1, 2))
        a.write_again(set(blocks(1, 2, 3)))
        await level(index, a)
        assert index.overlaps(blocks(1, 2, 3)) == {"a": 3}


async def test_unreadable_entries_are_counted_and_skipped(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    a = writer("a")
    async with mirroring(redis_url, a) as (mirror, index):
        await eventually(lambda: mirror.is_connected)
        a.client.xadd(events_key(MODEL), {"what": "ever"})
        a.client.xadd(
            events_key(MODEL), {"replica": "a", "epoch": "e1", "number": "x", "added": b"", "removed": b""}
        )
        a.change(added=blocks(1))
        await level(index, a)
        assert mirror.num_malformed == 2


async def test_another_models_changes_are_not_seen(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    a = writer("a")
    foreign = IndexSetWriter(redis_url, "other", "a")
    async with mirroring(redis_url, a) as (_, index):
        foreign.change(added=blocks(1))
        a.change(added=blocks(2))
        await level(index, a)
        assert index.stored(a.replica_id) == set(blocks(2))
    foreign.close()


async def test_announcements_follow_and_end(redis_url: str, writer: Callable[[str], IndexSetWriter]) -> None:
    a, b = writer("a"), writer("b")
    async with mirroring(redis_url, a, b) as (mirror, index):
        await eventually(lambda: mirror.num_resyncs == 2)
        a.change(announced={7: blocks(1, 2)})
        b.change(announced={8: blocks(1)})
        await eventually(lambda: index.overlaps(blocks(1, 2)) == {"a": 2, "b": 1})
        assert mirror.num_predictions == 2
        b.change(ended=(8,))
        a.change(added=blocks(1, 2), ended=(7,))
        await level(index, a, b)
        assert index.overlaps(blocks(1, 2)) == {"a": 2}
        assert mirror.num_predictions == 0
        assert mirror.num_resyncs == 2


def test_stream_ids_compare_as_numbers() -> None:
    assert StreamId.parse(b"9-10") < StreamId.parse(b"10-2") < StreamId.parse(b"10-11")
    assert str(StreamId.parse(b"12-3")) == "12-3"


@pytest.mark.timeout(60)
async def test_a_redis_that_comes_back_empty_costs_nothing_but_time(own_redis: RedisServer) -> None:
    a = IndexSetWriter(own_redis.url, MODEL, "a")
    async with mirroring(own_redis.url, a) as (mirror, index):
        a.change(added=blocks(1, 2))
        await level(index, a)
        own_redis.kill()
        await eventually(lambda: not mirror.is_connected)
        assert index.overlaps(blocks(1, 2)) == {"a": 2}
        own_redis.start()
        await eventually(lambda: mirror.is_connected)
        assert index.overlaps(blocks(1, 2)) == {"a": 2}
        a.client.connection_pool.disconnect()
        a.write_again(set(blocks(1, 2, 3)))
        await level(index, a)
        a.change(added=blocks(4), removed=blocks(1))
        await level(index, a)
        assert index.stored(a.replica_id) == set(blocks(2, 3, 4))
    a.close()


async def test_a_flushed_redis_is_noticed_though_the_connection_held(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    a = writer("a")
    async with mirroring(redis_url, a) as (mirror, index):
        a.change(added=blocks(1, 2))
        await level(index, a)
        a.client.flushall()
        # an id far below the old ones, as after a restart on a machine whose clock is behind
        a.client.xadd(events_key(MODEL), {"what": "ever"}, id="1-1")
        a.client.sadd(a.key, b"\x00", *blocks(7, 8))
        await eventually(lambda: index.stored(a.replica_id) == set(blocks(7, 8)))
        before = mirror.num_changes
        a.number = index.last_change(a.replica_id)
        a.number += 1
        a.client.sadd(a.key, block(9))
        a.client.xadd(
            events_key(MODEL),
            {
                "replica": "a",
                "epoch": "e1",
                "number": a.number,
                "added": block(9),
                "removed": b"",
                "cleared": "0",
            },
            id="1-2",
        )
        await eventually(lambda: mirror.num_changes == before + 1)
        await level(index, a)


@pytest.mark.timeout(60)
async def test_a_redis_that_is_absent_at_the_start_is_found_when_it_comes(own_redis: RedisServer) -> None:
    a = IndexSetWriter(own_redis.url, MODEL, "a")
    record = a.record()
    own_redis.kill()
    a.close()
    index = PrefixIndex(16, 16)
    mirror = IndexMirror(own_redis.url, MODEL, index)
    mirror.set_live({record.replica_id: record})
    task = asyncio.create_task(mirror.run())
    await asyncio.sleep(0.2)
    assert not mirror.is_connected
    own_redis.start()
    a = IndexSetWriter(own_redis.url, MODEL, "a")
    a.change(added=blocks(1))
    await level(index, a)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    a.close()


@pytest.mark.timeout(60)
async def test_without_redis_nothing_stays_announced_but_what_we_predict_does(own_redis: RedisServer) -> None:
    a = IndexSetWriter(own_redis.url, MODEL, "a")
    async with mirroring(own_redis.url, a) as (mirror, index):
        await eventually(lambda: mirror.num_resyncs == 1)
        index.predict(8, a.replica_id, blocks(3, 4))
        a.change(announced={7: blocks(1, 2), 8: blocks(3, 4)})
        await eventually(lambda: index.num_predictions == 2)
        own_redis.kill()
        await eventually(lambda: index.overlaps(blocks(1, 2)) == {})
        assert index.overlaps(blocks(3, 4)) == {"a": 2}
        index.end_prediction(8)
        assert index.num_predictions == 0
    a.close()


class ChurningReplica:
    """A replica that stores, evicts, announces, and dies and comes back, and is heard badly."""

    def __init__(self, writer: IndexSetWriter, rng: random.Random) -> None:
        self.writer = writer
        self.held: set[BlockHash] = set()
        self._rng = rng

    def step(self, number: int) -> None:
        rng, live = self._rng, self.writer.live
        if rng.random() < 0.003:
            self.writer.restart(f"e-{number}")
            self.held.clear()
            return
        added = {block(rng.randrange(300)) for _ in range(rng.randrange(4))}
        removed = set(rng.sample(sorted(self.held), min(len(self.held), rng.randrange(4)))) - added
        ended = tuple(rng.sample(sorted(live), min(len(live), rng.randrange(3))))
        announced = {}
        if rng.random() < 0.4:
            announced[number] = tuple(block(rng.randrange(300)) for _ in range(rng.randrange(1, 4)))
        cleared = rng.random() < 0.005
        self.writer.change(
            added=tuple(added),
            removed=tuple(removed),
            cleared=cleared,
            announced=announced,
            ended=ended,
            num_heard=rng.choices([1, 2, 0, None], [0.96, 0.02, 0.01, 0.01])[0],
        )
        self.held = (set() if cleared else self.held - removed) | added
        if rng.random() < 0.02:
            self.writer.catch_up()

    def end_announcements(self) -> None:
        self.writer.change(ended=tuple(self.writer.live), num_heard=self._rng.randrange(2))


@pytest.mark.timeout(90)
@pytest.mark.parametrize("seed", range(3))
async def test_under_churn_of_every_kind_mirror_and_sets_end_up_equal(
    redis_url: str, writer: Callable[[str], IndexSetWriter], seed: int
) -> None:
    rng = random.Random(seed)
    replicas = [ChurningReplica(writer(f"r{number}"), rng) for number in range(4)]
    writers = [replica.writer for replica in replicas]
    async with mirroring(redis_url, *writers) as (mirror, index):
        for step in range(1500):
            rng.choice(replicas).step(step)
            if rng.random() < 0.1:
                await asyncio.sleep(rng.random() * 0.005)
            if rng.random() < 0.02:
                announce(mirror, *writers)
            if rng.random() < 0.003:
                announce(mirror, *rng.sample(writers, 3))
        for each in writers:
            each.catch_up()
        announce(mirror, *writers)
        await level(index, *writers)
        live = {announcement_id for each in writers for announcement_id in each.live}
        await eventually(lambda: index._predictions.keys() <= live)
        for replica in replicas:
            replica.end_announcements()
        announce(mirror, *writers)
        await eventually(lambda: index.num_predictions == 0)
        await level(index, *writers)
    for replica in replicas:
        assert replica.writer.members() == replica.held


@pytest.mark.timeout(60)
async def test_a_redis_that_hangs_is_noticed_and_followed_again(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_mirror, "TIMEOUT_SECONDS", 0.3)
    a = IndexSetWriter(own_redis.url, MODEL, "a")
    async with mirroring(own_redis.url, a) as (mirror, index):
        a.change(added=blocks(1), announced={7: blocks(2)})
        await level(index, a)
        own_redis.pause()
        await eventually(lambda: not mirror.is_connected)
        assert index.overlaps(blocks(1, 2)) == {"a": 1}
        own_redis.resume()
        await eventually(lambda: mirror.is_connected)
        a.change(added=blocks(2), ended=(7,))
        await level(index, a)
    a.close()


@pytest.mark.timeout(60)
async def test_a_mirror_ends_whenever_it_is_cancelled(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    a = writer("a")
    a.change(added=blocks(1, 2, 3))
    for num_turns in range(120):
        mirror = IndexMirror(redis_url, MODEL, PrefixIndex(16, 16))
        announce(mirror, a)
        task = asyncio.create_task(mirror.run())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        _, still_running = await asyncio.wait([task], timeout=30)
        assert not still_running
        assert task.cancelled()


class Dice(random.Random):
    """Says how often it was asked for a moment, and that it is now."""

    num_asked = 0

    def uniform(self, a: float, b: float) -> float:
        assert (a, b) == (0, index_mirror.RESCAN_SPREAD_SECONDS)
        self.num_asked += 1
        return 0.0


@pytest.mark.timeout(60)
async def test_sets_are_read_at_once_at_the_start_and_at_a_moment_of_its_own_when_redis_is_back(
    own_redis: RedisServer,
) -> None:
    a = IndexSetWriter(own_redis.url, MODEL, "a")
    a.change(added=blocks(1))
    index, dice = PrefixIndex(16, 16), Dice()
    mirror = IndexMirror(own_redis.url, MODEL, index, rng=dice)
    record = a.record()
    mirror.set_live({record.replica_id: record})
    task = asyncio.create_task(mirror.run())
    await level(index, a)
    assert dice.num_asked == 0
    a.close()
    own_redis.kill()
    await eventually(lambda: not mirror.is_connected)
    own_redis.start()
    await eventually(lambda: mirror.is_connected)
    assert dice.num_asked >= 1
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


KEY = "stream-reader-test"


async def test_it_reads_what_the_client_reads(redis_url: str) -> None:
    async with plain_redis(redis_url) as client, StreamReader(client, KEY) as reader:
        assert list(await reader.read("0-0", count=10, block_seconds=0.01)) == []
        first = await client.xadd(KEY, {b"one": b"\x00\xff", b"two": b""})
        for number in range(3):
            await client.xadd(KEY, {b"number": str(number)})
        for after, count in (("0-0", 10), ("0-0", 2), (first.decode(), 10)):
            ((_, wanted),) = await client.xread({KEY: after}, count=count)
            assert list(await reader.read(after, count=count, block_seconds=0.01)) == wanted
            assert len(wanted) in (2, 3, 4)


async def test_a_key_that_holds_no_stream_is_said(redis_url: str) -> None:
    async with plain_redis(redis_url) as client, StreamReader(client, KEY) as reader:
        await client.set(KEY, b"text")
        with pytest.raises(ResponseError):
            await reader.read("0-0", count=1, block_seconds=0.01)


async def test_it_never_connects_again(redis_url: str) -> None:
    """Who follows a stream must notice that it was away."""
    async with plain_redis(redis_url) as client:
        async with StreamReader(client, KEY) as reader:
            await reader.read("0-0", count=1, block_seconds=0.01)
            await client.client_kill_filter(_type="normal", skipme=True)
            for _ in range(2):
                with pytest.raises((RedisError, OSError)):
                    await reader.read("0-0", count=1, block_seconds=0.01)
        with pytest.raises(RedisError):
            await reader.read("0-0", count=1, block_seconds=0.01)


async def test_a_mirror_reads_no_more_often_than_it_may(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    """However many changes come one by one."""
    a = writer("a")
    async with plain_redis(redis_url) as client, mirroring(redis_url, a) as (mirror, index):
        await eventually(lambda: mirror.num_resyncs == 1)
        await client.config_resetstat()
        started = time.monotonic()
        for number in range(300):
            a.change(added=blocks(number))
            await asyncio.sleep(0)
        await level(index, a)
        calls = (await client.info("commandstats"))["cmdstat_xread"]["calls"]
        most = (time.monotonic() - started) / SECONDS_BETWEEN_READS
        assert calls <= 1.1 * most + 2
        assert mirror.num_changes == 300


async def test_a_mirror_reads_on_at_once_while_there_is_more(
    redis_url: str, writer: Callable[[str], IndexSetWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a fleet that changes faster would leave it behind for good."""
    a = writer("a")
    monkeypatch.setattr(index_mirror, "SECONDS_BETWEEN_READS", 3.0)
    async with mirroring(redis_url, a) as (mirror, _):
        await eventually(lambda: mirror.num_resyncs == 1)
        for number in range(16 * ENTRIES_PER_READ):
            a.change(added=blocks(number))
        await eventually(lambda: mirror.num_changes == 16 * ENTRIES_PER_READ)
