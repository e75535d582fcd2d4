"""Reading an arena, or a disk, from outside: a copy is the chunk's, or none, whatever its owner does."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from replicas.engine import SharedKv
from replicas.kvstore.arena import Arena
from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.layout import HEADER_BYTES, LayoutId, decode
from replicas.kvstore.pulling.chunk_reader import ChunkReader
from replicas.kvstore.pulling.file_reader import FileReader
from replicas.kvstore.slot_books import SlotBooks
from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import UserTag
from tests.replicas.kvstore.chunk_images import LAYOUT, PAYLOAD_BYTES, SLOT_BYTES, image, payload
from tests.replicas.kvstore.chunk_names import key, name
from tests.replicas.kvstore.open_disk import file_of, opened

ID = LAYOUT.digest()
WRITERS = (UserTag(b"anna"), UserTag(b""), UserTag(b"bert"), UserTag(b"c" * 16))


class Owner:
    """An arena, and the books that its engine keeps."""

    def __init__(self, num_slots: int = 4) -> None:
        self.arena = Arena(num_slots, PAYLOAD_BYTES, has_table=True)
        self.books = SlotBooks(self.arena, 128, ID)

    @property
    def shared(self) -> SharedKv:
        assert self.books.shared is not None
        return self.books.shared

    def put(self, slot: int, path: str) -> None:
        self.books.taken(slot, name(path), WRITERS)
        self.arena.payload(slot)[:] = payload(path)
        self.books.filled(slot)


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.arena.close()


@pytest.fixture
def reader(owner: Owner) -> Iterator[ChunkReader]:
    reader = ChunkReader(owner.shared)
    yield reader
    reader.close()


def room(reader: ChunkReader) -> memoryview:
    return memoryview(bytearray(reader.image_bytes))


def test_a_copy_is_the_file_of_the_chunk(owner: Owner, reader: ChunkReader) -> None:
    owner.put(1, "a")
    owner.put(3, "ab")
    for path in ("ab", "a"):
        copied = room(reader)
        assert reader.copy(key(path), copied)
        header = decode(copied, ID, key(path))
        assert (header.name, header.writers, header.num_tokens) == (name(path), WRITERS, 128)
        assert bytes(copied[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES]) == payload(path)


def test_what_is_not_there_is_not_copied(owner: Owner, reader: ChunkReader) -> None:
    assert not reader.copy(key("a"), room(reader))
    owner.books.taken(0, name("a"), WRITERS)
    assert not reader.copy(key("a"), room(reader)), "it is being filled"
    owner.books.filled(0)
    assert reader.copy(key("a"), room(reader))
    owner.put(0, "b")
    assert not reader.copy(key("a"), room(reader)), "its slot went to another"
    assert reader.copy(key("b"), room(reader))
    owner.books.cleared()
    assert not reader.copy(key("b"), room(reader)), "everything was forgotten"


def test_a_key_that_lies_across_two_others_is_none(owner: Owner, reader: ChunkReader) -> None:
    every = bytes(range(1, 33))
    for slot, own in enumerate((every[:16], every[16:])):
        owner.books.taken(slot, ChunkName(BlockHash(own), None, 3), WRITERS)
        owner.books.filled(slot)
    assert not reader.copy(BlockHash(every[8:24]), room(reader))
    owner.books.taken(3, ChunkName(BlockHash(every[8:24]), None, 3), WRITERS)
    owner.books.filled(3)
    assert reader.copy(BlockHash(every[8:24]), room(reader))


@pytest.mark.parametrize("is_the_same_chunk", [False, True])
def test_a_slot_that_gets_another_chunk_while_it_is_copied_is_no_copy(
    owner: Owner, reader: ChunkReader, monkeypatch: pytest.MonkeyPatch, is_the_same_chunk: bool
) -> None:
    """Half of the payload is read; then the owner takes the slot and writes."""
    owner.put(2, "a")
    real, has_happened = os.preadv, False

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal has_happened
        (buffer,) = buffers
        if len(buffer) == PAYLOAD_BYTES and not has_happened:
            has_happened = True
            done = real(fd, [buffer[: PAYLOAD_BYTES // 2]], offset)
            owner.put(2, "a" if is_the_same_chunk else "b")
            return done
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert not reader.copy(key("a"), room(reader))
    assert has_happened
    assert reader.copy(key("a"), room(reader)) is is_the_same_chunk


def test_kv_of_another_layout_is_not_copied(owner: Owner) -> None:
    owner.put(0, "a")
    other = ChunkReader(replace(owner.shared, layout=LayoutId(bytes(16))))
    assert not other.copy(key("a"), memoryview(bytearray(other.image_bytes)))
    other.close()


def test_memory_that_is_not_as_large_as_it_says_is_refused(owner: Owner) -> None:
    with pytest.raises(OSError, match="not as large"):
        ChunkReader(replace(owner.shared, num_slots=5))
    with pytest.raises(OSError):
        ChunkReader(replace(owner.shared, fd=10_000))


def test_another_process_reads_it(owner: Owner) -> None:
    owner.put(0, "a")
    code = f"""
from replicas.engine import SharedKv
from replicas.kvstore.pulling.chunk_reader import ChunkReader
reader = ChunkReader({owner.shared!r})
image = memoryview(bytearray(reader.image_bytes))
assert reader.copy({key("a")!r}, image)
import sys; sys.stdout.buffer.write(image)
"""
    copied = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    assert decode(memoryview(copied), ID, key("a")).name == name("a")


def test_without_a_table_nothing_is_shared() -> None:
    arena = Arena(2, PAYLOAD_BYTES)
    assert os.fstat(arena.fd).st_size == 2 * arena.slot_bytes
    books = SlotBooks(arena, 128, ID)
    books.taken(0, name("a"), WRITERS)
    books.filled(0)
    assert books.shared is None
    arena.close()


def test_what_lies_on_disk_alone_is_read_from_there(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as at:
        at.write("ab")
        reader = FileReader(tmp_path / "kv", LAYOUT.digest())
        found = memoryview(bytearray(SLOT_BYTES))
        assert reader.copy(key("ab"), found) and bytes(found) == bytes(image("ab"))
        assert not reader.copy(key("a"), found)
        file = file_of(tmp_path / "kv", "ab")
        damaged = bytearray(file.read_bytes())
        damaged[-PAYLOAD_BYTES] ^= 1
        file.write_bytes(damaged)
        assert not reader.copy(key("ab"), found)
        file.write_bytes(damaged[:5000])
        assert not reader.copy(key("ab"), found)


def test_what_host_memory_has_not_comes_from_the_disk(tmp_path: Path) -> None:
    arena = Arena(2, PAYLOAD_BYTES, has_table=True)
    shared = SlotBooks(arena, 128, LAYOUT.digest()).shared
    assert shared is not None
    found = memoryview(bytearray(SLOT_BYTES))
    with opened(tmp_path / "kv") as at:
        at.write("ab")
        with_disk, without = ChunkReader(shared, tmp_path / "kv"), ChunkReader(shared)
        assert with_disk.copy(key("ab"), found) and bytes(found) == bytes(image("ab"))
        assert not without.copy(key("ab"), found)
        with_disk.close()
        without.close()
    arena.close()
