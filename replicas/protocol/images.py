"""Images by their bytes: the size in a header, and the name of a content.

Owns the parsing of headers and the hash of a media item. Knows no pixels: a decoder must find the size in the
header, turned by `orientation` and nothing else. Pillow reads XMP too, and joins several EXIF parts; here XMP
is not read, and the first EXIF part of a JPEG counts.

Headers are untrusted. Work is bounded by the parts that a file of its length may have (`most_parts`) and by
`MAX_TAGS` tags of one EXIF part, a few bytes of each, whatever their lengths claim.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from replicas.protocol.blocks import BlockHash

MAX_PARTS = 8192
"""Segments, chunks or blocks of a file. A PNG of 64 MiB in chunks of 8 KiB has as many."""

FREE_PARTS = 256
"""Parts allowed in any file, however short. XMP's padding in a GIF, 33 bytes a block, may follow in any
number."""

PART_BYTES = 32
"""A file may have one more part for each. Many short files in one body are then little work together, which
a router does on its event loop."""

MAX_TAGS = 1000

MAX_SCANS = 300
"""Scans of a JPEG: a decoder processes the whole picture for each, and the smallest has 53 bytes. Cameras
write one to ten; data after a picture, such as a film, matches by chance one time in 65,536 bytes."""

MEDIA_HASH_BYTES = 32

_PNG = b"\x89PNG\r\n\x1a\n"
_EXIF = b"Exif\0\0"
_ORIENTATION = 0x0112
_SHORT, _LONG = 3, 4
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})
_START_OF_SCAN, _END_OF_IMAGE, _APPLICATION_1 = 0xDA, 0xD9, 0xE1
_SCAN = b"\xff\xda"
_WEBP_HAS_EXIF = 0x08


class ImageError(ValueError):
    """An error about an image, for the caller: unreadable, or inconsistent with its prompt."""


class ImageFormat(StrEnum):
    PNG = "PNG"
    JPEG = "JPEG"
    WEBP = "WebP"
    GIF = "GIF"


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Pixels as an image is shown: `orientation`, 1 to 8 as EXIF counts, has been applied."""

    format: ImageFormat
    width: int
    height: int
    orientation: int = 1


def media_hash(root: BlockHash, content: bytes) -> bytes:
    """Name a media item in one namespace. The hash is keyed, so it is no fingerprint of the picture.

    Covers the bytes as received. The same picture in another file is another item.
    """
    return named_media(root, media_digest(content))


def media_digest(content: bytes) -> bytes:
    """The same in every namespace: a fingerprint of the picture, which stays where the picture is."""
    return hashlib.sha256(content).digest()


def named_media(root: BlockHash, digest: bytes) -> bytes:
    """Return `media_hash` of the content with this digest."""
    return hashlib.blake2b(digest, key=root, digest_size=MEDIA_HASH_BYTES, person=b"kvasir-media-v1").digest()


def read_size(content: bytes) -> ImageSize:
    """Read the size in the header. Raises ImageError."""
    if content[:8] == _PNG:
        return _png(content)
    if content[:3] == b"\xff\xd8\xff":
        return _jpeg(content)
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return _webp(content)
    if content[:6] in (b"GIF87a", b"GIF89a"):
        return _gif(content)
    raise ImageError("an image has to be a PNG, a JPEG, a WebP or a GIF")


def most_parts(num_bytes: int) -> int:
    """Segments, chunks or blocks that are looked at in a file of this length."""
    return min(MAX_PARTS, FREE_PARTS + num_bytes // PART_BYTES)


def _png(content: bytes) -> ImageSize:
    if content[8:16] != b"\0\0\0\x0dIHDR":
        raise ImageError("the PNG does not begin with its header")
    width, height = _number(content, 16, 4, "big"), _number(content, 20, 4, "big")
    exif: tuple[int, int] | None = None
    at = 8
    for _ in range(most_parts(len(content))):
        length, kind = _number(content, at, 4, "big"), content[at + 4 : at + 8]
        body = at + 8
        at = body + length + 4
        if at > len(content):
            raise ImageError("the PNG ends early")
        if kind == b"IHDR" and body != 16:
            raise ImageError("the PNG has two headers")
        if kind == b"eXIf":
            exif = body, body + length
        if kind == b"IEND":
            return _shown(ImageFormat.PNG, width, height, _orientation(content, exif))
    raise _too_many_parts(ImageFormat.PNG, content)


def _jpeg(content: bytes) -> ImageSize:
    size: tuple[int, int] | None = None
    exif: tuple[int, int] | None = None
    at = 2
    for _ in range(most_parts(len(content))):
        if _number(content, at, 1, "big") != 0xFF:
            raise ImageError("the JPEG is broken: a marker is missing")
        marker = _number(content, at + 1, 1, "big")
        if marker == 0xFF:  # fills
            at += 1
            continue
        if marker in _WITHOUT_LENGTH:
            at += 2
            continue
        if marker in (_START_OF_SCAN, _END_OF_IMAGE):
            if size is None:
                raise ImageError("the JPEG does not say its size")
            if content.count(_SCAN, at) > MAX_SCANS:
                raise ImageError(f"the JPEG has more than {MAX_SCANS} scans")
            return _shown(ImageFormat.JPEG, *size, _orientation(content, exif))
        body, end = at + 4, at + 2 + _number(content, at + 2, 2, "big")
        if end < body or end > len(content):
            raise ImageError("the JPEG is broken: the length of a segment is wrong")
        if marker in _FRAME_HEADERS:
            if size is not None or end < body + 5:
                raise ImageError("the JPEG is broken: it needs one frame header")
            size = _number(content, body + 3, 2, "big"), _number(content, body + 1, 2, "big")
        if marker == _APPLICATION_1 and exif is None and content[body : min(body + 6, end)] == _EXIF:
            exif = body, end
        at = end
    raise _too_many_parts(ImageFormat.JPEG, content)


def _webp(content: bytes) -> ImageSize:
    kind = content[12:16]
    if kind == b"VP8 ":
        if _number(content, 20, 1, "little") & 1 or content[23:26] != b"\x9d\x01\x2a":
            raise ImageError("the WebP does not begin with a key frame")
        width, height = (_number(content, at, 2, "little") & 0x3FFF for at in (26, 28))
        return _shown(ImageFormat.WEBP, width, height, 1)
    if kind == b"VP8L":
        if content[20:21] != b"\x2f":
            raise ImageError("the WebP does not begin with its header")
        bits = _number(content, 21, 4, "little")
        return _shown(ImageFormat.WEBP, (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, 1)
    if kind != b"VP8X":
        raise ImageError("the WebP does not begin with its header")
    width, height = (_number(content, at, 3, "little") + 1 for at in (24, 27))
    exif = _webp_exif(content) if _number(content, 20, 1, "little") & _WEBP_HAS_EXIF else None
    return _shown(ImageFormat.WEBP, width, height, _orientation(content, exif))


def _webp_exif(content: bytes) -> tuple[int, int] | None:
    file_end = min(len(content), 8 + _number(content, 4, 4, "little"))
    at = 12
    for _ in range(most_parts(len(content))):
        if at + 8 > file_end:
            return None
        length, body = _number(content, at + 4, 4, "little"), at + 8
        if body + length > file_end:
            raise ImageError("the WebP ends early")
        if content[at : at + 4] == b"EXIF":
            return body, body + length
        at = body + length + length % 2
    raise _too_many_parts(ImageFormat.WEBP, content)


def _gif(content: bytes) -> ImageSize:
    """Read the size of a GIF: the screen, enlarged by a first picture that exceeds it."""
    width, height = (_number(content, at, 2, "little") for at in (6, 8))
    at = 13 + _colours(_number(content, 10, 1, "little"))
    in_extension = False
    for _ in range(most_parts(len(content))):
        introducer = _number(content, at, 1, "little")
        if in_extension:
            in_extension = introducer != 0
            at += 1 + introducer
        elif introducer == 0x21:
            in_extension = True
            at += 2
        elif introducer == 0x2C:
            left, top, wide, high = (_number(content, at + 1 + 2 * field, 2, "little") for field in range(4))
            if not wide or not high:
                raise ImageError("the GIF has a picture without pixels")
            return _shown(ImageFormat.GIF, max(width, left + wide), max(height, top + high), 1)
        else:
            raise ImageError("the GIF is broken: it has no picture")
    raise _too_many_parts(ImageFormat.GIF, content)


def _colours(flags: int) -> int:
    return 3 * (2 << (flags & 7)) if flags & 0x80 else 0


def _orientation(content: bytes, exif: tuple[int, int] | None) -> int:
    """Return the orientation; 1 for an invalid EXIF value, which is advice and no reason to refuse an
    image."""
    if exif is None:
        return 1
    start, end = exif
    if content[start : min(start + 6, end)] == _EXIF:
        start += 6
    if end - start < 8:
        return 1
    order = content[start : start + 4]
    if order not in (b"II*\0", b"MM\0*"):
        return 1
    endian = "little" if order[:1] == b"I" else "big"
    tags = start + _number(content, start + 4, 4, endian)
    if tags + 2 > end:
        return 1
    first = tags + 2
    for at in range(first, first + 12 * min(_number(content, tags, 2, endian), MAX_TAGS), 12):
        if at + 12 > end:
            return 1
        if _number(content, at, 2, endian) == _ORIENTATION:
            return _orientation_value(content, at, endian)
    return 1


def _orientation_value(content: bytes, at: int, endian: str) -> int:
    kind, count = _number(content, at + 2, 2, endian), _number(content, at + 4, 4, endian)
    if kind not in (_SHORT, _LONG) or count != 1:
        return 1
    value = _number(content, at + 8, 2 if kind == _SHORT else 4, endian)
    return value if 1 <= value <= 8 else 1


def _shown(image_format: ImageFormat, width: int, height: int, orientation: int) -> ImageSize:
    if not width or not height:
        raise ImageError(f"the {image_format} has no pixels")
    if orientation >= 5:
        width, height = height, width
    return ImageSize(image_format, width, height, orientation)


def _number(content: bytes, at: int, length: int, endian: str) -> int:
    part = content[at : at + length]
    if len(part) != length:
        raise ImageError("the image ends early")
    return int.from_bytes(part, "little" if endian == "little" else "big")


def _too_many_parts(image_format: ImageFormat, content: bytes) -> ImageError:
    most = most_parts(len(content))
    return ImageError(f"the {image_format} has more than {most} parts, for its {len(content)} bytes")
