"""Chunk: its name, and a directory's record of it.

A chunk is consecutive blocks of one chain, named by the hash of its last block, which stands for everything
before it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from replicas.protocol.blocks import BlockHash


class ChunkName(NamedTuple):
    """`key` is the hash of the chunk's last block, `last_block` that block's position in its chain; `parent`
    is the key of the chunk before it, None for a chain's first.
    """

    key: BlockHash
    parent: BlockHash | None
    last_block: int


class NotedLease(NamedTuple):
    """Ends at `until`, in seconds since 1970; a use extends it to `seconds` from then, if that is known."""

    until: float
    seconds: int = 0
    tenant: bytes = b""


class StoreTenant:
    """A tenant with a share of the store: see `tenant_shares.py`."""

    __slots__ = ("num_held", "share")

    def __init__(self, share: float) -> None:
        self.share = share
        self.num_held = 0
        """Chunks, once for each tier."""


@dataclass(slots=True, eq=False)
class Chunk:
    name: ChunkName
    slot: int | None = None
    is_filling: bool = False
    num_readers: int = 0
    is_writing: bool = False
    is_on_disk: bool = False
    has_failed: bool = False
    """It could not be written when it was tried last, and was not used since."""
    num_uses: int = 1
    tenant: StoreTenant | None = None
    """The tenant that is charged; None is unowned."""

    @property
    def may_leave_host(self) -> bool:
        return not (self.is_filling or self.num_readers or self.is_writing)

    @property
    def has_file(self) -> bool:
        """Or is getting one."""
        return self.is_on_disk or self.is_writing

    @property
    def is_ready(self) -> bool:
        """Whether it has a copy."""
        return self.is_on_disk or (self.slot is not None and not self.is_filling)

    @property
    def may_be_written(self) -> bool:
        """Whether it can be written now, to a file that it lacks."""
        return self.slot is not None and not (self.is_filling or self.has_failed or self.has_file)


def chain_before(chunk: Chunk, chunks: Mapping[BlockHash, Chunk]) -> Iterator[Chunk]:
    """Yield the chunks before it in its chain, nearest first, up to one that is not among `chunks`."""
    while chunk.name.parent is not None and (before := chunks.get(chunk.name.parent)) is not None:
        if before.name.last_block >= chunk.name.last_block:
            return  # a file has said so that we did not write
        yield before
        chunk = before
