"""read_whole(): an HTTP answer of bounded length."""

import logging

import httpx

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request


async def read_whole(answer: httpx.Response, most_bytes: int) -> bytes:
    """Raises HTTPError, and ValueError for a longer one."""
    content = bytearray()
    async for piece in answer.aiter_bytes():
        content += piece
        if len(content) > most_bytes:
            raise ValueError(f"it answers more than {most_bytes} bytes")
    return bytes(content)
