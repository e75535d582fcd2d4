"""A disk that is slow, full, broken or hangs: a miss, a pause, a word in the log; never a wrong byte."""

import errno
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replicas.kvstore.directory import ChunkPlace
from replicas.kvstore.layout import ChunkHeader, LayoutId
from replicas.kvstore.on_disk import chunk_files, layout_folder
from replicas.kvstore.on_disk.chunk_files import ChunkFiles
from replicas.kvstore.on_disk.disk import Disk, Kind
from replicas.kvstore.on_disk.folder import Folder
from replicas.kvstore.on_disk.journal import Journal
from replicas.kvstore.on_disk.layout_folder import LayoutFolder
from replicas.process.settings import SettingsError
from replicas.protocol.blocks import BlockHash
from tests.replicas.kvstore.chunk_images import LAYOUT, SLOT_BYTES, fill, image
from tests.replicas.kvstore.chunk_names import key, name
from tests.replicas.kvstore.open_disk import PATIENCE_SECONDS, OpenDisk, file_of, opened, options
from tests.replicas.kvstore.test_store_on_disk import OpenStore, store_on

DEADLINE_SECONDS = 1000.0
"""Of the clock that a test can put forward."""
OLD = LayoutId(b"another layout..")
PATHS = "abcdefghijklmnopqrst"


class Clock:
    """The real one, and what a test adds to it."""

    def __init__(self) -> None:
        self.added = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.added


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Hangs:
    """Reads of some chunks do not come back before `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._released = threading.Event()
        self.paths: set[str] = set()
        self.num_hanging = 0
        real = ChunkFiles.read

        def read(files: ChunkFiles, wanted: Any, slot: memoryview) -> Any:
            if any(wanted == key(path) for path in self.paths):
                self.num_hanging += 1
                self._released.wait()
            return real(files, wanted, slot)

        monkeypatch.setattr(ChunkFiles, "read", read)

    def release(self) -> None:
        self.paths.clear()
        self._released.set()


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hangs]:
    hanging = Hangs(monkeypatch)
    yield hanging
    hanging.release()


def messages(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


def num_workers() -> int:
    return sum(thread.name == "kv-disk" for thread in threading.enumerate())


def hanging_read(at: OpenDisk, hangs: Hangs, path: str, slot: int) -> int:
    """A read that hangs by now."""
    num_before = hangs.num_hanging
    job = at.disk.read(key(path), at.slots[slot])
    assert job is not None
    at.until(lambda: hangs.num_hanging > num_before)
    return job


def test_a_read_that_hangs_is_overdue_and_later_returned(tmp_path: Path, hangs: Hangs, clock: Clock) -> None:
    with opened(tmp_path, clock, read_deadline_seconds=DEADLINE_SECONDS) as at:
        at.write("a")
        at.write("b")
        hangs.paths = {"a"}
        job = hanging_read(at, hangs, "a", 1)
        assert at.disk.take_finished() == []
        clock.added += DEADLINE_SECONDS
        overdue = at.ends(job)
        assert overdue.kind is Kind.OVERDUE and not overdue.ok and overdue.key == key("a")
        assert overdue.seconds >= DEADLINE_SECONDS and overdue.reason == "late"
        assert at.has("b", slot=2)
        assert at.write("a", slot=3).ok
        assert bytes(at.slots[1]) == b"\xa5" * SLOT_BYTES
        hangs.release()
        returned = at.ends(job, Kind.RETURNED)
        assert returned.key == key("a") and not returned.ok
        ends = [each.kind for each in at.finished if each.job == job]
        assert at.has("a", slot=1) and ends == [Kind.OVERDUE, Kind.RETURNED]


def test_an_overdue_read_that_fails_removes_nothing(tmp_path: Path, hangs: Hangs, clock: Clock) -> None:
    with opened(tmp_path, clock, read_deadline_seconds=DEADLINE_SECONDS) as at:
        at.write("a")
        hangs.paths = {"a"}
        job = hanging_read(at, hangs, "a", 1)
        clock.added += DEADLINE_SECONDS
        at.ends(job, Kind.OVERDUE)
        os.truncate(file_of(tmp_path, "a"), 100)
        hangs.release()
        at.ends(job, Kind.RETURNED)
        assert file_of(tmp_path, "a").exists() and at.disk.bytes_used == SLOT_BYTES
        assert at.write("a").ok and at.has("a")


def test_a_read_that_waits_too_long_fails_and_never_touches_its_slot(
    tmp_path: Path, hangs: Hangs, clock: Clock
) -> None:
    limits = {"num_threads": 1, "read_deadline_seconds": DEADLINE_SECONDS, "hang_seconds": 1e9}
    with opened(tmp_path, clock, **limits) as at:
        for path in "ab":
            at.write(path)
        hangs.paths = {"a"}
        first = hanging_read(at, hangs, "a", 1)
        second = at.disk.read(key("b"), at.slots[2])
        clock.added += DEADLINE_SECONDS
        waiting = at.ends(second)
        assert (waiting.kind, waiting.ok, waiting.reason) == (Kind.READ, False, "late")
        assert not waiting.is_gone
        assert at.ends(first).kind is Kind.OVERDUE
        hangs.release()
        at.ends(first, Kind.RETURNED)
        assert bytes(at.slots[2]) == b"\xa5" * SLOT_BYTES and at.has("b", slot=3)


def test_a_thread_that_hangs_is_replaced_until_all_of_them_hang(
    tmp_path: Path, hangs: Hangs, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"num_threads": 2, "read_deadline_seconds": 1e9, "hang_seconds": DEADLINE_SECONDS}
    with opened(tmp_path, clock, **limits) as at:
        for path in "abcdz":
            at.write(path)
        hangs.paths = set("abcd")
        jobs = [hanging_read(at, hangs, path, slot) for slot, path in enumerate("ab", 1)]
        assert num_workers() == 2
        clock.added += DEADLINE_SECONDS
        at.until(lambda: num_workers() == 4)
        assert at.has("z", slot=7) and not messages(caplog, "hangs")
        jobs += [hanging_read(at, hangs, path, slot) for slot, path in enumerate("cd", 3)]
        assert at.disk.can_write
        clock.added += DEADLINE_SECONDS
        at.until(lambda: not at.disk.can_write)
        assert at.disk.read(key("z"), at.slots[7]) is None
        assert at.disk.write(fill(at.slots[6], "new"), at.slots[6]) is None
        assert len(messages(caplog, "hangs: each of 4 threads")) == 1 and num_workers() == 4
        hangs.release()
        for job in jobs:
            assert at.ends(job).ok
        at.until(lambda: num_workers() == 2 and at.disk.can_write)
        assert at.has("z", slot=7) and at.write("new").ok


def test_closing_does_not_wait_for_what_hangs_and_keeps_the_folder(tmp_path: Path, hangs: Hangs) -> None:
    disk = Disk(options(tmp_path))
    at = OpenDisk(disk, tmp_path)
    at.write("a")
    hangs.paths = {"a"}
    job = hanging_read(at, hangs, "a", 1)
    assert not disk.close(0.01)
    with pytest.raises(SettingsError, match="in use"):
        Folder(tmp_path)
    hangs.release()
    assert disk.close(30.0) and at.ends(job).ok
    with opened(tmp_path) as again:
        assert list(again.disk.restored) == [name("a")]


def test_while_it_waits_to_erase_nothing_is_taken(tmp_path: Path, hangs: Hangs) -> None:
    with opened(tmp_path) as at:
        at.write("a")
        hangs.paths = {"a"}
        read = hanging_read(at, hangs, "a", 1)
        waiting = at.disk.erase()
        assert at.disk.erase() is None and not at.disk.can_write
        assert at.disk.read(key("a"), at.slots[2]) is None
        assert at.disk.write(fill(at.slots[3], "b"), at.slots[3]) is None
        assert file_of(tmp_path, "a").exists()
        hangs.release()
        assert at.ends(read).ok and at.ends(waiting).ok
        assert not file_of(tmp_path, "a").exists()
        assert at.disk.can_write and at.write("b").ok


def test_an_overdue_read_does_not_hold_up_erasing(tmp_path: Path, hangs: Hangs, clock: Clock) -> None:
    with opened(tmp_path, clock, read_deadline_seconds=DEADLINE_SECONDS) as at:
        at.write("a")
        hangs.paths = {"a"}
        read = hanging_read(at, hangs, "a", 1)
        clock.added += DEADLINE_SECONDS
        at.ends(read, Kind.OVERDUE)
        assert at.ends(at.disk.erase()).ok and not file_of(tmp_path, "a").exists()
        hangs.release()
        at.ends(read, Kind.RETURNED)
        assert at.disk.bytes_used == 0


def test_a_thread_that_dies_turns_the_disk_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def dies(*_: object) -> None:
        raise RuntimeError("of our own fault")

    with opened(tmp_path) as at:
        at.write("a")
        monkeypatch.setattr(ChunkFiles, "read", dies)
        jobs = [at.disk.read(key("a"), at.slots[1]), at.disk.read(key("a"), at.slots[2])]
        assert {at.ends(job).ok for job in jobs} == {False} and at.ends(jobs[0]).reason == "died"
        at.until(lambda: at.disk.is_off)
        assert at.disk.read(key("a"), at.slots[1]) is None and not at.disk.can_write
        assert len(messages(caplog, "neither read nor written")) == 1


def test_the_keepers_death_turns_the_disk_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def dies(*_: object, **__: object) -> None:
        raise RuntimeError("of our own fault")

    with opened(tmp_path) as at:
        monkeypatch.setattr(Journal, "flush", dies)
        at.until(lambda: at.disk.is_off)
        at.until(lambda: messages(caplog, "neither read nor written"))


def test_no_more_wait_than_the_queue_holds(tmp_path: Path, hangs: Hangs) -> None:
    with opened(tmp_path, num_threads=1, max_queue=2) as at:
        at.write("a")
        hangs.paths = {"a"}
        jobs = [at.disk.read(key("a"), at.slots[1])]
        at.until(lambda: jobs.append(at.disk.read(key("b"), at.slots[2])) or jobs[-1] is None)
        assert len(jobs) <= 5 and not at.disk.can_write
        hangs.release()
        for job in jobs[:-1]:
            at.ends(job)
        assert at.disk.can_write


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_write_that_fails_stops_writing_for_a_while_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, clock: Clock, code: int
) -> None:
    def fails(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    disk = Disk(options(tmp_path), clock)
    at = OpenDisk(disk, tmp_path)
    at.write("a")
    with monkeypatch.context() as patched:
        patched.setattr(ChunkFiles, "_write_image", fails)
        for pause in (1.0, 2.0, 4.0):
            assert disk.can_write
            failed = at.write("b")
            assert not failed.ok and failed.reason == errno.errorcode[code]
            assert not disk.can_write and at.has("a")
            clock.added += pause
    assert len(messages(caplog, os.strerror(code))) == 1 and not messages(caplog, "again\n")
    assert at.write("b").ok and disk.can_write and at.has("b")
    assert len(messages(caplog, "can be written to again")) == 1
    assert disk.close(30)


@pytest.mark.parametrize(
    ("code", "is_gone"), [(errno.EIO, True), (errno.EACCES, True), (errno.EMFILE, False)]
)
def test_a_file_that_cannot_be_read_goes_and_one_that_cannot_be_read_now_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_gone: bool
) -> None:
    def fails(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    with opened(tmp_path) as at:
        at.write("a")
        with monkeypatch.context() as patched:
            patched.setattr(ChunkFiles, "_read_image", fails)
            failed = at.read("a")
        assert failed.reason == errno.errorcode[code] and failed.is_gone == is_gone
        assert at.has("a") != is_gone and at.disk.can_write


def test_with_less_free_space_than_the_reserve_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = [100 * SLOT_BYTES]
    monkeypatch.setattr(ChunkFiles, "free_bytes", lambda files: free[0])
    with opened(tmp_path, reserve_bytes=10 * SLOT_BYTES) as at:
        at.write("a")
        assert at.disk.can_write
        free[0] = 11 * SLOT_BYTES - 1
        at.until(lambda: not at.disk.can_write)
        assert at.has("a")
        free[0] = 11 * SLOT_BYTES
        at.until(lambda: at.disk.can_write)
        assert len(messages(caplog, "less free space")) == len(messages(caplog, "free space again")) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 20 slots."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={20 * SLOT_BYTES}", "tmpfs", str(tmp_path)]
    if os.getuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a file system")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk_reads_on_and_is_written_to_when_there_is_room(small_disk: Path, clock: Clock) -> None:
    folder = small_disk / "kv"
    disk = Disk(options(folder), clock)
    at = OpenDisk(disk, folder)
    filler = small_disk / "somebody else's"
    filler.touch()
    written = []
    for path in "abcdefghijklmnopqrstuvwxyz":
        finished = at.write(path)
        if not finished.ok:
            assert finished.reason == "ENOSPC"
            break
        written.append(path)
    assert len(written) >= 10 and not disk.can_write
    with filler.open("wb", buffering=0) as other, pytest.raises(OSError, match="No space"):
        while True:
            other.write(bytes(4096))
    assert all(at.has(path) for path in written)
    assert not list(folder.glob("v1/*/.tmp-*")), "what could not be written leaves nothing"
    clock.added += 1.0
    at.removed(written[0])
    filler.unlink()
    at.until(lambda: disk.can_write)
    assert at.write(path).ok
    assert disk.close(30)
    with opened(folder) as again:
        assert sorted(again.disk.restored) == sorted(name(each) for each in [*written[1:], path])
        assert all(again.has(each) for each in [*written[1:], path])


def test_a_file_system_without_direct_access_is_used_through_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def no_direct(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *arguments, **named)

    monkeypatch.setattr(chunk_files.os, "open", no_direct)
    with opened(tmp_path, probe_bytes=1 << 20) as at:
        assert at.write("a").ok and at.has("a") and bytes(at.slots[1]) == bytes(image("a"))
        at.until(lambda: not list(tmp_path.glob("v1/*/.tmp-*")))
    folder = Folder(tmp_path)
    files = ChunkFiles(folder, LAYOUT.digest())
    assert not files.is_direct
    files.close()
    folder.close()


def test_speeds_are_measured_before_anything_has_moved(tmp_path: Path) -> None:
    with opened(tmp_path, probe_bytes=1 << 20, max_bytes=1 << 30) as at:
        speeds = at.until(lambda: at.disk.speeds() if at.disk.speeds().read_seconds_per_byte else None)
        assert speeds.write_seconds_per_byte is not None and speeds.backlog_seconds == 0
        assert 1e-12 < speeds.write_seconds_per_byte < 1e-3
        at.until(lambda: not list(tmp_path.glob("v1/*/.tmp-*")))
        assert at.disk.bytes_used == 0


def test_a_disk_too_small_for_a_probe_has_none(tmp_path: Path) -> None:
    with opened(tmp_path, probe_bytes=64 << 20, max_bytes=(1 << 20) - 1) as at:
        at.write("a")
        assert at.disk.speeds().read_seconds_per_byte is None


def test_what_waits_to_be_read_is_the_backlog(tmp_path: Path, hangs: Hangs) -> None:
    with opened(tmp_path, num_threads=1, probe_bytes=1 << 20, max_bytes=1 << 30) as at:
        at.until(lambda: at.disk.speeds().read_seconds_per_byte)
        at.write("a")
        hangs.paths = {"a"}
        for slot in range(1, 4):
            at.disk.read(key("a"), at.slots[slot])
        speeds = at.disk.speeds()
        assert speeds.read_seconds_per_byte is not None
        assert speeds.backlog_seconds == pytest.approx(3 * SLOT_BYTES * speeds.read_seconds_per_byte)
        hangs.release()
        at.until(lambda: at.disk.speeds().backlog_seconds == 0)


def test_a_journal_that_cannot_be_written_is_said_once_and_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(tmp_path) as at:
        with monkeypatch.context() as patched:
            patched.setattr("replicas.kvstore.on_disk.journal._write", is_full)
            for path in "abc":
                assert at.write(path).ok
            at.until(lambda: messages(caplog, "the journal"))
        at.write("d")
    assert len(messages(caplog, "the journal")) == 1
    with opened(tmp_path) as at:
        assert sorted(at.disk.restored) == sorted(name(path) for path in "abcd")


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


def keep_files(monkeypatch: pytest.MonkeyPatch, stuck: set[str]) -> None:
    """Let removing the files of these names fail."""
    unlink = layout_folder.unlink_file

    def unlink_or_fail(parent: int, name: str) -> int:
        if name in stuck:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return unlink(parent, name)

    monkeypatch.setattr(layout_folder, "unlink_file", unlink_or_fail)
    monkeypatch.setattr(chunk_files, "unlink_file", unlink_or_fail)


def remove_again(disk: Disk, num_left: int = 0) -> None:
    disk._books._remove_again_at = 0.0
    while disk.num_unremoved > num_left:
        disk.wait(0.01)


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
        remove_again(at.disk)
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
    stuck = {file_of(tmp_path, "a").name}
    keep_files(monkeypatch, stuck)
    with store_on(tmp_path, disk_chunks=10) as at:
        put_all(at, PATHS[:8])
        assert at.disk.bytes_used == 8 * SLOT_BYTES
        assert at.store.clear()
        while at.store._erasures:
            assert at.disk.wait(PATIENCE_SECONDS)
            at.store.poll()
        left = [path for path in PATHS if file_of(tmp_path, path).exists()]
        assert left == ["a"], "all others are gone"
        remove_again(at.disk, 1)
        assert at.disk.bytes_used == SLOT_BYTES
        stuck.clear()
        remove_again(at.disk)
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
        remove_again(at.disk)
        assert at.disk.bytes_used == 0 and not file_of(tmp_path, "a").exists()


def test_a_file_of_another_layout_that_cannot_be_removed_takes_the_room_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, layout=OLD) as at:
        assert at.write_as(OLD, "old").ok and at.write_as(OLD, "older").ok
    keep_files(monkeypatch, {file_of(tmp_path, "old").name})
    with store_on(tmp_path, disk_chunks=5) as at:
        while at.disk.is_comparing:
            at.disk.wait(0.01)
        assert at.disk.other_bytes == 2 * SLOT_BYTES
        put_all(at, PATHS)
        assert at.disk.write_stop is None and at.disk.other_bytes == SLOT_BYTES
        assert [each.key for each in at.store.directory.on_disk()] == [key(path) for path in PATHS[-7:-3]]
        assert at.disk.bytes_used == 5 * SLOT_BYTES
