"""ObjectPrefix: takes what is JSON, ends where it no longer is, and keeps what is complete."""

import json
import random
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jiter import from_json

from router.answers.object_prefix import MAX_DEPTH, ObjectPrefix, completed_object

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)
OBJECTS = st.builds(
    json.dumps,
    st.dictionaries(TEXTS, VALUES, max_size=4),
    ensure_ascii=st.booleans(),
    indent=st.sampled_from((None, 1)),
)


def fed(text: str, seed: int) -> str:
    """What is taken of a text that comes in random pieces."""
    rng, prefix, taken, at = random.Random(seed), ObjectPrefix(), "", 0
    while at < len(text):
        end = at + rng.randint(1, 4)
        taken += prefix.feed(text[at:end])
        at = end
    return taken


@given(OBJECTS, st.integers(0, 10**6), st.data())
def test_of_an_object_that_is_cut_all_is_taken_and_all_that_is_complete_is_kept(
    text: str, seed: int, data: st.DataObject
) -> None:
    assert fed(text, seed) == text
    assert completed_object(text) == text.rstrip()
    cut = text[: data.draw(st.integers(1, len(text)))]
    assert fed(cut, seed) == cut
    assert json.loads(completed_object(cut)) == from_json(cut.encode(), partial_mode=True)


@given(OBJECTS, st.integers(0, 10**6), st.data())
def test_of_a_broken_object_what_is_taken_is_the_beginning_of_one(
    text: str, seed: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(text)))
    put = data.draw(st.text('{}[]",:\\ utrue01.-+eE\n\x01NaN', max_size=3))
    broken = text[:at] + put + text[at + data.draw(st.integers(0, 2)) :]
    assume(not re.search(r"\\u[dD][89a-fA-F]", broken))  # jiter refuses half of a surrogate pair
    taken = fed(broken, seed)
    assert broken.startswith(taken)
    kept: dict[str, Any] = json.loads(completed_object(broken))
    assert isinstance(kept, dict) and completed_object(taken) == completed_object(broken)
    if taken.strip():
        assert from_json(taken.encode(), partial_mode=True) == kept


@pytest.mark.parametrize(
    ("text", "taken", "kept"),
    [
        ('{"a": 1, "city": "Pa', '{"a": 1, "city": "Pa', '{"a": 1}'),
        ('{"a": 1, "city": Paris}', '{"a": 1, "city": ', '{"a": 1}'),
        ('{"a": "say "hi"", "b": 2}', '{"a": "say "', '{"a": "say "}'),
        ('{"a": [1, {"b": tru', '{"a": [1, {"b": tru', '{"a": [1, {}]}'),
        ('{"a": truth}', '{"a": tru', "{}"),
        ('{"a": NaN}', '{"a": ', "{}"),
        ('{"a": 01}', '{"a": 0', '{"a": 0}'),
        ('{"a": 1.e5}', '{"a": 1.', "{}"),
        ('{"a": "\\q"}', '{"a": "\\', "{}"),
        ('{"a": "b\nc"}', '{"a": "b', "{}"),
        ('{"a": 1}}', '{"a": 1}', '{"a": 1}'),
        ("{'a': 1}", "{", "{}"),
        ('[{"a": 1}]', "", "{}"),
        ('"text"', "", "{}"),
        ("", "", "{}"),
    ],
)
def test_some_that_models_write(text: str, taken: str, kept: str) -> None:
    assert (fed(text, 1), completed_object(text)) == (taken, kept)


def test_what_is_nested_too_deep_and_numbers_without_an_end_are_not_taken() -> None:
    assert len(ObjectPrefix().feed('{"a":' + "[" * 2 * MAX_DEPTH)) < 2 * MAX_DEPTH
    assert len(ObjectPrefix().feed('{"a": ' + "1" * 10**6)) < 10_000
