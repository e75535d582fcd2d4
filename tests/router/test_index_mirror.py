"""The mirror against a real Redis: whatever happens to sets and stream, it equals SMEMBERS in the end."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
import redis

from replicas.protocol.blocks import BlockHash
from replicas.protocol.keys import events_key
from router import index_mirror
from router.index_mirror import IndexMirror, StreamId
from router.routing.overlap import PrefixIndex
from tests.redis_server import RedisServer
from tests.router.index_set_writer import IndexSetWriter

MODEL = "m"


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def blocks(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(block(number) for number in numbers)


@pytest.fixture
def writer(redis_url: str) -> Iterator[Callable[[str], IndexSetWriter]]:
    writers = []

    def make(replica_id: str) -> IndexSetWriter:
        writers.append(IndexSetWriter(redis_url, MODEL, replica_id))
        return writers[-1]

    yield make
    for made in writers:
        made.close()


@asynccontextmanager
async def mirroring(
    url: str, *writers: IndexSetWriter, audit_seconds: float = 0.1
) -> AsyncIterator[tuple[IndexMirror, PrefixIndex]]:
    index = PrefixIndex(16, 16)
    mirror = IndexMirror(url, MODEL, index, audit_seconds=audit_seconds)
    announce(mirror, *writers)
    task = asyncio.create_task(mirror.run())
    try:
        yield mirror, index
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def announce(mirror: IndexMirror, *writers: IndexSetWriter) -> None:
    mirror.set_live({writer.replica_id: writer.record() for writer in writers})


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.01)


async def level(index: PrefixIndex, *writers: IndexSetWriter) -> None:
    """Wait until the mirror holds what Redis holds, for each writer."""
    await eventually(lambda: all(index.stored(w.replica_id) == w.members() for w in writers))


async def test_a_set_that_was_there_first_is_read(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    a = writer("a")
    a.change(added=blocks(*range(5000)))
    async with mirroring(redis_url, a) as (_, index):
        await eventually(lambda: len(index.stored(a.replica_id)) == 5000)
        assert index.stored(a.replica_id) == a.members()


async def test_additions_removals_and_clearing_follow(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    a, b = writer("a"), writer("b")
    async with mirroring(redis_url, a, b) as (mirror, index):
        a.change(added=blocks(1, 2, 3))
        b.change(added=blocks(2))
        await eventually(lambda: index.overlaps(blocks(1, 2, 3)) == {"a": 3})
        a.change(removed=blocks(2), added=blocks(4))
        await eventually(lambda: index.stored(a.replica_id) == set(blocks(1, 3, 4)))
        a.change(cleared=True, added=blocks(9))
        await eventually(lambda: index.stored(a.replica_id) == set(blocks(9)))
        await level(index, a, b)
        assert mirror.statistics().num_entries == 2
        assert mirror.statistics().num_malformed == 0


async def test_changes_reach_the_mirror_by_the_stream_and_not_by_reading_sets_again(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    a = writer("a")
    async with mirroring(redis_url, a) as (mirror, index):
        await eventually(lambda: mirror.statistics().num_resyncs == 1)
        for number in range(200):
            a.change(added=blocks(number))
        await level(index, a)
        assert mirror.statistics().num_changes == 200
        assert mirror.statistics().num_resyncs == 1


async def test_a_replica_that_joins_later_is_read_and_followed(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    a = writer("a")
    async with mirroring(redis_url, a) as (mirror, index):
        b = writer("b")
        b.change(added=blocks(1))
        announce(mirror, a, b)
        await level(index, a, b)
        b.change(added=blocks(2))
        await eventually(lambda: index.stored(b.replica_id) == set(blocks(1, 2)))


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
        before = mirror.statistics().num_resyncs
        a.change(added=blocks(2), removed=blocks(1), num_heard=0)
        a.change(added=blocks(3))
        await eventually(lambda: index.stored(a.replica_id) == set(blocks(2, 3)))
        assert mirror.statistics().num_resyncs > before
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
        await eventually(lambda: mirror.statistics().is_connected)
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
        before = mirror.statistics().num_resyncs
        a.client.delete(a.key)
        await eventually(lambda: mirror.statistics().num_resyncs >= before + 2)
        assert index.stored(a.replica_id) == set(blocks(1, 2))
        a.write_again(set(blocks(1, 2, 3)))
        await level(index, a)
        assert index.overlaps(blocks(1, 2, 3)) == {"a": 3}


async def test_unreadable_entries_are_counted_and_skipped(
    redis_url: str, writer: Callable[[str], IndexSetWriter]
) -> None:
    a = writer("a")
    async with mirroring(redis_url, a) as (mirror, index):
        await eventually(lambda: mirror.statistics().is_connected)
        a.client.xadd(events_key(MODEL), {"what": "ever"})
        a.client.xadd(
            events_key(MODEL), {"replica": "a", "epoch": "e1", "number": "x", "added": b"", "removed": b""}
        )
        a.change(added=blocks(1))
        await level(index, a)
        assert mirror.statistics().num_malformed == 2


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


@pytest.mark.timeout(60)
async def test_a_redis_that_comes_back_empty_costs_nothing_but_time(own_redis: RedisServer) -> None:
    a = IndexSetWriter(own_redis.url, MODEL, "a")
    async with mirroring(own_redis.url, a) as (mirror, index):
        a.change(added=blocks(1, 2))
        await level(index, a)
        own_redis.kill()
        await eventually(lambda: not mirror.statistics().is_connected)
        assert index.overlaps(blocks(1, 2)) == {"a": 2}
        own_redis.start()
        await eventually(lambda: mirror.statistics().is_connected)
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
        before = mirror.statistics().num_changes
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
        await eventually(lambda: mirror.statistics().num_changes == before + 1)
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
    assert not mirror.statistics().is_connected
    own_redis.start()
    a = IndexSetWriter(own_redis.url, MODEL, "a")
    a.change(added=blocks(1))
    await level(index, a)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    a.close()


async def test_announcements_follow_and_end(redis_url: str, writer: Callable[[str], IndexSetWriter]) -> None:
    a, b = writer("a"), writer("b")
    async with mirroring(redis_url, a, b) as (mirror, index):
        await eventually(lambda: mirror.statistics().num_resyncs == 2)
        a.change(announced={7: blocks(1, 2)})
        b.change(announced={8: blocks(1)})
        await eventually(lambda: index.overlaps(blocks(1, 2)) == {"a": 2, "b": 1})
        assert mirror.statistics().num_predictions == 2
        b.change(ended=(8,))
        a.change(added=blocks(1, 2), ended=(7,))
        await level(index, a, b)
        assert index.overlaps(blocks(1, 2)) == {"a": 2}
        assert mirror.statistics().num_predictions == 0
        assert mirror.statistics().num_resyncs == 2


@pytest.mark.parametrize("how", ["missed change", "missed end", "death", "restart"])
async def test_an_announcement_whose_end_may_have_been_missed_is_forgotten(
    redis_url: str, writer: Callable[[str], IndexSetWriter], how: str
) -> None:
    a = writer("a")
    async with mirroring(redis_url, a) as (mirror, index):
        await eventually(lambda: mirror.statistics().num_resyncs == 1)
        a.change(announced={7: blocks(1, 2)})
        await eventually(lambda: index.num_predictions == 1)
        a.change(ended=(7,), num_heard=0)
        if how == "missed change":
            a.change(added=blocks(5))
        elif how == "missed end":
            announce(mirror, a)
        elif how == "death":
            announce(mirror)
        else:
            a.restart("e2")
            announce(mirror, a)
        await eventually(lambda: index.num_predictions == 0)
        assert index.overlaps(blocks(1, 2)) == {}


@pytest.mark.timeout(60)
async def test_without_redis_nothing_stays_announced_but_what_we_predict_does(own_redis: RedisServer) -> None:
    a = IndexSetWriter(own_redis.url, MODEL, "a")
    async with mirroring(own_redis.url, a) as (mirror, index):
        await eventually(lambda: mirror.statistics().num_resyncs == 1)
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
        await eventually(lambda: not mirror.statistics().is_connected)
        assert index.overlaps(blocks(1, 2)) == {"a": 1}
        own_redis.resume()
        await eventually(lambda: mirror.statistics().is_connected)
        a.change(added=blocks(2), ended=(7,))
        await level(index, a)
    a.close()


def test_stream_ids_compare_as_numbers() -> None:
    assert StreamId.parse(b"9-10") < StreamId.parse(b"10-2") < StreamId.parse(b"10-11")
    assert str(StreamId.parse(b"12-3")) == "12-3"


def test_the_fixture_redis_is_real(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        assert client.ping()


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
        _, still_running = await asyncio.wait([task], timeout=5)
        assert not still_running
        assert task.cancelled()
