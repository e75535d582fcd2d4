"""The mirror against a real Redis: whatever happens to sets and stream, it equals SMEMBERS in the end."""

from collections.abc import Callable

import pytest
import redis

from replicas.protocol.keys import events_key
from router.fleet.index_mirror import StreamId
from tests.router.index_set_writer import IndexSetWriter
from tests.router.mirrored_index import MODEL, announce, block, blocks, level, mirroring, writer
from tests.router.scripted_replica import eventually

__all__ = ["writer"]


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
        assert mirror.num_entries == 2
        assert mirror.num_malformed == 0


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


@pytest.mark.parametrize("how", ["missed change", "missed end", "death", "restart"])
async def test_an_announcement_whose_end_may_have_been_missed_is_forgotten(
    redis_url: str, writer: Callable[[str], IndexSetWriter], how: str
) -> None:
    a = writer("a")
    async with mirroring(redis_url, a) as (mirror, index):
        await eventually(lambda: mirror.num_resyncs == 1)
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


def test_stream_ids_compare_as_numbers() -> None:
    assert StreamId.parse(b"9-10") < StreamId.parse(b"10-2") < StreamId.parse(b"10-11")
    assert str(StreamId.parse(b"12-3")) == "12-3"


def test_the_fixture_redis_is_real(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        assert client.ping()
