"""Images that cost a server the most for the bytes that they take: of every format, and in every dialect.

Owns the corpus: each body by name, at whatever size is asked for. Most are no image beyond their header; what
reads no more than that has to say so soon, and who decodes them has to refuse them.
"""

import base64
import json
import random
import zlib
from collections.abc import Callable, Iterator, Mapping

from loadtests.workloads.worst_bodies import CHAT, MESSAGES, RESPONSES, WorstBody
from replicas.media.probes import probe_png
from replicas.protocol.media import MAX_IMAGES

SIDES = 300, 200
BOMB_SIDE = 5_700
"""Just under the most pixels that are read."""

Content = Callable[[int], bytes]
"""Size → an image of about that many bytes."""


def worst_images(size: int, *, model: str = "toy") -> Iterator[WorstBody]:
    """Yield bodies of about `size` bytes each, as JSON."""
    num_bytes = (size - 1024) * 3 // 4
    for name, image_of in IMAGES.items():
        yield _chat(f"image: {name}", model, [_url(image_of(num_bytes))])
    for name in PARTS:
        for kind, most in (("images", num_bytes), ("small images", LIGHT_BYTES * 3 // 4)):
            content = IMAGES[name](most // MAX_IMAGES)
            urls = [_url(content + bytes([number])) for number in range(MAX_IMAGES)]  # each is another one
            yield _chat(f"{MAX_IMAGES} {kind}: {name}", model, urls)
    pixels = IMAGES["PNG: noise"](num_bytes)
    yield _chat("image: broken base64", model, [_url(pixels)[:-3] + "*" * 3])
    yield _chat("image: base64 in lines", model, ["data:image/png;base64," + "QUJD\n" * (size // 6)])
    yield _chat("images: one more than any", model, [_url(pixels[:64])] * (size // 256))
    data = base64.b64encode(pixels).decode()
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    item = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
    part = {"inlineData": {"mimeType": "image/png", "data": data}}
    for route, body in (
        (MESSAGES, {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}),
        (RESPONSES, {"model": model, "max_output_tokens": 1, "input": [{"role": "user", "content": [item]}]}),
        (
            f"/v1beta/models/{model}:generateContent",
            {"contents": [{"role": "user", "parts": [part]}], "generationConfig": {"maxOutputTokens": 1}},
        ),
    ):
        yield WorstBody("image: PNG: noise", route, json.dumps(body).encode())


LIGHT_BYTES = 200_000
"""A body of this size is read on the event loop."""


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """W3C, Portable Network Graphics, section 5. 8-bit grey."""
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        for kind, data in ((b"IHDR", header), *chunks)
    )


def png_of_noise(num_bytes: int) -> bytes:
    """A sound one, of pixels that cannot be packed."""
    side = max(1, int(num_bytes**0.5) - 8)
    noise = random.Random(0)
    rows = b"".join(b"\0" + noise.randbytes(side) for _ in range(side))
    return png(side, side, (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))


def png_bomb(num_bytes: int) -> bytes:
    """A sound one of few bytes and as many pixels as are read."""
    rows = zlib.compress((b"\0" + bytes(BOMB_SIDE)) * BOMB_SIDE, 9)
    return png(BOMB_SIDE, BOMB_SIDE, (b"IDAT", rows), (b"IEND", b""))


def _repeated(piece: bytes, num_bytes: int) -> bytes:
    return piece * (num_bytes // len(piece))


_SCAN = b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x02"
"""The head of a refinement: a decoder goes through the whole picture for each."""


def _jpeg(segments: bytes, end: bytes = b"") -> bytes:
    """ITU-T T.81, annex B: what stands between the start and the frame's size."""
    height_and_width = SIDES[1].to_bytes(2, "big") + SIDES[0].to_bytes(2, "big")
    frame = b"\xff\xc0\x00\x11\x08" + height_and_width + b"\x03\x01\x22\0\x02\x11\x01\x03\x11\x01"
    return b"\xff\xd8" + segments + frame + end


def _gif(blocks: bytes) -> bytes:
    """GIF89a: what stands between the screen's size and the picture's."""
    sides = b"".join(side.to_bytes(2, "little") for side in SIDES)
    return b"GIF89a" + sides + b"\0\0\0" + blocks + b"\x2c\0\0\0\0" + sides + b"\0\x02\x02\x4c\x01\0\x3b"


def _webp(chunks: bytes) -> bytes:
    """RIFF: an extended file whose chunks come before its picture."""
    canvas = b"".join((side - 1).to_bytes(3, "little") for side in SIDES)
    extended = b"VP8X\x0a\0\0\0\0\0\0\0" + canvas
    return b"RIFF" + (4 + len(extended) + len(chunks)).to_bytes(4, "little") + b"WEBP" + extended + chunks


IMAGES: Mapping[str, Content] = {
    "PNG: noise": png_of_noise,
    "PNG: a bomb": png_bomb,
    "PNG: a header that lies": lambda size: png(16, 16, (b"IDAT", zlib.compress(bytes(64 * size), 1))),
    "PNG: two headers": lambda size: png(
        *SIDES, (b"IHDR", bytes(13)), (b"IDAT", bytes(size)), (b"IEND", b"")
    ),
    "PNG: tiny chunks": lambda size: png(*SIDES, *[(b"tEXt", b"")] * (size // 12)),
    "PNG: cut off": lambda size: png_of_noise(size)[: size // 2],
    "PNG: something else behind it": lambda size: (
        probe_png(*SIDES, b"\1\2\3") + _repeated(b"PK\3\4<script>", size)
    ),
    "PNG: 4 billion pixels": lambda size: png(2**31 - 1, 2**31 - 1, (b"IDAT", bytes(size))),
    "JPEG: fills": lambda size: _jpeg(_repeated(b"\xff", size)),
    "JPEG: restart markers": lambda size: _jpeg(_repeated(b"\xff\xd0", size)),
    "JPEG: empty comments": lambda size: _jpeg(_repeated(b"\xff\xfe\x00\x02", size)),
    "JPEG: EXIF of tags": lambda size: _jpeg(_exif(min(size, 60_000)), bytes(max(0, size - 60_000))),
    "JPEG: scans": lambda size: _jpeg(b"", _repeated(_SCAN, size)),
    "JPEG: no frame": lambda size: b"\xff\xd8" + _repeated(b"\xff\xfe\xff\xff" + bytes(65_533), size),
    "GIF: tiny sub-blocks": lambda size: _gif(b"\x21\xfe" + _repeated(b"\1a", size) + b"\0"),
    "GIF: empty comments": lambda size: _gif(_repeated(b"\x21\xfe\0", size)),
    "WebP: empty chunks": lambda size: _webp(_repeated(b"ABCD\0\0\0\0", size)),
    "WebP: a length that lies": lambda size: _webp(b"VP8 \xff\xff\xff\xff" + bytes(size)),
    "zeroes": bytes,
}

PARTS = (
    "PNG: noise",
    "PNG: tiny chunks",
    "JPEG: fills",
    "JPEG: restart markers",
    "JPEG: EXIF of tags",
    "GIF: tiny sub-blocks",
    "WebP: empty chunks",
)
"""Images with most to parse, or to forward."""


def _exif(num_bytes: int) -> bytes:
    num_tags = num_bytes // 12 - 4
    tags = num_tags.to_bytes(2, "big") + b"\x01\x0e\x00\x02\x00\x00\x00\x01\0\0\0\0" * num_tags
    exif = b"Exif\0\0MM\0\x2a\0\0\0\x08" + tags
    return b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif


def _chat(name: str, model: str, urls: list[str]) -> WorstBody:
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    return WorstBody(name, CHAT, json.dumps(body).encode())


def _url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()
