"""PromptImage and Media: images of a prompt, with the tokens that stand for them, and with their names.

Plain data. A PromptImage travels to the process that prepares large bodies and back.
"""

from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from replicas.protocol.bounds import Uint32
from replicas.protocol.media import MAX_MEDIA_BYTES


class PromptImage(Struct, frozen=True, array_like=True):
    """Tokens `[start, start + length)` stand for it; `digest` is `media_digest` of the content as it came."""

    content: Annotated[bytes, Meta(max_length=MAX_MEDIA_BYTES)]
    digest: bytes
    start: Uint32
    length: Uint32


class Media(NamedTuple):
    """An image, and its name under the root that its prompt has."""

    content_hash: bytes
    content: bytes
