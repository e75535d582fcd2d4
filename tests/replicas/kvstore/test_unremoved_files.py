"""Files that could not be removed: they take room until they go, and nothing stops for their sake."""

import errno
import os
from pathlib import Path

import pytest

from replicas.kvstore.directory import Place
from replicas.kvstore.on_disk.chunk_files import ChunkFiles
from replicas.protocol.blocks import BlockHash
from tests.replicas.kvstore.chunk_images import SLOT_BYTES
from tests.replicas.kvstore.chunk_names import key
from tests.replicas.kvstore.open_disk import file_of
from tests.replicas.kvstore.test_store_on_disk import OpenStore, store_on

PATHS = "abcdefghijklmnopqrst"


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> set[BlockHash]:
    """Keys of files that cannot be removed."""
    keys: set[BlockHash] = set()
    remove = ChunkFiles.remove

    def remove_or_fail(self: ChunkFiles, found: BlockHash) -> int:
        if found in keys:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return remove(self, found)

    monkeypatch.setattr(ChunkFiles, "remove", remove_or_fail)
    return keys


def put_all(at: OpenStore, paths: str) -> None:
    """Each after what has gone for the one before it is off the disk, or could not be removed."""
    for path in paths:
        at.put(path)
        while at.disk._books._queue.num_running or at.disk._books._queue._behind:
            at.disk.wait(0.01)


def test_a_full_disk_with_files_that_cannot_be_removed_is_written_to_all_the_same(
    tmp_path: Path, stuck: set[BlockHash]
) -> None:
    stuck.update(map(key, "ac"))
    with store_on(tmp_path, disk_chunks=5) as at:
        put_all(at, PATHS)
        assert [each.key for each in at.store.directory.on_disk()] == [key(path) for path in PATHS[-6:-3]]
        assert at.disk.bytes_used == 5 * SLOT_BYTES, "what could not be removed counts"
        assert file_of(tmp_path, "a").exists() and file_of(tmp_path, "c").exists()


def test_what_could_not_be_removed_goes_later_and_gives_its_room_back(
    tmp_path: Path, stuck: set[BlockHash]
) -> None:
    stuck.add(key("a"))
    with store_on(tmp_path, disk_chunks=3) as at:
        put_all(at, PATHS[:10])
        assert file_of(tmp_path, "a").exists() and at.store.directory.num_on_disk == 2
        stuck.clear()
        at.disk._books._remove_again_at = 0.0
        while at.disk.num_unremoved:
            at.disk.wait(0.01)
        assert not file_of(tmp_path, "a").exists()
        put_all(at, PATHS[10:])
        assert at.store.directory.num_on_disk == 3 and at.disk.bytes_used == 3 * SLOT_BYTES


def test_a_file_that_was_to_go_and_was_written_anew_stays(tmp_path: Path, stuck: set[BlockHash]) -> None:
    stuck.add(key("a"))
    with store_on(tmp_path, disk_chunks=3) as at:
        put_all(at, PATHS[:10])
        assert at.disk.num_unremoved == 1
        put_all(at, "auvwx")
        assert at.place("a") is Place.DISK and at.disk.num_unremoved == 0
        stuck.clear()
        at.disk._books._remove_again_at = 0.0
        put_all(at, "y")
        assert file_of(tmp_path, "a").exists() and at.place("a") is Place.DISK
        assert at.disk.bytes_used == 3 * SLOT_BYTES
