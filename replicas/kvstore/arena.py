"""Arena: the host memory for KV below the device, cut into slots of one size.

Owns that memory. Does not know the contents of slots.

It is an unnamed file (memfd), so that another process can receive it, and nothing remains when the process
dies. A slot is the image of a chunk's file on disk: a header, then the payload, both whole pages. Behind the
slots there may be a table of their contents, for readers in other processes.
"""

import mmap
import os
from pathlib import Path

from replicas.kvstore.layout import HEADER_BYTES, file_bytes
from replicas.kvstore.pulling.slot_table import SlotTable, table_bytes
from replicas.process.settings import SettingsError

_CGROUP_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


class Arena:
    """`num_slots` slots, each with a payload of `payload_bytes`. Pages are taken when they are first written.

    Raises SettingsError if the machine has not as much memory available now.
    """

    def __init__(self, num_slots: int, payload_bytes: int, *, has_table: bool = False) -> None:
        if num_slots < 1 or payload_bytes < 1:
            raise ValueError(f"an arena has slots and payloads, not {num_slots} of {payload_bytes} bytes")
        self.num_slots = num_slots
        self.payload_bytes = payload_bytes
        self.slot_bytes = file_bytes(payload_bytes)
        of_slots = num_slots * self.slot_bytes
        total = of_slots + (table_bytes(num_slots) if has_table else 0)
        available = available_bytes()
        if available is not None and total > available:
            raise SettingsError(
                f"host memory for KV of {total:,} bytes is more than the {available:,} that are available"
                " here: lower host_kv_bytes"
            )
        self.fd = os.memfd_create("kvasir-kv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, total)
            self.memory = mmap.mmap(self.fd, total)
        except BaseException:
            os.close(self.fd)
            raise
        self._view = memoryview(self.memory)
        self.table = SlotTable(self._view[of_slots:], num_slots) if has_table else None

    def slot(self, index: int) -> memoryview:
        """Header and payload."""
        assert 0 <= index < self.num_slots
        return self._view[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def payload(self, index: int) -> memoryview:
        return self.slot(index)[HEADER_BYTES : HEADER_BYTES + self.payload_bytes]

    def close(self) -> None:
        """The memory goes when the last view of it has gone. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            if self.table is not None:
                self.table.close()
            self._view.release()


def available_bytes() -> int | None:
    """Memory that this process may still take, by the machine and by its control group; None if unknown."""
    limits = [each for each in (_machine_bytes(), *map(_group_bytes, _CGROUP_LIMITS)) if each is not None]
    return min(limits, default=None)


def _machine_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _group_bytes(files: tuple[Path, Path]) -> int | None:
    try:
        limit, used = (file.read_text().strip() for file in files)
    except OSError:
        return None
    return max(0, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else None
