"""Pages of documents as PNG files: the same name gives the same file everywhere, and another name another.

Owns their sizes and how they are drawn: lines of dark marks on white, one bit a pixel. Pure and seeded. The
format is written here, so that nothing is needed to make them.
"""

import base64
import hashlib
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from loadtests.workloads.workload import PageSize

PAGE_SIZES: Mapping[str, PageSize] = {
    "page_tokens": PageSize(448, 640),
    "slide_tokens": PageSize(640, 448),
    "table_tokens": PageSize(640, 280),
}
"""By the parameter that says how many tokens the model makes of one."""

MOST_PAGE_BYTES = 40_000
"""Size of a file: its pixels have 35,840 bytes, and compression adds little where it removes nothing."""

CACHED_PAGES = 1024
"""Files that are kept, in base64: some ten kilobytes each, and 55 at most."""

_LINE_HEIGHT = 16
_FEWEST_LINES = 8
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(slots=True)
class Pages:
    """Pages of one seed."""

    seed: int
    _urls: dict[tuple[str, PageSize], str] = field(default_factory=dict)

    def url(self, name: str, size: PageSize) -> str:
        """Return a `data:` URL of the page."""
        found = self._urls.get((name, size))
        if found is None:
            found = "data:image/png;base64," + base64.b64encode(page_png(self.seed, name, size)).decode()
            if len(self._urls) >= CACHED_PAGES:
                del self._urls[next(iter(self._urls))]
            self._urls[name, size] = found
        return found


def page_png(seed: int, name: str, size: PageSize) -> bytes:
    """Return a PNG of one bit a pixel (W3C, Portable Network Graphics, section 11)."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    rng = random.Random(digest)
    num_bytes = -(-size.width // 8)
    blank = b"\0" + b"\xff" * num_bytes
    num_lines = rng.randint(_FEWEST_LINES, max(_FEWEST_LINES, size.height // _LINE_HEIGHT))
    rows: list[bytes] = []
    for _ in range(num_lines):
        length = rng.randint(num_bytes // 2, num_bytes)
        for _ in range(2):
            marks = b"\0" + rng.randbytes(length) + b"\xff" * (num_bytes - length)
            rows += [marks] * (_LINE_HEIGHT // 4)
        rows += [blank] * (_LINE_HEIGHT // 2)
    rows = (rows + [blank] * size.height)[: size.height]
    header = size.width.to_bytes(4, "big") + size.height.to_bytes(4, "big") + bytes((1, 0, 0, 0, 0))
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    content = _SIGNATURE + b"".join(map(_chunk, *zip(*parts, strict=True)))
    assert len(content) <= MOST_PAGE_BYTES, (
        f"a page of {size.width} by {size.height} has {len(content)} bytes"
    )
    return content


def _chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
