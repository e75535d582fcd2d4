"""TierFigures: contents, moves and failures of memory below a replica's device.

Owns the vocabulary and the record, which crosses the pipe from an engine's process to its replica. Counts are
since the engine's start, other values are current.
"""

import enum
from collections.abc import Mapping

from msgspec import Struct


class MoveFailure(enum.StrEnum):
    """Why KV was not read from a file or from a peer, or not written. It is computed again, or stays where it
    is.
    """

    MISSING = "missing"
    DAMAGED = "damaged"
    """The file is not what its name says: torn, changed, or another's."""
    LATE = "late"
    """The disk or the peer took longer than a read may."""
    NO_SPACE = "no_space"
    IO_ERROR = "io_error"
    REFUSED = "refused"
    """The disk's queue is full, or it is off; or the peer refused."""
    BUSY = "busy"
    """The peer sends to as many others as it may."""
    UNREACHABLE = "unreachable"
    """The peer's connection could not be had, or broke."""


class WriteStop(enum.StrEnum):
    """Reason for writing nothing to the disk, while reads may go on."""

    OFF = "off"
    """Broken for good."""
    HANGS = "hangs"
    FAILS = "fails"
    """The last write failed; another is tried after a pause."""
    FULL = "full"
    """Less free space is left than others are to have."""


class Moves(Struct, frozen=True, array_like=True):
    """`num` moves from one tier to another have succeeded, of `num_tokens`, and took `seconds` together."""

    num: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    num_failed: Mapping[MoveFailure, int] = {}


class TierFill(Struct, frozen=True, array_like=True):
    """`num_chunks` are there, those that are being made too; of `max_bytes`, `num_bytes` are in use."""

    num_chunks: int = 0
    num_bytes: int = 0
    max_bytes: int = 0


class TierFigures(Struct, frozen=True, array_like=True):
    """`loads` go from host memory to the device, `reads` from disk to host memory, `writes` back.

    `disk` is None without one. A *quarantined* slot may still be written by an abandoned read.
    `num_waiting_writes` chunks wait for the write budget, of which `write_budget_ratio` is left; while it is
    short, only chunks that were used again or are leased are written. `num_other_bytes` of the disk belong to
    other layouts and versions. `pulls` go from peers to host memory, and fail as whole transfers of several
    chunks; None without pulls.
    """

    host: TierFill = TierFill()
    disk: TierFill | None = None
    loads: Moves = Moves()
    reads: Moves = Moves()
    writes: Moves = Moves()
    num_quarantined_slots: int = 0
    num_waiting_writes: int = 0
    write_budget_ratio: float = 1.0
    is_write_budget_short: bool = False
    write_stop: WriteStop | None = None
    num_other_bytes: int = 0
    pulls: Moves | None = None
