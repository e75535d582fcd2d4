"""LayoutFolder: the files of one layout in a folder for KV, by their names.

Owns a chunk's path (`ab/cd/<key>.kv`), our other files beside it, and walking over all. It opens no chunk.
Walks are iterators, so that their caller sets the pace; files that vanish or appear meanwhile may be seen or
not.
"""

import contextlib
import os
import re
from collections.abc import Iterator

from replicas.kvstore.layout import FORMAT_VERSION, LayoutId
from replicas.kvstore.on_disk.folder import TEMPORARY, Folder, names_in, open_folder, regular_file
from replicas.process.settings import SettingsError
from replicas.protocol.blocks import BlockHash

JOURNAL = "journal.log"

_TWO_DIGITS = re.compile(r"[0-9a-f]{2}")
_CHUNK = re.compile(r"[0-9a-f]{32}\.kv")
_LAYOUT = re.compile(r"[0-9a-f]{32}")


def file_name(key: BlockHash) -> str:
    return f"{key.hex()}.kv"


class LayoutFolder:
    """`fd` is the layout's folder, and is closed with it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        os.close(self.fd)

    def open_leaf(self, key: BlockHash, *, make: bool = False) -> int | None:
        """Return the descriptor of the folder that a chunk's file is in, to be closed by the caller. None if
        it is not there, or is not ours alone."""
        digits = key.hex()
        upper = open_folder(self.fd, digits[:2], make=make)
        if upper is None:
            return None
        try:
            return open_folder(upper, digits[2:4], make=make)
        finally:
            os.close(upper)

    def sync_leaf(self, key: BlockHash, leaf: int) -> None:
        """Make the contents of the chunk's folders durable."""
        os.fsync(leaf)
        upper = open_folder(self.fd, key.hex()[:2])
        if upper is not None:
            try:
                os.fsync(upper)
            finally:
                os.close(upper)
        os.fsync(self.fd)

    def walk(self, *, prune: bool = False) -> Iterator[tuple[int, list[str]]]:
        """For each folder of chunks its descriptor, closed by the next step, and names of chunks in it.

        With `prune`, folders that are empty then go.
        """
        for upper_name, upper in _folders_in(self.fd, prune=prune):
            for lower_name, leaf in _folders_in(upper, prune=prune):
                prefix = upper_name + lower_name
                yield (
                    leaf,
                    [name for name in names_in(leaf) if name.startswith(prefix) and _CHUNK.fullmatch(name)],
                )

    def count(self) -> Iterator[int]:
        """Yield the bytes of its chunks, folder by folder."""
        for leaf, names in self.walk():
            yield sum(found.st_size for name in names if (found := regular_file(leaf, name)) is not None)

    def remove_leftovers(self) -> None:
        """Files that a write has not come to rename."""
        for name in names_in(self.fd):
            if TEMPORARY.fullmatch(name):
                unlink_file(self.fd, name)

    def remove_chunks(self) -> Iterator[int]:
        """Remove one chunk after the other; the bytes of each. Raises OSError at the end, if some cannot be
        removed.
        """
        failed: OSError | None = None
        for leaf, names in self.walk(prune=True):
            for name in names:
                try:
                    num_bytes = unlink_file(leaf, name)
                except OSError as error:
                    failed = error
                else:
                    yield num_bytes
        if failed is not None:
            raise failed

    def last_used_seconds(self) -> float:
        """Since 1970: when its journal was written to last, or else its folder."""
        journal = regular_file(self.fd, JOURNAL)
        return (journal or os.fstat(self.fd)).st_mtime


def open_layout(folder: Folder, layout: LayoutId) -> LayoutFolder:
    """Made where it is not there. Raises SettingsError."""
    fd = None
    version = open_folder(folder.fd, f"v{FORMAT_VERSION}", make=True)
    if version is not None:
        try:
            fd = open_folder(version, layout.hex(), make=True)
        finally:
            os.close(version)
    if fd is None:
        raise SettingsError(
            f"in the KV folder {folder.path}, v{FORMAT_VERSION}/{layout.hex()} is no folder that can be used;"
            " both must be folders, no links, of the user that the replica runs as, with mode 0700"
        )
    return LayoutFolder(fd)


def layouts_in(version: int) -> Iterator[tuple[str, LayoutFolder]]:
    """Name and folder of each layout in a version's folder; the folder is closed by the next."""
    for name in names_in(version):
        if _LAYOUT.fullmatch(name) and (fd := open_folder(version, name)) is not None:
            folder = LayoutFolder(fd)
            try:
                yield name, folder
            finally:
                folder.close()


def unlink_file(parent: int, name: str) -> int:
    """Remove a regular file. Returns its bytes, 0 if there was none."""
    found = regular_file(parent, name)
    if found is None:
        return 0
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return 0
    return found.st_size


def remove_empty_folder(parent: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=parent)


def _folders_in(parent: int, *, prune: bool) -> Iterator[tuple[str, int]]:
    """Name and descriptor of each, which is closed by the next step."""
    for name in names_in(parent):
        if _TWO_DIGITS.fullmatch(name) and (fd := open_folder(parent, name)) is not None:
            try:
                yield name, fd
            finally:
                os.close(fd)
            if prune:
                remove_empty_folder(parent, name)
