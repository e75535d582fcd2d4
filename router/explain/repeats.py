"""Repeats: which tokens of a prompt an earlier prompt has as well, behind the place where the two part.

Owns the rule by which a change costs tokens: what follows it and was computed before is lost, what is new is
not. A router's answers, its metrics and `kvasir lint` all count by it. Knows no text: prompts are numbers
here, one a token, either the tokens or marks of them.

A token counts if it is in a run of GRAM tokens that both have. What is little of both is no change: templates
and unrelated prompts have some words in common.
"""

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

GRAM = 8
LEAST_BLOCKS = 2
LEAST_PART = 8
"""Common tokens are at least this part of the shorter prompt's rest."""

SURE_PART = 2
"""The same, where nothing else says that the one prompt goes on from the other."""

MAX_RUNS = 8
"""How many are told apart; beyond, the rest counts as one that is as long as all of them."""

MAX_GRAMS = 2**16
"""A longer prompt is sampled, and tokens between two matches count too."""

Run: TypeAlias = tuple[int, int]
"""The first token, from 0, and the first behind it."""

Numbers: TypeAlias = npt.NDArray[Any]
"""One unsigned integer a token, of 2 or 4 bytes."""

Grams: TypeAlias = npt.NDArray[np.uint64]

_WORD_BYTES = 8
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_BITS = 64
_LEAST_BITS = 10
_SLOTS_PER_GRAM = 16


def repeats(
    ours: Numbers,
    theirs: Numbers,
    *,
    parted: int,
    start: int,
    block_size: int,
    least_part: int = LEAST_PART,
) -> list[Run]:
    """Return the repeated tokens of this prompt from `start` on, in full blocks. `ours` and `theirs` are the
    tokens from `parted` on, the first difference."""
    end = (parted + len(ours) - 1) // block_size * block_size
    found = []
    num_left = len(theirs)
    for first, behind in _runs(ours, theirs, max(0, start - parted)):
        run = parted + first, min(parted + behind, parted + first + num_left, end)
        if run[0] < run[1]:
            found.append(run)
            num_left -= run[1] - run[0]
    num_tokens = len(theirs) - num_left
    least = max(LEAST_BLOCKS * block_size, min(len(ours), len(theirs)) // least_part)
    return _bounded(found) if num_tokens >= least else []


def seem_alike(ours: bytes, theirs: bytes, number_bytes: int) -> bool:
    """Whether one of two runs stands in both: a look that takes some microseconds."""
    size, quarter = GRAM * number_bytes, min(len(ours), len(theirs)) // (4 * number_bytes) * number_bytes
    return ours[quarter : quarter + size] in theirs or ours[3 * quarter : 3 * quarter + size] in theirs


def grams_of(numbers: Numbers) -> Grams:
    """Return the hash of the run that begins at each token; none where fewer than GRAM are left."""
    num_grams = len(numbers) - GRAM + 1
    if num_grams <= 0:
        return np.zeros(0, dtype=np.uint64)
    each = _WORD_BYTES // numbers.itemsize
    words = np.ndarray(len(numbers) - each + 1, "<u8", np.ascontiguousarray(numbers), 0, (numbers.itemsize,))
    hashes: Grams = words[:num_grams] * _FACTOR
    for at in range(each, GRAM, each):
        hashes ^= hashes >> _HALF
        hashes += words[at : at + num_grams]
        hashes *= _MIX
    hashes ^= hashes >> _HALF
    hashes *= _FACTOR
    return hashes


def _runs(ours: Numbers, theirs: Numbers, start: int) -> Iterator[Run]:
    """From `start` on, in order."""
    own, others = grams_of(ours[start:]), grams_of(theirs)
    places = np.arange(len(own))
    most = max(len(own), len(others))
    if most > MAX_GRAMS:
        step = np.uint64((1 << (most // MAX_GRAMS).bit_length()) - 1)
        places = np.flatnonzero(own & step == 0)
        own, others = own[places], others[others & step == 0]
    hits = np.flatnonzero(_are_in(own, others))
    if not len(hits):
        return
    at = places[hits] + start
    breaks = np.flatnonzero((np.diff(hits) > 1) & (np.diff(at) > GRAM))
    firsts = at[np.concatenate(([0], breaks + 1))]
    lasts = at[np.concatenate((breaks, [len(at) - 1]))] + GRAM
    yield from zip(firsts.tolist(), lasts.tolist(), strict=True)


def _are_in(own: Grams, others: Grams) -> npt.NDArray[np.bool_]:
    """Test membership like `np.isin`, which sorts both and takes ten times as long. The last gram wins a
    slot; the others are in a second table."""
    found = np.zeros(len(own), dtype=np.bool_)
    while len(others):
        bits = max(_LEAST_BITS, (_SLOTS_PER_GRAM * len(others)).bit_length())
        shift = np.uint64(_BITS - bits)
        slots = np.zeros(1 << bits, dtype=np.int32)
        theirs = others >> shift
        slots[theirs] = np.arange(len(others), dtype=np.int32)
        found |= others[slots[own >> shift]] == own
        others = others[others[slots[theirs]] != others]
    return found


def _bounded(runs: list[Run]) -> list[Run]:
    if len(runs) <= MAX_RUNS:
        return runs
    first = runs[MAX_RUNS - 1][0]
    return [*runs[: MAX_RUNS - 1], (first, first + sum(end - start for start, end in runs[MAX_RUNS - 1 :]))]
