"""Blocks that are announced before they are stored: in memory, in the stream, after an outage."""

import asyncio
import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replicas.index import index_writer
from replicas.index.announcements import Announcements
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import BlockRemoved, BlockStored
from replicas.protocol.keys import Announcement
from tests.examples import examples
from tests.redis_server import RedisServer
from tests.replicas.mirror import connect, live_announcements, read_changes, replay
from tests.replicas.waiting import until
from tests.replicas.written_index import (
    EPOCH,
    MODEL,
    announced_in,
    assert_redis_holds,
    hashes,
    running_writer,
    stored,
)


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


def test_what_began_and_ended_between_two_writes_is_never_told() -> None:
    announcements = Announcements()
    assert announcements.begin(1, hashes(1))
    announcements.end(1)
    assert not announcements.has_change
    assert announcements.take_change() == ((), ())


def test_an_id_that_lives_begins_no_second_announcement() -> None:
    announcements = Announcements()
    assert announcements.begin(1, hashes(1))
    assert not announcements.begin(1, hashes(2))
    (announced,), _ = announcements.take_change()
    assert announced.block_hashes == hashes(1)


def test_an_id_begins_anew_only_when_its_end_was_told() -> None:
    announcements = Announcements()
    announcements.begin(1, hashes(1))
    announcements.take_change()
    announcements.end(1)
    assert not announcements.begin(1, hashes(2))  # readers would take the end for that of the second
    assert announcements.take_change() == ((), (1,))
    assert announcements.begin(1, hashes(2))


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
