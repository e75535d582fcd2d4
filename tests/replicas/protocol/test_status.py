"""States of replicas, cards, and the hits that a card promises."""

from dataclasses import fields, replace

import pytest

from replicas.protocol.hits import num_hit_tokens, num_searched, points_left
from replicas.protocol.status import TRANSITIONS, ModelCard, ReplicaState, advance

CARD = ModelCard("m", "ff", "torch", 16, 100, 4096, 1000, (1, 2), 2048, 256)


@pytest.mark.parametrize("current", ReplicaState)
@pytest.mark.parametrize("following", ReplicaState)
def test_a_state_advances_only_along_the_table(current: ReplicaState, following: ReplicaState) -> None:
    if following in TRANSITIONS[current]:
        assert advance(current, following) is following
    else:
        with pytest.raises(ValueError, match=f"from {current.value} to {following.value}"):
            advance(current, following)


def test_stopped_is_the_end_and_every_other_state_leads_to_it() -> None:
    assert TRANSITIONS[ReplicaState.STOPPED] == frozenset()
    for state in set(ReplicaState) - {ReplicaState.STOPPED}:
        assert ReplicaState.STOPPED in TRANSITIONS[state]


@pytest.mark.parametrize("name", [field.name for field in fields(ModelCard)])
def test_the_digest_changes_with_every_field_of_the_card(name: str) -> None:
    value = getattr(CARD, name)
    if isinstance(value, tuple):
        other: object = (*value, 3)
    else:
        other = value + "x" if isinstance(value, str) else (value or 0) + 1
    assert replace(CARD, **{name: other}).digest() != CARD.digest()


def test_equal_cards_have_equal_digests() -> None:
    assert replace(CARD).digest() == CARD.digest()


DENSE = ModelCard("m", "ff", "vllm", 32, 100, 4096, 1000)
SPARSE = replace(DENSE, is_sparse=True)
DRAFTED = replace(DENSE, peek_tokens=32)
SPARSE_DRAFTED = replace(SPARSE, peek_tokens=32)
STATES = replace(SPARSE, state_tokens=32)
FINER = replace(SPARSE, state_tokens=128)


@pytest.mark.parametrize(
    ("card", "num_tokens", "expected"),
    [
        (DENSE, 0, 0),
        (DENSE, 32, 0),
        (DENSE, 33, 1),
        (SPARSE, 64, 1),
        (DRAFTED, 64, 1),
        (SPARSE_DRAFTED, 64, 2),
        (SPARSE_DRAFTED, 63, 1),
    ],
)
def test_the_last_token_is_always_computed(card: ModelCard, num_tokens: int, expected: int) -> None:
    assert num_searched(card, num_tokens) == expected
    assert num_hit_tokens(card, num_searched(card, num_tokens)) < max(1, num_tokens)


@pytest.mark.parametrize(("card", "expected"), [(DENSE, 96), (DRAFTED, 64)])
def test_a_draft_model_takes_a_block_off_a_hit(card: ModelCard, expected: int) -> None:
    assert num_hit_tokens(card, 3) == expected
    assert num_hit_tokens(card, 0) == 0


@pytest.mark.parametrize(
    ("card", "num_tokens", "num_shared", "expected"),
    [
        (SPARSE, 32, 0, []),
        (SPARSE, 33, 0, [1]),
        (SPARSE, 320, 0, [9]),
        (SPARSE, 321, 4, [4, 10]),
        (SPARSE, 321, 12, [10]),
        (replace(SPARSE, retention_interval=128), 321, 0, [4, 8, 10]),
        (replace(SPARSE, retention_interval=32), 130, 0, [1, 2, 3, 4]),
        (SPARSE_DRAFTED, 64, 0, [2]),
        (SPARSE_DRAFTED, 320, 0, [9, 10]),
        (SPARSE_DRAFTED, 330, 4, [4, 10]),
        (replace(SPARSE_DRAFTED, retention_interval=128), 330, 0, [5, 9, 10]),
        (STATES, 321, 4, [4, 10]),
        (replace(STATES, retention_interval=128), 321, 0, [10]),
        (replace(STATES, peek_tokens=32), 320, 0, [10]),
        (FINER, 128, 0, [3]),
        (FINER, 129, 3, [4]),
        (FINER, 321, 6, [4, 8, 10]),
        (replace(FINER, peek_tokens=32), 321, 6, [5, 10]),
    ],
)
def test_a_prompt_leaves_points_at_its_end_where_others_part_and_at_the_interval(
    card: ModelCard, num_tokens: int, num_shared: int, expected: list[int]
) -> None:
    assert points_left(card, num_tokens, num_shared) == expected
