"""The directory alone: places, order of eviction, what is written when, events."""

import pytest

from replicas.kvstore.directory import ChunkPlace, Directory
from replicas.kvstore.write_budget import BURST_SECONDS, WriteBudget
from replicas.protocol.events import BlockRemoved, BlockStored, Tier
from tests.replicas.kvstore.chunk_names import chain, key, name


def put(directory: Directory, *paths: str) -> None:
    """Into host memory, as from the device."""
    for path in paths:
        assert directory.offer(name(path)) is not None
        directory.filled(key(path))


def write_all(directory: Directory, now: float = 0.0) -> list[str]:
    """All that the directory wants on disk; the paths in their order."""
    written = []
    while writes := directory.take_writes(now, 1):
        directory.written(writes[0].name.key)
        written.append(writes[0].name.key.decode().rstrip("."))
    return written


def test_a_chain_is_found_up_to_its_first_hole() -> None:
    directory = Directory(host_chunks=8)
    put(directory, "a", "abc")
    directory.offer(name("ab"))
    assert directory.find(chain("abcd")) == [ChunkPlace.HOST, ChunkPlace.COMING, ChunkPlace.HOST]
    directory.given_up(key("ab"))
    assert directory.find(chain("abcd")) == [ChunkPlace.HOST]


def test_the_least_recently_used_goes_first_and_the_end_of_a_chain_before_its_beginning() -> None:
    directory = Directory(host_chunks=4)
    put(directory, "a", "ab", "abc", "z")
    directory.use(chain("abc"))
    directory.take_events()
    put(directory, "y")
    assert directory.place(key("z")) is None
    put(directory, "x")
    assert directory.find(chain("abc")) == [ChunkPlace.HOST, ChunkPlace.HOST]
    assert [each for each in directory.take_events() if isinstance(each, BlockRemoved)] == [
        BlockRemoved((key("z"),), Tier.HOST),
        BlockRemoved((key("abc"),), Tier.HOST),
    ]


def test_a_chain_that_was_used_once_goes_from_its_end_as_well() -> None:
    directory = Directory(host_chunks=4, disk_chunks=3)
    put(directory, "a", "ab", "abc", "z")
    assert write_all(directory) == ["a", "ab", "abc"]
    put(directory, "y")
    assert [directory.place(each) for each in chain("abc")] == [
        ChunkPlace.HOST,
        ChunkPlace.HOST,
        ChunkPlace.DISK,
    ]
    put(directory, "x", "w", "v")
    write_all(directory)
    assert directory.find(chain("abc")) == [ChunkPlace.DISK, ChunkPlace.DISK]


def test_a_chunk_whose_write_failed_holds_up_no_other() -> None:
    directory = Directory(host_chunks=4, disk_chunks=9)
    put(directory, "a", "ab", "abc", "z")
    [write] = directory.take_writes(0.0, 1)
    directory.not_written(write.name.key)
    put(directory, "y")
    assert "a" not in write_all(directory)


def test_what_is_restored_twice_is_there_once() -> None:
    directory = Directory(host_chunks=1, disk_chunks=2)
    directory.restore([name("a"), name("a")])
    assert directory.num_on_disk == 1 and len(directory.take_events()) == 1


def test_a_slot_has_another_generation_for_each_chunk() -> None:
    directory = Directory(host_chunks=1)
    put(directory, "a")
    before = directory.slot(key("a"))
    put(directory, "b")
    after = directory.slot(key("b"))
    assert before is not None and after is not None
    assert before[0] == after[0] and before[1] != after[1]


def test_the_oldest_quarter_is_written_and_found_on_disk_when_it_has_left() -> None:
    directory = Directory(host_chunks=4, disk_chunks=9)
    put(directory, "a", "b", "c")
    assert write_all(directory) == []
    put(directory, "d")
    assert write_all(directory) == ["a"]
    assert BlockStored((key("a"),), 3, tier=Tier.DISK) in directory.take_events()
    put(directory, "e")
    assert directory.place(key("a")) is ChunkPlace.DISK
    assert directory.take_events()[0] == BlockRemoved((key("a"),), Tier.HOST)


def test_what_is_used_before_it_is_written_is_not_cold_any_more() -> None:
    directory = Directory(host_chunks=4, disk_chunks=9)
    put(directory, "a", "b", "c", "d")
    directory.use([key("a")])
    assert write_all(directory) == ["b"]


def test_a_chain_is_written_from_its_beginning() -> None:
    directory = Directory(host_chunks=8, disk_chunks=9)
    put(directory, *("abc"[:length] for length in (1, 2, 3)))
    directory.use(chain("abc"))
    put(directory, *"stuvw")
    assert write_all(directory) == ["a", "ab", "abc", "s"][:3]


def test_the_oldest_file_goes_when_the_disk_is_full() -> None:
    directory = Directory(host_chunks=4, disk_chunks=2)
    for path in "abcdefg":
        put(directory, path)
        write_all(directory)
    assert directory.num_on_disk == 2
    assert directory.take_removals() == [key("a"), key("b")]
    assert directory.take_removals() == []
    assert directory.place(key("a")) is None and directory.place(key("c")) is ChunkPlace.DISK


def test_a_write_that_failed_is_not_tried_again_at_once() -> None:
    directory = Directory(host_chunks=4, disk_chunks=9)
    put(directory, *"abcd")
    [write] = directory.take_writes(0.0, 9)
    directory.not_written(write.name.key)
    assert directory.num_on_disk == 0 and directory.take_writes(0.0, 9) == []
    directory.use([key("a")])
    assert write_all(directory) == ["b"]
    directory.use([key(path) for path in "dcb"])
    assert write_all(directory) == ["a"]


def test_while_the_budget_is_short_only_what_was_used_again_is_written() -> None:
    directory = Directory(
        host_chunks=40, disk_chunks=99, chunk_bytes=2, write_budget=WriteBudget(bytes_per_second=1.0)
    )
    paths = [chr(ord("A") + number) for number in range(20)]
    reused = paths[4:10]
    put(directory, *paths)
    directory.use([key(path) for path in reversed(reused)])
    put(directory, *(chr(ord("a") + number) for number in range(20)))
    assert write_all(directory) == ["A", "B", "C"]
    assert directory.num_to_write == 7
    directory.use([key(chr(ord("a") + number)) for number in range(20)])
    put(directory, *"0123456789")
    assert write_all(directory) == reused[:2]
    assert write_all(directory, now=BURST_SECONDS) == reused[2:]


def test_what_an_earlier_life_left_is_there_and_what_does_not_fit_is_removed() -> None:
    directory = Directory(host_chunks=1, disk_chunks=2)
    directory.restore(map(name, ["a", "b", "c"]))
    assert directory.take_removals() == [key("a")]
    assert [directory.place(key(path)) for path in "abc"] == [None, ChunkPlace.DISK, ChunkPlace.DISK]
    assert directory.take_events() == [
        *(BlockStored((key(path),), 3, tier=Tier.DISK) for path in "abc"),
        BlockRemoved((key("a"),), Tier.DISK),
    ]


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_a_directory_without_room_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="slot of host memory"):
        Directory(host_chunks=sizes[0], disk_chunks=sizes[1], chunk_bytes=sizes[2])


def test_what_is_hot_is_written_early_oldest_first_and_never_for_another_file() -> None:
    directory = Directory(host_chunks=8, disk_chunks=2)
    for path in ("a", "ab", "c"):
        put(directory, path)
    assert directory.take_writes(0.0, 4) == [], "nothing is cold"
    assert [write.name.key for write in directory.take_early_writes(0.0, 1)] == [key("a")]
    directory.written(key("a"))
    assert [write.name.key for write in directory.take_early_writes(0.0, 4)] == [key("ab")]
    directory.not_written(key("ab"))
    assert [write.name.key for write in directory.take_early_writes(0.0, 4)] == [key("c")]
    directory.written(key("c"))
    put(directory, "d")
    assert directory.take_early_writes(0.0, 4) == [], "there is no room but that of other files"
    assert directory.num_to_write == 0


def test_nothing_is_written_early_while_the_budget_is_short() -> None:
    directory = Directory(host_chunks=8, disk_chunks=8, chunk_bytes=10, write_budget=WriteBudget(2.0))
    for path in ("a", "b", "c"):
        put(directory, path)
    assert [write.name.key for write in directory.take_early_writes(0.0, 4)] == [key("a"), key("b")]
    assert directory.take_early_writes(1.0, 4) == []
    assert [write.name.key for write in directory.take_early_writes(100.0, 4)] == [key("c")]
