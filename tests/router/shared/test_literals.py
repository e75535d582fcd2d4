"""Patterns of many literals find what one look per literal would find."""

import re

from hypothesis import given
from hypothesis import strategies as st

from router.shared.literals import first_characters_of, longest_of

literals = st.lists(st.text("ab|(\\", min_size=1, max_size=5), min_size=1, max_size=8, unique=True)
texts = st.text("ab|(\\", max_size=30)


@given(literals, texts)
def test_the_longest_literal_at_each_place_is_found(words: list[str], text: str) -> None:
    longest_first = sorted(words, key=len, reverse=True)
    assert re.findall(longest_of(words), text) == re.findall("|".join(map(re.escape, longest_first)), text)


@given(literals, texts)
def test_every_beginning_of_a_literal_is_found_where_literals_overlap_too(
    words: list[str], text: str
) -> None:
    found = [match.start() for match in re.finditer(first_characters_of(words), text)]
    assert found == [
        start for start in range(len(text)) if any(text.startswith(word, start) for word in words)
    ]


def test_a_literal_may_be_very_long() -> None:
    assert re.search(longest_of(["<" * 5000, "<a"]), "<" * 6000)
