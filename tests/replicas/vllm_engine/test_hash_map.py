"""The map from vLLM's hashes to ours, without vLLM."""

import pytest

from replicas.protocol.blocks import hash_blocks
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored
from replicas.vllm_engine.hash_map import HashMap, UnknownBlock
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
        root=ROOT if parent is None else None,
        token_ids=TOKENS[first * 4 : (first + len(names)) * 4],
        num_prompt_tokens=num_prompt_tokens,
    )


def test_a_run_is_named_from_its_root_and_the_next_one_from_its_parent() -> None:
    hashes = HashMap(4)
    assert stored(hashes, [A, B]) == [BlockStored(OURS[:2], 0)]
    assert stored(hashes, [C, D], 2, parent=B) == [BlockStored(OURS[2:], 2)]
    assert (len(hashes), hashes.num_copies) == (4, 4)


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
    assert (len(hashes), hashes.num_copies) == (1, 2)
    assert hashes.removed([A]) == hashes.removed([A]) == BlockRemoved(OURS[:1])
    assert (len(hashes), hashes.num_copies) == (0, 0)
    with pytest.raises(UnknownBlock):
        hashes.removed([A])


def test_a_cleared_map_is_empty() -> None:
    hashes = HashMap(4)
    stored(hashes, [A, B])
    assert hashes.cleared() == AllBlocksCleared()
    assert (len(hashes), hashes.num_copies) == (0, 0)


def test_what_cannot_be_named_changes_nothing() -> None:
    hashes = HashMap(4)
    with pytest.raises(UnknownBlock, match="parent"):
        stored(hashes, [B], 1, parent=A)
    with pytest.raises(UnknownBlock, match="without a namespace"):
        hashes.stored([A], parent=None, root=None, token_ids=TOKENS[:4], num_prompt_tokens=None)
    with pytest.raises(UnknownBlock, match="cannot hold"):
        hashes.stored([A], parent=None, root=OTHER_ROOT, token_ids=TOKENS[:5], num_prompt_tokens=None)
    assert len(hashes) == 0
