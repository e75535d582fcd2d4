"""SlotTable: which chunk each slot of host memory holds, for lock-free readers.

Owns the table behind the slots. The engine's thread writes it. A reader in another thread or process takes no
lock and pins nothing: it finds a key's slot, copies the slot, and checks that its stamp is unchanged.

    stamps    8 bytes each: twice the number of chunks that the slot was taken for, and 1 while it holds one
    keys      16 bytes each, zeros while it holds none
    labels    the fields of a file's header, `HEADER_BYTES` each

A slot loses its chunk here before the first byte of another is written to it, and gets one after the last.
Each change and each look passes a private lock, which never waits but is a memory barrier, so that readers
see this order.
"""

import threading

from replicas.kvstore.layout import HEADER_BYTES, ChunkHeader, encode_label
from replicas.protocol.blocks import HASH_BYTES

STAMP_BYTES = 8
_NO_KEY = bytes(HASH_BYTES)


def table_bytes(num_slots: int) -> int:
    return num_slots * (STAMP_BYTES + HASH_BYTES + HEADER_BYTES)


def keys_at(num_slots: int) -> int:
    """From the beginning of the table."""
    return num_slots * STAMP_BYTES


def label_at(num_slots: int, slot: int) -> int:
    """From the beginning of the table."""
    return num_slots * (STAMP_BYTES + HASH_BYTES) + slot * HEADER_BYTES


class SlotTable:
    """In this memory, which is zero at first and has `table_bytes`."""

    def __init__(self, memory: memoryview, num_slots: int) -> None:
        self._num_slots = num_slots
        self._memory = memory
        # As whole numbers they are written at once: no reader sees half a stamp.
        self._stamps = memory[: keys_at(num_slots)].cast("Q")
        self._barrier = threading.Lock()

    def take(self, slot: int) -> None:
        """Another chunk will be written to the slot."""
        self._stamps[slot] = self._stamps[slot] // 2 * 2 + 2
        with self._barrier:
            self._set_key(slot, _NO_KEY)

    def publish(self, slot: int, header: ChunkHeader) -> None:
        """The slot holds this chunk. It was taken before."""
        assert self._stamps[slot] % 2 == 0, "what holds a chunk was not taken for another"
        label = encode_label(header)
        begin = label_at(self._num_slots, slot)
        self._memory[begin : begin + len(label)] = label
        self._set_key(slot, header.name.key)
        with self._barrier:
            self._stamps[slot] += 1

    def take_all(self) -> None:
        """No slot holds a chunk any more."""
        for slot in range(self._num_slots):
            if self._stamps[slot]:
                self.take(slot)

    def close(self) -> None:
        self._stamps.release()
        self._memory.release()

    def _set_key(self, slot: int, key: bytes) -> None:
        begin = keys_at(self._num_slots) + slot * HASH_BYTES
        self._memory[begin : begin + HASH_BYTES] = key
