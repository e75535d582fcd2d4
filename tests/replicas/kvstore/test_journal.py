"""The journal alone: what it says after any end, and after anything was done to its bytes."""

import errno
import os
import random
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.kvstore.chunk import ChunkName, NotedLease
from replicas.kvstore.on_disk import journal as journal_module
from replicas.kvstore.on_disk.journal import MIN_DEAD_RECORDS, RECORD_BYTES, Journal
from replicas.kvstore.on_disk.layout_folder import JOURNAL
from replicas.protocol.blocks import BlockHash
from tests.replicas.kvstore.chunk_names import key, name


@contextmanager
def journal_in(folder: Path) -> Iterator[Journal]:
    fd = os.open(folder, os.O_RDONLY)
    journal = Journal(fd)
    try:
        yield journal
    finally:
        journal.close()
        os.close(fd)


def write_some(folder: Path) -> bytes:
    """A small journal with a record of every kind; its bytes."""
    with journal_in(folder) as journal:
        for path in ("a", "ab", "abc", "z"):
            journal.added(name(path), 4096 * len(path))
        journal.leased(key("ab"), NotedLease(1234.5))
        journal.leased(key("z"), NotedLease(99.0))
        journal.used([key("ab"), key("a")])
        journal.removed(key("z"))
        journal.flush()
    return (folder / JOURNAL).read_bytes()


def state(folder: Path) -> tuple[list[ChunkName], dict[BlockHash, NotedLease], dict[BlockHash, int]]:
    with journal_in(folder) as journal:
        return journal.names(), dict(journal.leases), journal.sizes()


def test_the_log_has_the_bytes_that_earlier_versions_wrote(tmp_path: Path) -> None:
    assert zlib.crc32(write_some(tmp_path)) == 0xC98A2C37


def replayed(records: bytes) -> list[ChunkName]:
    """What whole records say, by another way: one pass with a list."""
    names: list[ChunkName] = []
    for at in range(0, len(records), RECORD_BYTES):
        crc, kind, _, key_, parent, last_block = struct.unpack_from("<IBBxx16s16sQ", records, at)
        if crc != zlib.crc32(records[at + 4 : at + RECORD_BYTES]):
            continue
        old = [each for each in names if each.key == key_]
        if kind == journal_module.LEASED:
            continue
        names = [each for each in names if each.key != key_]
        if kind & 0x7F == journal_module.ADDED:
            names.append(ChunkName(BlockHash(key_), BlockHash(parent) if kind & 0x80 else None, last_block))
        elif kind == journal_module.USED:
            names += old
    return names


def test_a_log_cut_at_any_byte_says_what_its_whole_records_say(tmp_path: Path) -> None:
    whole = write_some(tmp_path)
    for length in range(len(whole) + 1):
        (tmp_path / JOURNAL).write_bytes(whole[:length])
        assert state(tmp_path)[0] == replayed(whole[: length // RECORD_BYTES * RECORD_BYTES])


def test_a_flipped_bit_in_any_byte_costs_one_record(tmp_path: Path) -> None:
    whole = write_some(tmp_path)
    for byte in range(len(whole)):
        changed = bytearray(whole)
        changed[byte] ^= 1 << byte % 8
        at = byte // RECORD_BYTES * RECORD_BYTES
        (tmp_path / JOURNAL).write_bytes(changed)
        assert state(tmp_path)[0] == replayed(whole[:at] + whole[at + RECORD_BYTES :])


@given(st.data())
def test_whatever_the_log_holds_is_no_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    bodies = data.draw(st.lists(st.binary(min_size=60, max_size=60), max_size=8))
    records = [struct.pack("<I", zlib.crc32(body)) + body for body in bodies]
    (folder / JOURNAL).write_bytes(b"".join(records) + data.draw(st.binary(max_size=100)))
    names, leases, sizes = state(folder)
    with journal_in(folder) as journal:
        journal.added(name("a"), 1)
        journal.flush()
    assert state(folder)[0] == [*(each for each in names if each.key != key("a")), name("a")]
    assert state(folder)[1] == leases and len(sizes) == len(names)


def test_a_log_that_is_too_long_is_read_up_to_its_bound_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_READ_BYTES", RECORD_BYTES)
    monkeypatch.setattr(journal_module, "MAX_LOG_BYTES", 3 * RECORD_BYTES)
    whole = write_some(tmp_path)
    with journal_in(tmp_path) as journal:
        assert journal.names() == [name("a"), name("ab"), name("abc")]
        journal.flush()
    assert 0 < (tmp_path / JOURNAL).stat().st_size < len(whole)


def test_a_log_with_a_bad_record_is_written_anew(tmp_path: Path) -> None:
    changed = bytearray(write_some(tmp_path))
    changed[RECORD_BYTES] ^= 1
    (tmp_path / JOURNAL).write_bytes(changed)
    with journal_in(tmp_path) as journal:
        assert journal.num_bad_records == 1
        before = journal.names()
        journal.flush()
    with journal_in(tmp_path) as journal:
        assert journal.num_bad_records == 0 and journal.names() == before


def test_what_was_not_flushed_is_not_there(tmp_path: Path) -> None:
    with journal_in(tmp_path) as journal:
        journal.added(name("a"), 1)
        journal.flush()
        journal.added(name("b"), 1)
    assert state(tmp_path)[0] == [name("a")]


def test_the_log_stays_in_proportion_to_what_is_there(tmp_path: Path) -> None:
    with journal_in(tmp_path) as journal:
        for number in range(100):
            journal.added(name(str(number)), 10)
        journal.leased(key("5"), NotedLease(7.0))
        for number in range(4 * MIN_DEAD_RECORDS):
            journal.used([key(str(number % 100))])
            if number % 1000 == 0:
                journal.flush()
                records = (tmp_path / JOURNAL).stat().st_size // RECORD_BYTES
                assert records <= MIN_DEAD_RECORDS + 1101
        journal.flush()
        expected = journal.names()
    names, leases, _ = state(tmp_path)
    assert names == expected and leases == {key("5"): NotedLease(7.0)}
    assert sorted(each.name for each in tmp_path.iterdir()) == [JOURNAL]


def test_writing_that_fails_is_made_good_when_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def short_then_full(fd: int, data: memoryview, at: int) -> int:
        if len(data) > 70:
            return real(fd, bytes(data[:70]), at)
        raise OSError(errno.ENOSPC, "no space")

    with journal_in(tmp_path) as journal:
        journal.added(name("a"), 1)
        journal.flush()
        with monkeypatch.context() as patched:
            patched.setattr(journal_module.os, "pwrite", short_then_full)
            for path in ("b", "c", "d"):
                journal.added(name(path), 1)
                with pytest.raises(OSError, match="no space"):
                    journal.flush()
            assert sorted(each.name for each in tmp_path.iterdir()) == [JOURNAL]
        journal.removed(key("b"))
        journal.flush()
    assert state(tmp_path)[0] == [name("a"), name("c"), name("d")]


def test_a_full_disk_in_the_middle_of_a_record_loses_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    with journal_in(tmp_path) as journal:
        journal.added(name("a"), 1)
        journal.flush()
        monkeypatch.setattr(journal_module.os, "pwrite", lambda fd, data, at: real(fd, bytes(data[:70]), at))
        journal.added(name("b"), 1)
        journal.added(name("c"), 1)
        monkeypatch.setattr(
            journal_module.os, "pwrite", lambda fd, data, at: real(fd, bytes(data[:30]), at) and _fail()
        )
        with pytest.raises(OSError, match="full"):
            journal.flush()
    monkeypatch.undo()
    assert state(tmp_path)[0] == [name("a")]


def _fail() -> int:
    raise OSError(errno.ENOSPC, "full")


def test_a_lease_of_a_chunk_to_come_is_kept_and_one_of_a_chunk_that_never_came_is_not(tmp_path: Path) -> None:
    with journal_in(tmp_path) as journal:
        journal.leased(key("a"), NotedLease(5.0))
        journal.leased(key("never"), NotedLease(6.0))
        journal.added(name("a"), 1)
        journal.flush()
    assert state(tmp_path)[1] == {key("a"): NotedLease(5.0)}


def test_something_else_in_its_place_is_an_error_that_the_folder_reports(tmp_path: Path) -> None:
    for make in (Path.mkdir, lambda path: path.symlink_to("elsewhere"), os.mkfifo):
        path = tmp_path / JOURNAL
        make(path)
        with pytest.raises(OSError), journal_in(tmp_path):
            pass
        path.rmdir() if path.is_dir() else path.unlink()


def test_any_history_is_read_after_a_start(tmp_path: Path) -> None:
    drawn = random.Random(7)
    paths = [str(number) for number in range(30)]
    sizes: dict[str, int] = {}
    leases: dict[BlockHash, NotedLease] = {}
    for life in range(20):
        with journal_in(tmp_path) as journal:
            if life == 10:
                journal.clear()
                sizes, leases = {}, {}
            for _ in range(50):
                path = drawn.choice(paths)
                action = drawn.randrange(5)
                if action < 2:
                    sizes.pop(path, None)
                    sizes[path] = drawn.randrange(9000)
                    journal.added(name(path), sizes[path])
                elif action == 2:
                    journal.removed(key(path))
                    sizes.pop(path, None)
                    leases.pop(key(path), None)
                elif action == 3:
                    used = drawn.sample(paths, 5)
                    journal.used([key(each) for each in used])
                    for each in used:
                        sizes |= {each: sizes.pop(each)} if each in sizes else {}
                elif path in sizes:
                    lease = NotedLease(
                        drawn.choice([0.0, 5.0, 1e9]), drawn.choice([0, 60]), drawn.choice([b"", b"us"])
                    )
                    journal.leased(key(path), lease)
                    leases[key(path)] = lease
                    leases = {each: lease for each, lease in leases.items() if lease.until}
            journal.flush()
        expected = [name(path) for path in sizes]
        assert state(tmp_path) == (expected, leases, {key(path): size for path, size in sizes.items()})
