"""Disk: KV in files, read and written by threads while the engine goes on.

Owns the folder while it is open, the threads, the queue before them, and what is known of the disk's speed
and health. It decides nothing about which chunk lies where: that is the directory's. Its caller is one
thread, the engine's, and no method but `wait` and `close` lets it wait.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from replicas.kvstore.directory import ChunkName
from replicas.kvstore.layout import ChunkHeader, LayoutId
from replicas.protocol.blocks import BlockHash


class Kind(enum.Enum):
    READ = "read"
    WRITE = "write"
    OVERDUE = "overdue"
    """A read has not ended within its deadline: it failed, and its slot may still be written to."""
    RETURNED = "returned"
    """An overdue read has ended: nothing writes to its slot any more."""
    ERASE = "erase"


@dataclass(frozen=True, slots=True)
class Finished:
    """What has become of a job. Every job ends with one READ, WRITE or ERASE; a read that is overdue ends
    with OVERDUE, then RETURNED.

    `header` is that of a read that is `ok`: its slot holds KV whose checksum is right. `seconds` is the time
    it took, its wait in the queue left out. `reason` is one word for a metric where it is not `ok`.
    """

    kind: Kind
    job: int
    key: BlockHash | None
    ok: bool
    header: ChunkHeader | None = None
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Bytes and seconds. `slot_bytes` is a slot's, and so the most that a file has."""

    folder: Path
    layout: LayoutId
    slot_bytes: int
    max_bytes: int
    reserve_bytes: int = 1 << 30
    """Of the file system's free space: what is left to others."""
    num_threads: int = 4
    max_queue: int = 1024
    """Reads and writes that wait for a thread."""
    read_deadline_seconds: float = 10.0
    """From when a read is asked for: beyond, it has failed."""
    hang_seconds: float = 30.0
    """A thread that is at one job for longer is replaced, as many times as there are threads."""
    probe_bytes: int = 64 << 20
    """Written and read once at the start, for the first speeds; less on a small disk, 0 for none."""


@dataclass(frozen=True, slots=True)
class DiskSpeeds:
    """None for what was not measured yet: then nothing should wait for the disk."""

    read_seconds_per_byte: float | None
    write_seconds_per_byte: float | None
    backlog_seconds: float
    """Until a read that is asked for now would begin."""


class Disk:
    """Opens the folder. Raises SettingsError, with a sentence that names it, if it cannot be used."""

    def __init__(self, options: DiskOptions) -> None:
        raise NotImplementedError

    # What an earlier life has left.

    @property
    def restored(self) -> Sequence[ChunkName]:
        """What the journal said was there, oldest use first."""
        raise NotImplementedError

    @property
    def restored_leases(self) -> Mapping[BlockHash, float]:
        """Ends of leases of what was restored, in seconds since 1970, where they were noted."""
        raise NotImplementedError

    def take_found(self) -> list[ChunkName]:
        """Files that the journal did not know, found since the last call; the ends of chains first.

        The caller adopts them or has them removed.
        """
        raise NotImplementedError

    # Jobs. Each gets a number, which its Finished has.

    def read(self, key: BlockHash, slot: memoryview) -> int | None:
        """Read the chunk's file into the slot: the whole image. None if too many wait already, or if the disk
        is off. The slot is the disk's until the read has ended, and after OVERDUE until RETURNED.
        """
        raise NotImplementedError

    def write(self, header: ChunkHeader, slot: memoryview, *, sync: bool = False) -> int | None:
        """Write the slot to a file, header filled in; with `sync` it has survived a power cut once it is
        finished. None if too many wait already, or unless `can_write`. The payload must stay as it is
        until the write has ended.
        """
        raise NotImplementedError

    def remove(self, keys: Iterable[BlockHash]) -> None:
        """After what was asked for before about these keys, and before what is asked for after. Never
        finished aloud.
        """
        raise NotImplementedError

    def erase(self) -> int:
        """Remove every file of ours, whatever its layout, once what runs has ended; what waits has failed.
        A job: it ends with ERASE.
        """
        raise NotImplementedError

    # What the journal keeps.

    def note_use(self, keys: Iterable[BlockHash]) -> None:
        """They were used, in this order: the last is the newest. Unknown ones are ignored."""
        raise NotImplementedError

    def note_lease(self, key: BlockHash, until: float) -> None:
        """Seconds since 1970; 0 for none any more."""
        raise NotImplementedError

    # What happens.

    def take_finished(self) -> list[Finished]:
        raise NotImplementedError

    def wait(self, seconds: float) -> bool:
        """Until something has finished, at most so long. Whether something has."""
        raise NotImplementedError

    @property
    def can_write(self) -> bool:
        """There is room, no write has failed lately, and the queue is not full."""
        raise NotImplementedError

    @property
    def is_off(self) -> bool:
        """Closed, or broken for good: nothing is read or written any more."""
        raise NotImplementedError

    @property
    def bytes_used(self) -> int:
        """Of all files of ours, other layouts' too as far as they were counted yet."""
        raise NotImplementedError

    def speeds(self) -> DiskSpeeds:
        raise NotImplementedError

    def close(self, seconds: float) -> bool:
        """End what runs, fail what waits, sync the journal, leave the folder. False if that was not done in
        time: then threads still hang, and the folder stays ours until the process ends.
        """
        raise NotImplementedError
