"""The store with a disk below it: what leaves host memory is read again, within the disk's bound."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from replicas.kvstore.arena import Arena
from replicas.kvstore.directory import ChunkPlace
from replicas.kvstore.on_disk.disk import Disk
from replicas.kvstore.store import MIN_WRITES, ChunkShape, ChunkStore, DiskShare
from replicas.kvstore.write_budget import WriteBudget
from replicas.protocol.frames import UserTag
from tests.replicas.kvstore.chunk_images import LAYOUT, PAYLOAD_BYTES, SLOT_BYTES, payload
from tests.replicas.kvstore.chunk_names import key, name
from tests.replicas.kvstore.open_disk import PATIENCE_SECONDS, file_of, options

WRITERS = (UserTag(b"one"), UserTag(b""), UserTag(b"two"), UserTag(b"three"))


class OpenStore:
    def __init__(self, folder: Path, *, host_chunks: int = 4, disk_chunks: int = 100, **changes: Any) -> None:
        changes = {"max_bytes": disk_chunks * SLOT_BYTES, **changes}
        self.disk = Disk(options(folder, **changes))
        self.store = ChunkStore(
            Arena(host_chunks, PAYLOAD_BYTES),
            ChunkShape(block_size=4, blocks_per_chunk=4),
            clock=lambda: 0.0,
            share=DiskShare(self.disk, LAYOUT.digest(), disk_chunks, WriteBudget()),
        )
        self.store.begin()

    def put(self, *paths: str) -> None:
        """As from the device; each is written when its turn has come."""
        for path in paths:
            slot = self.store.offer(name(path), WRITERS)
            assert slot is not None
            self.store.arena.payload(slot)[:] = payload(path)
            self.store.filled(key(path))
            self.settle()

    def settle(self) -> None:
        self.store.poll()
        while self.store._reads or self.store._writes:
            assert self.disk.wait(PATIENCE_SECONDS)
            self.store.poll()

    def fetch(self, path: str) -> None:
        """From disk to host memory, if it is not lost on the way."""
        assert self.store._read(self.disk, key(path))
        self.settle()

    def is_right_in_memory(self, path: str) -> bool:
        if self.place(path) is not ChunkPlace.HOST:
            return False
        [slot] = self.store.pin([key(path)])
        self.store.unpin([key(path)])
        return bytes(self.store.arena.payload(slot)) == payload(path) and self.store.writers(slot) == WRITERS

    def place(self, path: str) -> ChunkPlace | None:
        return self.store.directory.place(key(path))


@contextmanager
def store_on(folder: Path, **changes: Any) -> Iterator[OpenStore]:
    at = OpenStore(folder, **changes)
    yield at
    at.store.close()


def test_what_leaves_host_memory_is_read_again_with_its_writers(tmp_path: Path) -> None:
    with store_on(tmp_path) as at:
        at.put(*"abcdefgh")
        assert at.place("a") is ChunkPlace.DISK
        at.fetch("a")
        assert at.is_right_in_memory("a")
    with store_on(tmp_path) as at:
        assert at.place("b") is ChunkPlace.DISK
        at.fetch("b")
        assert at.is_right_in_memory("b")


def test_a_full_disk_takes_every_new_chunk_in_place_of_the_oldest(tmp_path: Path) -> None:
    paths = "abcdefghijklmnopqrst"
    with store_on(tmp_path, disk_chunks=3) as at:
        for path in paths:
            at.put(path)
        while at.disk.bytes_used > 3 * SLOT_BYTES:
            at.disk.wait(0.01)
        on_disk = [path for path in paths if at.place(path) is ChunkPlace.DISK]
        assert on_disk == [*paths[-6:-4]], "the oldest in host memory has its file already"
        assert [each.key for each in at.store.directory.on_disk()] == [key(path) for path in paths[-6:-3]]


@pytest.mark.parametrize(("host_chunks", "most"), [(8, 4), (80, 10), (800, 32)])
def test_the_disk_is_given_enough_to_go_on_with_while_the_engine_computes(
    tmp_path: Path, host_chunks: int, most: int
) -> None:
    """And no more of what is hot than it can begin at once."""
    for is_hot in (True, False):
        with store_on(tmp_path / str(is_hot), host_chunks=host_chunks, disk_chunks=1000) as at:
            for number in range(host_chunks * 3 // 4):
                path = chr(0x100 + number)
                assert at.store.offer(name(path), WRITERS) is not None
                at.store.filled(key(path))
            if not is_hot:
                at.store.directory.write_all()
            at.store.poll()
            assert len(at.store._writes) == (MIN_WRITES if is_hot else most)
            at.settle()


def test_a_file_that_is_gone_is_a_miss_in_the_store_too(tmp_path: Path) -> None:
    with store_on(tmp_path) as at:
        at.put(*"abcdefgh")
        os.unlink(file_of(tmp_path, "a"))
        at.fetch("a")
        assert at.place("a") is None


def test_a_file_that_was_lost_between_two_lives_is_forgotten_without_being_read(tmp_path: Path) -> None:
    with store_on(tmp_path) as at:
        at.put(*"abcdefgh")
    os.unlink(file_of(tmp_path, "a"))
    with store_on(tmp_path) as at:
        while at.place("a") is not None:
            assert at.disk.wait(PATIENCE_SECONDS)
            at.settle()
        assert at.place("b") is ChunkPlace.DISK


def test_a_read_that_came_too_late_leaves_the_chunk_on_disk(tmp_path: Path) -> None:
    with store_on(tmp_path) as at:
        at.put(*"abcdefgh")
    with store_on(tmp_path, read_deadline_seconds=-1.0) as at:
        at.fetch("a")
        assert at.place("a") is ChunkPlace.DISK and at.store.directory.num_in_host == 0
    with store_on(tmp_path) as at:
        at.fetch("a")
        assert at.is_right_in_memory("a")
