"""Decompresses a request's body incrementally.

Owns the refusals: a body beyond the limit, before it is complete, and invalid gzip. Uses a thread for large
pieces, so that a body of many megabytes delays no other request.
"""

import asyncio
import zlib

from router.errors import BodyTooLarge, InvalidRequest
from router.limits.body_budget import BodyHold

GZIP = b"gzip"
PIECE_BYTES = 2**18
INLINE_BYTES = 4096
"""Compressed; what is less takes no thread, and becomes four MiB at the very most."""

_GZIP_WINDOW = 16 + zlib.MAX_WBITS


async def inflated(body: bytes, held: BodyHold, max_bytes: int) -> bytes:
    """Raises BodyTooLarge, BodiesFull or InvalidRequest. What it becomes counts as it grows."""
    inflate = zlib.decompressobj(_GZIP_WINDOW)
    is_long = len(body) > INLINE_BYTES
    content = bytearray()
    rest = body
    while not inflate.eof:
        try:
            if is_long:
                piece = await asyncio.to_thread(inflate.decompress, rest, PIECE_BYTES)
            else:
                piece = inflate.decompress(rest, PIECE_BYTES)
        except zlib.error as error:
            raise _no_gzip() from error
        rest = inflate.unconsumed_tail
        if not piece and not rest and not inflate.eof:
            raise _no_gzip()
        if len(content) + len(piece) > max_bytes:
            raise BodyTooLarge(f"The request body is larger than the {max_bytes} bytes that are accepted.")
        held.take(len(piece))
        content += piece
    if inflate.unused_data:
        raise _no_gzip()
    return bytes(content)


def _no_gzip() -> InvalidRequest:
    return InvalidRequest("The request body is not one whole gzip stream.", code="invalid_encoding")
