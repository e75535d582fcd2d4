"""A disk in a folder of a test, with slots, closed at its end."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from replicas.kvstore.layout import HEADER_BYTES, LayoutId
from replicas.kvstore.on_disk.disk import Disk, DiskOptions, Finished, Kind
from tests.replicas.kvstore.chunk_images import LAYOUT, PAYLOAD_BYTES, SLOT_BYTES, fill, payload, slots
from tests.replicas.kvstore.chunk_names import key

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
"""How long a test waits for what should come at once."""


def options(folder: Path, **changes: Any) -> DiskOptions:
    defaults: dict[str, Any] = {
        "folder": folder,
        "layout": LAYOUT.digest(),
        "slot_bytes": SLOT_BYTES,
        "max_bytes": 1000 * SLOT_BYTES,
        "reserve_bytes": 0,
        "probe_bytes": 0,
        "sync_seconds": 0.05,
        "read_deadline_seconds": PATIENCE_SECONDS,
    }
    return DiskOptions(**defaults | changes)


class OpenDisk:
    """A disk, some slots, and everything that has finished."""

    def __init__(self, disk: Disk, folder: Path, num_slots: int = 8) -> None:
        self.disk = disk
        self.folder = folder
        self.slots = slots(num_slots)
        self.finished: list[Finished] = []

    def ends(self, job: int | None, kind: Kind | None = None) -> Finished:
        """How the job has ended."""
        assert job is not None, "the disk takes the job"
        found = self.until(
            lambda: [each for each in self.finished if each.job == job and kind in (None, each.kind)]
        )
        return found[0]

    def until(self, look: Callable[[], T]) -> T:
        """What `look` gives, once it is something."""
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            self.finished += self.disk.take_finished()
            found = look()
            if found:
                return found
            assert time.monotonic() < end, "nothing comes"
            self.disk.wait(0.02)

    def write(self, path: str, slot: int = 0, **arguments: Any) -> Finished:
        return self.ends(self.disk.write(fill(self.slots[slot], path), self.slots[slot], **arguments))

    def write_as(self, layout: LayoutId, path: str) -> Finished:
        """As an engine of that layout would."""
        header = dataclasses.replace(fill(self.slots[0], path), layout=layout)
        return self.ends(self.disk.write(header, self.slots[0]))

    def read(self, path: str, slot: int = 1) -> Finished:
        self.slots[slot][:] = bytes(len(self.slots[slot]))
        return self.ends(self.disk.read(key(path), self.slots[slot]))

    def has(self, path: str, slot: int = 1) -> bool:
        """Whether the chunk is read, and right if it is."""
        finished = self.read(path, slot)
        if finished.ok:
            assert finished.header is not None and finished.header.name.key == key(path)
            read = bytes(self.slots[slot][HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES])
            assert read == payload(path), "a chunk that is read is what was written"
        return finished.ok

    def compared(self) -> None:
        self.until(lambda: not self.disk.is_comparing)

    def removed(self, *paths: str) -> None:
        self.disk.remove(key(path) for path in paths)
        self.until(lambda: not any(file_of(self.folder, path).exists() for path in paths))


@contextmanager
def opened(folder: Path, clock: Callable[[], float] = time.monotonic, **changes: Any) -> Iterator[OpenDisk]:
    disk = Disk(options(folder, **changes), clock)
    try:
        yield OpenDisk(disk, folder)
    finally:
        assert disk.close(PATIENCE_SECONDS)


def file_of(folder: Path, path: str) -> Path:
    digits = key(path).hex()
    return folder / "v1" / LAYOUT.digest().hex() / digits[:2] / digits[2:4] / f"{digits}.kv"
