"""Chunks with bytes, headers with every field set, and slots as an arena has them."""

import mmap
import random

from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.layout import ALIGNMENT, HEADER_BYTES, ChunkHeader, Layout, encode, file_bytes
from replicas.protocol.frames import UserTag
from tests.replicas.kvstore.chunk_names import name

LAYOUT = Layout(
    engine="torch",
    engine_version="0.1.0",
    kv_layout="layers, keys and values, blocks, tokens, heads",
    attention_backend="eager",
    dtype="bfloat16",
    num_layers=32,
    num_kv_heads=8,
    head_size=128,
    block_size=16,
    chunk_tokens=128,
    tensor_parallel_size=1,
    model="0123456789abcdef",
    engine_arguments='{"rope_theta": 1000000.0}',
)

PAYLOAD_BYTES = 5000
"""No multiple of the alignment."""

SLOT_BYTES = file_bytes(PAYLOAD_BYTES)


def slots(num_slots: int, slot_bytes: int = SLOT_BYTES) -> list[memoryview]:
    """Page-aligned, filled with what nobody has written."""
    assert slot_bytes % ALIGNMENT == 0
    arena = memoryview(mmap.mmap(-1, num_slots * slot_bytes))
    arena[:] = b"\xa5" * len(arena)
    return [arena[at : at + slot_bytes] for at in range(0, len(arena), slot_bytes)]


def header(path: str | ChunkName, payload_bytes: int = PAYLOAD_BYTES) -> ChunkHeader:
    return ChunkHeader(
        layout=LAYOUT.digest(),
        name=name(path) if isinstance(path, str) else path,
        num_tokens=128,
        payload_bytes=payload_bytes,
        writers=tuple(UserTag(b"u" * length) for length in (16, 0, 1, 7)),
        ends_prompt=True,
        tenant=b"tenant",
        created_seconds=1_700_000_000,
    )


def payload(path: str | ChunkName, payload_bytes: int = PAYLOAD_BYTES) -> bytes:
    """The chunk's KV: the same for a path, another for every other path."""
    key = (name(path) if isinstance(path, str) else path).key
    return random.Random(key).randbytes(payload_bytes)


def fill(slot: memoryview, path: str | ChunkName, payload_bytes: int = PAYLOAD_BYTES) -> ChunkHeader:
    """Put the chunk's KV into the slot. The header that belongs to it."""
    slot[HEADER_BYTES : HEADER_BYTES + payload_bytes] = payload(path, payload_bytes)
    return header(path, payload_bytes)


def image(path: str | ChunkName, payload_bytes: int = PAYLOAD_BYTES) -> bytearray:
    """The file of the chunk."""
    written = bytearray(file_bytes(payload_bytes))
    encode(fill(memoryview(written), path, payload_bytes), memoryview(written))
    return written
