"""Pulls: messages between replicas when one reads KV from another's host memory.

Owns these structs, and the bounds of one pull. A chunk travels as the image of its file: header and payload,
checksummed, in parts.
"""

from typing import Annotated

from msgspec import Meta, Struct

from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.bounds import MAX_ID_CHARACTERS, Uint32, Uint64, checked_address, checked_id
from replicas.protocol.status import Epoch, ReplicaId

MAX_PULLED_CHUNKS = 1024
"""In one pull."""

MAX_PULL_SECONDS = 60.0
"""A pull has a deadline, and none that is further away."""

MAX_PART_BYTES = 1 << 20

TOO_MANY_PULLS = "as many pulls as may be are served already"
"""Message of our RESOURCE_EXHAUSTED; gRPC itself uses that status for too large messages."""


class PullHint(Struct, frozen=True, array_like=True):
    """A peer that has more of a prompt than the replica that the prompt goes to, and how much of it.

    With a `split_id` the peer computes the prompt now, under this id. The hint then binds: the replica waits
    `wait_seconds` for the tokens that it lacks, and computes only those that have not come by then.

    Raises ValueError for ids and addresses that are none.
    """

    replica_id: ReplicaId
    epoch: Epoch
    address: str
    num_tokens: Uint32
    wait_seconds: Annotated[float, Meta(ge=0.0, le=MAX_PULL_SECONDS)] = 0.0
    split_id: Uint64 = 0

    @property
    def binds(self) -> bool:
        return self.split_id != 0 and self.wait_seconds > 0

    def without_waiting(self) -> "PullHint":
        """Return the hint as one that does not bind."""
        return PullHint(self.replica_id, self.epoch, self.address, self.num_tokens)

    def __post_init__(self) -> None:
        checked_id(self.replica_id)
        checked_id(self.epoch)
        checked_address(self.address)


class PullRequest(Struct, frozen=True, array_like=True):
    """These chunks, a chain's, of this layout, from this incarnation of the replica.

    With a `split_id` the peer waits for those that it computes under this id, until the call's deadline.
    """

    epoch: Annotated[Epoch, Meta(max_length=MAX_ID_CHARACTERS)]
    layout: Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    keys: Annotated[
        tuple[Annotated[BlockHash, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)], ...],
        Meta(min_length=1, max_length=MAX_PULLED_CHUNKS),
    ]
    split_id: Uint64 = 0


class PullPart(Struct, frozen=True, array_like=True):
    """The next bytes of the image of the chunk with this place among those that were asked for.

    Chunks come in the order in which they were asked for. The first that the peer does not have ends it.
    `has_waited`: the peer had to wait for the chunk that begins here, so its time is not the link's.
    """

    index: Uint32
    content: Annotated[bytes, Meta(min_length=1, max_length=MAX_PART_BYTES)]
    has_waited: bool = False
