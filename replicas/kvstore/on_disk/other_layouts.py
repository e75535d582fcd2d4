"""OtherLayouts: files of earlier engines, versions and settings in a folder for KV.

Owns their amount, and their order of eviction: they are never read, but count in the folder's bound. The
layout unused for longest goes first, file by file. Also erases a folder.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from replicas.kvstore.layout import FORMAT_VERSION, LayoutId
from replicas.kvstore.on_disk.folder import Folder, open_folder
from replicas.kvstore.on_disk.layout_folder import (
    JOURNAL,
    LayoutFolder,
    layouts_in,
    remove_empty_folder,
    unlink_file,
)


class OtherLayouts:
    """All but `ours`. Its methods block, and may be called by several threads."""

    def __init__(self, folder: Folder, ours: LayoutId | None) -> None:
        self._folder = folder
        self._ours = None if ours is None else (f"v{FORMAT_VERSION}", ours.hex())
        self._lock = threading.Lock()
        self.num_bytes = 0
        """Bytes counted so far."""
        self.stuck_bytes = 0
        """Bytes that could not be removed; they are not tried again by this process."""

    def count(self) -> Iterator[None]:
        """Count in steps; files removed meanwhile may be counted, and are corrected when none is left."""
        for version, fd in self._folder.version_folders():
            for name, layout in layouts_in(fd):
                if (version, name) != self._ours:
                    for num_bytes in layout.count():
                        with self._lock:
                            self.num_bytes += num_bytes
                        yield

    def make_room(self, wanted: int) -> int:
        """Remove at least `wanted` bytes, or all that can be; returns the bytes freed."""
        return self._remove(wanted)[0]

    def erase(self) -> int:
        """Remove everything of these layouts. The bytes of their chunks. Raises OSError."""
        freed, failed = self._remove(sys.maxsize)
        if failed is not None:
            raise failed
        return freed

    def _remove(self, wanted: int) -> tuple[int, OSError | None]:
        """Remove bytes; returns those freed, and the error that prevented more."""
        freed, failed = 0, None
        with self._lock:
            for _, version, name in self._by_age():
                if freed < wanted:
                    more, error = self._remove_from(version, name, wanted - freed)
                    freed, failed = freed + more, error or failed
            is_enough = freed >= wanted
            self.num_bytes = max(0, self.num_bytes - freed) if is_enough or failed else 0
            self.stuck_bytes = min(self.stuck_bytes, self.num_bytes) if is_enough else self.num_bytes
        return freed, None if is_enough else failed

    def _by_age(self) -> list[tuple[float, str, str]]:
        return sorted(
            (layout.last_used_seconds(), version, name)
            for version, fd in self._folder.version_folders()
            for name, layout in layouts_in(fd)
            if (version, name) != self._ours
        )

    def _remove_from(self, version: str, name: str, wanted: int) -> tuple[int, OSError | None]:
        """Remove chunks of one layout, up to `wanted` bytes, and its folder with the last."""
        freed = 0
        with contextlib.ExitStack() as opened:
            fd = open_folder(self._folder.fd, version)
            if fd is None:
                return 0, None
            opened.callback(os.close, fd)
            layout_fd = open_folder(fd, name)
            if layout_fd is None:
                return 0, None
            opened.callback(os.close, layout_fd)
            layout = LayoutFolder(layout_fd)
            try:
                for num_bytes in layout.remove_chunks():
                    freed += num_bytes
                    if freed >= wanted:
                        return freed, None
                layout.remove_leftovers()
                unlink_file(layout_fd, JOURNAL)
            except OSError as error:
                return freed, error
            remove_empty_folder(fd, name)
            remove_empty_folder(self._folder.fd, version)
        return freed, None


def erase_folder(path: Path) -> int:
    """Remove everything of ours from a folder that no replica uses; the bytes of KV that were in it.

    Raises SettingsError if a replica uses it, or if it is not ours; OSError if something cannot be removed.
    """
    folder = Folder(path)
    try:
        freed = OtherLayouts(folder, ours=None).erase()
        folder.forget()
        return freed
    finally:
        folder.close()
