"""Prompts as short texts, and their block hashes: equal prefixes of texts have equal hashes."""

import hashlib

from replicas.protocol.blocks import BlockHash


def chain(text: str) -> list[BlockHash]:
    """One block per character, chained as real ones are."""
    return [
        BlockHash(hashlib.blake2b(text[: end + 1].encode(), digest_size=16).digest())
        for end in range(len(text))
    ]
