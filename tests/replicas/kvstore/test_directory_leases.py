"""What the directory does for leases: what it keeps, what goes first, what is written at once, in one day."""

from unittest.mock import patch

import pytest

from replicas.kvstore.directory import ChunkPlace, Directory
from replicas.kvstore.leasing.leases import LeaseRecord, Leases
from replicas.kvstore.write_budget import WriteBudget
from replicas.protocol.events import BlockRemoved
from replicas.protocol.prefix_leases import HOUR_SECONDS, MAX_LEASE_SECONDS, LeaseBreak, LeaseRefusal
from tests.replicas.kvstore.chunk_names import chain, key, name
from tests.replicas.kvstore.test_directory import put, write_all

DAY = MAX_LEASE_SECONDS


def leasing(host: int, disk: int = 0, *, share: float = 0.5, budget: WriteBudget | None = None) -> Directory:
    leases = Leases(host_chunks=int(host * share), disk_chunks=int(disk * share))
    return Directory(host_chunks=host, disk_chunks=disk, write_budget=budget, leases=leases)


def test_that_a_lease_ran_out_is_told_of_what_went_after_it_and_of_nothing_else() -> None:
    directory = leasing(4)
    put(directory, "a", "b", "c")
    directory.grant([key("a")], 60)
    directory.grant([key("b")], 120)
    directory.pass_time(60.0)
    assert directory.num_expired(chain("a")) == 0, "it is there"
    put(directory, *"uvwxyz")
    assert directory.place(key("a")) is directory.place(key("c")) is None
    assert [directory.num_expired([key(each)]) for each in "abc"] == [1, 0, 0]
    put(directory, "a")
    assert directory.num_expired(chain("a")) == 0
    put(directory, *"uvwxyz")
    assert directory.place(key("a")) is None and directory.num_expired(chain("a")) == 0, "not leased again"
    directory.pass_time(120.0)
    directory.grant([key("b")], 60)
    put(directory, *"uvwxyz")
    assert directory.place(key("b")) is ChunkPlace.HOST and directory.num_expired([key("b")]) == 0
    assert directory.clear()
    assert directory.num_expired([key("b")]) == 0 and directory.broken([key("b")]) == (1, LeaseBreak.CLEARED)


def why_they_went(directory: Directory) -> dict[str, list[str]]:
    """Of each chunk that has left a tier since the events were last taken, in order."""
    told: dict[str, list[str]] = {}
    for event in directory.take_events():
        if isinstance(event, BlockRemoved):
            told.setdefault(event.block_hashes[0].decode().rstrip("."), []).append(event.reason.name)
    return told


def test_with_each_removal_it_is_said_why() -> None:
    directory = leasing(3)
    put(directory, *"abc")
    directory.grant([key("a")], 60)
    directory.pass_time(60.0)
    put(directory, *"xyz")
    assert why_they_went(directory) == {"a": ["EXPIRED"], "b": ["EVICTED"], "c": ["EVICTED"]}
    put(directory, "a")
    put(directory, *"uvw")
    assert why_they_went(directory)["a"] == ["EVICTED"], "it was not leased again"
    directory = leasing(1, share=1.0)
    put(directory, "a")
    directory.grant([key("a")], 60)
    put(directory, "b")
    assert why_they_went(directory) == {"a": ["BROKEN"]}


def test_what_ran_out_is_remembered_of_a_bounded_number() -> None:
    directory = leasing(6)
    put(directory, "a", "b", "c")
    for each in "abc":
        directory.grant([key(each)], 60)
    with patch("replicas.kvstore.leasing.leases.MAX_KEPT", 2):
        directory.pass_time(60.0)
    put(directory, *"uvwxyz")
    assert [directory.num_expired([key(each)]) for each in "abc"] == [0, 1, 1]


def test_expiry_deletes_nothing_and_makes_the_end_of_a_chain_the_oldest() -> None:
    directory = leasing(6)
    put(directory, "a", "ab", "abc")
    directory.grant(chain("abc"), 60)
    put(directory, *"xyz")
    directory.pass_time(60.0)
    assert directory.find(chain("abc")) == [ChunkPlace.HOST] * 3
    put(directory, "1", "2")
    assert directory.find(chain("abc")) == [ChunkPlace.HOST]


def test_what_is_leased_for_an_hour_is_written_at_once_and_before_all_else() -> None:
    directory = leasing(8, 8)
    put(directory, *"stuvwx")
    directory.use([key("s")])
    assert directory.num_to_write == 0
    put(directory, "y", "z", "a")
    directory.grant([key("a")], HOUR_SECONDS)
    put(directory, "b")
    directory.grant(chain("b"), HOUR_SECONDS - 1)
    assert write_all(directory)[0] == "a"
    assert directory.place(key("b")) is ChunkPlace.HOST and directory.leases.charged == (1, 1)


def test_a_lease_that_comes_before_its_chunk_holds_from_its_first_copy_on() -> None:
    directory = leasing(4, 8)
    assert directory.grant(chain("ab"), DAY) is None
    put(directory, "a", "ab")
    assert write_all(directory) == ["a", "ab"]
    put(directory, *"uvwxyz")
    assert directory.find(chain("ab")) == [ChunkPlace.DISK, ChunkPlace.DISK]


def test_while_the_write_budget_is_short_what_is_leased_is_still_written() -> None:
    directory = leasing(8, 8, budget=WriteBudget(bytes_per_second=0.2))
    put(directory, *"abcdefgh")
    assert write_all(directory) == ["a", "b"]
    directory.grant([key("h")], DAY)
    assert write_all(directory, now=5.0) == ["h"]


def test_a_lost_file_is_written_anew_if_host_memory_has_it_else_the_lease_is_broken() -> None:
    directory = leasing(4, 4)
    put(directory, "a", "b")
    for path in "ab":
        assert directory.grant([key(path)], DAY) is None
    assert write_all(directory) == ["a", "b"]
    put(directory, *"uvw")
    assert directory.place(key("a")) is ChunkPlace.DISK and directory.place(key("b")) is ChunkPlace.HOST
    directory.lost_file(key("a"))
    directory.lost_file(key("b"))
    assert directory.broken([key("a"), key("b")]) == (1, LeaseBreak.LOST)
    assert directory.leases.holds(key("b")) and write_all(directory)[0] == "b"


def test_a_write_that_failed_leaves_the_lease_to_host_memory_until_it_is_used_again() -> None:
    directory = leasing(4, 4)
    put(directory, "a")
    directory.grant([key("a")], DAY)
    (write,) = directory.take_writes(0.0, 9)
    directory.not_written(write.name.key)
    put(directory, *"uvwxyz")
    assert directory.place(key("a")) is ChunkPlace.HOST and "a" not in write_all(directory)
    directory.use([key("a")])
    assert write_all(directory)[0] == "a"


def test_leases_of_files_are_told_for_the_journal_and_come_back_from_it() -> None:
    directory = leasing(4, 4)
    put(directory, "a", "b")
    directory.grant([key("a")], DAY)
    assert directory.take_lease_changes() == []
    write_all(directory)
    assert directory.take_lease_changes() == [LeaseRecord(key("a"), DAY, float(DAY))]
    directory.pass_time(100.0)
    assert directory.take_lease_changes() == []
    directory.use([key("a")])
    (record,) = directory.take_lease_changes()
    assert record.seconds_left == DAY

    again = leasing(4, 2)
    again.restore(map(name, "abc"), [record._replace(seconds_left=50.0), LeaseRecord(key("z"), DAY, 50.0)])
    assert again.take_removals() == [key("b")] and again.leases.num_leased == 1
    assert again.place(key("a")) is ChunkPlace.DISK
    again.pass_time(50.0)
    assert again.leases.counts.kept == 1


def test_leases_on_a_disk_that_became_smaller_are_broken() -> None:
    directory = Directory(host_chunks=1, disk_chunks=2, leases=Leases(disk_chunks=2))
    records = [LeaseRecord(key(path), DAY, 50.0) for path in "abc"]
    directory.restore(map(name, "abc"), records)
    assert directory.take_removals() == [key("c")] and directory.leases.num_leased == 2


def test_more_cannot_be_leased_than_there_is() -> None:
    with pytest.raises(ValueError, match="less than"):
        Directory(host_chunks=1, leases=Leases(host_chunks=2))


def test_a_day_long_lease_is_kept_for_a_day_while_ten_times_the_tiers_pass_through() -> None:
    """Leased prefixes of three chunks each, and every minute of the day other prompts that want the room."""
    host, disk = 64, 256
    directory = leasing(host, disk)
    leased = ["abc", "def", "ghi", "jkl"]
    for path in leased:
        put(directory, *(path[:length] for length in (1, 2, 3)))
        assert directory.grant(chain(path), DAY) is None
    write_all(directory)
    num_passed = 0
    for minute in range(24 * 60):
        directory.pass_time(minute * 60.0)
        for number in range(2):
            put(directory, f"passing {minute} {number}"[:16])
            num_passed += 1
        write_all(directory, now=minute * 60.0)
    assert num_passed >= 10 * disk
    directory.pass_time(DAY - 1.0)
    for path in leased:
        assert directory.find(chain(path)) == [ChunkPlace.DISK] * 3
    directory.use(chain(leased[0]))
    directory.pass_time(float(DAY))
    assert directory.leases.counts.kept == 9
    for number in range(2 * disk):
        put(directory, f"after {number}")
        write_all(directory, now=float(DAY))
    assert [directory.find(chain(path)) for path in leased] == [[ChunkPlace.DISK] * 3, [], [], []]
    assert directory.leases.counts.broken.total() == 0
    assert directory.grant(chain("xyz"), DAY + 1) is LeaseRefusal.TOO_LONG
