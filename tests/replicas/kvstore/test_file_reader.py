"""Chunks for other replicas from a disk that the engine has open: whole ones, or none."""

from pathlib import Path

from replicas.kvstore.arena import Arena
from replicas.kvstore.pulling.chunk_reader import ChunkReader
from replicas.kvstore.pulling.file_reader import FileReader
from replicas.kvstore.slot_books import SlotBooks
from tests.replicas.kvstore.chunk_images import LAYOUT, PAYLOAD_BYTES, SLOT_BYTES, image
from tests.replicas.kvstore.chunk_names import key
from tests.replicas.kvstore.open_disk import file_of, opened


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
