"""incoming: puts the chunks that a peer sends into their slots, each verified before use.

Owns the format of a transfer. Pure: the parts are arguments.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.layout import ChunkError, ChunkHeader, LayoutId, decode
from replicas.protocol.pulls import PullPart
from replicas.protocol.tier_figures import MoveFailure


class PullFailed(Exception):
    """The transfer is over."""

    def __init__(self, reason: MoveFailure, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Ending(Enum):
    """The outcome of a pulled chunk."""

    FILLED = "filled"
    FAILED = "failed"
    OVERDUE = "overdue"
    """It has failed, and its slot may still be written to, until RETURNED."""
    RETURNED = "returned"


class Wanted(NamedTuple):
    """A chunk to pull, the slot that was taken for it, and that slot's memory."""

    name: ChunkName
    slot: int
    memory: memoryview


@dataclass(frozen=True, slots=True)
class ChunkKind:
    """Properties of every chunk here. `image_bytes` of each travel."""

    layout: LayoutId
    num_tokens: int
    num_blocks: int
    payload_bytes: int
    image_bytes: int


def incoming(
    parts: Iterable[PullPart], chunks: Sequence[Wanted], kind: ChunkKind
) -> Iterator[tuple[Wanted, ChunkHeader]]:
    """Yield the chunks that arrive whole, one by one. Raises PullFailed, and errors of `parts`.

    A peer may stop between two chunks. The slot of a chunk that did not arrive has invalid content.
    """
    number = num_bytes = 0
    for part in parts:
        if number == len(chunks):
            raise PullFailed(MoveFailure.DAMAGED, f"it sends more than the {number} chunks that were wanted")
        chunk = chunks[number]
        end = num_bytes + len(part.content)
        if part.index != number or end > kind.image_bytes:
            raise PullFailed(MoveFailure.DAMAGED, f"chunk {part.index} comes in place of chunk {number}")
        chunk.memory[num_bytes:end] = part.content
        num_bytes = end
        if end == kind.image_bytes:
            yield chunk, _verified(chunk, kind)
            number, num_bytes = number + 1, 0
    if num_bytes:
        raise PullFailed(MoveFailure.DAMAGED, f"it sends half of chunk {number}")


def _verified(chunk: Wanted, kind: ChunkKind) -> ChunkHeader:
    try:
        header = decode(chunk.memory[: kind.image_bytes], kind.layout, chunk.name.key)
    except ChunkError as error:
        raise PullFailed(MoveFailure.DAMAGED, str(error)) from error
    if not header.is_of(
        chunk.name,
        num_tokens=kind.num_tokens,
        num_blocks=kind.num_blocks,
        payload_bytes=kind.payload_bytes,
    ):
        raise PullFailed(MoveFailure.DAMAGED, "a header says something else of its chunk")
    return header
