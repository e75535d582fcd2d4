"""The index writer against a real Redis that is slow, dies, comes back empty, or loses a key."""

import asyncio
import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prometheus_client import CollectorRegistry

from replicas.index import index_writer
from replicas.index.announcements import Announcements
from replicas.index.index_writer import IndexWriter
from replicas.observation.metrics import ReplicaMetrics
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Removal,
    ResumePointsChanged,
    Tier,
)
from replicas.protocol.keys import Announcement, blocks_key, events_key
from tests.examples import examples
from tests.redis_server import RedisServer
from tests.replicas.mirror import (
    connect,
    live_announcements,
    read_changes,
    read_points,
    read_set,
    read_tiers,
    replay,
    replay_points,
)
from tests.replicas.scripted_engine import CARD
from tests.replicas.waiting import until
from tests.replicas.written_index import (
    EPOCH,
    MODEL,
    REPLICA,
    announced_in,
    assert_redis_holds,
    hashes,
    running_writer,
    stored,
)


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


async def test_set_and_stream_say_where_the_fastest_copy_lies(redis_url: str) -> None:
    async with running_writer(redis_url) as writer:
        redis = connect(redis_url)
        writer.observe([stored(1, 2, 3), stored(2, tier=Tier.HOST), stored(3, 4, tier=Tier.DISK)])
        await until(lambda: writer.is_settled)
        one, two, three, four = hashes(1, 2, 3, 4)
        device, host, disk = Tier
        assert await read_tiers(redis, MODEL, REPLICA, EPOCH) == {
            one: device, two: device, three: device, four: disk
        }  # fmt: skip
        writer.observe([BlockRemoved((one, two, three)), stored(4, tier=Tier.HOST)])
        await until(lambda: writer.is_settled)
        assert await read_tiers(redis, MODEL, REPLICA, EPOCH) == {two: host, three: disk, four: host}
        last = (await read_changes(redis, MODEL, EPOCH))[-1]
        assert (last.removed, set(last.in_host), last.on_disk) == ((one,), {two, four}, (three,))
        writer.rewrite()
        await until(lambda: writer.is_settled)
        assert await read_tiers(redis, MODEL, REPLICA, EPOCH) == {two: host, three: disk, four: host}
        last = (await read_changes(redis, MODEL, EPOCH))[-1]
        assert last.cleared and (set(last.in_host), last.on_disk, last.added) == ({two, four}, (three,), ())
        await redis.aclose()


async def test_resume_points_are_kept_beside_the_blocks_of_equal_hashes(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_writer, "HASHES_PER_CHANGE", 2)
    redis = connect(redis_url)

    async def assert_points(*numbers: int) -> None:
        await until(lambda: writer.is_settled)
        assert await read_points(redis, MODEL, REPLICA, EPOCH) == set(hashes(*numbers))
        assert replay_points(await read_changes(redis, MODEL, EPOCH)) == set(hashes(*numbers))
        members = await redis.scard(blocks_key(MODEL, REPLICA, EPOCH))
        writer.check(writer.last_change, members)
        assert writer.is_settled

    async with running_writer(redis_url) as writer:
        writer.observe([stored(1, 2, 3), ResumePointsChanged(hashes(2, 3, 7, 8, 9))])
        await assert_points(2, 3, 7, 8, 9)
        writer.observe([BlockRemoved(hashes(2)), ResumePointsChanged(hashes(1), hashes(3, 7, 8))])
        await assert_points(1, 2, 9)
        await assert_redis_holds(redis_url, [1, 3])
        writer.rewrite()
        await assert_points(1, 2, 9)
        writer.observe([AllBlocksCleared(), ResumePointsChanged(hashes(5))])
        await assert_points(5)
        await assert_redis_holds(redis_url, [])
    await redis.aclose()


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


async def test_reasons_go_through_the_stream_beside_their_hashes(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_writer, "HASHES_PER_CHANGE", 10)
    async with running_writer(redis_url) as writer:
        writer.observe([stored(*range(100))])
        await until(lambda: writer.is_settled)
        lost = hashes(*range(3, 25))
        writer.observe(
            [BlockRemoved(lost, reason=Removal.LOST), BlockRemoved(hashes(*range(3)), reason=Removal.BROKEN)]
        )
        await until(lambda: writer.is_settled)
        redis = connect(redis_url)
        told = {
            each: reason
            for change in await read_changes(redis, MODEL, EPOCH)
            for reason, some in change.removed_by_reason()
            for each in some
        }
        await redis.aclose()
    expected = dict.fromkeys(lost, Removal.LOST) | dict.fromkeys(hashes(*range(3)), Removal.BROKEN)
    assert told == expected


async def test_points_of_a_cleared_cache_go_through_the_stream_as_cleared(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_writer, "HASHES_PER_CHANGE", 10)
    points = hashes(*range(25))
    async with running_writer(redis_url) as writer:
        writer.observe([ResumePointsChanged(points)])
        await until(lambda: writer.is_settled)
        writer.observe([ResumePointsChanged((), points[:3]), AllBlocksCleared()])
        await until(lambda: writer.is_settled)
        redis = connect(redis_url)
        changes = await read_changes(redis, MODEL, EPOCH)
        await redis.aclose()
    told = {
        each: reason
        for change in changes
        for reason, some in change.points_removed_by_reason()
        for each in some
    }
    assert told == dict.fromkeys(points[:3], Removal.EVICTED) | dict.fromkeys(points[3:], Removal.CLEARED)


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


@pytest.mark.parametrize("what", ["a text", "a stream that takes no more"])
async def test_what_takes_no_changes_under_the_streams_name_is_taken_away(redis_url: str, what: str) -> None:
    redis = connect(redis_url)
    if what == "a text":
        await redis.set(events_key(MODEL), "no stream")
    else:
        await redis.xadd(events_key(MODEL), {"last": "one"}, id=f"{2**64 - 1}-{2**64 - 1}")
    async with running_writer(redis_url) as writer:
        writer.observe([stored(1)])
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


@pytest.mark.timeout(60)
async def test_a_redis_that_hangs_is_given_up_and_written_to_again(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_writer, "TIMEOUT_SECONDS", 0.5)
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
            rng=random.Random(0),
        )
        task = asyncio.create_task(writer.run())
        for turn in range(num_turns):
            writer.announce(turn, hashes(turn))
            await asyncio.sleep(0)
        task.cancel()
        _, still_running = await asyncio.wait([task], timeout=30)
        assert not still_running
        assert task.cancelled()
        await redis.aclose()


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
        writer.announce(8, hashes(3), hashes(4))
        await until(lambda: writer.is_settled)
        redis = connect(redis_url)
        last = (await read_changes(redis, MODEL, EPOCH))[-1]
        await redis.aclose()
        assert (set(last.added), last.ended, last.announced) == (
            set(hashes(1, 2)),
            (7,),
            (Announcement(8, hashes(3), hashes(4)),),
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


class Reader(RuleBasedStateMachine):
    """Hears every write, or is told everything anew; and always knows exactly what lived then."""

    def __init__(self) -> None:
        super().__init__()
        self.announcements = Announcements()
        self.live: dict[int, tuple[BlockHash, ...]] = {}
        self.heard: dict[int, tuple[BlockHash, ...]] = {}
        self.num_begun = 0

    @rule(number=st.integers(0, 5))
    def begin(self, number: int) -> None:
        self.num_begun += 1
        assert self.announcements.begin(self.num_begun, hashes(number))
        self.live[self.num_begun] = hashes(number)

    @rule(announcement_id=st.integers(1001, 1003))
    def begin_with_an_id_that_was_there_before(self, announcement_id: int) -> None:
        is_free = announcement_id not in self.live and announcement_id not in self.heard
        assert self.announcements.begin(announcement_id, hashes(9)) == is_free
        if is_free:
            self.live[announcement_id] = hashes(9)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        announcement_id = data.draw(st.sampled_from(sorted(self.live)))
        self.announcements.end(announcement_id)
        del self.live[announcement_id]

    @rule()
    def hear(self) -> None:
        announced, ended = self.announcements.take_change()
        for announcement in announced:
            assert announcement.announcement_id not in self.heard
            self.heard[announcement.announcement_id] = announcement.block_hashes
        for announcement_id in ended:
            del self.heard[announcement_id]  # one that was never begun is never ended
        assert self.heard == self.live
        assert not self.announcements.has_change

    @rule()
    def hear_all(self) -> None:
        self.heard = {it.announcement_id: it.block_hashes for it in self.announcements.take_all()}
        assert self.heard == self.live

    @invariant()
    def memory_is_bounded_by_what_lives_and_what_was_heard(self) -> None:
        assert len(self.announcements) == len(self.live)
        assert len(self.announcements._begun) + len(self.announcements._ended) <= len(self.live) + len(
            self.heard
        )


TestReader = Reader.TestCase
TestReader.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
