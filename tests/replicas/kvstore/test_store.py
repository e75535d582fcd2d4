"""The store between directory, memory and a real disk: what it is told, and what it makes of it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from replicas.kvstore.arena import Arena
from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.directory import ChunkPlace, Directory
from replicas.kvstore.layout import decode, encode
from replicas.kvstore.on_disk.disk import Disk, DiskOptions
from replicas.kvstore.store import ChunkShape, ChunkStore, DiskShare
from replicas.kvstore.write_budget import WriteBudget
from replicas.protocol.events import AllBlocksCleared, BlockStored, Tier
from replicas.protocol.frames import UserTag
from replicas.protocol.prefix_leases import PrefixLease
from replicas.protocol.tier_figures import WriteStop
from tests.replicas.kvstore.chunk_images import LAYOUT
from tests.replicas.kvstore.chunk_names import BLOCKS_PER_CHUNK, key, name
from tests.replicas.kvstore.open_disk import file_of

ANNA, BERT = UserTag(b"anna"), UserTag(b"bert")
PAYLOAD_BYTES = 6000


@contextmanager
def opened(folder: Path, *, host_chunks: int = 4, lease_share: float = 0.0) -> Iterator[ChunkStore]:
    arena = Arena(host_chunks, PAYLOAD_BYTES)
    options = DiskOptions(
        folder=folder,
        layout=LAYOUT.digest(),
        slot_bytes=arena.slot_bytes,
        max_bytes=100 << 20,
        reserve_bytes=0,
    )
    share = DiskShare(Disk(options), LAYOUT.digest(), 20, WriteBudget())
    store = ChunkStore(
        arena, ChunkShape(2, BLOCKS_PER_CHUNK), clock=time.monotonic, share=share, lease_share=lease_share
    )
    store.begin()
    yield store
    store.close()


def put(store: ChunkStore, path: str, *writers: UserTag) -> None:
    slot = store.offer(name(path), (writers * BLOCKS_PER_CHUNK)[:BLOCKS_PER_CHUNK])
    assert slot is not None
    store.arena.payload(slot)[:] = (path.encode() * PAYLOAD_BYTES)[:PAYLOAD_BYTES]
    store.filled(key(path))


def settle(store: ChunkStore) -> None:
    while store.look_again_seconds is not None:
        store.wait(0.01)
        store.poll()


def ask_for(store: ChunkStore, *paths: str) -> list[ChunkPlace]:
    """As a request does whose tokens take an age to compute."""
    store.loaded(1, 1e-6)
    while store.speeds().disk is None:
        time.sleep(0.001)
    store.arrived(
        [name(path) for path in paths],
        num_device_tokens=0,
        num_findable_tokens=len(paths) * store.shape.tokens,
        wait_seconds=0.0,
        token_seconds=1.0,
    )
    settle(store)
    return store.directory.find(key(path) for path in paths)


def spilled(folder: Path, *paths: str) -> None:
    """A life that ends with these on disk."""
    with opened(folder, host_chunks=8) as store:
        for path in paths:
            put(store, path, ANNA, BERT)
        store.close(seconds=20.0)


def test_a_chunk_comes_back_from_disk_with_whose_it_is(tmp_path: Path) -> None:
    spilled(tmp_path, "a", "ab")
    with opened(tmp_path) as store:
        assert ask_for(store, "a", "ab") == [ChunkPlace.HOST, ChunkPlace.HOST]
        (slot,) = store.pin([key("ab")])
        assert bytes(store.arena.payload(slot)) == (b"ab" * PAYLOAD_BYTES)[:PAYLOAD_BYTES]
        assert store.writers(slot) == (ANNA, BERT, ANNA, BERT)
        store.unpin([key("ab")])


def test_what_an_earlier_life_left_is_said_when_this_one_begins(tmp_path: Path) -> None:
    spilled(tmp_path, "a", "ab")
    with opened(tmp_path) as store:
        assert store.has_news
        first, *others = store.take_events()
        assert first == AllBlocksCleared(Tier.DISK)
        assert sorted(others, key=repr) == [
            BlockStored((key(path),), name(path).last_block, tier=Tier.DISK) for path in ("a", "ab")
        ]
        assert store.has_news and store.is_news(store.figures())
        assert not store.has_news and not store.is_news(store.figures())


def test_a_trial_before_it_begins_leaves_the_disk_as_it_is(tmp_path: Path) -> None:
    spilled(tmp_path, "a")
    with opened(tmp_path) as store:
        pass
    arena = Arena(4, PAYLOAD_BYTES)
    options = DiskOptions(
        folder=tmp_path,
        layout=LAYOUT.digest(),
        slot_bytes=arena.slot_bytes,
        max_bytes=1 << 20,
        reserve_bytes=0,
    )
    share = DiskShare(Disk(options), LAYOUT.digest(), 20, WriteBudget())
    store = ChunkStore(arena, ChunkShape(2, BLOCKS_PER_CHUNK), clock=time.monotonic, share=share)
    put(store, "x", ANNA)
    store.poll()
    assert store.clear()
    store.begin()
    assert store.directory.place(key("a")) is ChunkPlace.DISK
    assert store.directory.place(key("x")) is None
    settle(store)
    store.close()
    assert file_of(tmp_path, "a").exists()


def test_a_file_that_fails_is_forgotten_and_not_asked_for_again(tmp_path: Path) -> None:
    spilled(tmp_path, "a", "ab")
    file = file_of(tmp_path, "ab")
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    with opened(tmp_path) as store:
        assert ask_for(store, "a", "ab") == [ChunkPlace.HOST]
        assert store.directory.place(key("ab")) is None
        settle(store)
        assert not file.exists()


def test_a_disk_that_has_nothing_else_to_do_writes_what_is_new(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for path in ("a", "ab", "c"):
            put(store, path, ANNA)
        store.poll()
        settle(store)
        assert all(file_of(tmp_path, path).exists() for path in ("a", "ab", "c"))
        assert [store.directory.place(key(path)) for path in ("a", "ab", "c")] == [ChunkPlace.HOST] * 3
        for path in ("d", "e"):
            put(store, path, ANNA)
        places = [store.directory.place(key(path)) for path in ("a", "ab", "c")]
        assert sorted(place.value for place in places if place) == ["disk", "host", "host"]


def test_without_a_disk_nothing_ends_by_itself() -> None:
    store = ChunkStore(Arena(4, PAYLOAD_BYTES), ChunkShape(2, BLOCKS_PER_CHUNK), clock=time.monotonic)
    store.begin()
    for path in ("a", "b", "c", "d"):
        put(store, path, ANNA)
    assert store.look_again_seconds is None
    assert store.speeds().disk is None
    store.poll()
    store.close()


def test_the_end_waits_for_what_the_budget_allows(tmp_path: Path) -> None:
    arena = Arena(8, PAYLOAD_BYTES)
    options = DiskOptions(
        folder=tmp_path,
        layout=LAYOUT.digest(),
        slot_bytes=arena.slot_bytes,
        max_bytes=1 << 20,
        reserve_bytes=0,
    )
    # Two chunks at once, then eight a second.
    budget = WriteBudget(8.0 * arena.slot_bytes)
    budget.take(time.monotonic(), 78 * arena.slot_bytes)
    share = DiskShare(Disk(options), LAYOUT.digest(), 20, budget)
    store = ChunkStore(arena, ChunkShape(2, BLOCKS_PER_CHUNK), clock=time.monotonic, share=share)
    store.begin()
    for path in ("a", "b", "c", "d", "e", "f"):
        put(store, path, ANNA)
        store.directory.use([key(path)])  # what was used again is written although the budget is short
    store.close(seconds=30.0)
    assert all(file_of(tmp_path, path).exists() for path in ("a", "b", "c", "d", "e", "f"))


def test_an_engine_without_requests_looks_again_until_what_is_new_is_written(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, "a", ANNA)
        assert store.look_again_seconds is not None
        store.poll()
        settle(store)
        assert file_of(tmp_path, "a").exists()
        assert store.look_again_seconds is None


def test_a_file_that_says_something_else_of_its_chunk_is_no_hit(tmp_path: Path) -> None:
    """Its checksums are right, so whoever wrote it had our code and not our engine."""
    spilled(tmp_path, "a")
    file = file_of(tmp_path, "a")
    image = memoryview(bytearray(file.read_bytes()))
    header = decode(image, LAYOUT.digest(), key("a"))
    encode(replace(header, writers=(ANNA,)), image)
    file.write_bytes(image)
    with opened(tmp_path) as store:
        assert ask_for(store, "a") == []
        store.poll()
        while file.exists():
            time.sleep(0.001)


def test_a_chain_that_bites_its_tail_ends_all_the_same() -> None:
    directory = Directory(host_chunks=4, disk_chunks=4)
    first, second = ChunkName(key("a"), key("b"), 3), ChunkName(key("b"), key("a"), 3)
    directory.restore([ChunkName(key("s"), key("s"), 3), first, second])
    for each in ("s", "a", "b"):
        assert directory.fetch(key(each)) is not None
        directory.filled(key(each))


@pytest.mark.parametrize("stop", [None, WriteStop.FULL])
def test_a_lease_that_only_a_disk_can_keep_is_refused_while_it_takes_nothing(
    tmp_path: Path, stop: WriteStop | None
) -> None:
    with opened(tmp_path, lease_share=0.5) as store:
        assert store._disk is not None
        if stop is not None:
            store._disk._books.write_stop = lambda: stop  # type: ignore[method-assign]
        outcome = store.leases.ask([name("a")], [PrefixLease(BLOCKS_PER_CHUNK, 86_400)], 0)
        (answer,) = outcome.answers
        assert (answer.refusal is None) == (stop is None)


def test_the_disks_speed_is_told_before_any_request_comes(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        while store.speeds().disk is None:
            assert store.look_again_seconds is not None, "nobody would look again"
            time.sleep(0.001)
        assert store.look_again_seconds is None
