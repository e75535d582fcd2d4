"""Who wrote a block: the first to compute it, until it is forgotten; nobody in particular never counts."""

import pytest

from replicas.kvcache.writers import BlockWriters, Shares
from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import NO_USER, UserTag

HASHES = [BlockHash(bytes([i]) * 16) for i in range(6)]
ANN, BOB = UserTag(b"ann"), UserTag(b"bob")


def cross_user(writers: BlockWriters, user: UserTag) -> list[bool]:
    return [bool(writers.shares([block_hash], user).cross_user) for block_hash in HASHES]


def test_only_what_another_known_user_wrote_is_cross_user() -> None:
    writers = BlockWriters(6)
    writers.wrote(HASHES[:2], ANN)
    writers.wrote(HASHES[2:3], BOB)
    writers.wrote(HASHES[3:4], NO_USER)
    assert cross_user(writers, BOB) == [True, True, False, False, False, False]
    assert cross_user(writers, ANN) == [False, False, True, False, False, False]
    assert cross_user(writers, NO_USER) == [False] * 6
    assert writers.shares(HASHES, BOB) == Shares(own=1, cross_user=2)
    assert writers.shares(HASHES, ANN) == Shares(own=2, cross_user=1)
    assert writers.shares(HASHES, NO_USER) == Shares(own=0, cross_user=0)


def test_whoever_computes_a_copy_is_not_the_writer() -> None:
    writers = BlockWriters(6)
    writers.wrote(HASHES[:1], ANN)
    writers.wrote(HASHES[1:2], NO_USER)
    writers.wrote(HASHES[:3], BOB)
    assert cross_user(writers, ANN)[:3] == [False, False, True]
    assert cross_user(writers, BOB)[:3] == [True, False, False]


def test_a_forgotten_block_has_a_new_writer() -> None:
    writers = BlockWriters(6)
    writers.wrote(HASHES[:2], ANN)
    writers.forget([HASHES[0], HASHES[5]])
    writers.wrote(HASHES[:2], BOB)
    assert cross_user(writers, ANN)[:2] == [True, False]
    writers.clear()
    assert len(writers) == 0 and not any(cross_user(writers, BOB))


def test_beyond_the_bound_the_oldest_are_nobodys() -> None:
    writers = BlockWriters(3)
    writers.wrote(HASHES[:3], ANN)
    writers.forget(HASHES[:1])
    writers.wrote(HASHES[:1], ANN)  # the newest now
    writers.wrote(HASHES[3:5], ANN)
    assert len(writers) == 3
    assert cross_user(writers, BOB) == [True, False, False, True, True, False]


def test_a_bound_that_is_passed_again_and_again_holds() -> None:
    writers = BlockWriters(64)
    for number in range(1000):
        writers.wrote([BlockHash(number.to_bytes(16))], ANN)
        assert len(writers) <= 64
    newest = [BlockHash(number.to_bytes(16)) for number in range(940, 1000)]
    assert writers.shares(newest, BOB).cross_user == 60


@pytest.mark.parametrize(
    ("num_prompt_tokens", "own", "cross_user"),
    [(0, 0, 0), (1, 1, 0), (4, 4, 0), (5, 4, 1), (7, 4, 3), (8, 4, 4), (9, 5, 4), (13, 8, 5)],
)
def test_tokens_are_counted_up_to_the_prompts_end(num_prompt_tokens: int, own: int, cross_user: int) -> None:
    """Blocks of four: the second and the fourth are another user's, the third is the reader's."""
    writers = BlockWriters(6)
    writers.wrote(HASHES[:1], ANN)
    writers.wrote(HASHES[1:2], BOB)
    writers.wrote(HASHES[2:3], ANN)
    writers.wrote(HASHES[3:4], BOB)
    counted = writers.token_shares(HASHES[:4], ANN, block_size=4, num_prompt_tokens=num_prompt_tokens)
    assert counted == Shares(own, cross_user)
