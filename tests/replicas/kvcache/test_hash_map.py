"""Names of vLLM's blocks under our hashes, and who wrote them."""

import random

import pytest

from replicas.kvcache.hash_map import HashMap, PlacedMedia, UnknownBlock
from replicas.kvcache.writers import BlockWriters, Shares
from replicas.protocol.blocks import BlockHash, ImageTokens, hash_blocks
from replicas.protocol.events import AllBlocksCleared, BlockStored, Tier
from replicas.protocol.frames import NO_USER, UserTag
from tests.replicas.builders import OTHER_ROOT, ROOT

TOKENS = list(range(100, 116))
OURS = tuple(hash_blocks(ROOT, TOKENS, 4))
A, B, C, D = (bytes([number]) * 32 for number in range(4))


def stored(
    hashes: HashMap,
    names: list[bytes],
    first: int = 0,
    *,
    parent: bytes | None = None,
    num_prompt_tokens: int | None = None,
) -> list[BlockStored]:
    return hashes.stored(
        names,
        parent=parent,
        roots=[ROOT] if parent is None else [],
        token_ids=TOKENS[first * 4 : (first + len(names)) * 4],
        num_prompt_tokens=num_prompt_tokens,
    )


def test_a_run_is_named_from_its_root_and_the_next_one_from_its_parent() -> None:
    hashes = HashMap(4)
    assert stored(hashes, [A, B]) == [BlockStored(OURS[:2], 0)]
    assert stored(hashes, [C, D], 2, parent=B) == [BlockStored(OURS[2:], 2)]
    assert (len(hashes), hashes.num_copies()) == (4, 4)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "expected"),
    [
        (16, [BlockStored(OURS, 0, ends_prompt=True)]),
        (19, [BlockStored(OURS, 0, ends_prompt=True)]),
        (15, [BlockStored(OURS[:3], 0, ends_prompt=True), BlockStored(OURS[3:], 3)]),
        (4, [BlockStored(OURS[:1], 0, ends_prompt=True), BlockStored(OURS[1:], 1)]),
        (3, [BlockStored(OURS, 0)]),
        (20, [BlockStored(OURS, 0)]),
    ],
)
def test_the_prompts_end_is_marked_where_it_lies(num_prompt_tokens: int, expected: list[BlockStored]) -> None:
    assert stored(HashMap(4), [A, B, C, D], num_prompt_tokens=num_prompt_tokens) == expected


def test_a_prompt_that_ended_in_an_earlier_run_is_not_marked_again() -> None:
    hashes = HashMap(4)
    stored(hashes, [A, B], num_prompt_tokens=8)
    assert stored(hashes, [C, D], 2, parent=B, num_prompt_tokens=8) == [BlockStored(OURS[2:], 2)]


def test_each_copy_is_removed_by_itself() -> None:
    hashes = HashMap(4)
    stored(hashes, [A])
    stored(hashes, [A])
    assert (len(hashes), hashes.num_copies()) == (1, 2)
    assert hashes.removed(A) == hashes.removed(A) == OURS[0]
    assert (len(hashes), hashes.num_copies()) == (0, 0)
    with pytest.raises(UnknownBlock):
        hashes.removed(A)


def test_a_block_is_known_while_any_tier_holds_it() -> None:
    gone: list[BlockHash] = []
    hashes = HashMap(4, on_gone=gone.extend)
    stored(hashes, [A, B])
    assert hashes.copied(B, Tier.HOST) == BlockStored(OURS[1:2], 1, tier=Tier.HOST)
    assert hashes.removed(B) == OURS[1]
    assert stored(hashes, [C], 2, parent=B) == [BlockStored(OURS[2:3], 2)]
    assert not gone
    assert hashes.removed(B, Tier.HOST) == OURS[1]
    assert gone == [OURS[1]]
    assert [hashes.num_copies(tier) for tier in Tier] == [2, 0, 0]


def test_a_tier_gives_back_only_what_it_holds() -> None:
    hashes = HashMap(4)
    stored(hashes, [A])
    with pytest.raises(UnknownBlock, match="host"):
        hashes.removed(A, Tier.HOST)
    assert hashes.num_copies() == 1


def test_a_tier_is_cleared_by_itself() -> None:
    gone: list[BlockHash] = []
    hashes = HashMap(4, on_gone=gone.extend)
    stored(hashes, [A, B, C])
    hashes.copied(B, Tier.HOST)
    assert hashes.cleared() == AllBlocksCleared()
    assert (len(hashes), hashes.num_copies(), hashes.num_copies(Tier.HOST)) == (1, 0, 1)
    assert gone == [OURS[0], OURS[2]]
    assert hashes.cleared(Tier.HOST) == AllBlocksCleared(Tier.HOST)
    assert (len(hashes), hashes.num_copies(Tier.HOST)) == (0, 0)


def test_a_copy_that_is_reported_after_the_block_has_left_the_device_has_its_name() -> None:
    gone: list[BlockHash] = []
    hashes = HashMap(4, on_gone=gone.extend, num_remembered=2)
    stored(hashes, [A, B, C])
    for theirs in (A, B, C):
        hashes.removed(theirs)
    assert gone == [OURS[0]], "two are remembered, and the oldest is not"
    assert hashes.copied(B, Tier.HOST) == BlockStored(OURS[1:2], 1, tier=Tier.HOST)
    assert hashes.copied(A, Tier.HOST) is None
    assert gone == [OURS[0]]


def test_a_block_that_is_computed_anew_was_gone_before() -> None:
    gone: list[BlockHash] = []
    hashes = HashMap(4, on_gone=gone.extend, num_remembered=8)
    stored(hashes, [A])
    hashes.removed(A)
    assert not gone
    stored(hashes, [A])
    assert gone == [OURS[0]]


def test_copies_from_an_earlier_process_are_reported_when_the_device_names_them() -> None:
    hashes = HashMap(4)
    assert hashes.copied(A, Tier.DISK) is None
    assert hashes.copied(A, Tier.HOST) is None
    assert hashes.copied(B, Tier.HOST) is None
    assert hashes.removed(B, Tier.HOST) is None
    assert hashes.names([A]) == []
    assert hashes.num_leading([A, B]) == 1
    assert stored(hashes, [A, B]) == [
        BlockStored(OURS[:2], 0),
        BlockStored(OURS[:1], 0, tier=Tier.DISK),
        BlockStored(OURS[:1], 0, tier=Tier.HOST),
    ]
    assert hashes.removed(A, Tier.HOST) == OURS[0]


def test_the_leading_blocks_of_a_chain_have_names() -> None:
    hashes = HashMap(4)
    stored(hashes, [A, B])
    assert hashes.names([A, B, C]) == list(OURS[:2])
    assert hashes.names([C, A]) == []
    assert hashes.num_leading([A, B, C]) == 2


def test_what_cannot_be_named_changes_nothing() -> None:
    hashes = HashMap(4)
    with pytest.raises(UnknownBlock, match="parent"):
        stored(hashes, [B], 1, parent=A)
    with pytest.raises(UnknownBlock, match="without a namespace"):
        hashes.stored([A], parent=None, roots=[], token_ids=TOKENS[:4], num_prompt_tokens=None)
    with pytest.raises(UnknownBlock, match="cannot hold"):
        hashes.stored([A], parent=None, roots=[OTHER_ROOT], token_ids=TOKENS[:5], num_prompt_tokens=None)
    assert len(hashes) == 0


@pytest.mark.parametrize("seed", range(30))
def test_blocks_that_stand_for_images_are_named_as_prompts_with_them_are(seed: int) -> None:
    """In runs of any length, as vLLM reports them: with each block, the images that it overlaps."""
    rng = random.Random(seed)
    block_size, num_blocks = 4, 8
    tokens = [rng.randrange(1000) for _ in range(block_size * num_blocks)]
    spans: list[ImageTokens] = []
    at = rng.randrange(6)
    while at < len(tokens) - 1:
        length = rng.randrange(1, 11)
        spans.append(ImageTokens(rng.choice([b"a", b"b"]) * 32, at, min(length, len(tokens) - at)))
        at += length + rng.randrange(5)
    expected = hash_blocks(ROOT, tokens, block_size, media=spans)
    keys = [
        [
            PlacedMedia(span.content_hash, span.start - start)
            for span in spans
            if span.start < start + block_size and span.start + span.length > start
        ]
        for start in range(0, len(tokens), block_size)
    ]
    hashes = HashMap(block_size)
    named: list[BlockHash] = []
    first = 0
    while first < num_blocks:
        last = min(num_blocks, first + rng.randrange(1, 5))
        (event,) = hashes.stored(
            [bytes([number]) * 32 for number in range(first, last)],
            parent=bytes([first - 1]) * 32 if first else None,
            roots=[] if first else [ROOT],
            token_ids=tokens[first * block_size : last * block_size],
            num_prompt_tokens=None,
            media=keys[first:last],
        )
        named += event.block_hashes
        first = last
    assert named == expected
    assert named != hash_blocks(ROOT, tokens, block_size)


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
