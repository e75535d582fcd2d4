"""Files that could not be removed: they take room until they go, and nothing stops for their sake."""

import errno
import os
from pathlib import Path

import pytest

from replicas.kvstore.directory import ChunkPlace
from replicas.kvstore.layout import ChunkHeader, LayoutId
from replicas.kvstore.on_disk import chunk_files, layout_folder
from replicas.kvstore.on_disk.chunk_files import ChunkFiles
from replicas.kvstore.on_disk.layout_folder import LayoutFolder
from replicas.protocol.blocks import BlockHash
from tests.replicas.kvstore.chunk_images import SLOT_BYTES
from tests.replicas.kvstore.chunk_names import key
from tests.replicas.kvstore.open_disk import PATIENCE_SECONDS, file_of, opened
from tests.replicas.kvstore.test_store_on_disk import OpenStore, store_on

OLD = LayoutId(b"another layout..")
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
        assert at.place("a") is ChunkPlace.DISK and at.disk.num_unremoved == 0
        stuck.clear()
        at.disk._books._remove_again_at = 0.0
        put_all(at, "y")
        assert file_of(tmp_path, "a").exists() and at.place("a") is ChunkPlace.DISK
        assert at.disk.bytes_used == 3 * SLOT_BYTES


def test_erasing_goes_past_a_file_that_cannot_be_removed_which_counts_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, stuck = layout_folder.unlink_file, {file_of(tmp_path, "a").name}

    def unlink_or_fail(parent: int, name: str) -> int:
        if name in stuck:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return unlink(parent, name)

    monkeypatch.setattr(layout_folder, "unlink_file", unlink_or_fail)
    monkeypatch.setattr(chunk_files, "unlink_file", unlink_or_fail)
    with store_on(tmp_path, disk_chunks=10) as at:
        put_all(at, PATHS[:8])
        assert at.disk.bytes_used == 8 * SLOT_BYTES
        assert at.store.clear()
        while at.store._erasures:
            assert at.disk.wait(PATIENCE_SECONDS)
            at.store.poll()
        left = [path for path in PATHS if file_of(tmp_path, path).exists()]
        assert left == ["a"], "all others are gone"
        at.disk._books._remove_again_at = 0.0
        while at.disk.num_unremoved > 1:
            at.disk.wait(0.01)
        assert at.disk.bytes_used == SLOT_BYTES
        stuck.clear()
        at.disk._books._remove_again_at = 0.0
        while at.disk.num_unremoved:
            at.disk.wait(0.01)
        assert at.disk.bytes_used == 0 and not file_of(tmp_path, "a").exists()
        put_all(at, PATHS[:8])
        assert at.disk.bytes_used == 8 * SLOT_BYTES
    with store_on(tmp_path, disk_chunks=10) as at:
        assert at.store.directory.num_on_disk == 8


def test_a_write_whose_last_sync_fails_leaves_no_file_that_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LayoutFolder, found: BlockHash, leaf: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(LayoutFolder, "sync_leaf", fail)
    with opened(tmp_path) as at:
        assert not at.write("a", sync=True).ok
        assert at.disk.bytes_used == 0 and not file_of(tmp_path, "a").exists()


def test_a_write_that_fails_leaves_no_file_of_before_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ChunkFiles, header: ChunkHeader, slot: memoryview, *, sync: bool = False) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path) as at:
        assert at.write("a").ok
        monkeypatch.setattr(ChunkFiles, "write", fail)
        assert not at.write("a").ok
        assert at.disk.num_unremoved == 1 and at.disk.bytes_used == SLOT_BYTES
        at.disk._books._remove_again_at = 0.0
        at.until(lambda: not at.disk.num_unremoved)
        assert at.disk.bytes_used == 0 and not file_of(tmp_path, "a").exists()


def test_a_file_of_another_layout_that_cannot_be_removed_takes_the_room_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, layout=OLD) as at:
        assert at.write_as(OLD, "old").ok and at.write_as(OLD, "older").ok
    unlink, stuck = layout_folder.unlink_file, f"{key('old').hex()}.kv"

    def unlink_or_fail(parent: int, name: str) -> int:
        if name == stuck:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return unlink(parent, name)

    monkeypatch.setattr(layout_folder, "unlink_file", unlink_or_fail)
    with store_on(tmp_path, disk_chunks=5) as at:
        while at.disk.is_comparing:
            at.disk.wait(0.01)
        assert at.disk.other_bytes == 2 * SLOT_BYTES
        put_all(at, PATHS)
        assert at.disk.write_stop is None and at.disk.other_bytes == SLOT_BYTES
        assert [each.key for each in at.store.directory.on_disk()] == [key(path) for path in PATHS[-7:-3]]
        assert at.disk.bytes_used == 5 * SLOT_BYTES
