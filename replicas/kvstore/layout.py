"""Layout: the format of KV in a file, and its header.

Owns the digest that separates KV of different engines, versions and shapes, and the bytes of a file. Pure: it
opens no file and reads no clock.

A file is `HEADER_BYTES` of header, then the payload, then zeros up to a multiple of `ALIGNMENT`; a slot of
host memory is the image of a file. The header, little-endian::

    0     magic, format version
    12    flags, number of writers, number of tokens, position of the last block, payload bytes, created
    48    layout, key, parent, tenant tag
    113   writers: a length and 16 bytes each
    4072  xxh3_64 of the header up to here, for readers of a header alone
    4080  xxh3_128 of the header up to here and of the payload

The checksums find accidents: torn writes, flipped bits, another file under this name. They authenticate
nothing: a writer to the folder can forge KV.
"""

import hashlib
import struct
from dataclasses import astuple, dataclass, fields
from typing import NewType

import xxhash

from replicas.kvstore.chunk import ChunkName
from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.frames import MAX_USER_TAG_BYTES, UserTag

HEADER_BYTES = 4096
ALIGNMENT = 4096
"""Bytes: of slots in memory and of files, as reads and writes beside the page cache need it."""

FORMAT_VERSION = 1
MAGIC = b"KvasirKV"

MAX_TAG_BYTES = MAX_USER_TAG_BYTES

LayoutId = NewType("LayoutId", bytes)
"""16 bytes that identify everything in which KV must agree to be readable."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Properties of KV besides adapter, tenant and salt, which a block's hash covers."""

    engine: str
    engine_version: str
    kv_layout: str
    """How the engine orders layers, keys and values, blocks, tokens and heads."""
    attention_backend: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    chunk_tokens: int
    tensor_parallel_size: int
    model: str
    """Fingerprint of its files. Hashes have it, too; here it keeps one model's files out of another's way."""
    engine_arguments: str
    """Other arguments of the engine, since some (rope, quantisation) change the KV of equal tokens."""

    def digest(self) -> LayoutId:
        """Every field with its name, both prefixed with their lengths, so that no two layouts look alike."""
        hashed = hashlib.blake2b(digest_size=HASH_BYTES, person=b"kvasir-layout-1")
        for field, value in zip(fields(self), astuple(self), strict=True):
            for part in (field.name, str(value)):
                encoded = part.encode()
                hashed.update(len(encoded).to_bytes(4, "little") + encoded)
        return LayoutId(hashed.digest())


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """`writers` has one tag for each block, `tenant` is a tag too: 16 bytes at most, empty for unknown.
    `created_seconds` is since 1970.
    """

    layout: LayoutId
    name: ChunkName
    num_tokens: int
    payload_bytes: int
    writers: tuple[UserTag, ...]
    ends_prompt: bool
    """The chunk's last block was the last full block of a prompt."""
    tenant: bytes
    created_seconds: int

    def is_of(self, name: ChunkName, *, num_tokens: int, num_blocks: int, payload_bytes: int) -> bool:
        """Whether the header matches the known properties of a chunk with this name."""
        found = (self.name, self.num_tokens, len(self.writers), self.payload_bytes)
        return found == (name, num_tokens, num_blocks, payload_bytes)


class ChunkError(Exception):
    """Bytes that are not the expected chunk.

    ChunkError
    ├── NotAChunk        they do not begin as a chunk's file does
    ├── OtherVersion     they are in a format that this code does not read
    ├── MalformedHeader  the header's own checksum or its fields are wrong
    ├── OtherLayout      an engine of another kind has made them
    ├── OtherKey         they are another chunk
    ├── WrongLength      they are fewer, or more, than the header says
    └── WrongChecksum    header or payload have changed since they were written
    """


class NotAChunk(ChunkError):
    pass


class OtherVersion(ChunkError):
    pass


class MalformedHeader(ChunkError):
    pass


class OtherLayout(ChunkError):
    pass


class OtherKey(ChunkError):
    pass


class WrongLength(ChunkError):
    pass


class WrongChecksum(ChunkError):
    pass


_BEGIN = struct.Struct("<8sI")
_FIELDS = struct.Struct("<8sIHHIQQq4x16s16s16s16sB")
_WRITER = struct.Struct("<B16s")
_HEADER_CHECK_AT = HEADER_BYTES - 24
_CHECKSUM_AT = HEADER_BYTES - 16

_HAS_PARENT = 1
_ENDS_PROMPT = 2

MAX_WRITERS = (_HEADER_CHECK_AT - _FIELDS.size) // _WRITER.size
"""Blocks in a chunk: as many as a header has room for."""

_NO_HASH = bytes(HASH_BYTES)


def file_bytes(payload_bytes: int) -> int:
    """Bytes of a file, and at least of a slot, for that much KV."""
    return HEADER_BYTES + -(-payload_bytes // ALIGNMENT) * ALIGNMENT


def encode(header: ChunkHeader, slot: memoryview) -> int:
    """Turn a slot with a payload into the image of its file: fill in the header, and zero the bytes after the
    payload. Returns the file's bytes.

    Raises ValueError for an impossible header: too many writers, a long tag, a slot too small.
    """
    total = file_bytes(header.payload_bytes)
    if len(slot) < total:
        raise ValueError(f"a slot of {len(slot)} bytes is too small for a file of {total}")
    slot[:_CHECKSUM_AT] = encode_label(header)
    end = HEADER_BYTES + header.payload_bytes
    slot[end:total] = bytes(total - end)
    slot[_CHECKSUM_AT:HEADER_BYTES] = _checksum(slot, end)
    return total


def encode_label(header: ChunkHeader) -> bytes:
    """Return the fields of a header and their own checksum, without that of a payload. Raises ValueError."""
    fields = _encode_fields(header)
    return fields + xxhash.xxh3_64_digest(fields)


def decode_header(header: memoryview, layout: LayoutId, key: BlockHash) -> ChunkHeader:
    """Decode the first `HEADER_BYTES` of a file, without checking the payload.

    Raises ChunkError.
    """
    if len(header) < HEADER_BYTES:
        raise WrongLength(f"a file begins with {HEADER_BYTES} bytes of header; there are {len(header)}")
    magic, version = _BEGIN.unpack_from(header)
    if magic != MAGIC:
        raise NotAChunk(f"the file begins with {magic.hex()}, which no chunk does")
    if version != FORMAT_VERSION:
        raise OtherVersion(f"the file is in format {version}; this is format {FORMAT_VERSION}")
    if header[_HEADER_CHECK_AT:_CHECKSUM_AT] != xxhash.xxh3_64_digest(header[:_HEADER_CHECK_AT]):
        raise MalformedHeader("the header is not what was written")
    decoded = _decode_fields(header)
    if decoded.layout != layout:
        raise OtherLayout(f"the KV has the layout {decoded.layout.hex()}, not {layout.hex()}")
    if decoded.name.key != key:
        raise OtherKey(f"the chunk is {decoded.name.key.hex()}, not {key.hex()}")
    return decoded


def decode(image: memoryview, layout: LayoutId, key: BlockHash) -> ChunkHeader:
    """Return the header of a whole file, after its checksum was found right. Raises ChunkError."""
    header = decode_header(image[:HEADER_BYTES], layout, key)
    expected = file_bytes(header.payload_bytes)
    if len(image) != expected:
        raise WrongLength(f"the file has {len(image)} bytes; its header says {expected}")
    if image[_CHECKSUM_AT:HEADER_BYTES] != _checksum(image, HEADER_BYTES + header.payload_bytes):
        raise WrongChecksum("header or payload are not what was written")
    return header


def _checksum(image: memoryview, end: int) -> bytes:
    hashed = xxhash.xxh3_128(image[:_CHECKSUM_AT])
    hashed.update(image[HEADER_BYTES:end])
    return hashed.digest()


def _encode_fields(header: ChunkHeader) -> bytes:
    if len(header.writers) > MAX_WRITERS:
        raise ValueError(f"a header has room for {MAX_WRITERS} writers, not {len(header.writers)}")
    if any(len(tag) > MAX_TAG_BYTES for tag in (*header.writers, header.tenant)):
        raise ValueError(f"tags have at most {MAX_TAG_BYTES} bytes")
    key, parent, last_block = header.name
    if not len(key) == len(parent or _NO_HASH) == len(header.layout) == HASH_BYTES:
        raise ValueError(f"a layout, a key and a parent have {HASH_BYTES} bytes each")
    flags = _HAS_PARENT * (parent is not None) | _ENDS_PROMPT * header.ends_prompt
    try:
        encoded = _FIELDS.pack(
            *(MAGIC, FORMAT_VERSION, flags, len(header.writers), header.num_tokens, last_block),
            *(header.payload_bytes, header.created_seconds),
            *(header.layout, key, parent or _NO_HASH, header.tenant, len(header.tenant)),
        )
    except struct.error as error:
        raise ValueError(f"a chunk's header cannot hold {header}: {error}") from error
    encoded += b"".join(_WRITER.pack(len(tag), tag) for tag in header.writers)
    return encoded.ljust(_HEADER_CHECK_AT, b"\0")


def _decode_fields(header: memoryview) -> ChunkHeader:
    """Raises MalformedHeader unless encoding the result gives the same bytes again."""
    _, _, flags, num_writers, num_tokens, last_block, payload_bytes, created_seconds, *hashes = (
        _FIELDS.unpack_from(header)
    )
    layout, key, parent, tenant, tenant_bytes = hashes
    if num_writers > MAX_WRITERS:
        raise MalformedHeader(f"the header announces {num_writers} writers")
    writers = header[_FIELDS.size : _FIELDS.size + num_writers * _WRITER.size]
    decoded = ChunkHeader(
        layout=LayoutId(layout),
        name=ChunkName(BlockHash(key), BlockHash(parent) if flags & _HAS_PARENT else None, last_block),
        num_tokens=num_tokens,
        payload_bytes=payload_bytes,
        writers=tuple(UserTag(tag[:length]) for length, tag in _WRITER.iter_unpack(writers)),
        ends_prompt=bool(flags & _ENDS_PROMPT),
        tenant=tenant[:tenant_bytes],
        created_seconds=created_seconds,
    )
    if _encode_fields(decoded) != header[:_HEADER_CHECK_AT]:
        raise MalformedHeader("the header's fields do not fit together")
    return decoded
