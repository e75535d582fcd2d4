"""Media: how an image's content gets to a replica, once, before prompts refer to it by its hash.

Owns these structs and their bounds. The content comes in parts, in a call of its own: megabytes on the stream
of requests would delay everything behind them. The replica hashes what it received.
"""

from typing import Annotated

from msgspec import Meta, Struct

from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.bounds import MAX_MESSAGE_CHARACTERS, Uint64
from replicas.protocol.images import MEDIA_HASH_BYTES

MAX_MEDIA_BYTES = 10 << 20
"""Per item."""

MAX_IMAGES = 20
"""In one prompt."""

MEDIA_PART_BYTES = 256 << 10

MAX_MEDIA_SECONDS = 60.0
"""A call has a deadline, and none that is further away."""


class ImagePart(Struct, frozen=True, array_like=True):
    """The first part has the item's root and size; the others only content."""

    content: Annotated[bytes, Meta(max_length=MEDIA_PART_BYTES)]
    root: Annotated[bytes, Meta(max_length=HASH_BYTES)] = b""
    num_bytes: Annotated[int, Meta(ge=0, le=MAX_MEDIA_BYTES)] = 0


class ImageTaken(Struct, frozen=True, array_like=True):
    """It is there, and prompts may refer to it by this hash until it is forgotten."""

    content_hash: Annotated[bytes, Meta(min_length=MEDIA_HASH_BYTES, max_length=MEDIA_HASH_BYTES)]


class ImageQuery(Struct, frozen=True, array_like=True):
    """Asks an engine to take an item. Inside a replica."""

    number: Uint64
    root: Annotated[BlockHash, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    content: bytes


class ImageQueryAnswer(Struct, frozen=True, array_like=True):
    """Answers the question with this number: the item's hash, or the `problem` with its content. `is_full`:
    only room is missing."""

    number: Uint64
    content_hash: bytes = b""
    problem: Annotated[str, Meta(max_length=MAX_MESSAGE_CHARACTERS)] = ""
    is_full: bool = False
    seconds: float = 0.0
    """Seconds that reading it took."""
