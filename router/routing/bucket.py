"""Buckets: a prompt's preferred replicas when no cache is known to hold it.

Owns the bucket's definition; `replicas/protocol/affinity.py` ranks replicas for it.
"""

import hashlib
from collections.abc import Sequence

from replicas.protocol.affinity import tagged
from replicas.protocol.blocks import BlockHash, ImageTokens, media_within

BUCKET_TOKENS = 256
"""A prompt is pinned by this many of its first tokens, in whole blocks."""

SHORT_HEAD_TOKENS = 128
"""A beginning with as many tokens is in the index, by the default stride."""

BUCKET_BYTES = 16


def bucket_of(
    root: BlockHash,
    prompt_cache_key: str | None,
    packed_tokens: bytes,
    num_stable_tokens: int | None,
    block_size: int,
    media: Sequence[ImageTokens] = (),
) -> bytes:
    """Hash the namespace, `prompt_cache_key` and head of a request's prompt.

    `num_stable_tokens` is the length of the part that later turns repeat (tools, system, first user message).
    If that is shorter than the usual head it *is* the head, so that a short conversation keeps its bucket as
    it grows. None or 0: unknown. Media that begin in the head count, since their placeholders are alike.
    """
    num_head_tokens = max(block_size, BUCKET_TOKENS // block_size * block_size)
    if num_stable_tokens:
        num_head_tokens = min(num_head_tokens, num_stable_tokens)
    digest = hashlib.blake2b(digest_size=BUCKET_BYTES, person=b"kvasir-bucket-v1")
    digest.update(tagged(b"root", root))
    if prompt_cache_key is not None:
        digest.update(tagged(b"key", prompt_cache_key.encode("utf-8", "surrogatepass")))
    digest.update(tagged(b"head", packed_tokens[: 4 * num_head_tokens]))
    if media and (in_head := [span for span in media if span.start < num_head_tokens]):
        digest.update(tagged(b"media", media_within(in_head, 0, num_head_tokens)))
    return digest.digest()


def head_bucket_of(
    root: BlockHash, key: str | None, packed_tokens: bytes, num_head_tokens: int | None, block_size: int
) -> bytes | None:
    """Return the bucket of the whole blocks of a prompt's short head; None if there are none, if the index
    tells who holds them, or with a `prompt_cache_key`, which says what belongs together."""
    num_tokens = (num_head_tokens or 0) // block_size * block_size
    if key is not None or not 0 < num_tokens < SHORT_HEAD_TOKENS:
        return None
    return bucket_of(root, None, packed_tokens, num_tokens, block_size)
