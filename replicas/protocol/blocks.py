"""Block hashes: the names of cached prefixes, for replicas, router and index alike.

Owns the one hashing function of the project.

A block hash names a *full* block together with everything before it::

    root = BLAKE2b(namespace)[:16]                      keyed with the cluster secret
    key  = root | "kvasir block hash" | zeros           64 bytes, one block of SHA-256
    h_0  = zeros
    h_i  = SHA-256(key | h_{i-1} | tokens_i as u32le | extras_i)[:16]

The first blocks of a prompt may be published: they have the published root, and the block after them
continues the chain under the prompt's own.

The root is the key of every link and is itself no hash: it goes to replicas with a request, and never into
the index. So a reader of the index can confirm no guess, even knowing the tokens, the model and the salt.
SHA-256 with a secret first block authenticates here because half of the digest is cut off: an observed hash
cannot be continued. The state after that block is computed once per prompt.

Two prompts share a hash only if they share the namespace, every token up to the end of that block, and every
media item in that block or before. The token part has a fixed length for a given block size, and the block
size is part of the root, so extras cannot be read as tokens.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NewType, cast

from msgspec import Meta, Struct

from replicas.protocol.bounds import MAX_BLOCKS, Uint32
from replicas.protocol.cluster_secret import MIN_SECRET_BYTES

BlockHash = NewType("BlockHash", bytes)
"""16 bytes: SHA-256, keyed and truncated. Chained, so one hash stands for a whole prefix."""

HASH_BYTES = 16

_KEY_BYTES = hashlib.sha256().block_size
_PURPOSE = b"kvasir block hash"
_NO_PARENT = bytes(HASH_BYTES)


@dataclass(frozen=True, slots=True)
class Namespace:
    """The root of a chain. Prompts in different namespaces never share a block.

    `prompt_cache_key` is deliberately absent: it decides placement, never identity.
    """

    model_fingerprint: bytes
    block_size: int
    adapter: str | None = None
    tenant: str | None = None
    salt: str | None = None


class PublishedBeginning(Struct, frozen=True, array_like=True):
    """The first blocks of a prompt belong to everyone: they hash under a `root` of their own, and the chain
    goes on from them under the prompt's."""

    root: Annotated[BlockHash, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    num_blocks: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Placeholder tokens `[start, start + length)` of a prompt that stand for one media item.

    The tokens of two images are equal; `content_hash` (`images.media_hash` of their bytes) is not.
    """

    content_hash: bytes
    start: Uint32
    length: Uint32


def namespace_root(secret: bytes, namespace: Namespace) -> BlockHash:
    """Return the root of every chain in `namespace`: unpredictable without the cluster `secret`, and a secret
    too.

    Fields are tagged and length-prefixed, absent ones are left out, so no two different namespaces
    encode to the same bytes. Keyed BLAKE2b (RFC 7693).
    """
    if not MIN_SECRET_BYTES <= len(secret) <= hashlib.blake2b.MAX_KEY_SIZE:
        raise ValueError(f"the cluster secret has {len(secret)} bytes; it needs {MIN_SECRET_BYTES} to 64")
    fields: list[tuple[bytes, bytes | None]] = [
        (b"model", namespace.model_fingerprint),
        (b"block_size", namespace.block_size.to_bytes(4, "little")),
        (b"adapter", None if namespace.adapter is None else namespace.adapter.encode()),
        (b"tenant", None if namespace.tenant is None else namespace.tenant.encode()),
        (b"salt", None if namespace.salt is None else namespace.salt.encode()),
    ]
    digest = hashlib.blake2b(key=secret, digest_size=HASH_BYTES, person=b"kvasir-root-v1")
    for tag, value in fields:
        if value is not None:
            digest.update(_tagged(tag, value))
    return BlockHash(digest.digest())


def hash_blocks(
    root: BlockHash,
    token_ids: Sequence[int],
    block_size: int,
    *,
    parent: BlockHash | None = None,
    start: int = 0,
    media: Sequence[ImageTokens] = (),
    published: PublishedBeginning | None = None,
) -> list[BlockHash]:
    """Hash the full blocks in `token_ids`, in the namespace of `root`; a partial last block has none.

    `parent` is the hash of the block before them, None at a sequence's start. `start` is the position of
    `token_ids[0]` in the sequence, a multiple of the block size. `media` positions count from its start. The
    `published` beginning hashes under its own root.
    """
    packed = pack_token_ids(token_ids)
    if published is None or start >= published.num_blocks * block_size:
        return hash_packed(root, packed, block_size, parent=parent, start=start, media=media)
    cut = (published.num_blocks * block_size - start) * 4
    hashes = hash_packed(published.root, packed[:cut], block_size, parent=parent, start=start, media=media)
    if len(packed) > cut:
        start += cut // 4
        hashes += hash_packed(root, packed[cut:], block_size, parent=hashes[-1], start=start, media=media)
    return hashes


def hash_packed(
    root: BlockHash,
    packed: bytes,
    block_size: int,
    *,
    parent: BlockHash | None = None,
    start: int = 0,
    media: Sequence[ImageTokens] = (),
) -> list[BlockHash]:
    """`hash_blocks` of tokens that `pack_token_ids` has packed."""
    block_bytes = block_size * 4
    keyed = hashlib.sha256((root + _PURPOSE).ljust(_KEY_BYTES, b"\0")).copy
    hashes: list[bytes] = []
    hash_so_far: bytes = _NO_PARENT if parent is None else parent
    for at in range(0, len(packed) - block_bytes + 1, block_bytes):
        hashed = hash_so_far + packed[at : at + block_bytes]
        if media:
            hashed += _extras(media, start + at // 4, block_size)
        link = keyed()
        link.update(hashed)
        hash_so_far = link.digest()[:HASH_BYTES]
        hashes.append(hash_so_far)
    return cast("list[BlockHash]", hashes)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian unsigned 32-bit integers. Raises OverflowError outside that range."""
    packed = array("I")
    # Takes two thirds of the time of `array("I", token_ids)`.
    packed.fromlist(token_ids if isinstance(token_ids, list) else list(token_ids))
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(packed: bytes) -> list[int]:
    """Return the inverse of `pack_token_ids`. Raises ValueError if the length is no multiple of 4."""
    token_ids = array("I")
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tolist()


def _extras(media: Sequence[ImageTokens], block_start: int, block_size: int) -> bytes:
    """Encode the block's extra keys: each media item that it overlaps, and the item's start relative to
    it."""
    block_end = block_start + block_size
    return b"".join(
        _tagged(b"media", span.content_hash) + (span.start - block_start).to_bytes(8, "little", signed=True)
        for span in media
        if span.start < block_end and span.start + span.length > block_start
    )


def media_within(media: Sequence[ImageTokens], start: int, end: int) -> bytes:
    """Return the media that determine the extra keys of the blocks in tokens `[start, end)`, besides their
    starts."""
    return b"".join(
        _tagged(b"media", span.content_hash)
        + (span.start - start).to_bytes(8, "little", signed=True)
        + span.length.to_bytes(4, "little")
        for span in media
        if span.start < end and span.start + span.length > start
    )


def _tagged(tag: bytes, value: bytes) -> bytes:
    return len(tag).to_bytes(1, "little") + tag + len(value).to_bytes(4, "little") + value
