"""Probe images: sizes with which a replica proves at start that it reads images as routers predict.

Owns their sizes, and which of them a replica has room for. Pure.
"""

import zlib

from replicas.protocol.image_rules import ImageRule
from replicas.protocol.images import ImageFormat, ImageSize
from replicas.protocol.status import ModelCard

PROBE_SIZES = ((56, 56), (640, 224), (224, 640))
"""Width and height, in pixels."""


def room_of(card: ModelCard) -> int:
    """Tokens of a prompt that is to have its blocks, and one more for the answer."""
    return min(card.context_length - 2, card.num_cache_tokens - card.block_size)


def has_room(card: ModelCard, rule: ImageRule, size: ImageSize) -> bool:
    """For a prompt with such an image, and a block of words around it."""
    return rule.num_tokens(size) + card.block_size <= room_of(card)


def has_room_for_any(card: ModelCard, rule: ImageRule) -> bool:
    sizes = [ImageSize(ImageFormat.PNG, width, height) for width, height in PROBE_SIZES]
    return any(has_room(card, rule, size) for size in sizes)


def probe_png(width: int, height: int, colour: bytes) -> bytes:
    """Return a PNG of one colour, in RGB (W3C, Portable Network Graphics, section 5)."""
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((8, 2, 0, 0, 0))
    rows = zlib.compress((b"\0" + colour * width) * height)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        for kind, data in ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b""))
    )
