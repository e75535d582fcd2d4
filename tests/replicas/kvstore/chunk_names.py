"""Chunks that tests can read: the chunk "abc" follows "ab", which follows "a"."""

from replicas.kvstore.chunk import ChunkName
from replicas.protocol.blocks import HASH_BYTES, BlockHash

BLOCKS_PER_CHUNK = 4


def key(path: str) -> BlockHash:
    return BlockHash(path.encode().ljust(HASH_BYTES, b"."))


def name(path: str) -> ChunkName:
    parent = key(path[:-1]) if len(path) > 1 else None
    return ChunkName(key(path), parent, len(path) * BLOCKS_PER_CHUNK - 1)


def chain(path: str) -> list[BlockHash]:
    """The keys of every chunk up to this one."""
    return [key(path[:length]) for length in range(1, len(path) + 1)]
