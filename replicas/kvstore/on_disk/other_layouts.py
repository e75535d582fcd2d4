"""OtherLayouts: what earlier engines, versions and settings have left in a folder for KV.

Owns how much that is, and what of it goes first when room is needed: it is never read, but it takes part in
the folder's bound. The layout that was used longest ago goes first, file by file. Also erases a folder.
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
        """As far as they were counted."""

    def count(self) -> Iterator[None]:
        """In steps; what is removed meanwhile may have been counted, and is again when none is left."""
        for version, fd in self._folder.version_folders():
            for name, layout in layouts_in(fd):
                if (version, name) != self._ours:
                    for num_bytes in layout.count():
                        with self._lock:
                            self.num_bytes += num_bytes
                        yield

    def make_room(self, wanted: int) -> int:
        """Remove at least so many bytes, or all that there are. The bytes that this has freed.

        Raises OSError.
        """
        freed = 0
        with self._lock:
            for _, version, name in self._by_age():
                if freed < wanted:
                    freed += self._remove_from(version, name, wanted - freed)
            self.num_bytes = max(0, self.num_bytes - freed) if freed >= wanted else 0
        return freed

    def erase(self) -> int:
        """Remove everything of these layouts. The bytes of their chunks. Raises OSError."""
        return self.make_room(sys.maxsize)

    def _by_age(self) -> list[tuple[float, str, str]]:
        return sorted(
            (layout.last_used_seconds(), version, name)
            for version, fd in self._folder.version_folders()
            for name, layout in layouts_in(fd)
            if (version, name) != self._ours
        )

    def _remove_from(self, version: str, name: str, wanted: int) -> int:
        """Chunks of one layout, up to so many bytes; with the last of them goes its folder."""
        freed = 0
        with contextlib.ExitStack() as opened:
            fd = open_folder(self._folder.fd, version)
            if fd is None:
                return 0
            opened.callback(os.close, fd)
            layout_fd = open_folder(fd, name)
            if layout_fd is None:
                return 0
            opened.callback(os.close, layout_fd)
            layout = LayoutFolder(layout_fd)
            for num_bytes in layout.remove_chunks():
                freed += num_bytes
                if freed >= wanted:
                    return freed
            layout.remove_leftovers()
            unlink_file(layout_fd, JOURNAL)
            remove_empty_folder(fd, name)
            remove_empty_folder(self._folder.fd, version)
        return freed


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
