"""Journal: a folder's chunks in LRU order, so that a start reads megabytes, not a tree.

Owns `journal.log` and its table; belongs to one thread. It is a hint: an unknown file is found by walking,
and a record without a file when the file is read.

The log is records of 64 bytes, little-endian, each with a CRC-32 of the rest::

    0   crc        4   kind, version     8   key
    24  parent     40  last block        48  lease end, seconds since 1970
    56  bytes of the file, or how many seconds after its last use a lease ends

In the record of a lease, the tenant's tag replaces the parent, and its length the last block.

Appends are buffered until `flush`. A torn or changed record is skipped; the next begins 64 bytes on. When
more than half is stale, or a write has failed, the log is rewritten beside the old one, in LRU order, and
renamed.
"""

import contextlib
import itertools
import os
import struct
import zlib
from collections.abc import Iterable

from replicas.kvstore.chunk import ChunkName, NotedLease
from replicas.kvstore.on_disk.folder import regular_file
from replicas.kvstore.on_disk.layout_folder import JOURNAL
from replicas.protocol.blocks import HASH_BYTES, BlockHash

RECORD_BYTES = 64

MIN_DEAD_RECORDS = 16_384
"""Fewer stale records stay in the log, whatever their share: a megabyte."""

MAX_LOG_BYTES = 1 << 30
"""More is not read at a start: 16 million records, of which half at least would be alive."""

MAX_LEASES_AHEAD = 65_536
"""Leases of chunks without a file."""

ADDED = 1
REMOVED = 2
USED = 3
LEASED = 4

_VERSION = 1
_HAS_PARENT = 0x80
_READ_BYTES = RECORD_BYTES << 16
_TEMPORARY = ".tmp-0"

_CRC = struct.Struct("<I")
_BODY = struct.Struct("<BBxx16s16sQdQ")
_NAME = struct.Struct("<4xB3x16s16sQ16x")
_NO_HASH = bytes(HASH_BYTES)

assert _CRC.size + _BODY.size == RECORD_BYTES


class Journal:
    """The journal in the folder of this descriptor, created if missing. Reads its content.

    Raises OSError if the log cannot be opened; bad content is no error.
    """

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self._table: dict[BlockHash, bytes] = {}
        """The record that added each chunk, oldest use first."""
        self.leases: dict[BlockHash, NotedLease] = {}
        self.num_bad_records = 0
        """Bad records in the log at opening."""
        self._buffer: list[bytes] = []
        self._num_records = 0
        self._is_behind = False
        """The log lacks records of the table, or has bad ones."""
        self._fd = os.open(JOURNAL, _OPEN, 0o600, dir_fd=folder)
        if regular_file(folder, JOURNAL) is None:
            os.close(self._fd)
            raise FileExistsError(0, f"{JOURNAL} is no file")
        self._read()

    def names(self) -> list[ChunkName]:
        """Oldest use first."""
        make = ChunkName._make
        return [
            make((key, parent if kind & _HAS_PARENT else None, last_block))
            for kind, key, parent, last_block in _NAME.iter_unpack(b"".join(self._table.values()))
        ]

    def keys(self) -> Iterable[BlockHash]:
        return self._table.keys()

    def sizes(self) -> dict[BlockHash, int]:
        """Bytes of each chunk's file."""
        return {key: int.from_bytes(record[56:64], "little") for key, record in self._table.items()}

    # What happens.

    def added(self, name: ChunkName, num_bytes: int) -> None:
        flags = ADDED | (_HAS_PARENT if name.parent is not None else 0)
        record = _record(flags, name.key, name.parent or _NO_HASH, name.last_block, 0.0, num_bytes)
        self._add(name.key, record)
        self._append(record)

    def removed(self, key: BlockHash) -> None:
        self.leases.pop(key, None)
        if self._table.pop(key, None) is not None:
            self._append(_record(REMOVED, key))

    def used(self, keys: Iterable[BlockHash]) -> None:
        """In this order: the last is the newest."""
        for key in keys:
            if key in self._table:
                self._table[key] = self._table.pop(key)
                self._append(_record(USED, key))

    def leased(self, key: BlockHash, lease: NotedLease) -> None:
        """Record a lease; one until 0 has ended. The chunk's file may come later."""
        if self._lease(key, lease):
            self._append(_lease_record(key, lease))

    def clear(self) -> None:
        """Clear everything; the next flush writes it to the log."""
        self._table.clear()
        self.leases.clear()
        self._is_behind = True

    # The log.

    def flush(self) -> None:
        """Write buffered records to the log, durably. Raises OSError; the next flush then writes the rest."""
        if self._is_behind or self._num_dead > max(MIN_DEAD_RECORDS, self._num_live):
            self._rewrite()
        elif self._buffer:
            self._is_behind = True
            _write(self._fd, b"".join(self._buffer), self._num_records * RECORD_BYTES)
            os.fdatasync(self._fd)
            self._num_records += len(self._buffer)
            self._buffer.clear()
            self._is_behind = False

    def close(self) -> None:
        os.close(self._fd)

    @property
    def _num_live(self) -> int:
        return len(self._table) + len(self.leases)

    @property
    def _num_dead(self) -> int:
        return self._num_records + len(self._buffer) - self._num_live

    def _append(self, record: bytes) -> None:
        if not self._is_behind:
            self._buffer.append(record)

    def _rewrite(self) -> None:
        self._is_behind = True
        self._buffer.clear()
        records = b"".join((*self._table.values(), *itertools.starmap(_lease_record, self.leases.items())))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_TEMPORARY, dir_fd=self._folder)
        fd = os.open(_TEMPORARY, _OPEN | os.O_EXCL, 0o600, dir_fd=self._folder)
        try:
            _write(fd, records, 0)
            os.fdatasync(fd)
            os.rename(_TEMPORARY, JOURNAL, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            os.fsync(self._folder)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(_TEMPORARY, dir_fd=self._folder)
            raise
        os.close(self._fd)
        self._fd = fd
        self._num_records = len(records) // RECORD_BYTES
        self._is_behind = False

    def _read(self) -> None:
        """Read the readable part of the log."""
        at = 0
        while at < MAX_LOG_BYTES:
            try:
                piece = os.pread(self._fd, _READ_BYTES, at)
            except OSError:
                self._is_behind = True
                break
            whole = len(piece) // RECORD_BYTES * RECORD_BYTES
            self._replay(piece[:whole])
            at += whole
            if whole < _READ_BYTES:
                self._is_behind |= len(piece) > whole
                break
        else:
            self._is_behind = True
        self._num_records = at // RECORD_BYTES
        self._is_behind |= self.num_bad_records > 0
        self.leases = {key: lease for key, lease in self.leases.items() if key in self._table}

    def _replay(self, records: bytes) -> None:
        table, crc32, unpack_crc = self._table, zlib.crc32, _CRC.unpack_from
        for at in range(0, len(records), RECORD_BYTES):
            record = records[at : at + RECORD_BYTES]
            key = BlockHash(record[8:24])
            kind = record[4] & ~_HAS_PARENT
            if unpack_crc(record)[0] != crc32(record[4:]) or record[5] != _VERSION:
                self.num_bad_records += 1
            elif kind == ADDED:
                self._add(key, record)
            elif kind == USED:
                if key in table:
                    table[key] = table.pop(key)
            elif kind == REMOVED:
                self.leases.pop(key, None)
                table.pop(key, None)
            elif kind == LEASED:
                tag, tag_bytes, until, seconds = _BODY.unpack_from(record, _CRC.size)[3:]
                self._lease(key, NotedLease(until, seconds, tag[:tag_bytes]))
            else:
                self.num_bad_records += 1

    # The table.

    def _add(self, key: BlockHash, record: bytes) -> None:
        self._table.pop(key, None)
        self._table[key] = record

    def _lease(self, key: BlockHash, lease: NotedLease) -> bool:
        """Whether that changes anything."""
        if not lease.until > 0:
            return self.leases.pop(key, None) is not None
        if key not in self._table and len(self.leases) >= len(self._table) + MAX_LEASES_AHEAD:
            return False
        before = self.leases.pop(key, None)
        self.leases[key] = lease
        return before != lease


_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK


def _record(
    kind: int,
    key: BlockHash,
    parent: bytes = _NO_HASH,
    last_block: int = 0,
    until: float = 0.0,
    number: int = 0,
) -> bytes:
    body = _BODY.pack(kind, _VERSION, key, parent, last_block, until, number)
    return _CRC.pack(zlib.crc32(body)) + body


def _lease_record(key: BlockHash, lease: NotedLease) -> bytes:
    tag = lease.tenant.ljust(HASH_BYTES, b"\0")
    return _record(LEASED, key, tag, len(lease.tenant), until=lease.until, number=lease.seconds)


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done
