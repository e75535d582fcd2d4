"""ReplicaWords: what one replica says of itself and of requests, decoded part by part.

Owns what is wrong with it: a part that breaks the contract is passed over, counted, and told in the log once.
Knows neither streams nor requests: what follows for them is the client's business.
"""

import logging
from dataclasses import dataclass

from replicas.process.complaints import Complaints
from replicas.protocol import replica_pb2 as pb
from replicas.protocol.bounds import checked_id
from replicas.protocol.frames import LoadSnapshot, TokenDelta
from replicas.protocol.status import Epoch, ModelCard, ReplicaId
from replicas.protocol.wire import card_from_wire, delta_from_wire, load_from_wire

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Traffic:
    """What has gone over streams to replicas, for as long as this router lives."""

    num_frames: int = 0
    num_submits: int = 0
    num_aborts: int = 0
    num_malformed: int = 0
    """Parts of frames, and descriptions, that broke the contract."""


class ReplicaWords:
    def __init__(self, replica_id: ReplicaId, traffic: Traffic) -> None:
        self._replica_id = replica_id
        self._traffic = traffic
        self._vocab_size: int | None = None
        self._complaints = Complaints(logger)

    def description(self, response: pb.DescribeResponse) -> tuple[ModelCard, ReplicaId, Epoch]:
        """Raises ValueError. From then on tokens must be of the card's vocabulary."""
        try:
            card = card_from_wire(response.card)
            replica_id, epoch = ReplicaId(checked_id(response.replica_id)), Epoch(checked_id(response.epoch))
        except ValueError as error:
            self._refuse("description", error)
            raise
        self._vocab_size = card.vocab_size
        return card, replica_id, epoch

    def load(self, message: pb.Load) -> LoadSnapshot | None:
        try:
            return load_from_wire(message)
        except ValueError as error:
            self._refuse("load", error)
            return None

    def delta(self, message: pb.TokenDelta) -> TokenDelta:
        """Raises ValueError."""
        try:
            return delta_from_wire(message, self._vocab_size)
        except ValueError as error:
            self._refuse("delta", error)
            raise

    def stranger(self, request_id: int) -> None:
        """A delta is for a request that it was never sent."""
        self._refuse("id", ValueError(f"there is no request {request_id}"))

    def _refuse(self, part: str, error: ValueError) -> None:
        self._traffic.num_malformed += 1
        self._complaints.say(part, f"replica {self._replica_id}: what it says is passed over: {error}")
