"""ChunkFiles: chunks in files, read from and written to slots directly.

Owns atomic writes and verified reads. Its methods block; several threads may call them, but only one per key.

A file is written under another name and renamed. Only `sync` makes it durable: without it, a power cut may
leave anything under the name, which the checksum detects. Bytes bypass the page cache if the file system
allows it; otherwise the cache is told not to keep them.
"""

import contextlib
import errno
import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from replicas.kvstore.layout import (
    ALIGNMENT,
    HEADER_BYTES,
    ChunkHeader,
    LayoutId,
    WrongLength,
    decode,
    decode_header,
    encode,
    file_bytes,
)
from replicas.kvstore.on_disk.folder import Folder, regular_file
from replicas.kvstore.on_disk.layout_folder import (
    LayoutFolder,
    file_name,
    open_layout,
    unlink_file,
)
from replicas.protocol.blocks import BlockHash

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_BOTH = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW

_PROBE_PIECE = 1 << 20


Moved = TypeVar("Moved")


class FileMissing(Exception):
    """The chunk has no file."""


class ChunkFiles:
    """Files of one layout in an open folder. Raises SettingsError."""

    def __init__(self, folder: Folder, layout: LayoutId) -> None:
        self.layout = layout
        self._folder = folder
        self.of_layout: LayoutFolder = open_layout(folder, layout)
        self._temporary = itertools.count(1)
        self.of_layout.remove_leftovers()
        self.is_direct = self._can_be_direct()
        """Whether reads and writes go beside the page cache."""

    def close(self) -> None:
        self.of_layout.close()

    def free_bytes(self) -> int:
        """Free bytes of the file system for unprivileged users."""
        found = os.fstatvfs(self._folder.fd)
        return found.f_bavail * found.f_frsize

    # One chunk.

    def write(self, header: ChunkHeader, slot: memoryview, *, sync: bool = False) -> None:
        """A file of the same key is replaced. Raises OSError; then the file is the one before, or none."""
        image = slot[: encode(header, slot)]
        self._either_way(lambda direct: self._write_image(header.name.key, image, direct=direct, sync=sync))

    def read(self, key: BlockHash, slot: memoryview) -> ChunkHeader:
        """Read the file into the slot and verify it. After a failure the slot's content is invalid.

        Raises FileMissing, ChunkError for bytes that are not this chunk, OSError.
        """
        image = self._either_way(lambda direct: self._read_image(key, slot, direct=direct))
        return decode(image, self.layout, key)

    def read_header(self, key: BlockHash) -> tuple[ChunkHeader, int]:
        """Read the header, and the file's size, which matches it. Raises as `read` does."""
        with self._opened(key) as (fd, size):
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            header = decode_header(memoryview(os.read(fd, HEADER_BYTES)), self.layout, key)
            if file_bytes(header.payload_bytes) != size:
                raise WrongLength(f"the file has {size} bytes, and not what its header says")
            return header, size

    def remove(self, key: BlockHash) -> int:
        """Return the bytes that this has freed. Raises OSError."""
        leaf = self.of_layout.open_leaf(key)
        if leaf is None:
            return 0
        try:
            return unlink_file(leaf, file_name(key))
        finally:
            os.close(leaf)

    def erase(self) -> None:
        """Remove every chunk of this layout. Raises OSError, after all others, if some cannot be removed."""
        for _ in self.of_layout.remove_chunks():
            pass

    def probe(self, num_bytes: int) -> tuple[float, float]:
        """Measure the seconds to write that many bytes to the disk, and to read them. Raises OSError."""
        with mmap.mmap(-1, min(num_bytes, _PROBE_PIECE)) as piece:
            piece.write(os.urandom(len(piece)))
            starts = range(0, num_bytes, len(piece))
            return self._either_way(lambda direct: self._probe(piece, starts, direct=direct))

    def has(self, key: BlockHash) -> bool:
        """Whether it has a file. Raises OSError."""
        try:
            with self._opened(key):
                return True
        except FileMissing:
            return False

    def walk(self) -> Iterator[list[BlockHash]]:
        """Yield the keys of the files that are there, folder by folder."""
        for _, names in self.of_layout.walk():
            yield [BlockHash(bytes.fromhex(name.removesuffix(".kv"))) for name in names]

    # The bytes.

    def _write_image(self, key: BlockHash, image: memoryview, *, direct: bool, sync: bool) -> None:
        with self._temporary_file(direct) as (name, fd):
            done = 0
            while done < len(image):
                done += os.pwrite(fd, image[done:], done)
            if sync:
                os.fdatasync(fd)
            if not direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self._rename(name, key, sync=sync)

    def _probe(self, piece: mmap.mmap, starts: range, *, direct: bool) -> tuple[float, float]:
        with self._temporary_file(direct) as (_, fd):
            began = time.monotonic()
            for at in starts:
                os.pwrite(fd, piece, at)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            written = time.monotonic()
            for at in starts:
                os.preadv(fd, [piece], at)
            return written - began, time.monotonic() - written

    @contextlib.contextmanager
    def _temporary_file(self, direct: bool) -> Iterator[tuple[str, int]]:
        """Open a new file, and remove it in the end unless it was renamed."""
        name = f".tmp-{next(self._temporary)}"
        try:
            fd = os.open(name, _BOTH | os.O_DIRECT * direct, 0o600, dir_fd=self.of_layout.fd)
            try:
                yield name, fd
            finally:
                os.close(fd)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self.of_layout.fd)

    def _rename(self, temporary: str, key: BlockHash, *, sync: bool) -> None:
        leaf = self.of_layout.open_leaf(key, make=True)
        if leaf is None:
            raise NotADirectoryError(errno.ENOTDIR, f"{key.hex()[:2]}/{key.hex()[2:4]} is no folder of ours")
        try:
            os.rename(temporary, file_name(key), src_dir_fd=self.of_layout.fd, dst_dir_fd=leaf)
            if sync:
                try:
                    self.of_layout.sync_leaf(key, leaf)
                except OSError:
                    unlink_file(leaf, file_name(key))
                    raise
        finally:
            os.close(leaf)

    def _read_image(self, key: BlockHash, slot: memoryview, *, direct: bool) -> memoryview:
        """Return the part of the slot that is read."""
        with self._opened(key, direct=direct) as (fd, size):
            if size > len(slot) or size % ALIGNMENT:
                raise WrongLength(f"a file of {size} bytes is none for a slot of {len(slot)}")
            done = 0
            while done < size and (count := os.preadv(fd, [slot[done:size]], done)):
                done += count
            if not direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return slot[:done]

    def _either_way(self, move: Callable[[bool], Moved]) -> Moved:
        """Beside the page cache, or through it where the file system or the slot's place refuses that."""
        if self.is_direct:
            try:
                return move(True)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return move(False)

    @contextlib.contextmanager
    def _opened(self, key: BlockHash, *, direct: bool = False) -> Iterator[tuple[int, int]]:
        """The descriptor of the chunk's file, and its bytes."""
        leaf = self.of_layout.open_leaf(key)
        if leaf is None:
            raise FileMissing
        try:
            if regular_file(leaf, file_name(key)) is None:
                raise FileMissing
            fd = os.open(file_name(key), _READ | os.O_DIRECT * direct, dir_fd=leaf)
        except FileNotFoundError as error:
            raise FileMissing from error
        finally:
            os.close(leaf)
        try:
            yield fd, os.fstat(fd).st_size
        finally:
            os.close(fd)

    def _can_be_direct(self) -> bool:
        """Whether a page can be written and read beside the page cache. On a full disk: it is tried again."""
        try:
            with mmap.mmap(-1, ALIGNMENT) as page, self._temporary_file(True) as (_, fd):
                return os.pwrite(fd, page, 0) == os.preadv(fd, [page], 0) == ALIGNMENT
        except OSError as error:
            return error.errno != errno.EINVAL
