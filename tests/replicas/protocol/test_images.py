"""Headers of images: the same size as Pillow finds, only our own error, and never much looked at."""

import io
import struct
import zlib
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from replicas.protocol.blocks import BlockHash
from replicas.protocol.images import (
    MAX_PARTS,
    MAX_TAGS,
    ImageError,
    ImageFormat,
    ImageSize,
    media_hash,
    read_size,
)
from replicas.protocol.media import MAX_IMAGES
from router.large_bodies.body_weight import MOST_BYTES

PNG_BEGINNING = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR"
FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("PNG", {}),
    ("JPEG", {}),
    ("JPEG", {"progressive": True}),
    ("WEBP", {}),
    ("WEBP", {"lossless": True}),
    ("GIF", {}),
]
MODES = {"PNG": ["RGB", "RGBA", "L", "P", "1"], "JPEG": ["RGB", "L", "CMYK"], "WEBP": ["RGB", "RGBA"]}


SMALL_JPEG = b"\xff\xd8\xff\xc0\x00\x0b\x08\x00\x07\x00\x07\x01\x01\x11\x00"
"""Up to where its scans begin."""


class CountedBytes:
    """Bytes of a file that count how many of them were looked at."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.num_seen = 0
        self.num_looks = 0

    def __len__(self) -> int:
        return len(self._content)

    def __getitem__(self, part: slice) -> bytes:
        found = self._content[part]
        self.num_seen += len(found)
        self.num_looks += 1
        return found

    def count(self, piece: bytes, start: int) -> int:
        return self._content.count(piece, start)


def read_counted(content: bytes) -> ImageSize:
    counted = CountedBytes(content)
    try:
        return read_size(cast("bytes", counted))
    finally:
        assert counted.num_seen <= 64 + 24 * MAX_PARTS + 14 * MAX_TAGS


def encoded(
    width: int, height: int, name: str, options: dict[str, Any], orientation: int = 0, mode: str = "RGB"
) -> bytes:
    into = io.BytesIO()
    exif = Image.Exif()
    if orientation:
        exif[0x010E] = "a description that lies outside the tag"
        exif[0x0112] = orientation
    extra = {"exif": exif} if orientation and name != "GIF" else {}
    Image.new(mode, (width, height)).save(into, name, **options, **extra)
    return into.getvalue()


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def ihdr(width: int, height: int) -> tuple[bytes, bytes]:
    return b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)


@given(st.integers(1, 200), st.integers(1, 200), st.sampled_from(FORMATS), st.integers(0, 10), st.randoms())
def test_the_size_is_what_pillow_shows(
    width: int, height: int, kind: tuple[str, dict[str, Any]], orientation: int, rng: Any
) -> None:
    name, options = kind
    content = encoded(width, height, name, options, orientation, rng.choice(MODES.get(name, ["RGB", "L"])))
    size = read_counted(content)
    with Image.open(io.BytesIO(content)) as image:
        shown = ImageOps.exif_transpose(image).size
    assert (size.width, size.height) == shown
    assert size.format.upper() == name
    can_turn = name != "GIF" and 1 <= orientation <= 8
    assert size.orientation == (orientation if can_turn else 1)


@pytest.mark.parametrize("byte_order", ["<", ">"])
@pytest.mark.parametrize("kind", [3, 4])
def test_an_orientation_in_either_byte_order_after_the_pixels(byte_order: str, kind: int) -> None:
    order = b"II*\0" if byte_order == "<" else b"MM\0*"
    value = struct.pack(byte_order + ("HH" if kind == 3 else "I"), *([6, 0] if kind == 3 else [6]))
    tags = struct.pack(byte_order + "HHHI", 1, 0x0112, kind, 1) + value + bytes(4)
    exif = order + struct.pack(byte_order + "I", 8) + tags
    pixels = zlib.compress(bytes(20 * (1 + 30 * 3)))
    content = png(ihdr(30, 20), (b"IDAT", pixels), (b"eXIf", exif), (b"IEND", b""))
    assert read_counted(content) == ImageSize(ImageFormat.PNG, 20, 30, 6)
    with Image.open(io.BytesIO(content)) as image:
        assert ImageOps.exif_transpose(image).size == (20, 30)


def test_an_animation_has_the_size_of_its_screen() -> None:
    for name in ("GIF", "WEBP", "PNG"):
        into = io.BytesIO()
        frames = [Image.new("RGB", (40, 20), colour) for colour in ("red", "green", "blue")]
        frames[0].save(into, name, save_all=True, append_images=frames[1:])
        size = read_counted(into.getvalue())
        assert (size.width, size.height) == (40, 20)


def test_a_gif_whose_picture_reaches_beyond_its_screen_is_larger() -> None:
    content = bytearray(encoded(40, 20, "GIF", {}))
    content[6:10] = struct.pack("<HH", 7, 9)
    with Image.open(io.BytesIO(bytes(content))) as image:
        assert image.size == (40, 20)
    assert read_counted(bytes(content)) == ImageSize(ImageFormat.GIF, 40, 20)


def test_a_bomb_is_read_by_its_header_alone() -> None:
    content = png(ihdr(2**31 - 1, 2**31 - 1), (b"IDAT", b""), (b"IEND", b""))
    assert read_counted(content) == ImageSize(ImageFormat.PNG, 2**31 - 1, 2**31 - 1)


FRAME_HEADER = b"\xff\xc0\0\x0b\x08\0\x10\0\x10\x01\x01\x11\0"


@pytest.mark.parametrize(
    ("beginning", "part"),
    [
        (b"\xff\xd8" + FRAME_HEADER, b"\xff"),
        (b"\xff\xd8" + FRAME_HEADER, b"\xff\xd0"),
        (b"GIF89a\x10\0\x10\0\0\0\0!\xfe", b"\x01x"),
        (png(ihdr(16, 16)), b"\0\0\0\0tEXt\0\0\0\0"),
        (b"RIFF\xff\xff\xff\x7fWEBPVP8X\x0a\0\0\0\x08" + bytes(9), b"junk\0\0\0\0"),
    ],
    ids=["JPEG of fills", "JPEG of restarts", "GIF", "PNG", "WebP"],
)
def test_a_light_body_full_of_tiny_parts_is_little_to_look_at(beginning: bytes, part: bytes) -> None:
    """Such a body is read on a router's event loop."""
    num_bytes = MOST_BYTES // 4 * 3 // MAX_IMAGES
    counted = CountedBytes(beginning + part * ((num_bytes - len(beginning)) // len(part)))
    with pytest.raises(ImageError):
        read_size(cast("bytes", counted))
    assert MAX_IMAGES * counted.num_looks <= 4 * 12_000


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "has to be a PNG, a JPEG, a WebP or a GIF"),
        (b"BM" + bytes(60), "has to be a PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "has to be a PNG"),
        (b"%PDF-1.4" + encoded(3, 3, "JPEG", {}), "has to be a PNG"),
        (png(ihdr(0, 7), (b"IEND", b"")), "the PNG has no pixels"),
        (png((b"IDAT", b""), ihdr(7, 7), (b"IEND", b"")), "does not begin with its header"),
        (png(ihdr(7, 7)) + b"\xff\xff\xff\xffIDAT", "the PNG ends early"),
        (png(ihdr(7, 7), (b"IDAT", b"")), "ends early"),
        (png(ihdr(7, 7), ihdr(9, 9), (b"IEND", b"")), "the PNG has two headers"),
        (SMALL_JPEG + b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x02" * 301, "more than 300 scans"),
        (png(ihdr(7, 7), *[(b"tEXt", b"")] * MAX_PARTS), "more than 3329 parts, for its"),
        (png(ihdr(7, 7), *[(b"tEXt", bytes(64))] * MAX_PARTS), f"more than {MAX_PARTS} parts"),
        (png(ihdr(7, 7), *[(b"eXIf", b"II*\0" + b"\xff" * 40)] * MAX_PARTS), "more than"),
        (b"\xff\xd8" + b"\xff" * 10**6, "more than"),
        (b"\xff\xd8\xff\xd9", "does not say its size"),
        (b"\xff\xd8\xff\xe1\x00\x01", "the length of a segment is wrong"),
        (b"\xff\xd8\xff\xc0\x00\x04\x08\x00", "needs one frame header"),
        (b"\xff\xd8" + b"\xff\xc0\x00\x08\x08\x00\x07\x00\x07\x00" * 2, "needs one frame header"),
        (b"\xff\xd8\xff\xe0\x00\x02garbage", "a marker is missing"),
        (b"GIF89a" + bytes(7) + b";", "it has no picture"),
        (b"GIF89a\x07\0\x07\0\0\0\0!\xfe" + b"\x01x" * MAX_PARTS, "more than"),
        (b"GIF89a\x07\0\x07\0\0\0\0,\0\0\0\0\0\0\x01\0", "a picture without pixels"),
        (b"RIFF\x04\0\0\0WEBPVP8X\x0a\0\0\0\x08", "ends early"),
        (b"RIFF\xff\xff\xff\xffWEBPVP8 \0\0\0\0\x01\0\0\x9d\x01\x2a\x07\0\x07\0", "a key frame"),
        (b"RIFF\xff\xff\xff\xffWEBPVP8X\xff\xff\xff\xff\x08" + bytes(9), "the WebP ends early"),
        (b"RIFF\xff\xff\xff\x7fWEBPVP8X\x0a\0\0\0\x08" + bytes(9) + b"junk\0\0\0\0" * MAX_PARTS, "more than"),
    ],
)
def test_what_is_no_image_is_one_sentence(content: bytes, sentence: str) -> None:
    with pytest.raises(ImageError, match=sentence) as caught:
        read_counted(content)
    assert "\n" not in str(caught.value)


@given(
    st.sampled_from(FORMATS),
    st.integers(0, 9),
    st.data(),
)
def test_a_damaged_image_has_a_size_or_our_own_error(
    kind: tuple[str, dict[str, Any]], orientation: int, data: st.DataObject
) -> None:
    content = bytearray(encoded(33, 21, *kind, orientation=orientation))
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, 0xD8, 0x2C]))
    cut = data.draw(st.integers(0, len(content)))
    for damaged in (bytes(content), bytes(content[:cut]), bytes(content[:cut]) + bytes(content[:cut])):
        try:
            size = read_counted(damaged)
        except ImageError:
            continue
        assert size.width > 0
        assert size.height > 0
        assert 1 <= size.orientation <= 8


@given(
    st.sampled_from(
        [b"", b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR", b"\xff\xd8\xff\xe1", b"GIF89a", b"RIFF0000WEBPVP8X"]
    ),
    st.binary(max_size=600),
)
def test_random_bytes_have_a_size_or_our_own_error(beginning: bytes, rest: bytes) -> None:
    try:
        read_counted(beginning + rest)
    except ImageError as error:
        assert str(error)


def test_a_lying_exif_part_turns_nothing() -> None:
    many_tags = struct.pack("<H", 65535) + bytes(12 * 2000) + struct.pack("<HHII", 0x0112, 3, 1, 6)
    for exif in (
        b"",
        b"II*\0",
        b"Exif\0\0",
        b"II*\0\xff\xff\xff\xff" + bytes(30),
        b"MM*\0" + bytes(40),
        b"II*\0\x08\0\0\0" + many_tags,
        b"II*\0\x08\0\0\0" + struct.pack("<HHHIHH", 1, 0x0112, 3, 2, 6, 6),
        b"II*\0\x08\0\0\0" + struct.pack("<HHHII", 1, 0x0112, 2, 1, 6),
        b"II*\0\x08\0\0\0" + struct.pack("<HHHI", 1, 0x0112, 3, 1),
    ):
        content = png(ihdr(30, 20), (b"eXIf", exif), (b"IEND", b""))
        assert read_counted(content) == ImageSize(ImageFormat.PNG, 30, 20)


def test_the_hash_of_a_content_is_what_it_always_was() -> None:
    root = BlockHash(bytes(range(16)))
    assert media_hash(root, b"").hex() == GOLDEN_EMPTY
    assert media_hash(root, encoded_golden()).hex() == GOLDEN_PNG


def test_the_hash_tells_contents_and_namespaces_apart() -> None:
    roots = [BlockHash(bytes(range(16))), BlockHash(bytes(range(1, 17)))]
    contents = [b"", b"\0", b"\0\0", encoded_golden()]
    hashes = {media_hash(root, content) for root in roots for content in contents}
    assert len(hashes) == len(roots) * len(contents)
    assert {len(name) for name in hashes} == {32}


GOLDEN_EMPTY = "ba01c6f126b12b05a8731795c2193f58de8dc754f70753d0d71ede996abf3651"
GOLDEN_PNG = "78d0719c11322ae1bae3563eaad0b804fc9083ebc5b22af18ea3dcfb9da82fb2"


def encoded_golden() -> bytes:
    return png(ihdr(30, 20), (b"IEND", b""))
