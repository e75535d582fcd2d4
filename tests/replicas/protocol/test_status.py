"""The state table and the card's digest."""

from dataclasses import fields, replace

import pytest

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
