"""Linter: feeds on a log's prompts in their order, and finds where they break what they go on from.

Owns which earlier prompt each is compared with, and what is a break. A prompt could at best read from cache
what any earlier one begins with; it could have read more where it repeats the one that it goes on from
(`repeats.py`), and does not begin as that one. What it would have read is an upper bound: real caches forget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from replicas.protocol.blocks import Namespace, pack_token_ids
from router.explain.linting.habits import Habit, goes_on, habit_of, surer
from router.explain.linting.remembered import EarlierPrompt, EarlierPrompts, EndlessCache, num_common
from router.explain.places import Place
from router.explain.repeats import grams_of, repeats

MOSTLY = 0.75
"""A prompt that has so much of another's rest, and it is no short one, goes on from that."""

CERTAIN_BLOCKS = 16

TOKENS = "<u4"


class PlaceOf(Protocol):
    """Finds the origin of a prompt's token."""

    def __call__(self, number: int) -> Place: ...


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """`line` is where its request stands in the log."""

    line: int
    space: Namespace
    body: Mapping[str, Any]
    token_ids: Sequence[int]
    place_of: PlaceOf


@dataclass(frozen=True, slots=True)
class Break:
    """A prompt that does not begin as the one that it goes on from: from `token` on, at `place`."""

    line: int
    earlier_line: int
    token: int
    place: Place
    habit: Habit
    num_lost_tokens: int


class Linter:
    def __init__(self) -> None:
        self._cache = EndlessCache()
        self._earlier = EarlierPrompts()

    @property
    def num_forgotten(self) -> int:
        return self._cache.num_forgotten + self._earlier.num_forgotten

    def take(self, prompt: LoggedPrompt) -> tuple[int, Break | None]:
        """How many of its tokens could be read from cache at best, and what keeps more from it."""
        grams = grams_of(np.asarray(prompt.token_ids, dtype=TOKENS))
        earlier = self._earlier.nearest(prompt.space, prompt.token_ids, grams)
        num_cached = self._cache.take(prompt.space, prompt.token_ids)
        found = None
        if earlier is not None:
            found = self._break(prompt, earlier, num_cached)
        self._earlier.add(prompt.line, prompt.space, prompt.token_ids, prompt.body, grams)
        return num_cached, found

    def _break(self, prompt: LoggedPrompt, earlier: EarlierPrompt, num_cached: int) -> Break | None:
        packed = pack_token_ids(prompt.token_ids)
        token = num_common(earlier.packed_tokens, packed)
        same_space = earlier.space == prompt.space
        parted = token if same_space else 0
        new, old = (np.frombuffer(one, TOKENS) for one in (packed, earlier.packed_tokens))
        block_size = prompt.space.block_size
        found = repeats(new[parted:], old[parted:], parted=parted, start=num_cached, block_size=block_size)
        lost = sum(end - start for start, end in found)
        if not lost:
            return None
        rest = len(old) - token
        body = earlier.body
        place = prompt.place_of(token if same_space else 0)
        if same_space:
            place = surer(body, prompt.body, place)
        habit = habit_of(body, prompt.body, place, same_space=same_space)
        least = max(MOSTLY * rest, CERTAIN_BLOCKS * prompt.space.block_size)
        if (lost < least or not same_space) and not goes_on(body, prompt.body, place, habit):
            return None
        return Break(prompt.line, earlier.line, token, place, habit, lost)
