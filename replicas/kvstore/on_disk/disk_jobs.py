"""Runs one disk job from start to end, without a lock.

Owns the name of each failure, and which failures mean that the file is worthless.
"""

import errno
from dataclasses import dataclass

from replicas.kvstore.layout import ChunkError, ChunkHeader
from replicas.kvstore.on_disk.chunk_files import ChunkFiles, FileMissing
from replicas.kvstore.on_disk.jobs import DiskJob, Kind
from replicas.kvstore.on_disk.other_layouts import OtherLayouts

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ETIMEDOUT)
"""Errors of a read that say nothing about the file."""


@dataclass(frozen=True, slots=True)
class DiskOutcome:
    """`reason` is empty for success, and else one word. `error` is the file system's."""

    reason: str = ""
    header: ChunkHeader | None = None
    is_worthless: bool = False
    """The file is missing, is not what its name says, or cannot be read."""
    error: OSError | None = None
    read_seconds_per_byte: float | None = None
    write_seconds_per_byte: float | None = None


@dataclass(frozen=True, slots=True)
class Files:
    """Files that jobs work on."""

    chunks: ChunkFiles
    others: OtherLayouts


def perform(files: Files, job: DiskJob, *, excess_bytes: int = 0) -> DiskOutcome:
    """Run the job; `excess_bytes` of other layouts are removed first."""
    try:
        if excess_bytes > 0:
            files.others.make_room(excess_bytes)
        return _do(files, job)
    except FileMissing:
        return DiskOutcome(reason="missing", is_worthless=True)
    except ChunkError as error:
        return DiskOutcome(reason=type(error).__name__, is_worthless=True)
    except ValueError:
        return DiskOutcome(reason="header")
    except OSError as error:
        is_unreadable = job.kind is Kind.READ and error.errno not in _PASSING
        reason = errno.errorcode.get(error.errno or 0, "unknown")
        return DiskOutcome(reason=reason, error=error, is_worthless=is_unreadable)


def _do(files: Files, job: DiskJob) -> DiskOutcome:
    if job.kind is Kind.PROBE:
        write_seconds, read_seconds = files.chunks.probe(job.num_bytes)
        return DiskOutcome(
            read_seconds_per_byte=read_seconds / job.num_bytes,
            write_seconds_per_byte=write_seconds / job.num_bytes,
        )
    if job.kind is Kind.ERASE:
        try:
            files.chunks.erase()
        finally:
            files.others.erase()
        return DiskOutcome()
    assert job.key is not None
    if job.kind is Kind.REMOVE:
        files.chunks.remove(job.key)
        return DiskOutcome()
    assert job.slot is not None
    if job.kind is Kind.READ:
        return DiskOutcome(header=files.chunks.read(job.key, job.slot))
    assert job.header is not None
    files.chunks.write(job.header, job.slot, sync=job.sync)
    return DiskOutcome()
