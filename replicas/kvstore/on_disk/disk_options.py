"""DiskOptions: size and deadlines of a disk for KV, and its reported speeds."""

from dataclasses import dataclass
from pathlib import Path

from replicas.kvstore.layout import LayoutId


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Bytes and seconds. `slot_bytes` is a slot's, and so the most that a file has."""

    folder: Path
    layout: LayoutId
    slot_bytes: int
    max_bytes: int
    reserve_bytes: int = 1 << 30
    """Free space of the file system left to others."""
    num_threads: int = 4
    max_queue: int = 1024
    """Reads and writes that wait for a thread."""
    read_deadline_seconds: float = 10.0
    """From when a read is asked for: beyond, it has failed."""
    hang_seconds: float = 30.0
    """A thread that is at one job for longer is replaced, as many times as there are threads."""
    probe_bytes: int = 64 << 20
    """Written and read once at the start, for the first speeds; less on a small disk, 0 for none."""
    sync_seconds: float = 1.0
    """Between two writes of the journal."""


@dataclass(frozen=True, slots=True)
class DiskSpeeds:
    """None if not measured yet: then nothing should wait for the disk."""

    read_seconds_per_byte: float | None
    write_seconds_per_byte: float | None
    backlog_seconds: float
    """Until a read that is asked for now would begin."""
