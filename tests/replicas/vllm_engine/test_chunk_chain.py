"""Chunks of a vLLM request under our names, against the hashes of the whole prompt."""

import pytest

from replicas.kvstore.chunk import ChunkName
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.frames import NO_USER, UserTag
from replicas.vllm_engine.chunk_chain import ChunkChain
from tests.replicas.builders import OTHER_ROOT, ROOT

BLOCK, BLOCKS = 4, 3
CHUNK = BLOCK * BLOCKS
ANN, BOB = (UserTag(name.ljust(16)) for name in (b"ann", b"bob"))


def chain_of(token_ids: list[int], root: BlockHash = ROOT) -> ChunkChain:
    return ChunkChain(root, token_ids, block_size=BLOCK, blocks_per_chunk=BLOCKS)


def test_a_chunk_has_the_name_that_routers_give_its_last_block() -> None:
    tokens = list(range(100, 140))
    hashes = hash_blocks(ROOT, tokens, BLOCK)
    chain = chain_of(tokens)
    assert chain.name(2 * CHUNK) == ChunkName(hashes[5], hashes[2], 5)
    assert chain.name(CHUNK) == ChunkName(hashes[2], None, 2)
    assert chain.names() == [
        ChunkName(hashes[2], None, 2),
        ChunkName(hashes[5], hashes[2], 5),
        ChunkName(hashes[8], hashes[5], 8),
    ]
    assert {name.key for name in chain_of(tokens, OTHER_ROOT).names()}.isdisjoint(hashes)


def test_what_is_generated_becomes_chunks_of_the_same_chain() -> None:
    tokens = list(range(CHUNK + 5))
    chain = chain_of(tokens)
    assert len(chain.names()) == 1
    tokens += range(500, 500 + CHUNK)
    hashes = hash_blocks(ROOT, tokens, BLOCK)
    assert [name.key for name in chain.names()] == [hashes[2], hashes[5]]
    with pytest.raises(AssertionError, match="all its tokens are known"):
        chain.name(3 * CHUNK)


def test_the_cache_knows_best_who_computed_a_block_then_the_tier_then_the_request() -> None:
    tokens = list(range(2 * CHUNK))
    hashes = hash_blocks(ROOT, tokens, BLOCK)
    chain = chain_of(tokens)
    first, second = chain.names()
    chain.user = ANN
    chain.num_found_tokens = 4 * BLOCK
    known: dict[BlockHash, UserTag] = {hashes[0]: BOB}
    assert chain.writers(first, known.get) == (BOB, NO_USER, NO_USER), "found, and nobody knows of whom"
    assert chain.writers(second, known.get) == (NO_USER, ANN, ANN)
    chain.load(first, (ANN, BOB, BOB))
    assert chain.writers(first, known.get) == (BOB, BOB, BOB)
    assert [chain.loaded_from(each) for each in hashes[:4]] == [ANN, BOB, BOB, None]


def test_a_block_in_which_what_was_found_ends_was_found() -> None:
    """Of a prompt that is found whole, the last token is computed again."""
    tokens = list(range(CHUNK))
    chain = chain_of(tokens)
    chain.user = ANN
    chain.num_found_tokens = CHUNK - 1
    assert chain.writers(chain.name(CHUNK), lambda _: None) == (NO_USER,) * BLOCKS


def test_chunks_whose_writers_are_not_known_are_loaded_from_nobody() -> None:
    chain = chain_of(list(range(CHUNK)))
    (name,) = chain.names()
    chain.load(name, ())
    assert chain.loaded_from(name.key) is None


def test_tokens_that_were_read_from_disk_are_counted_where_a_load_brought_them() -> None:
    tokens = list(range(3 * CHUNK))
    chain = chain_of(tokens)
    names = chain.names()
    assert chain.names(CHUNK) == names[1:]
    chain.read = frozenset(name.key for name in names[1:])
    for name in names[:2]:
        chain.load(name, ())
    assert chain.num_disk_tokens(0, 3 * CHUNK) == CHUNK, "the first was in host memory, the last not loaded"
    assert chain.num_disk_tokens(CHUNK + BLOCK, 3 * CHUNK) == CHUNK - BLOCK
    assert chain.num_disk_tokens(0, CHUNK + BLOCK) == BLOCK
