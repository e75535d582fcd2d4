"""Grams: which tokens of a prompt stand in another prompt as well, wherever.

Owns the reckoning: runs of GRAM tokens, hashed. What two prompts have in common by it, and not by their
beginnings, is what could have been read from cache if they had begun alike.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

GRAM = 8
SAMPLED = 8
"""Of so many runs one is looked up when the most similar of many prompts is looked for."""

Grams = npt.NDArray[np.uint64]

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)


def grams_of(token_ids: Sequence[int]) -> Grams:
    """The hash of the run that begins at each token; none where fewer than GRAM are left."""
    tokens = np.asarray(token_ids, dtype=np.uint64) + np.uint64(1)
    num_grams = max(0, len(tokens) - GRAM + 1)
    hashes = np.zeros(num_grams, dtype=np.uint64)
    for at in range(GRAM):
        hashes = (hashes * _FACTOR) ^ tokens[at : at + num_grams]
        hashes = (hashes ^ (hashes >> np.uint64(29))) * _MIX
    return hashes ^ (hashes >> np.uint64(32))


def sampled(grams: Grams) -> list[int]:
    """Those that are looked up: the same in every prompt that has them."""
    chosen: list[int] = np.unique(grams[grams % np.uint64(SAMPLED) == 0]).tolist()
    return chosen


def num_covered(grams: Grams, others: Grams, start: int) -> int:
    """How many tokens from `start` on belong to a run that the other prompt has as well."""
    own = grams[start:]
    if not len(own) or not len(others):
        return 0
    covered = np.zeros(len(own) + GRAM, dtype=np.int64)
    places = np.flatnonzero(np.isin(own, others))
    np.add.at(covered, places, 1)
    np.add.at(covered, places + GRAM, -1)
    return int(np.count_nonzero(np.cumsum(covered)))
