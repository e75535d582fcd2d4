"""How the C library gives memory back, how much of it is in use, and what Python's collector walks.

Owns their settings. Left to itself glibc learns from large blocks that were freed to keep the next
ones: after a flood of bodies a router would keep hundreds of megabytes for good.
"""

import ctypes
import gc

M_MMAP_THRESHOLD = -3
LARGE_BYTES = 64 * 1024

YOUNG_OBJECTS = 10_000
"""Made and not freed, before the collector looks at them."""


def return_large_blocks() -> bool:
    """Blocks from `LARGE_BYTES` on go back to the system when freed. False where the C library cannot."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, LARGE_BYTES) == 1


def spare_long_lived_objects() -> None:
    """Keep the collector from walking again what exists now and lives as long as the process. It walks every
    token of the prompts that are served, and a request that has ended leaves it nothing to find."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


class _Statistics(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def heap_bytes() -> int:
    """Return the bytes that this process has allocated in C and not freed; 0 if the C library does not
    tell."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _Statistics
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)
