"""Retracing: an answer's prompt is found again where it is, and nowhere else."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from replicas.protocol.blocks import pack_token_ids
from router.history.remembered import AskedAnswer, Mark
from router.history.retracing import ENDING_TOKENS, MOST_PLACES, Retracing, record_of

BEGIN, END = [1, 2], [3]
"""Of every turn of the model's: what a template writes before an answer, and behind it."""

texts = st.lists(st.integers(4, 6), min_size=1, max_size=3 * ENDING_TOKENS)
"""Of few words, so that one turn looks like another."""

turns = st.lists(st.tuples(texts, texts, texts), min_size=1, max_size=5)
"""What a user says, what the model does, and what a template makes of that later."""


def added(prompt: list[int], said: list[int]) -> tuple[bytes, AskedAnswer]:
    packed = pack_token_ids(prompt)
    return packed + pack_token_ids(said), AskedAnswer(len(packed), may_call=False, starts_in_reasoning=False)


@given(turns, texts)
def test_every_prompt_of_a_conversation_is_found_in_its_last_one(
    turns: list[tuple[list[int], list[int], list[int]]], last: list[int]
) -> None:
    plain: list[int] = []
    for asked, _, written in turns:
        plain += [*asked, *END, *BEGIN, *written, *END]
    plain += [*last, *END, *BEGIN]
    retracing, parent = Retracing(pack_token_ids(plain)), None
    for asked, said, _ in turns:
        prompt = [*asked, *END, *BEGIN]
        told = record_of(*added(prompt, [*said, *END]), parent, 0)
        assert told.is_well_formed
        assert retracing.prompt_of(told) == pack_token_ids(prompt)
        parent = told.mark


@given(texts, texts, texts)
def test_what_is_found_is_of_the_prompt_itself(asked: list[int], said: list[int], plain: list[int]) -> None:
    whole = [*plain, *END, *BEGIN]
    for parent in (None, Mark(b"p" * 16)):
        prompt = Retracing(pack_token_ids(whole)).prompt_of(record_of(*added(asked, said), parent, 0))
        if prompt is not None:
            assert prompt == pack_token_ids(asked)
            splits = range(max(0, len(asked) - ENDING_TOKENS), len(asked) + 1)
            assert any(
                whole[len(whole) - len(asked) + split :] == asked[split:]
                and any(whole[place : place + split] == asked[:split] for place in range(len(whole)))
                for split in splits
            )


def test_no_more_than_an_answers_beginning_is_taken_from_the_end() -> None:
    content, asked = added([1, 2, 3] * 20, [4, 5])
    told = record_of(content, asked, None, 0)
    assert told.is_well_formed and len(told.ending) == 4 * ENDING_TOKENS
    for ending in (told.ending + pack_token_ids([1]), told.ending[1:]):
        assert not msgspec.structs.replace(told, ending=ending).is_well_formed


def test_marks_tell_apart_what_is_before_and_in_a_record() -> None:
    content, asked = added([1, 2, 3] * 20, [4, 5])
    marks = {
        record_of(content, asked, None, 0).mark,
        record_of(content, asked, Mark(b"p" * 16), 0).mark,
        record_of(content + b"more", asked, None, 0).mark,
        record_of(b"diff" + content[4:], asked, None, 0).mark,
    }
    assert len(marks) == 4
    assert record_of(content, asked, None, 0).mark == record_of(content, asked, None, 99).mark


def test_a_prompt_that_looks_alike_everywhere_is_given_up() -> None:
    asked, said = [7] * 100 + [8] * ENDING_TOKENS, [9]
    plain = pack_token_ids([7] * 100_000)
    retracing = Retracing(plain)
    assert retracing.prompt_of(record_of(*added(asked, said), Mark(b"p" * 16), 0)) is None
    assert retracing._left > 4 * len(plain) - 4 * 101 * (MOST_PLACES + 1)


def test_all_that_is_hashed_is_bounded_by_the_prompt() -> None:
    plain = pack_token_ids([7] * 10_000)
    asked, said = [7] * 9_000 + [8] * ENDING_TOKENS, [9]
    retracing = Retracing(plain)
    told = record_of(*added(asked, said), Mark(b"p" * 16), 0)
    for _ in range(10):
        assert retracing.prompt_of(told) is None
    assert retracing._left < 0
