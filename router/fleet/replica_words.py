"""ReplicaWords: decodes one replica's messages part by part.

Owns the defects: a part that breaks the contract is skipped, counted, and logged once. `replica_client.py`
decides about streams and requests.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from replicas.process.complaints import Complaints
from replicas.protocol.frames import LoadSnapshot, TokenDelta
from replicas.protocol.status import ReplicaId
from replicas.protocol.wire import (
    MAX_SERVER_FRAME_BYTES,
    BrokenDelta,
    DescribeResponse,
    decode_description,
    decode_load,
    decode_loose_delta,
    decode_loose_frame,
    decode_server_frame,
)
from router.fleet.image_traffic import ImageTraffic

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Traffic:
    """Traffic over the streams to replicas since this router's start."""

    num_frames: int = 0
    num_submits: int = 0
    num_aborts: int = 0
    num_malformed: int = 0
    """Parts of frames, and descriptions, that broke the contract."""
    images: ImageTraffic = field(default_factory=ImageTraffic)


class HeardFrame(NamedTuple):
    """The readable part of a ServerFrame. `load` is None if it breaks the contract."""

    deltas: Sequence[TokenDelta | BrokenDelta]
    load: LoadSnapshot | None
    num_counted_submits: int
    is_draining: bool


class ReplicaWords:
    def __init__(self, replica_id: ReplicaId, traffic: Traffic) -> None:
        self._replica_id = replica_id
        self._traffic = traffic
        self.vocab_size: int | None = None
        """Bounds the tokens, once the model is described."""
        self._complaints = Complaints(logger)

    def description(self, encoded: bytes) -> DescribeResponse:
        """Raises ValueError. From then on tokens must be of the card's vocabulary."""
        try:
            description = decode_description(encoded)
        except ValueError as error:
            self.refuse("description", error)
            raise
        self.vocab_size = description.card.vocab_size
        return description

    def frame(self, encoded: bytes) -> HeardFrame:
        """Decode a frame whole if it is valid, else part by part. Raises ValueError if it is no frame, or if
        a delta's recipient is unreadable."""
        try:
            if len(encoded) > MAX_SERVER_FRAME_BYTES:
                raise ValueError(f"a frame has {len(encoded)} bytes, which is too many")
            try:
                whole = decode_server_frame(encoded)
            except ValueError:
                return self._loose_frame(encoded)
        except ValueError as error:
            self.refuse("frame", error)
            raise
        return HeardFrame(whole.deltas, whole.load, whole.num_counted_submits, whole.is_draining)

    def stranger(self, submit_id: int) -> None:
        """Report a delta for a request that the replica was never sent."""
        self.refuse("id", ValueError(f"there is no submit {submit_id}"))

    def _loose_frame(self, encoded: bytes) -> HeardFrame:
        frame = decode_loose_frame(encoded)
        load: LoadSnapshot | None = None
        try:
            load = decode_load(frame.load)
        except ValueError as error:
            self.refuse("load", error)
        deltas = [decode_loose_delta(delta) for delta in frame.deltas]
        return HeardFrame(deltas, load, frame.num_counted_submits, frame.is_draining)

    def refuse(self, part: str, error: ValueError) -> None:
        """Report a part that breaks the contract."""
        self._traffic.num_malformed += 1
        self._complaints.say(part, f"replica {self._replica_id}: an invalid message is ignored: {error}")
