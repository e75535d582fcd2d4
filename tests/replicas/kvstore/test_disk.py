"""The disk as its caller sees it: what is written is read, removed, restored; what fails is a miss."""

import dataclasses
import os
from pathlib import Path

import pytest

from replicas.kvstore.layout import HEADER_BYTES
from replicas.kvstore.on_disk import disk_keeper
from replicas.kvstore.on_disk.disk import Kind
from replicas.kvstore.on_disk.journal import Journal
from tests.replicas.kvstore.chunk_images import LAYOUT, SLOT_BYTES, fill, header, image
from tests.replicas.kvstore.chunk_names import key, name
from tests.replicas.kvstore.open_disk import file_of, opened


def test_what_is_written_is_read(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as at:
        written = at.write("ab")
        assert written.kind is Kind.WRITE and written.ok and written.key == key("ab") and written.seconds > 0
        read = at.read("ab")
        assert read.kind is Kind.READ and read.ok and read.header == header("ab")
        assert bytes(at.slots[1]) == bytes(image("ab"))
        assert at.disk.bytes_used == SLOT_BYTES


def test_files_are_seen_by_nobody_else(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as at:
        at.write("a")
        for root, folders, files in os.walk(tmp_path / "kv"):
            assert Path(root).stat().st_mode & 0o777 == 0o700
            assert all((Path(root) / each).stat().st_mode & 0o777 == 0o600 for each in files)
            assert not folders or root
        assert file_of(tmp_path / "kv", "a").stat().st_size == SLOT_BYTES


def test_what_was_never_written_is_missing(tmp_path: Path) -> None:
    with opened(tmp_path) as at:
        finished = at.read("a")
        assert not finished.ok and finished.reason == "missing" and finished.header is None
        assert finished.is_gone


def test_a_lease_may_come_before_its_chunk(tmp_path: Path) -> None:
    with opened(tmp_path) as at:
        at.disk.note_lease(key("a"), 2e9)
        at.write("a")
    with opened(tmp_path) as at:
        assert at.disk.restored_leases == {key("a"): (2e9, 0, b"")}


def test_without_a_journal_files_are_found_one_by_one(tmp_path: Path) -> None:
    with opened(tmp_path) as at:
        for path in ("a", "ab", "abc"):
            at.write(path)
    next(tmp_path.glob("v1/*/journal.log")).unlink()
    with opened(tmp_path) as at:
        assert list(at.disk.restored) == []
        at.compared()
        assert at.disk.take_found() == [name("abc"), name("ab"), name("a")]
        assert at.disk.bytes_used == 3 * SLOT_BYTES
        assert all(at.has(path) for path in ("a", "ab", "abc"))
    with opened(tmp_path) as at:
        assert sorted(at.disk.restored) == [name("a"), name("ab"), name("abc")]


def test_a_file_that_is_not_what_its_name_says_is_not_found_but_removed(tmp_path: Path) -> None:
    with opened(tmp_path) as at:
        at.write("a")
    os.rename(file_of(tmp_path, "a"), file_of(tmp_path, "a").with_name(f"{key('a').hex()[:-2]}ff.kv"))
    with opened(tmp_path) as at:
        at.compared()
        assert at.disk.take_found() == []
        lost = at.until(lambda: [each for each in at.finished if each.kind is Kind.LOST])
        assert [each.key for each in lost] == [key("a")]
        assert at.disk.bytes_used == 0 and not list(tmp_path.glob("v1/*/*/*/*.kv"))


def test_ten_thousand_chunks_are_there_at_once_and_those_without_a_file_are_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_keeper, "BUSY_TICK_SECONDS", 0.0)
    with opened(tmp_path) as at:
        at.write("a")
    folder = os.open(next(tmp_path.glob("v1/*")), os.O_RDONLY)
    journal = Journal(folder)
    names = [name("a"), *(name(str(number)) for number in range(9_999))]
    for each in names[1:]:
        journal.added(each, SLOT_BYTES)
    journal.flush()
    journal.close()
    os.close(folder)
    with opened(tmp_path, max_bytes=10_000 * SLOT_BYTES) as at:
        assert list(at.disk.restored) == names and at.has("a")
        assert at.disk.bytes_used > 9_000 * SLOT_BYTES
        at.compared()
        at.until(lambda: at.disk.bytes_used == SLOT_BYTES)
        assert {each.key for each in at.finished if each.kind is Kind.LOST} == {
            each.key for each in names[1:]
        }
    with opened(tmp_path) as at:
        assert list(at.disk.restored) == [name("a")]


@pytest.mark.parametrize("at_byte", [0, 70, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 4999])
def test_a_changed_file_is_a_miss_and_removed(tmp_path: Path, at_byte: int) -> None:
    with opened(tmp_path) as at:
        at.write("a")
        path = file_of(tmp_path, "a")
        changed = bytearray(path.read_bytes())
        changed[at_byte] ^= 0x10
        path.write_bytes(changed)
        assert not at.has("a") and not path.exists() and at.disk.bytes_used == 0
        assert at.read("a").reason == "missing"
        assert at.write("a").ok and at.has("a")


@pytest.mark.parametrize(
    "length", [0, 1, 4095, 4096, 8192, SLOT_BYTES - 1, SLOT_BYTES + 1, SLOT_BYTES + 4096]
)
def test_a_file_of_another_length_is_a_miss_and_removed(tmp_path: Path, length: int) -> None:
    with opened(tmp_path) as at:
        at.write("a")
        os.truncate(file_of(tmp_path, "a"), length)
        assert at.read("a").reason == "WrongLength" and not file_of(tmp_path, "a").exists()


def test_another_chunk_under_its_name_is_a_miss(tmp_path: Path) -> None:
    with opened(tmp_path) as at:
        at.write("a")
        at.write("b")
        os.rename(file_of(tmp_path, "b"), file_of(tmp_path, "a"))
        assert at.read("a").reason == "OtherKey" and not file_of(tmp_path, "a").exists()


def test_links_and_folders_in_place_of_a_file_are_a_miss_and_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as at:
        for path in "ab":
            at.write(path)
        elsewhere = tmp_path / "elsewhere"
        os.rename(file_of(tmp_path / "kv", "a"), elsewhere)
        file_of(tmp_path / "kv", "a").symlink_to(elsewhere)
        folder = file_of(tmp_path / "kv", "b")
        folder.unlink()
        folder.mkdir()
        assert not at.has("a") and not at.has("b")
        at.disk.remove([key("a"), key("b")])
        at.write("c")
        assert elsewhere.exists() and folder.is_dir() and file_of(tmp_path / "kv", "a").is_symlink()


def test_a_slot_that_is_not_aligned_works_as_well(tmp_path: Path) -> None:
    with opened(tmp_path) as at:
        odd = memoryview(bytearray(SLOT_BYTES + 1))[1:]
        assert at.ends(at.disk.write(fill(odd, "a"), odd)).ok
        assert at.ends(at.disk.read(key("a"), odd)).ok and bytes(odd) == bytes(image("a"))


@pytest.mark.parametrize("names_are_in_order_of_age", [True, False])
def test_other_layouts_are_counted_and_make_room(tmp_path: Path, names_are_in_order_of_age: bool) -> None:
    others = (dataclasses.replace(LAYOUT, engine_version=version).digest() for version in ("1", "2"))
    oldest, older = sorted(others, reverse=not names_are_in_order_of_age)
    for each in (oldest, older):
        with opened(tmp_path, layout=each) as at:
            for path in "abc":
                assert at.write_as(each, path).ok
    os.utime(tmp_path / "v1" / oldest.hex() / "journal.log", (1, 1))
    with opened(tmp_path, max_bytes=7 * SLOT_BYTES) as at:
        at.compared()
        assert at.disk.other_bytes == 6 * SLOT_BYTES and list(at.disk.restored) == []
        at.write("a")
        assert at.disk.other_bytes == 6 * SLOT_BYTES
        at.write("b")
        assert at.disk.bytes_used == 7 * SLOT_BYTES
        at.write("c")
        at.write("d")
        assert at.disk.bytes_used == 7 * SLOT_BYTES and at.disk.other_bytes == 3 * SLOT_BYTES
        assert len(list((tmp_path / "v1" / older.hex()).glob("*/*/*.kv"))) == 3
        at.write("e")
        assert not (tmp_path / "v1" / oldest.hex()).exists() and at.disk.bytes_used == 7 * SLOT_BYTES
        for path in "fg":
            assert at.write(path).ok
        assert at.disk.other_bytes == 0 and all(at.has(path) for path in "abcdefg")


def test_the_folder_holds_no_more_than_it_may(tmp_path: Path) -> None:
    with opened(tmp_path, max_bytes=2 * SLOT_BYTES) as at:
        at.write("a")
        at.write("b")
        assert at.disk.write(fill(at.slots[0], "c"), at.slots[0]) is None
        at.disk.remove([key("a")])
        assert at.write("c").ok
        at.until(lambda: at.disk.bytes_used == 2 * SLOT_BYTES)


def test_a_chunk_is_written_again_where_there_is_room_for_no_other(tmp_path: Path) -> None:
    with opened(tmp_path, max_bytes=SLOT_BYTES) as at:
        at.write("a")
        assert at.write("a").ok and at.disk.write(fill(at.slots[0], "b"), at.slots[0]) is None


def test_erasing_leaves_nothing_of_ours_and_everything_of_others(tmp_path: Path) -> None:
    other = dataclasses.replace(LAYOUT, engine_version="other").digest()
    with opened(tmp_path, layout=other) as at:
        at.write_as(other, "a")
    foreign = tmp_path / "v1" / other.hex() / "mine.txt"
    foreign.write_text("mine")
    with opened(tmp_path) as at:
        for path in "abc":
            at.write(path)
        finished = at.ends(at.disk.erase())
        assert finished.kind is Kind.ERASE and finished.ok and at.disk.bytes_used == 0
        assert not list(tmp_path.rglob("*.kv")) and foreign.read_text() == "mine"
        assert not at.has("a")
        assert at.write("b").ok and at.has("b")
    with opened(tmp_path) as at:
        assert list(at.disk.restored) == [name("b")]


def test_what_waits_when_it_is_closed_has_failed_and_nothing_is_taken_any_more(tmp_path: Path) -> None:
    with opened(tmp_path) as at:
        jobs = [
            at.disk.write(fill(slot, path), slot) for path, slot in zip("abcdefgh", at.slots, strict=True)
        ]
        assert at.disk.close(30) and at.disk.close(0) and at.disk.is_off
        ends = [at.ends(job) for job in jobs]
        assert {each.reason for each in ends} <= {"", "closed"}
        assert at.disk.read(key("a"), at.slots[0]) is None and at.disk.erase() is None
        assert at.disk.write(header("a"), at.slots[0]) is None and not at.disk.can_write
        kept = {str(each.key) for each in ends if each.ok}
    with opened(tmp_path) as at:
        assert {str(each.key) for each in at.disk.restored} == kept
