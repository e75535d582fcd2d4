"""ChunkReader: reads chunks from an engine's host memory and disk without asking it, from any process.

Owns an open descriptor of that memory. The slot table tells whether a copy is valid: see `slot_table.py`. A
copy gets a file's header and checksum, so that receivers can verify it.

All reads are system calls, which block no other thread of this process.
"""

import os
import sys
import threading
from collections.abc import Collection
from pathlib import Path

from replicas.engine import SharedKv
from replicas.kvstore.layout import HEADER_BYTES, ChunkError, LayoutId, decode_header, encode, file_bytes
from replicas.kvstore.pulling.file_reader import FileReader
from replicas.kvstore.pulling.slot_table import STAMP_BYTES, keys_at, label_at, table_bytes
from replicas.protocol.blocks import HASH_BYTES, BlockHash


class ChunkReader:
    """Thread-safe. Raises OSError if the memory is unavailable or is not as described."""

    def __init__(self, shared: SharedKv, folder: Path | None = None) -> None:
        """`folder` is that of the engine's disk, if it has one."""
        self.layout = LayoutId(shared.layout)
        self._files = None if folder is None else FileReader(folder, self.layout)
        self.image_bytes = file_bytes(shared.payload_bytes)
        self._payload_bytes = shared.payload_bytes
        self._num_slots = shared.num_slots
        self._table_at = shared.num_slots * self.image_bytes
        self._barrier = threading.Lock()
        self._fd = os.open(f"/proc/{shared.pid}/fd/{shared.fd}", os.O_RDONLY | os.O_CLOEXEC)
        if os.fstat(self._fd).st_size != self._table_at + table_bytes(shared.num_slots):
            self.close()
            raise OSError("the engine's memory for KV is not as large as it says")

    def copy(self, key: BlockHash, image: memoryview) -> bool:
        """Copy the chunk's file image into `image_bytes` of `image`. False if neither host memory nor disk
        has it, or it was lost during the copy; the content is then invalid. Raises OSError."""
        return self._copy_from_host(key, image) or (self._files is not None and self._files.copy(key, image))

    def _copy_from_host(self, key: BlockHash, image: memoryview) -> bool:
        slot = _position(self._keys(), key)
        if slot is None:
            return False
        stamp = self._stamp(slot)
        label = bytearray(HEADER_BYTES)
        self._read(memoryview(label), self._table_at + label_at(self._num_slots, slot))
        payload = image[HEADER_BYTES : HEADER_BYTES + self._payload_bytes]
        self._read(payload, slot * self.image_bytes + HEADER_BYTES)
        if stamp % 2 == 0 or self._stamp(slot) != stamp:
            return False
        try:
            header = decode_header(memoryview(label), self.layout, key)
        except ChunkError:
            return False
        encode(header, image)
        return True

    def found(self, keys: Collection[BlockHash]) -> set[BlockHash]:
        """Return those of the chunks that lie in host memory now, by one look. Raises OSError."""
        table = self._keys()
        return {key for key in keys if _position(table, key) is not None}

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _keys(self) -> bytearray:
        """Return the keys of the slots' chunks, one after the other."""
        keys = bytearray(self._num_slots * HASH_BYTES)
        self._read(memoryview(keys), self._table_at + keys_at(self._num_slots))
        return keys

    def _stamp(self, slot: int) -> int:
        stamp = bytearray(STAMP_BYTES)
        with self._barrier:
            self._read(memoryview(stamp), self._table_at + slot * STAMP_BYTES)
        with self._barrier:
            return int.from_bytes(stamp, sys.byteorder)

    def _read(self, into: memoryview, offset: int) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], offset + done)
            if not count:
                raise OSError("the engine's memory for KV is shorter than it was")
            done += count


def _position(keys: bytearray, key: BlockHash) -> int | None:
    at = keys.find(key)
    while at % HASH_BYTES and at >= 0:
        at = keys.find(key, at + 1)
    return at // HASH_BYTES if at >= 0 else None
