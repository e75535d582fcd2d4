"""Media spans: the names of images in vLLM's block hashes and events.

Owns vLLM's identifier of an item: our hash of it, as text. vLLM takes that for the item's identity, in blocks
and in its encoder's cache, so it never comes from a client. Imports nothing of vLLM.
"""

from typing import Any

from replicas.kvcache.hash_map import PlacedMedia
from replicas.protocol.blocks import ImageTokens
from replicas.protocol.images import MEDIA_HASH_BYTES

_DIGITS = 2 * MEDIA_HASH_BYTES


def identifier_of(content_hash: bytes) -> str:
    return content_hash.hex()


def spans_of(request: Any) -> list[ImageTokens]:
    """Return the media of a vLLM request, in order."""
    return [
        ImageTokens(_content_hash(feature.identifier), feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features or ()
    ]


def media_in(extra_keys: Any) -> list[PlacedMedia]:
    """Return the items that a block was hashed with: pairs of an identifier and where it begins, among keys
    of other kinds."""
    return [
        PlacedMedia(_content_hash(key[0]), key[1])
        for key in extra_keys or ()
        if isinstance(key, tuple | list) and len(key) == 2 and isinstance(key[1], int)
    ]


def _content_hash(identifier: str) -> bytes:
    """Return the hash after an adapter's name, which is there if the adapter changes the encoder."""
    return bytes.fromhex(identifier[-_DIGITS:])
