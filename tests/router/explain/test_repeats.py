"""What a change costs: the tokens behind it that were computed before, as a list of all runs has them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.explain import repeats as rule
from router.explain.repeats import GRAM, LEAST_BLOCKS, LEAST_PART, MAX_RUNS, repeats

BLOCK_SIZE = 2
LEAST = LEAST_BLOCKS * BLOCK_SIZE
SMALL = st.lists(st.integers(0, 2), max_size=70)


def found(ours: list[int], theirs: list[int], start: int, dtype: str = "<u2") -> list[tuple[int, int]]:
    """Of prompts that part at token 3."""
    mine, other = (np.array(one, dtype=dtype) for one in (ours, theirs))
    return repeats(mine, other, parted=3, start=start, block_size=BLOCK_SIZE)


@given(SMALL, SMALL, st.integers(0, 60), st.sampled_from(["<u2", "<u4"]))
def test_repeated_tokens_are_those_of_runs_that_both_have(
    ours: list[int], theirs: list[int], start: int, dtype: str
) -> None:
    runs = {tuple(theirs[at : at + GRAM]) for at in range(len(theirs) - GRAM + 1)}
    first, end = max(0, start - 3), (len(ours) + 2) // BLOCK_SIZE * BLOCK_SIZE - 3
    starts = [at for at in range(first, len(ours) - GRAM + 1) if tuple(ours[at : at + GRAM]) in runs]
    places = sorted({at + step for at in starts for step in range(GRAM) if at + step < end})
    places = places[: len(theirs)]
    least = max(LEAST, min(len(ours), len(theirs)) // LEAST_PART)
    expected = [place + 3 for place in places] if len(places) >= least else []
    told = found(ours, theirs, start, dtype)
    assert [place for begin, behind in told for place in range(begin, behind)] == expected
    assert len(told) <= MAX_RUNS


def test_an_edit_costs_what_follows_it_and_not_itself() -> None:
    rest = list(range(100, 400))
    assert found([7, 8, 9, *rest, 1, 2], [5, 6, *rest], 0) == [(6, 306)]
    assert found([*rest, 1, 2], [5, 6, *rest], 100) == [(100, 303)]


def test_other_documents_cost_nothing_and_neither_does_a_short_question_behind_them() -> None:
    documents = [list(range(1000 * number, 1000 * number + 400)) for number in (1, 2)]
    question = list(range(30))
    assert found(*documents, 0) == []
    assert found(*([*document, *question] for document in documents), 0) == []


def test_beyond_some_runs_the_rest_counts_as_one() -> None:
    pieces = [list(range(100 * number, 100 * number + GRAM)) for number in range(2 * MAX_RUNS)]
    ours = [token for piece in pieces for token in (*piece, 9999)]
    theirs = [token for piece in reversed(pieces) for token in piece]
    told = found(ours, theirs, 0)
    assert len(told) == MAX_RUNS
    assert sum(end - start for start, end in told) == len(theirs)


@pytest.mark.parametrize("size", [5_000, 60_000])
def test_of_very_long_prompts_a_part_is_looked_up(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(rule, "MAX_GRAMS", 1000)
    rng = np.random.default_rng(1)
    rest, new = rng.integers(0, 2**16, size), rng.integers(0, 2**16, size)
    told = found([7, *rest, *new], [5, 6, *rest], 0)
    assert size - 2000 < sum(end - start for start, end in told) <= size
    assert found([7, *new], [5, 6, *rest], 0) == []
