"""How the C library gives memory back.

Owns one of its settings. Left to itself glibc learns from large blocks that were freed to keep the next
ones: after a flood of bodies a router would keep hundreds of megabytes for good.
"""

import ctypes

M_MMAP_THRESHOLD = -3
LARGE_BYTES = 64 * 1024


def return_large_blocks() -> bool:
    """Blocks from `LARGE_BYTES` on go back to the system when freed. False where the C library cannot."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, LARGE_BYTES) == 1
